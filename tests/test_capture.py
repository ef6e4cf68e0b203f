"""Capture: what the hooks record is what the model used, whatever the router; what a server returns is what the trace holds."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
import types
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_server import LocalServer

from moesim import capture as capture_module
from moesim.capture import Recorder, capture, load_model
from moesim.capture.files import Parts, need, prompts_of, read_prompts
from moesim.capture.server import capture_server
from moesim.cli.main import run
from moesim.errors import InputError
from moesim.trace import DECODE, load_trace

PROMPTS = [[5, 9, 2, 40, 17], [3, 3, 8], [61, 1, 30, 7, 7, 7, 19, 22]]
NEW = 6
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 8},
    "Olmoe": {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "DeepseekV3": DEEPSEEK,
    "GptOss": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
}


def tiny(name: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(COMMON | ARCHITECTURES[name]))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "gate.weight" in key or "router.weight" in key:
                value.normal_(0, 0.5)
            elif "correction_bias" in key or "router.bias" in key:
                value.normal_(0, 0.2)
    return model


@pytest.fixture(params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, tiny(request.param)


def router_inputs(model: Any, tokens: list[int]) -> list[tuple[Any, Any]]:
    """(router, hidden states it is given) of each MoE layer, by hooks of the test's own."""
    torch = pytest.importorskip("torch")
    seen: list[tuple[Any, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: seen.append((m, args[0].detach().reshape(-1, args[0].shape[-1]))))
        for name, module in model.named_modules()
        if name.endswith((".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")) and hasattr(module, "weight")
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def by_the_paper(name: str, router: Any, hidden: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids by descending score of choice, and weights, in NumPy: an independent statement of each model's rule."""
    h, w = hidden.double().numpy(), router.weight.detach().double().numpy()
    logits = h @ w.T
    if name == "GptOss":
        logits = logits + router.bias.detach().double().numpy()
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        top = np.take_along_axis(logits, ids, 1)
        top = np.exp(top - top.max(axis=1, keepdims=True))
        return ids, top / top.sum(axis=1, keepdims=True)
    if name == "DeepseekV3":
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + router.e_score_correction_bias.double().numpy()
        groups = choice.reshape(len(choice), 4, 2)
        best = np.argsort(-np.sort(groups, axis=2)[:, :, -2:].sum(axis=2), axis=1, kind="stable")[:, :2]
        allowed = np.zeros((len(choice), 4), bool)
        np.put_along_axis(allowed, best, True, 1)
        choice = np.where(np.repeat(allowed, 2, axis=1), choice, -np.inf)
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :k]
        top = np.take_along_axis(scores, ids, 1)
        return ids, 2.5 * top / top.sum(axis=1, keepdims=True)
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    share = exp / exp.sum(axis=1, keepdims=True)
    ids = np.argsort(-share, axis=1, kind="stable")[:, :k]
    top = np.take_along_axis(share, ids, 1)
    return ids, top if name == "Olmoe" else top / top.sum(axis=1, keepdims=True)


def test_ids_and_weights_are_those_of_the_model(model: tuple[str, Any]) -> None:
    """Prefill rows against the rule of each architecture, computed from the routers' inputs."""
    name, net = model
    trace = capture(net, PROMPTS)
    layers = 2 if name == "DeepseekV3" else 3  # its first layer is dense
    k = ARCHITECTURES[name]["num_experts_per_tok"]
    assert (trace.n_rows, trace.n_layers, trace.n_experts, trace.top_k) == (16, layers, 8, k)
    assert trace.seq_id.tolist() == [0] * 5 + [1] * 3 + [2] * 8 and not trace.phase.any()
    assert trace.position.tolist() == [*range(5), *range(3), *range(8)]
    assert trace.weights is not None
    for (start, stop), tokens in zip(trace.sequences, PROMPTS, strict=True):
        inputs = router_inputs(net, tokens)
        assert len(inputs) == layers
        for layer, (router, hidden) in enumerate(inputs):
            ids, weights = by_the_paper(name, router, hidden, k)
            got, given = trace.expert_ids[start:stop, layer], trace.weights[start:stop, layer].astype(float)
            if name == "DeepseekV3":  # asks for no order
                order, back = np.argsort(ids, axis=1), np.argsort(got, axis=1)
                ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
                got, given = np.take_along_axis(got, back, 1), np.take_along_axis(given, back, 1)
            assert (got == ids).all()
            assert np.abs(given - weights).max() < 2e-3


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "GptOss"])
def test_ids_agree_with_output_router_logits(name: str) -> None:
    torch = pytest.importorskip("torch")
    net = tiny(name)
    trace = capture(net, PROMPTS[:1])
    with torch.no_grad():
        logits = net(input_ids=torch.tensor(PROMPTS[:1]), output_router_logits=True, use_cache=False).router_logits
    want = np.stack([layer.topk(trace.top_k, dim=-1).indices.numpy() for layer in logits], axis=1)
    assert (trace.expert_ids == want).all()


