"""Owns the recording of a running transformers model's routing: which modules to listen to, and what they say.

It must not know servers or commands. torch and transformers are imported when asked for. Listened to, best first, in each MoE block (a
module with a child ``experts``):

1. what the experts are given: ids (rows, K) and weights (rows, K), exactly as the model uses them. All routers of transformers 5 end
   here, whatever their rule: softmax, DeepSeek-V3's group-limited sigmoid with bias correction, gpt-oss's softmax over the chosen.
2. what the router returns, where that holds ids (transformers 4: DeepSeek-V3 (ids, weights), gpt-oss (scattered scores, ids)).
3. plain logits of a router (transformers 4: Mixtral, Qwen, OLMoE), with the rule of ``LOGITS_RULES``; a model that is not in the table
   gives ids (its K largest logits) and no weights, with a note.

Ids keep the router's order, which is the order of strength unless the router asks ``topk`` for no order (DeepSeek-V3 does). A generated
token is routed when it is run, so the last one has no row: n new tokens are n - 1 decode rows, as in vLLM's ``routed_experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.capture.files import Parts, need, parts_beside
from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace

ROUTERS = ("gate", "router", "router_gate", "gating")  # names of a router beside ``experts``, in the order they are tried
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # of a configuration
EXPERT_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k")
# model_type -> how logits become weights in transformers 4: softmax over all experts, normalised over the chosen ("norm"), or only if
# config.norm_topk_prob says so ("config"); or softmax over the chosen logits ("chosen"). Source: the models' modeling_*.py.
LOGITS_RULES = {
    "mixtral": "norm",
    "qwen2_moe": "config",
    "qwen3_moe": "config",
    "olmoe": "config",
    "flex_olmo": "config",
    "gpt_oss": "chosen",
}

Cells = tuple[NDArray[np.int16], NDArray[np.float16] | None]  # ids and weights of one layer in one pass, (rows, K)


def capture(
    model: Any,
    sequences: Iterable[Sequence[int]],
    path: str | Path | None = None,
    *,
    new_tokens: int = 0,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RoutingTrace:
    """Run prompts through a transformers model, one at a time, and record which experts every token chose.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model with MoE layers; it is put into eval mode.
    sequences : iterable of sequences of int
        Token ids of each prompt; may be lazy.
    path : path, optional
        The ``.npz`` to write. Passes are appended to files beside it as they come, so memory does not grow with the length of the
        recording; the trace is read once, checked, at the end.
    new_tokens : int
        Tokens to generate greedily after each prompt; the last one has no row.
    name : str, optional
        Name of the model in the meta; by default what its configuration says.
    progress : callable, optional
        Called with the number of sequences and of rows recorded, after each sequence.

    Returns
    -------
    RoutingTrace

    Raises
    ------
    InputError
        If torch is not installed, the model shows no router, or its layers disagree in shape.
    """
    torch = need("torch")
    if new_tokens < 0:
        raise InputError("new_tokens", expected="at least 0", got=str(new_tokens))
    model.eval()
    config = _text_config(model.config)
    target = None if path is None else Path(path)
    with parts_beside(target) as parts:
        try:
            with Recorder(model) as recorder, parts, torch.no_grad():
                facts: list[dict[str, Any]] = []
                for number, tokens in enumerate(sequences):
                    facts.append(_one(model, torch, recorder, parts, number, tokens, new_tokens))
                    if progress is not None:
                        progress(number + 1, parts.n_rows)
                if not facts:
                    raise InputError("sequences", expected="at least one prompt", got="none")
                ids, *_ = parts.shape
                meta: dict[str, Any] = {
                    "model": name or str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", "unknown")),
                    "n_layers": ids[0],
                    "n_experts": recorder.n_experts(config),
                    "top_k": ids[1],
                    "captured_by": f"moesim trace capture (transformers {_version()}, torch {torch.__version__})",
                    "router": recorder.router,
                    "router_blocks": recorder.blocks,
                    "new_tokens": new_tokens,
                    "sequences": facts,
                    "notes": recorder.notes,
                }
            return parts.finish(meta, target)
        except RuntimeError as error:  # torch's own, out of memory among them
            got = " ".join(str(error).split())[:200]
            raise InputError("model", expected="a run without errors", got=got, fix="shorter prompts, or another --device") from error


def load_model(folder: str | Path, device: str = "cpu") -> Any:
    """Load a causal language model from a local folder: safetensors only, no code from the folder, no network.

    Raises
    ------
    InputError
        If transformers is not installed, or the folder holds no such model.
    """
    transformers = need("transformers")
    torch = need("torch")
    where = Path(folder)
    if not (where / "config.json").is_file():
        raise InputError("model", expected="a folder with config.json", got=f'"{folder}"', fix="download the model first")
    if not any(where.glob("*.safetensors")):
        fix = "convert the weights; .bin and .pt files are pickles and are not read"
        raise InputError("model", expected="weights in .safetensors files", got="none", fix=fix, where=str(folder))
    kind = "dtype" if tuple(int(part) for part in _version().split(".")[:2]) >= (4, 56) else "torch_dtype"  # renamed then
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, kind: "auto"}
    try:
        torch.device(device)
        return transformers.AutoModelForCausalLM.from_pretrained(str(where), **safe).to(device).eval()
    except Exception as error:  # a damaged or unknown model can raise nearly anything in there
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError("model", expected="a causal language model that transformers knows", got=got, where=str(folder)) from None


class Recorder:
    """Hooks on every MoE block of a model; used as a context manager, it leaves the model as it was.

    Attributes
    ----------
    blocks : list of str
        Names of the MoE blocks, in the order they ran.
    router : str
        What was listened to.
    notes : list of str
    """

    def __init__(self, model: Any) -> None:
        self.config = _text_config(model.config)
        self.blocks: list[str] = []
        self.router = ""
        self.notes: list[str] = []
        self._handles: list[Any] = []
        self._heard: dict[str, dict[str, Cells]] = {}  # block -> source -> cells of this pass
        self._widths: set[int] = set()  # widths of logits, and numbers of experts that modules state
        self._found = [(name, block) for name, block in model.named_modules() if "experts" in dict(block.named_children())]
        if not self._found:
            kind = type(model).__name__
            raise InputError("model", expected="MoE blocks (modules with a child named experts)", got=f"none in {kind}", fix="is it dense?")

    def __enter__(self) -> Recorder:
        for name, block in self._found:
            children = dict(block.named_children())
            experts = children["experts"]
            self._widths.update(n for n in (getattr(experts, "num_experts", None), _length(experts)) if isinstance(n, int))
            self._handles.append(experts.register_forward_pre_hook(self._on_experts(name), with_kwargs=True))
            router = next((children[word] for word in ROUTERS if word in children), None)
            if router is not None:
                self._handles.append(router.register_forward_hook(self._on_router(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def n_experts(self, config: Any) -> int:
        """Routed experts of a layer: what the modules state, else what the configuration does."""
        stated = [getattr(config, key) for key in EXPERT_COUNTS if isinstance(getattr(config, key, None), int)]
        known = sorted(self._widths) or stated[:1]
        if len(known) != 1:
            raise InputError("model", expected="one number of experts in all layers", got=str(known or "none stated"))
        return int(known[0])

    def take(self) -> tuple[NDArray[np.int16], NDArray[np.float16] | None]:
        """Return ids and weights (rows, L, K) of the pass since the last call.

        Raises
        ------
        InputError
            If the routers said nothing that can be read, or the layers differ in rows or K.
        """
        heard, self._heard = self._heard, {}
        names = [name for name in heard if heard[name]]
        if not names:
            kinds = ", ".join(sorted({type(block).__name__ for _, block in self._found}))
            fix = "load it without fused MoE kernels, which pass the modules by; else report the model type"
            raise InputError("model", expected="routers that can be listened to", got=f"silence in {kinds}", fix=fix)
        if not self.blocks:
            self.blocks = names
            self.router = _best(heard[names[0]])
        if names != self.blocks:
            raise InputError("model", expected=f"the same {len(self.blocks)} MoE blocks in every pass", got=f"{len(names)} blocks")
        try:
            cells = [heard[name][self.router] for name in names]
            ids = np.stack([layer for layer, _ in cells], axis=1)
            weights = None if any(w is None for _, w in cells) else np.stack([w for _, w in cells if w is not None], axis=1)
        except (KeyError, ValueError):
            shapes = sorted({str(layer.shape) for one in heard.values() for layer, _ in one.values()})
            raise InputError("model", expected="MoE layers of one shape", got=f"(rows, K) of {', '.join(shapes)}") from None
        if weights is not None and not (weights >= 0).all():  # False for NaN too
            self._note("some routing weights are negative or no numbers: weights are left out")
            weights = None
        return ids, weights

    def _on_experts(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._hear(name, "experts' input", _chosen([*args, *kwargs.values()]))

        return hook

    def _on_router(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            tensors = list(output) if isinstance(output, (tuple, list)) else [output]
            found = _chosen(tensors)
            if found is not None:
                self._hear(name, "router's output", found)
                return
            logits = [tensor for tensor in tensors if _is_float(tensor)]
            if len(logits) == 1:
                self._widths.add(int(logits[0].shape[-1]))
                self._hear(name, "router's logits", self._from_logits(logits[0]))

        return hook

    def _hear(self, name: str, source: str, cells: Cells | None) -> None:
        # ids of a pass come once a block; a block that is run twice in a pass is another layer, which nothing here can tell apart
        heard = self._heard.setdefault(name, {})
        if source in heard:
            raise InputError("model", expected="each MoE block once in a pass", got=f"{name} twice", fix="shared blocks are not supported")
        if cells is not None:
            heard[source] = cells

    def _from_logits(self, logits: Any) -> Cells | None:
        sizes = [getattr(self.config, key) for key in EXPERT_CHOICES if isinstance(getattr(self.config, key, None), int)]
        if not sizes:
            return None
        logits = logits.reshape(-1, logits.shape[-1]).float()
        best = logits.topk(sizes[0], dim=-1)
        rule = LOGITS_RULES.get(getattr(self.config, "model_type", ""))
        if rule is None:
            self._note("weights are left out: the model gives logits alone, and its rule for weights is not known here")
            return _half(best.indices, None)
        if rule == "chosen":
            return _half(best.indices, best.values.softmax(dim=-1))
        weights = logits.softmax(dim=-1).gather(-1, best.indices)
        if rule == "norm" or getattr(self.config, "norm_topk_prob", False):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return _half(best.indices, weights)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _one(model: Any, torch: Any, recorder: Recorder, parts: Parts, number: int, tokens: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Record one prompt and what follows it; return the facts of the sequence."""
    size = int(getattr(_text_config(model.config), "vocab_size", 2**31))
    bad = [token for token in tokens if not 0 <= token < size]
    if bad or not len(tokens):
        raise InputError(f"prompt {number}", expected=f"token ids from 0 to {size - 1}", got=str(bad[0]) if bad else "no tokens")
    prompt = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    at = 0

    def heard(*_: object) -> None:
        nonlocal at
        ids, weights = recorder.take()
        n = len(ids)
        if n != (len(tokens) if at == 0 else 1):
            raise InputError("model", expected="one row a token in every MoE layer", got=f"{n} rows at position {at}")
        parts.append(ids, weights, number, at, PREFILL if at == 0 else DECODE)
        at += n

    # the body without the head of the vocabulary, whose output over a whole prompt would be large
    body = getattr(model, "base_model", model)
    handle = body.register_forward_hook(heard)
    try:
        if new_tokens:
            mask = torch.ones_like(prompt)
            model.generate(prompt, attention_mask=mask, generation_config=_greedy(model, new_tokens))
        else:
            body(input_ids=prompt, use_cache=False)
    finally:
        handle.remove()
    made = at - len(tokens) + 1 if new_tokens else 0
    return {"seq_id": number, "prompt_tokens": len(tokens), "new_tokens": made, "finished": int(made < new_tokens)}


