"""Owns the meaning of a GGUF header: architecture from the metadata, the exact tensors and their exact formats from the tensor infos.

Tensor and key names after llama.cpp (gguf-py/gguf/constants.py, src/llama-arch.cpp). The planned bytes of a model read here equal the bytes
of the tensors in the file, but for the multi-token prediction layers, which the engines do not load and which are left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moesim.architecture import Attention, FullAttention, LinearAttention, MlaAttention, NoAttention, group_attention
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_files.config_reader import Keys
from moesim.model_files.gguf_header import GgufHeader, GgufTensor, read_header
from moesim.model_tensors import TensorSpec
from moesim.precision import MAX_LAYERS, PrecisionPlan, plan_from

# Period of the layers that see the whole context, where the engine has it built in and the file need not say it; the last layer of a
# period is the full one, or in the second table the first (llama.cpp, src/models, set_swa_pattern). A window under any other architecture
# without a pattern in the file is not used by the engine either.
FULL_EVERY = {"gpt-oss": 2, "gemma3": 6, "gemma4": 6, "cohere2": 4, "llama4": 4, "afmoe": 4, "exaone-moe": 4}
FULL_FIRST = {"smallthinker": 4}
DELTANET = ("qwen3next", "qwen35moe")

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_OLD_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")  # one tensor per expert, as files had it before 2024-04
_EXPERT = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_MATRICES = {
    "ffn_gate_inp": ("router", "router"),
    "ffn_gate_inp_shexp": ("router", "shared_gate"),
    "ffn_gate_shexp": ("shared_expert", "gate"),
    "ffn_up_shexp": ("shared_expert", "up"),
    "ffn_down_shexp": ("shared_expert", "down"),
    "ffn_gate": ("dense_ffn", "gate"),
    "ffn_up": ("dense_ffn", "up"),
    "ffn_down": ("dense_ffn", "down"),
    "attn_q": ("attention", "q"),
    "attn_k": ("attention", "k"),
    "attn_v": ("attention", "v"),
    "attn_qkv": ("attention", "qkv"),
    "attn_output": ("attention", "o"),
    "attn_q_a": ("attention", "q_a"),
    "attn_q_b": ("attention", "q_b"),
    "attn_kv_a_mqa": ("attention", "kv_a"),
    "attn_kv_b": ("attention", "kv_b"),
    "attn_k_b": ("attention", "k_b"),
    "attn_v_b": ("attention", "v_b"),
}
_GLOBAL = {
    "token_embd.weight": ("embeddings", "embed"),
    "output.weight": ("head", "head"),
    "per_layer_token_embd.weight": ("lookup", "per_layer"),
}
_VECTORS = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "shortconv.conv")  # small tables that count as vectors, as in model_tensors
_VISION = ("v.", "mm.", "a.")


def model_from_gguf(path: Path) -> tuple[ModelSpec, PrecisionPlan]:
    """Build the model and the exact precision plan of a GGUF file from its header (of all parts, if it is split).

    Raises
    ------
    InputError
        With file and key or byte offset: for a damaged header, a model without experts, or facts that are missing.
    """
    header = read_header(path)
    infos = list(header.tensors)
    for part in _other_parts(path, header):
        infos += read_header(part).tensors
    where = str(path)
    stated = Keys(header.metadata, where).int("split.tensors.count", default=len(infos), low=0)
    if stated != len(infos) or len({info.name for info in infos}) < len(infos):
        got = f"{len(infos)} tensors, {len({info.name for info in infos})} names"
        raise InputError("split.tensors.count", expected=f"{stated} different tensors in all parts", got=got, where=where)
    architecture = Keys(header.metadata, where).text("general.architecture")
    if not architecture:
        raise Keys(header.metadata, where).missing("the architecture", "general.architecture")
    prefix = f"{architecture}."
    c = Keys({k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}, where, prefix)
    n_experts = c.int("expert_count", default=0, low=0)
    if not n_experts:
        error = c.missing("an expert count of 1 or more", "expert_count")
        raise InputError("model", expected=error.expected, got="no expert count", fix=f"a dense model? {error.fix}", where=where)
    n_layers = c.require_int("the number of layers", "block_count") - c.int("nextn_predict_layers", default=0, low=0)
    if not 1 <= n_layers <= MAX_LAYERS:
        raise c.fail("block_count", f"1 to {MAX_LAYERS} layers, without those of nextn_predict_layers", str(n_layers))
    found: list[tuple[TensorSpec, GgufTensor]] = []
    for info in infos:
        tensor = _tensor(info, n_layers, n_experts, where)
        if tensor is not None:
            found.append((tensor, info))
    table, formats = _merge(found, n_experts, where)
    try:
        fields = _fields(c, header, architecture, n_layers, n_experts, table)
        fields["tensor_table"] = table
        model = build(ModelSpec, Document(fields, where))
    except ValidationError as error:
        raise InputError("GGUF metadata", expected=error.errors()[0]["msg"], got="sizes that contradict each other", where=where) from None
    return model, _plan(table, formats, where)


def _other_parts(path: Path, header: GgufHeader) -> list[Path]:
    """The other files of a split model; the metadata is in the first."""
    c = Keys(header.metadata, str(path))
    count = c.int("split.count", default=1, low=0)
    match = re.fullmatch(r"(.+-)(\d{5})-of-(\d{5})\.gguf", path.name)
    if count <= 1 or not match:
        return []
    if count > 10_000 or int(match[3]) != count:
        raise c.fail("split.count", f"{int(match[3])}, as the file's name says", str(count))
    if int(match[2]) != 1:
        raise InputError("GGUF", expected="the first part, which has the metadata", got=f"part {int(match[2])}", where=str(path))
    parts = [path.with_name(f"{match[1]}{i:05}-of-{match[3]}.gguf") for i in range(2, count + 1)]
    gone = next((part.name for part in parts if not part.is_file()), "")
    if gone:
        fix = "put the headers of all parts beside each other"
        raise InputError("GGUF", expected=f"all {count} parts of the split model", got=f"no {gone}", fix=fix, where=str(path))
    return parts


def _tensor(info: GgufTensor, n_layers: int, n_experts: int, where: str) -> TensorSpec | None:
    """Return what a tensor is, or None for a layer of multi-token prediction."""
    cols, rows = info.shape[0], info.shape[1] if len(info.shape) > 1 else 1
    count = info.shape[2] if len(info.shape) > 2 else 1
    count *= info.shape[3] if len(info.shape) > 3 else 1
    vector = rows == count == 1

    def spec(part: str, layer: int, matrix: str) -> TensorSpec:
        return TensorSpec(info.name, part, layer, matrix, rows, cols, count)

    block = _BLOCK.fullmatch(info.name)
    if not block:
        part, matrix = _GLOBAL.get(info.name, ("", ""))
        if part:
            return spec(part, -1, matrix)
        if info.name.startswith(_VISION):
            return spec("vision", -1, info.name)
        return spec("norms" if vector or not info.name.endswith(".weight") else "attention", -1, info.name)
    layer, rest = int(block[1]), block[2]
    if layer >= n_layers:
        return None
    old, expert = _OLD_EXPERT.fullmatch(rest), _EXPERT.fullmatch(rest)
    if old:
        return TensorSpec(info.name, "routed_experts", layer, old[1], rows, cols, 1)
    if expert:
        bias = expert[2] == "bias"
        held = rows if bias else count
        if held != n_experts:
            got = f"{held} in a tensor of {list(info.shape)}"
            raise InputError(info.name, expected=f"{n_experts} experts, as expert_count says", got=got, where=where)
        return TensorSpec(info.name, "routed_experts", layer, expert[1] + ("_bias" if bias else ""), 1 if bias else rows, cols, n_experts)
    stem, _, suffix = rest.rpartition(".")
    if suffix == "weight" and stem in _MATRICES:
        part, matrix = _MATRICES[stem]
        return spec(part, layer, matrix)
    if vector or suffix != "weight" or "norm" in stem or stem in _VECTORS:
        return spec("norms", layer, rest.replace(".weight", ""))
    return spec("attention", layer, stem)  # a matrix that every token reads, whatever it is called


def _merge(found: list[tuple[TensorSpec, GgufTensor]], n_experts: int, where: str) -> tuple[tuple[TensorSpec, ...], list[str]]:
    """Join the tensors of single experts into one entry; return all entries and their formats."""
    table: list[TensorSpec] = []
    formats: list[str] = []
    single: dict[tuple[int, str], list[tuple[TensorSpec, GgufTensor]]] = defaultdict(list)
    for tensor, info in found:
        if tensor.part == "routed_experts" and tensor.count != n_experts:
            single[tensor.layer, tensor.matrix].append((tensor, info))
        else:
            table.append(tensor)
            formats.append(info.format.name)
    for (layer, matrix), group in single.items():
        kinds = {(t.rows, t.cols, info.format.name) for t, info in group}
        if len(kinds) != 1 or len(group) != n_experts:
            got = f"{len(group)} tensors of {len(kinds)} kinds"
            raise InputError(f"blk.{layer}.ffn_{matrix}", expected=f"{n_experts} equal experts", got=got, where=where)
        rows, cols, name = kinds.pop()
        table.append(TensorSpec(f"blk.{layer}.ffn_{matrix}.*.weight", "routed_experts", layer, matrix, rows, cols, n_experts))
        formats.append(name)
    return tuple(table), formats


def _fields(c: Keys, header: GgufHeader, architecture: str, n_layers: int, n_experts: int, table: Sequence[TensorSpec]) -> dict[str, Any]:
    places = {(t.part, t.layer, t.matrix): t for t in table}
    hidden = c.require_int("the hidden size", "embedding_length")
    embed = places.get(("embeddings", -1, "embed"))
    if embed is None:
        raise InputError(
            "token_embd.weight", expected="the embeddings", got="no such tensor", fix="is this the whole model?", where=c.where
        )
    ups = {layer: t for (part, layer, matrix), t in places.items() if part == "routed_experts" and matrix in ("up", "gate_up")}
    if not ups:
        raise InputError("ffn_up_exps", expected="tensors of experts", got="none", where=c.where)
    first = ups[min(ups)]
    bare = sorted(set(range(n_layers)) - {t.layer for t in table})
    if bare:
        got = f"layer {bare[0]} has no tensors"
        raise c.fail("block_count", "tensors in every layer", got, "is this one part of a split model?")
    shared = [t for (part, _, matrix), t in places.items() if part == "shared_expert" and matrix == "up"]
    dense = {layer: t for (part, layer, matrix), t in places.items() if part == "dense_ffn" and matrix == "up"}
    experts: dict[str, Any] = {
        "n_experts": n_experts,
        "top_k": c.require_int("the number of experts per token", "expert_used_count"),
        "intermediate_size": first.rows // (2 if first.matrix == "gate_up" else 1),
        "gated": first.matrix == "gate_up" or ("routed_experts", first.layer, "gate") in places,
        "layers": sorted(ups),
    }
    if shared:
        experts |= {"n_shared": c.int("expert_shared_count", default=1), "shared_intermediate_size": shared[0].rows}
    fields: dict[str, Any] = {
        "name": (Keys(header.metadata, c.where).text("general.name") or Path(c.where).stem)[:200],
        "n_layers": n_layers,
        "hidden_size": hidden,
        "vocab_size": embed.rows,
        "tied_embeddings": ("head", -1, "head") not in places,
        "experts": experts,
        "source": f"{Path(c.where).name} (GGUF, {architecture})",
    }
    if dense or len(ups) < n_layers:
        width = max((t.rows for t in dense.values()), default=0)
        fields["dense_ffn"] = {"intermediate_size": width} | ({"layers": sorted(dense)} if dense else {})
    context = c.int("context_length")
    if context:
        fields["max_context"] = context
    return fields | group_attention(_attention(c, architecture, n_layers, hidden, places))


def _per_layer(c: Keys, name: str, n_layers: int, default: int) -> list[int]:
    """A number for each layer, from one number or an array of them."""
    if isinstance(c.data.get(name), list):
        values = c.items(name, int, "whole numbers") or []
        if len(values) < n_layers or any(v < 0 for v in values):
            raise c.fail(name, f"{n_layers} numbers of 0 or more", f"{len(values)} numbers")
        return values[:n_layers]
    return [c.int(name, default=default, low=0)] * n_layers


def _attention(c: Keys, arch: str, n_layers: int, hidden: int, places: dict[tuple[str, int, str], TensorSpec]) -> list[Attention]:
    heads = _per_layer(c, "attention.head_count", n_layers, 0)
    kv_heads = _per_layer(c, "attention.head_count_kv", n_layers, 0)
    sliding = _sliding(c, arch, n_layers)
    by_layer: dict[int, list[TensorSpec]] = defaultdict(list)
    for (_, layer, _), tensor in places.items():
        by_layer[layer].append(tensor)
    out: list[Attention] = []
    for i in range(n_layers):
        matrices = {t.matrix for t in by_layer[i] if t.part == "attention"}
        if any(m.startswith(("ssm_", "shortconv")) for m in matrices):
            mixer = sum(t.params for t in by_layer[i] if t.part == "attention" or t.matrix.startswith("ssm_"))
            out.append(_linear(c, arch, hidden, mixer))
        elif "kv_a" in matrices:
            out.append(_mla(c, heads[i]))
        elif matrices & {"q", "k", "qkv", "q_a"}:
            out.append(_full(c, i, heads[i], kv_heads[i] or heads[i], hidden, sliding[i]))
        else:
            out.append(NoAttention(kind="none"))
    return out


def _sliding(c: Keys, arch: str, n_layers: int) -> list[int]:
    """The window of each layer, 0 where it sees the whole context."""
    window = c.int("attention.sliding_window", "attention.chunk_size", default=8192 if arch == "llama4" else 0, low=0)
    if not window:
        return [0] * n_layers
    pattern = c.data.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if not pattern or not all(isinstance(x, int) for x in pattern):
            raise c.fail("attention.sliding_window_pattern", "a list of true or false", repr(pattern)[:60])
        return [window if pattern[i % len(pattern)] else 0 for i in range(n_layers)]
    period = c.int("attention.sliding_window_pattern", default=FULL_EVERY.get(arch, 0), low=0)
    if period:
        return [window if (i + 1) % period else 0 for i in range(n_layers)]
    first = FULL_FIRST.get(arch, 0)
    return [window if first and i % first else 0 for i in range(n_layers)]


def _full(c: Keys, layer: int, heads: int, kv_heads: int, hidden: int, window: int) -> FullAttention:
    if not heads or heads % kv_heads:
        raise c.fail("attention.head_count", f"a multiple of the {kv_heads} K/V heads in layer {layer}", str(heads))
    swa = "_swa" if window else ""
    plain = hidden // heads if hidden % heads == 0 else None
    key = c.int("attention.key_length" + swa, "attention.key_length") or plain
    if key is None:
        raise c.missing("the head size", "attention.key_length")
    value = c.int("attention.value_length" + swa, "attention.value_length") or key
    kind = "sliding" if window else "full"
    fields = {"kind": kind, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": key, "v_head_dim": value if value != key else None}
    return FullAttention.model_validate(fields | {"window": window or None})


def _mla(c: Keys, heads: int) -> MlaAttention:
    """Newer files give the sizes of the latent cache as key_length, and those of the heads under other names."""
    rope = c.require_int("the rotary head size", "rope.dimension_count")
    key = c.require_int("the key head size", "attention.key_length_mla", "attention.key_length")
    if key <= rope:
        raise c.fail("attention.key_length", f"more than the rotary {rope}", str(key))
    return MlaAttention(
        kind="mla",
        n_heads=heads or c.require_int("the number of heads", "attention.head_count"),
        q_lora_rank=c.int("attention.q_lora_rank", low=0) or None,
        kv_lora_rank=c.require_int("the rank of the K/V latent", "attention.kv_lora_rank"),
        qk_nope_head_dim=key - rope,
        qk_rope_head_dim=rope,
        v_head_dim=c.require_int("the value head size", "attention.value_length_mla", "attention.value_length"),
    )


def _linear(c: Keys, arch: str, hidden: int, params: int) -> LinearAttention:
    if c.has("shortconv.l_cache"):
        state = hidden * (c.int("shortconv.l_cache", default=1) - 1)
        return LinearAttention(kind="linear", params=params, state_elements=state)
    kernel, inner = c.require_int("the convolution's length", "ssm.conv_kernel"), c.require_int("the inner size", "ssm.inner_size")
    size, groups = c.require_int("the state size", "ssm.state_size"), c.int("ssm.group_count", default=0, low=0)
    if arch in DELTANET:
        values = c.require_int("the value heads", "ssm.time_step_rank")
        fields = {"n_key_heads": groups, "n_value_heads": values, "key_head_dim": size, "value_head_dim": inner // values}
        return LinearAttention.model_validate({"kind": "linear", "conv_kernel": kernel} | fields)
    return LinearAttention(kind="linear", params=params, state_elements=inner * size + (inner + 2 * groups * size) * (kernel - 1))


def _plan(table: tuple[TensorSpec, ...], formats: list[str], where: str) -> PrecisionPlan:
    """The plan that gives every tensor of the table its own format: one format a part where that is all, else overrides."""
    size: Counter[str] = Counter()
    used: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for tensor, name in zip(table, formats, strict=True):
        size[name] += tensor.params
        used[tensor.part][tensor.matrix][name].append(tensor.layer)
    data: dict[str, Any] = {"default": size.most_common(1)[0][0]}
    overrides: list[dict[str, Any]] = []
    for part, matrices in used.items():
        weights = Counter(name for by_format in matrices.values() for name, layers in by_format.items() for _ in layers)
        data[part] = weights.most_common(1)[0][0]
        for matrix, by_format in matrices.items():
            # what a part's format does not reach (biases of experts), and what differs from it, is named
            for name, layers in by_format.items():
                if name != data[part] or matrix.endswith("_bias"):
                    one = len(by_format) == 1
                    overrides.append({"part": part, "matrix": matrix, "format": name} | ({} if one else {"layers": sorted(layers)}))
    return plan_from(data | {"overrides": overrides}, where)
