"""Writes traces in the layouts of other tools, independently of the readers, for tests. Each writer returns the options to read it with."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moesim.profile import RoutingProfile, save_profile
from moesim.trace import RoutingTrace
from moesim.trace_formats.source import Options


def make(
    seed: int = 0, *, sequences: int = 2, prompt: int = 5, decode: int = 7, layers: int = 4, experts: int = 16, k: int = 3,
    weights: bool = False, ragged: bool = False, start: int = 0,
) -> RoutingTrace:  # fmt: skip
    """A random trace; ragged: the last layer routes the last prompt token alone."""
    rng = np.random.default_rng(seed)
    per = prompt + decode
    n = sequences * per
    ids = np.argsort(rng.random((n, layers, experts)), axis=2)[:, :, :k].astype(np.int16)
    ids[0, 0] = [experts - 1, *[e for e in range(k - 1)]]  # the largest id occurs
    position = np.tile(np.arange(start, start + per), sequences).astype(np.int32)
    phase = np.tile(np.r_[np.zeros(prompt), np.ones(decode)], sequences).astype(np.uint8)
    share = rng.random((n, layers, k)).astype(np.float16) if weights else None
    if ragged and prompt > 1:
        gone = np.flatnonzero((phase == 0) & (position - start < prompt - 1))
        ids[gone, -1] = -1
        if share is not None:
            share[gone, -1] = np.nan
    seq = np.repeat(np.arange(sequences), per).astype(np.int32)
    return RoutingTrace(ids, share, seq, position, phase, {"n_experts": experts, "model": "test/random"})


def passes(trace: RoutingTrace, chunk: int = 10**9) -> Iterator[list[np.ndarray]]:
    """Forward passes as a single-user engine runs them: prompts in chunks, then one token each; (n, K) ids of every layer, absent ones left out."""
    for start, stop in trace.sequences:
        prompt = [t for t in range(start, stop) if trace.phase[t] == 0]
        groups = [prompt[i : i + chunk] for i in range(0, len(prompt), chunk)] + [[t] for t in range(start, stop) if trace.phase[t] == 1]
        for rows in groups:
            yield [
                np.array([trace.expert_ids[t, layer] for t in rows if trace.expert_ids[t, layer, 0] >= 0]).reshape(-1, trace.top_k)
                for layer in range(trace.n_layers)
            ]


def bigmoeonedge(trace: RoutingTrace, path: Path) -> Options:
    out = [
        "# route_trace v1",
        f"# model=/data/test.gguf arch=test n_layer={trace.n_layers} n_expert={trace.n_experts} n_expert_used={trace.top_k}",
    ]
    out += [f"# layer={i} expert_bytes={1000 + i} dense_bytes=7" for i in range(trace.n_layers)]
    out.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped")
    for number, (start, stop) in enumerate(trace.sequences):
        prompt = [t for t in range(start, stop) if trace.phase[t] == 0]
        order = [(t, layer) for layer in range(trace.n_layers) for t in prompt]
        order += [(t, layer) for t in range(start, stop) if trace.phase[t] == 1 for layer in range(trace.n_layers)]
        for t, layer in order:
            for slot, expert in enumerate(trace.expert_ids[t, layer].tolist()):
                if expert >= 0:
                    weight = "nan" if trace.weights is None else f"{float(trace.weights[t, layer, slot]):.6g}"
                    out.append(f"{number},{trace.phase[t]},{trace.position[t]},{layer},{slot},{expert},{weight},0,0,0")
    path.write_text("\n".join(out) + "\n")
    return Options()


def llama_long(trace: RoutingTrace, path: Path) -> Options:
    out = ["phase,token,layer,rank,expert"]
    prompt = [t for t in range(trace.n_rows) if trace.phase[t] == 0]
    order = [(t, layer) for layer in range(trace.n_layers) for t in prompt]
    order += [(t, layer) for t in range(trace.n_rows) if trace.phase[t] == 1 for layer in range(trace.n_layers)]
    for t, layer in order:
        name = ("prefill", "decode")[trace.phase[t]]
        out += [f"{name},{trace.position[t]},{layer},{rank},{e}" for rank, e in enumerate(trace.expert_ids[t, layer].tolist()) if e >= 0]
    path.write_text("\n".join(out) + "\n")
    return Options(n_experts=trace.n_experts)


def llama_pairs(trace: RoutingTrace, path: Path) -> Options:
    out = [f"{layer},{e}" for one in passes(trace) for layer, ids in enumerate(one) for e in ids.reshape(-1).tolist()]
    path.write_text("\n".join(out) + "\n")
    return Options(n_experts=trace.n_experts)


def llama_rows(trace: RoutingTrace, path: Path, chunk: int = 4) -> Options:
    out, at, step = [], 0, 0
    prompt = int((trace.phase == 0).sum())
    for one in passes(trace, chunk):
        n = max(len(ids) for ids in one)
        in_prompt = at < prompt
        for layer, ids in enumerate(one):
            for j, cell in enumerate(ids.tolist()):
                pos = -(at + len(ids) - j) if in_prompt else step
                out.append(",".join(map(str, (pos, layer, *cell))))
        at, step = at + n, step + (not in_prompt)
    path.write_text("\n".join(out) + "\n")
    return Options(n_experts=trace.n_experts)


def llama_steps(trace: RoutingTrace, path: Path) -> Options:
    out = []
    for number, (start, stop) in enumerate(trace.sequences):
        for t in range(start, stop):
            out += [
                " ".join(map(str, (number, trace.position[t], layer, *trace.expert_ids[t, layer].tolist())))
                for layer in range(trace.n_layers)
            ]
    path.write_text("\n".join(out) + "\n")
    return Options(n_experts=trace.n_experts)


def mbolt(trace: RoutingTrace, path: Path) -> Options:
    words = [0x544C424D, 1, trace.n_experts]
    for one in passes(trace):
        for layer, ids in enumerate(one):
            words += [layer, trace.top_k, len(ids), *ids.reshape(-1).tolist()]
    path.write_bytes(struct.pack(f"<{len(words)}i", *words))
    return Options()


def llama_bin(trace: RoutingTrace, path: Path, order: str = "nk") -> Options:
    words: list[int] = []
    for one in passes(trace):
        for layer, ids in enumerate(one):
            sizes = {"n": len(ids), "k": trace.top_k}
            words += [layer, sizes[order[0]], sizes[order[1]], *ids.reshape(-1).tolist()]
    path.write_bytes(struct.pack(f"<{len(words)}i", *words))
    return Options(n_experts=trace.n_experts, top_k=trace.top_k)


def print_tensor(name: str, kind: str, op: str, values: np.ndarray, limit: int = 3, function: str = "common_debug_cb_eval") -> str:
    """A tensor (rows, columns) as llama.cpp's common_debug_print_tensor shows it, with ``...`` beyond twice the limit."""

    def shown(n: int) -> list[int | None]:
        return list(range(n)) if n <= 2 * limit else [*range(limit), None, *range(n - limit, n)]

    rows, columns = values.shape
    out = [f"{function}: {name:>24} = ({kind}) {op:>10}(ffn_moe_argsort-0{{{columns}, {rows}, 1, 1}}, }}) = {{{columns}, {rows}, 1, 1}}"]
    pad = " " * 37
    out += [pad + "[", pad + " ["]
    for row in shown(rows):
        if row is None:
            out.append(pad + "  ..., ")
            continue
        cells = ["..., " if c is None else f"{float(values[row, c]):12.4f}" + (", " if c < columns - 1 else "") for c in shown(columns)]
        out.append(pad + "  [" + "".join(cells) + "],")
    return "\n".join([*out, pad + " ],", pad + "]", pad + f"sum = {float(values.sum()):f}"]) + "\n"