def _greedy(model: Any, new_tokens: int) -> Any:
    """Greedy search with the model's own end of text and nothing else of its settings."""
    own = model.generation_config
    end = own.eos_token_id
    pad = own.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, (list, tuple)) and end else end
    greedy = need("transformers").GenerationConfig(do_sample=False, num_beams=1, use_cache=True, max_new_tokens=new_tokens)
    greedy.eos_token_id, greedy.pad_token_id, greedy.bos_token_id = end, pad, own.bos_token_id
    return greedy


def _chosen(values: list[Any]) -> Cells | None:
    """Find ids (rows, K) among tensors, and their weights: of the same shape, or scores (rows, E) that are 0 but for the chosen."""
    ids = [value for value in values if _is_int(value) and value.dim() == 2]
    if len(ids) != 1:
        return None
    shape = ids[0].shape
    floats = [value for value in values if _is_float(value)]
    weights = [value for value in floats if value.shape == shape]
    if weights:
        return _half(ids[0], weights[-1])
    for wide in (value for value in floats if value.dim() == 2 and value.shape[0] == shape[0] and value.shape[1] > shape[1]):
        picked = wide.gather(-1, ids[0])
        if bool((wide != 0).sum() == (picked != 0).sum()) and bool((picked >= 0).all()):
            return _half(ids[0], picked)
    return _half(ids[0], None)


def _half(ids: Any, weights: Any) -> Cells:
    cells = ids.detach().to("cpu").numpy().astype(np.int16)
    return cells, None if weights is None else weights.detach().float().to("cpu").numpy().astype(np.float16)


def _is_float(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _is_int(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and str(value.dtype) in ("torch.int64", "torch.int32", "torch.int16")


def _best(heard: dict[str, Cells]) -> str:
    """Which source to trust: one with weights, the nearest to the experts first."""
    order = [source for source in ("experts' input", "router's output", "router's logits") if source in heard]
    return next((source for source in order if heard[source][1] is not None), order[0])


def _length(module: Any) -> int | None:
    """Length of a ModuleList, whose members are the experts."""
    return len(module) if hasattr(module, "__len__") else None


def _text_config(config: Any) -> Any:
    """The configuration of the language model, in models that see as well."""
    return getattr(config, "text_config", None) or config


def _version() -> str:
    return str(getattr(need("transformers"), "__version__", "?"))