def test_decode_rows_are_what_a_full_run_routes(model: tuple[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    _, net = model
    trace = capture(net, PROMPTS, new_tokens=NEW)
    for number, ((start, stop), prompt) in enumerate(zip(trace.sequences, PROMPTS, strict=True)):
        assert stop - start == len(prompt) + NEW - 1
        assert (trace.phase[start:stop] == DECODE).tolist() == [False] * len(prompt) + [True] * (NEW - 1)
        assert trace.position[start:stop].tolist() == list(range(stop - start))
        tokens = list(prompt)
        for _ in range(NEW - 1):  # greedy, without a cache
            with torch.no_grad():
                tokens.append(int(net(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        again = capture(net, [tokens])
        assert (np.sort(again.expert_ids, 2) == np.sort(trace.expert_ids[start:stop], 2)).all()
        assert trace.meta["sequences"][number] == {"seq_id": number, "prompt_tokens": len(prompt), "new_tokens": NEW, "finished": 0}


def test_the_model_is_left_as_it_was(model: tuple[str, Any]) -> None:
    _, net = model
    capture(net, PROMPTS[:1], new_tokens=2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_end_of_text_stops_a_sequence() -> None:
    net = tiny("Mixtral")
    first = capture(net, PROMPTS[:1], new_tokens=NEW)
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        net.generation_config.eos_token_id = int(net(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].argmax())
    stopped = capture(net, PROMPTS[:1], new_tokens=NEW)
    assert stopped.n_rows == len(PROMPTS[0]) < first.n_rows
    assert stopped.meta["sequences"][0]["finished"] == 1 and stopped.meta["sequences"][0]["new_tokens"] == 1


def test_file_equals_memory_and_leaves_nothing_behind(tmp_path: Path) -> None:
    net = tiny("Qwen3Moe")
    path = tmp_path / "trace.npz"
    seen: list[tuple[int, int]] = []
    trace = capture(net, iter(PROMPTS), path, new_tokens=3, name="tiny", progress=lambda n, rows: seen.append((n, rows)))
    assert trace == load_trace(path) == capture(net, PROMPTS, new_tokens=3, name="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.npz"]
    assert seen == [(1, 7), (2, 12), (3, 22)] and trace.meta["model"] == "tiny"


@pytest.mark.parametrize(
    ("prompts", "new", "what"), [([], 0, "at least one prompt"), ([[]], 0, "no tokens"), ([[64]], 0, "64"), ([[1]], -1, "new_tokens")]
)
def test_bad_prompts_are_refused(prompts: list[list[int]], new: int, what: str, tmp_path: Path) -> None:
    net = tiny("Olmoe")
    with pytest.raises(InputError, match=what):
        capture(net, prompts, tmp_path / "t.npz", new_tokens=new)
    assert not list(tmp_path.iterdir())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_errors_of_torch_are_one_line() -> None:
    net = old_style("logits", "mixtral")
    net.layers[1].forward = lambda x: x @ x  # shapes that do not match
    with pytest.raises(InputError, match="a run without errors"):
        capture(net, PROMPTS[:1])


def test_a_dense_model_is_refused() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 2)
    net.config = types.SimpleNamespace(model_type="dense")
    with pytest.raises(InputError, match="is it dense"):
        Recorder(net)


# --- routers as transformers 4 had them: what they return differs, and no module is given the choice ------------------------------------


def old_style(kind: str, model_type: str, **config: Any) -> Any:
    """A model of two MoE blocks whose routers return ``kind``, as in transformers 4."""
    torch = pytest.importorskip("torch")

    class Router(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            logits = super().forward(x)
            if kind == "logits":
                return logits
            top = logits.topk(2, dim=-1)
            weights = top.values.softmax(dim=-1)
            if kind == "ids, weights":
                return top.indices, weights
            return torch.zeros_like(logits).scatter_(1, top.indices, weights), top.indices

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.gate = Router(8, 6, bias=False)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Any) -> Any:
            self.gate(x)
            return x + self.experts[0](x)

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(64, 8)
            self.layers = torch.nn.ModuleList([Block(), Block()])
            self.config = types.SimpleNamespace(model_type=model_type, vocab_size=64, num_experts_per_tok=2, **config)
            self.device = torch.device("cpu")

        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            x = self.embed(input_ids)[0]
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(3)
    return Net()


def old_logits(net: Any, tokens: list[int]) -> list[np.ndarray]:
    torch = pytest.importorskip("torch")
    out, x = [], net.embed(torch.tensor(tokens))
    for layer in net.layers:
        out.append((x @ layer.gate.weight.T).detach().numpy())
        x = layer(x)
    return out


@pytest.mark.parametrize(
    ("kind", "model_type", "rule"),
    [
        ("logits", "mixtral", "norm"),
        ("logits", "olmoe", "all"),
        ("logits", "new_model", None),
        ("ids, weights", "deepseek_v3", "norm"),
        ("scores, ids", "gpt_oss", "norm"),
    ],
)
def test_routers_of_transformers_4(kind: str, model_type: str, rule: str | None) -> None:
    net = old_style(kind, model_type, norm_topk_prob=False)
    trace = capture(net, PROMPTS[:1])
    assert (trace.n_experts, trace.top_k, trace.n_layers) == (6, 2, 2)
    for layer, logits in enumerate(old_logits(net, PROMPTS[0])):
        ids = np.argsort(-logits, axis=1)[:, :2]
        assert (trace.expert_ids[:, layer] == ids).all()
        if rule is None:
            assert trace.weights is None and "weights are left out" in trace.meta["notes"][0]
            continue
        share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        top = np.take_along_axis(share, ids, 1)
        assert trace.weights is not None
        want = top / top.sum(axis=1, keepdims=True) if rule == "norm" else top
        assert np.abs(trace.weights[:, layer].astype(float) - want).max() < 1e-3


# --- files ----------------------------------------------------------------------------------------------------------------------------


def test_parts_do_not_grow_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    ids = np.tile(np.arange(8, dtype=np.int16), (2000, 48, 1))
    tracemalloc.start()
    with Parts(tmp_path) as parts:
        for number in range(20):
            parts.append(ids, ids.astype(np.float16), number, 0, 0)
    parts.join(tmp_path / "t.npz", {"n_experts": 8})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6 < 20 * ids.nbytes  # one pass and its copy, not twenty
    assert load_trace(tmp_path / "t.npz").n_rows == 40_000
    assert {i.filename for i in zipfile.ZipFile(tmp_path / "t.npz").infolist()} >= {"expert_ids.npy", "weights.npy", "meta.npy"}


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n\nthree\n", encoding="utf-8")
    assert prompts_of(tmp_path / "a.txt") == [(1, "one two"), (3, "three")]
    (tmp_path / "b.jsonl").write_text('{"token_ids": [1, 2, 3]}\n"text"\n{"prompt": "more"}\n[4]\n', encoding="utf-8")
    assert prompts_of(tmp_path / "b.jsonl") == [(1, [1, 2, 3]), (2, "text"), (3, "more"), (4, [4])]
    (tmp_path / "c.jsonl").write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [9]}\n', encoding="utf-8")
    assert read_prompts(tmp_path / "c.jsonl", None, 2) == [[1, 2], [9]]


@pytest.mark.parametrize("line", ['{"token_ids": [true]}', '{"token_ids": [-1]}', "{", "7", '{"x": 1}', "[" * 5000])
def test_bad_prompt_lines_are_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"fine"\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"p\.jsonl:2"):
        prompts_of(tmp_path / "p.jsonl")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(InputError, match=r"moesim\[capture\]"):
        need("torch_that_is_not_there")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    tiny("Olmoe").save_pretrained(folder)
    return folder


def test_command_captures_a_local_folder(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": p}) for p in PROMPTS) + "\n", encoding="utf-8")
    out = tmp_path / "out.npz"
    code = run(["trace", "capture", str(saved), "--prompts", str(prompts), "-o", str(out), "--new-tokens", "3", "--max-prompt", "4"])
    got = capsys.readouterr()
    assert code == 0, got.err
    assert "3 of 3 prompts" in got.err and "RoutingTrace(tiny" in got.out
    assert load_trace(out) == capture(load_model(saved), [p[:4] for p in PROMPTS], new_tokens=3, name="tiny")


def test_only_local_safetensors_are_read(saved: Path, tmp_path: Path) -> None:
    for path in saved.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(InputError, match="pickles"):
        load_model(saved)
    with pytest.raises(InputError, match=r"config\.json"):
        load_model("some/hub-name")


def test_a_damaged_model_is_one_line(saved: Path) -> None:
    next(saved.glob("*.safetensors")).write_bytes(b"not a tensor")
    with pytest.raises(InputError, match="model: expected a causal language model"):
        load_model(saved)


def test_text_needs_a_tokeniser(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n", encoding="utf-8")
    with pytest.raises(InputError, match="token_ids"):
        read_prompts(tmp_path / "p.txt", saved)


def test_text_is_read_with_the_models_tokeniser(saved: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "one": 11, "two": 12}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(saved)
    (tmp_path / "p.txt").write_text("one two\ntwo what one\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.txt", saved) == [[11, 12], [12, 0, 11]]
    assert read_prompts(tmp_path / "p.txt", saved, 2) == [[11, 12], [12, 0]]


def test_torch_is_not_imported_with_the_module() -> None:
    assert not {"torch", "transformers"} & set(vars(capture_module))


# --- a server -------------------------------------------------------------------------------------------------------------------------

L, K, E = 3, 2, 8


def routing(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((n, L, E)), axis=2)[:, :, :K].astype(np.int16)


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class Stub(LocalServer):
    """A server of one model; ``mode`` says how it answers."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.requests: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer({"data": [{"id": "served"}]} if self.path == "/v1/models" else {}, 200 if self.path == "/v1/models" else 404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(body)
                if stub.mode == "slow":
                    time.sleep(1.0)
                if stub.mode == "refuses":
                    self.answer({"error": {"message": "no such model"}}, 404)
                    return
                n = len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])
                array = routing(n + body["max_tokens"] - 1, len(stub.requests))
                choice: dict[str, Any] = {"text": "secret words", "index": 0}
                reply = {"model": "served", "usage": {"prompt_tokens": n}, "choices": [choice]}
                if stub.mode == "npy":
                    choice["routed_experts"] = npy(array)
                elif stub.mode == "lists":
                    choice["routed_experts"] = array.tolist()
                elif stub.mode == "apart":
                    choice["routed_experts"], reply["prompt_routed_experts"] = array[n:].tolist(), array[:n].tolist()
                elif stub.mode == "int32":
                    choice["meta_info"] = {"routed_experts": base64.b64encode(array.astype("<i4").tobytes()).decode()}
                elif stub.mode == "damaged":
                    choice["routed_experts"] = npy(array)[:-40]
                elif stub.mode == "not json":
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(b"<html>")
                    return
                self.answer(reply)

            def answer(self, body: dict[str, Any], code: int = 200) -> None:
                data = json.dumps(body).encode()
                try:
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client went away
                    pass

        super().__init__(Handler)


@pytest.fixture
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Stub(request.param)
    yield server
    server.close()


@pytest.mark.parametrize("stub", ["npy", "lists", "apart"], indirect=True)
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_server_routing_is_recorded(stub: Stub, suffix: str) -> None:
    done: list[int] = []
    trace = capture_server(stub.url + suffix, ["a b c", [7, 8]], new_tokens=4, progress=done.append)
    assert (trace.expert_ids == np.concatenate([routing(6, 1), routing(5, 2)])).all()
    assert trace.phase.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1] and trace.seq_id.tolist() == [0] * 6 + [1] * 5
    assert trace.meta["model"] == "served" and trace.meta["new_tokens"] == 4 and "secret" not in json.dumps(trace.meta)
    want = {"model": "served", "prompt": "a b c", "max_tokens": 4, "temperature": 0, "return_routed_experts": True}
    assert stub.requests[0] == want and done == [1, 2]


@pytest.mark.parametrize("stub", ["int32"], indirect=True)
def test_command_with_a_server(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"token_ids": [1, 2, 3, 4]}\n', encoding="utf-8")
    options = ["--server", stub.url, "--max-prompt", "3", "--layers", str(L), "--top-k", str(K), "--experts", str(E)]
    out = tmp_path / "o.npz"
    code = run(["trace", "capture", "my-model", "--prompts", str(tmp_path / "p.jsonl"), "-o", str(out), *options])
    assert code == 0, capsys.readouterr().err
    trace = load_trace(out)
    assert (trace.expert_ids == routing(3, 1)).all() and trace.n_experts == E and stub.requests[0]["model"] == "my-model"
    (tmp_path / "p.txt").write_text("text\n", encoding="utf-8")
    assert run(["trace", "capture", "--prompts", str(tmp_path / "p.txt"), "-o", str(out), *options]) == 2
    assert "--max-prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stub", "what"),
    [
        ("none", "enable-return-routed-experts"),
        ("damaged", "server: "),
        ("refuses", "HTTP 404.*no such model"),
        ("not json", "expected JSON"),
    ],
    indirect=["stub"],
)
def test_server_that_does_not_do_as_asked(stub: Stub, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        capture_server(stub.url, ["a b"])
    assert str(caught.value).startswith(stub.url)


@pytest.mark.parametrize("stub", ["slow"], indirect=True)
def test_server_that_is_too_slow(stub: Stub) -> None:
    with pytest.raises(InputError, match=r"within 0\.2 s.*--timeout"):
        capture_server(stub.url, ["a"], timeout_s=0.2, model="m")


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InputError, match="is it running"):
        capture_server(f"http://127.0.0.1:{port}", ["a"])
    for url in ("file:///etc/hosts", "127.0.0.1:8000", "http://", "ftp://x"):
        with pytest.raises(InputError, match="--server"):
            capture_server(url, ["a"])


def test_command_needs_a_model_or_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "capture", "--prompts", "x", "-o", str(tmp_path / "t.npz")]) == 2
    assert "MODEL" in capsys.readouterr().err