def eval_callback(trace: RoutingTrace, path: Path, limit: int = 3) -> Options:
    rng = np.random.default_rng(0)
    out = ["build: 1 (abc)\nllama_context: n_ctx = 512\n"]
    for one in passes(trace):
        for layer, ids in enumerate(one):
            out.append(print_tensor(f"ffn_moe_logits-{layer}", "f32", "MUL_MAT", rng.normal(size=(len(ids), trace.n_experts))))
            out.append(print_tensor(f"ffn_moe_topk-{layer}", "i32", "VIEW", ids, limit))
            out.append(print_tensor(f"ffn_moe_weights-{layer}", "f32", "GET_ROWS", rng.random((len(ids), trace.top_k))))
    path.write_text("".join(out))
    return Options(n_experts=trace.n_experts)


def imatrix(counts: np.ndarray, path: Path, layers: list[int] | None = None) -> Options:
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 5)
    writer.add_uint32("imatrix.chunk_size", 512)
    rng = np.random.default_rng(1)
    for row, layer in zip(counts, layers or range(len(counts)), strict=True):
        writer.add_tensor(f"blk.{layer}.attn_q.weight.in_sum2", rng.random((1, 8)).astype(np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.counts", np.array([[row.sum()]], np.float32))
        for name in ("down", "gate", "up"):
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.in_sum2", rng.random((len(row), 8)).astype(np.float32))
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.counts", row[:, None].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Options()


def routed_npy(trace: RoutingTrace, path: Path) -> Options:
    with path.open("wb") as file:
        np.save(file, trace.expert_ids.astype(np.int32))
    return Options(n_experts=trace.n_experts, prompt_tokens=(int((trace.phase == 0).sum()),))


def routed_npz(trace: RoutingTrace, path: Path) -> Options:
    arrays = {f"routed_experts_{i}": trace.expert_ids[a:b].astype(np.uint8) for i, (a, b) in enumerate(trace.sequences)}
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return Options(n_experts=trace.n_experts, prompt_tokens=_prompts(trace))


def _prompts(trace: RoutingTrace) -> tuple[int, ...]:
    return tuple(int((trace.phase[a:b] == 0).sum()) for a, b in trace.sequences)


def npy64(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def routed_vllm(trace: RoutingTrace, path: Path) -> Options:
    """Completions: base64 of .npy in each choice, usage tells the prompt's length."""
    lines = []
    for (a, b), prompt in zip(trace.sequences, _prompts(trace), strict=True):
        choice = {"index": 0, "text": "", "routed_experts": npy64(trace.expert_ids[a:b].astype(np.uint16))}
        lines.append(json.dumps({"id": "cmpl-1", "model": "test/random", "choices": [choice], "usage": {"prompt_tokens": prompt}}))
    path.write_text("\n".join(lines) + "\n")
    return Options(n_experts=trace.n_experts)


def routed_nested(trace: RoutingTrace, path: Path) -> Options:
    """vLLM's nested lists, prompt and answer apart."""
    prompt = _prompts(trace)[0]
    body = {
        "prompt_routed_experts": trace.expert_ids[:prompt].tolist(),
        "choices": [{"routed_experts": trace.expert_ids[prompt:].tolist()}],
    }
    path.write_text(json.dumps(body))
    return Options(n_experts=trace.n_experts)


def routed_sglang(trace: RoutingTrace, path: Path) -> Options:
    out = []
    for (a, b), prompt in zip(trace.sequences, _prompts(trace), strict=True):
        data = base64.b64encode(trace.expert_ids[a:b].astype("<i4").tobytes()).decode()
        out.append({"text": "", "meta_info": {"id": "x", "prompt_tokens": prompt, "routed_experts": data}})
    path.write_text(json.dumps(out))
    return Options(n_experts=trace.n_experts, n_layers=trace.n_layers, top_k=trace.top_k)


def vllm_jsonl(trace: RoutingTrace, path: Path, dummies: tuple[int, ...] = (32, 8, 4)) -> Options:
    meta = {
        "type": "meta",
        "model_id": "test/random",
        "vllm_version": "0",
        "layers_logged": list(range(trace.n_layers)),
        "top_k": trace.top_k,
    }
    out = [json.dumps(meta)]

    def add(layer: int, ids: Any, weights: Any) -> None:
        for i, cell in enumerate(ids):
            row = {"type": "route", "req_id": "r1", "token_idx": i, "layer": layer, "topk_ids": [int(e) for e in cell]}
            row["topk_weights"] = [round(float(w), 6) for w in weights[i]]
            out.append(json.dumps(row))

    for n in dummies:
        for layer in range(trace.n_layers):
            cell = list(range(layer, layer + trace.top_k))
            add(layer, [cell] * n, [[0.1 * i for i in range(trace.top_k)]] * n)
    prompt = int((trace.phase == 0).sum())
    for rows in [range(prompt), *([t] for t in range(prompt, trace.n_rows))]:
        assert trace.weights is not None
        for layer in range(trace.n_layers):
            add(layer, trace.expert_ids[list(rows), layer], trace.weights[list(rows), layer])
    path.write_text("\n".join(out) + "\n")
    return Options(n_experts=trace.n_experts)


def router_logits(trace: RoutingTrace, kind: str, path: Path) -> Options:
    """Logits whose softmax over all experts orders the trace's experts; weights are not those of the trace."""
    rng = np.random.default_rng(3)
    logits = rng.random((trace.n_layers, trace.n_rows, trace.n_experts)).astype(np.float32)
    for t in range(trace.n_rows):
        for layer in range(trace.n_layers):
            logits[layer, t, trace.expert_ids[t, layer]] = 8.0 - np.arange(trace.top_k)
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, logits)
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, **{f"layer_{i}": logits[i].astype(np.float16) for i in range(trace.n_layers)})  # type: ignore[arg-type]
    else:
        write_safetensors(path, {f"router_logits.{i}": logits[i] for i in range(trace.n_layers)})
    return Options(top_k=trace.top_k, prompt_tokens=tuple(b - a for a, b in trace.sequences))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """float32 tensors as BF16, which safetensors stores as the upper half of a float32."""
    header, data = {}, b""
    for name, array in tensors.items():
        part = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def stratamoe(trace: RoutingTrace, path: Path) -> Options:
    body = {
        "expertsPerLayer": trace.n_experts, "layers": trace.n_layers, "scenario": "test", "seed": 1, "selections": trace.expert_ids.tolist(),
        "source": {"kind": "captured", "model": {"id": "test/random"}}, "tokens": trace.n_rows, "topK": trace.top_k, "version": 2,
    }  # fmt: skip
    path.write_text(json.dumps(body, indent=2) + "\n")
    spans = [{"id": str(i), "token_start": a, "token_end_exclusive": b} for i, (a, b) in enumerate(trace.sequences)]
    metadata = {"prompt_spans": spans, "trace_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "scope": "encoder"}
    path.with_name("x-capture-metadata.json").write_text(json.dumps(metadata))
    return Options()


def policylang(trace: RoutingTrace, path: Path) -> Options:
    n = trace.n_rows * trace.n_layers
    out = [
        json.dumps(
            {
                "model_name": "test/random",
                "num_layers": trace.n_layers,
                "num_experts": trace.n_experts,
                "top_k": trace.top_k,
                "num_entries": n,
            }
        )
    ]
    for t in range(trace.n_rows):
        for layer in range(trace.n_layers):
            scores = None if trace.weights is None else trace.weights[t, layer].astype(float).tolist()
            out.append(json.dumps({"t": int(trace.position[t]), "l": layer, "e": trace.expert_ids[t, layer].tolist(), "s": scores}))
    path.write_text("\n".join(out) + "\n")
    return Options(prompt_tokens=_prompts(trace))


def counts_csv(trace: RoutingTrace, path: Path) -> Options:
    rows = [f"m,{layer},{e},{n}" for layer, row in enumerate(trace.counts().tolist()) for e, n in enumerate(row)]
    path.write_text("\n".join(["model,layer,expert,count", *rows]) + "\n")
    return Options()


def counts_json(trace: RoutingTrace, path: Path) -> Options:
    path.write_text(json.dumps({"model": "m", "counts": {str(i): row for i, row in enumerate(trace.counts().tolist())}}, indent=1))
    return Options()


def profile(trace: RoutingTrace, path: Path) -> Options:
    save_profile(RoutingProfile.from_counts(trace.counts(), range(trace.n_layers), "test"), path)
    return Options()


def sglang_dump(trace: RoutingTrace, replicas: int = 4, slots: int = 8) -> dict[str, Any]:
    """A per_token dump as plain data: physical ids with the first experts replicated, -1 padding, passes of all sequences at once."""
    rng = np.random.default_rng(5)
    physical = np.stack([rng.permutation(np.r_[np.arange(trace.n_experts), np.arange(replicas)]) for _ in range(trace.n_layers)])
    places = [[np.flatnonzero(row == e) for e in range(trace.n_experts)] for row in physical]
    records = []
    prompts = _prompts(trace)
    steps: list[tuple[int, list[list[int]]]] = [(1, [list(range(a, a + p)) for (a, _), p in zip(trace.sequences, prompts, strict=True)])]
    longest = max(b - a - p for (a, b), p in zip(trace.sequences, prompts, strict=True))
    for i in range(longest):
        steps.append((2, [[a + p + i] for (a, b), p in zip(trace.sequences, prompts, strict=True) if a + p + i < b]))
    for number, (mode, groups) in enumerate(steps):
        rows = [t for group in groups for t in group]
        ids = np.full((trace.n_layers, len(rows), slots), -1, np.int32)
        for j, t in enumerate(rows):
            for layer in range(trace.n_layers):
                ids[layer, j, : trace.top_k] = [rng.choice(places[layer][e]) for e in trace.expert_ids[t, layer]]
        records.append({
            "forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "input_ids": [1] * len(rows), "positions": trace.position[rows].tolist(),
            "extend_seq_lens": [len(group) for group in groups] if mode == 1 else None, "forward_mode": mode, "topk_ids_of_layer": ids,
            "misc_objects": [], "global_physical_count": np.zeros((trace.n_layers, physical.shape[1]), np.int32),
        })  # fmt: skip
    return {"records": records, "last_physical_to_logical_map": physical}


@dataclass(frozen=True)
class Case:
    """One format with a trace that it can hold in full, its file name, and how it is written."""

    format: str
    name: str
    trace: RoutingTrace
    write: Callable[[RoutingTrace, Path], Options]


def cases() -> dict[str, Case]:
    one = {"sequences": 1}
    prefill = {"decode": 0, "sequences": 3}
    return {
        "bigmoeonedge": Case("bigmoeonedge", "t.csv", make(weights=True, ragged=True), bigmoeonedge),
        "bigmoeonedge_decode": Case("bigmoeonedge", "t.csv", make(prompt=0, start=40), bigmoeonedge),
        "llama_long": Case("llama-csv", "t.csv", make(ragged=True, **one), llama_long),
        "llama_pairs": Case("llama-csv", "t.csv", make(ragged=True), llama_pairs),
        "llama_rows": Case("llama-csv", "t.csv", make(prompt=11, ragged=True, **one), llama_rows),
        "llama_steps": Case("llama-csv", "t.csv", make(prompt=0, sequences=3), llama_steps),
        "mbolt": Case("mbolt", "t.bin", make(ragged=True), mbolt),
        "llama_bin": Case("llama-bin", "t.bin", make(**prefill), llama_bin),
        "llama_bin_decode": Case("llama-bin", "t.bin", make(ragged=True), llama_bin),
        "eval_callback": Case("eval-callback", "t.txt", make(ragged=True), eval_callback),
        "routed_npy": Case("routed-experts", "t.npy", make(**one), routed_npy),
        "routed_npz": Case("routed-experts", "t.npz", make(), routed_npz),
        "routed_vllm": Case("routed-experts-json", "t.jsonl", make(), routed_vllm),
        "routed_nested": Case("routed-experts-json", "t.json", make(**one), routed_nested),
        "routed_sglang": Case("routed-experts-json", "t.json", make(), routed_sglang),
        "vllm_jsonl": Case("vllm-jsonl", "t.jsonl", make(weights=True, **one), vllm_jsonl),
        "logits_npy": Case("router-logits", "t.npy", make(**prefill), lambda t, p: router_logits(t, "npy", p)),
        "logits_npz": Case("router-logits", "t.npz", make(**prefill), lambda t, p: router_logits(t, "npz", p)),
        "logits_safetensors": Case("router-logits", "t.safetensors", make(**prefill), lambda t, p: router_logits(t, "safetensors", p)),
        "stratamoe": Case("stratamoe", "t.json", make(**prefill), stratamoe),
        "policylang": Case("policylang", "t.jsonl", make(weights=True), policylang),
        "imatrix": Case("imatrix", "t.gguf", make(), lambda t, p: imatrix(t.counts(), p)),
        "counts_csv": Case("counts-csv", "t.csv", make(), counts_csv),
        "profile": Case("profile", "t.json", make(), profile),
        "counts_json": Case("counts-json", "t.json", make(), counts_json),
    }
