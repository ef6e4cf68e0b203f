"""Owns what the name of a GGUF file's quantisation says of the formats of its parts, where the file itself is not here.

Three kinds of names, the first that fits:

- ``BITS``: the median bits per weight of public files of MoE models of that name (the loader logs and file sizes behind ``moesim
  backtest``'s public runs), divided among the parts by ``backtest.precision``;
- ``MIXES``: the rules of llama.cpp's quantiser (src/llama-quant.cpp, llama_tensor_get_type) for the names that it writes;
- ``NOMINAL``: bits per weight of the format that the name is of, given to the routed experts: what ik_llama.cpp prints of its types
  (src/llama.cpp, llama_model_ftype_name; examples/quantize), and for unsloth's UD- names, whose mixes are not published, llama.cpp's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from moesim.architecture import FullAttention
from moesim.backtest.precision import plan_of, plan_of_experts
from moesim.model import ModelSpec
from moesim.precision import FORMATS

BITS = {
    "UD-Q5_K_XL": 5.70, "UD-Q4_K_XL": 4.70, "UD-Q3_K_XL": 3.53, "UD-Q2_K_XL": 2.99, "UD-IQ3_XXS": 3.20, "IQ4_XS": 4.32, "IQ3_XXS": 3.20,
    "IQ2_XXS": 2.20, "Q8_0": 8.51, "Q6_K": 6.57, "Q5_K_M": 5.69, "Q4_K_M": 4.83, "Q3_K_M": 3.78, "Q4_0": 4.57,
}  # fmt: skip
PLAIN = {
    "MXFP4": {"default": "Q8_0", "routed_experts": "mxfp4"},
    "BF16": {"default": "bf16"},
    "F16": {"default": "F16"},
    "F32": {"default": "F32"},
}
NOMINAL = {
    "IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5625, "IQ2_M": 2.7, "IQ3_XXS": 3.0625, "IQ3_XS": 3.3,
    "IQ3_S": 3.4375, "IQ3_M": 3.66, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "TQ1_0": 1.6875, "TQ2_0": 2.0625, "Q2_K": 2.625, "Q3_K": 3.4375,
    "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "Q5_0": 5.5, "Q5_1": 6.0, "Q5_K": 5.5, "Q6_0": 6.5, "Q6_K": 6.5625, "Q8_0": 8.5,
    "IQ1_KT": 1.75, "IQ2_KS": 2.1875, "IQ2_K": 2.375, "IQ2_KT": 2.125, "IQ2_KL": 2.6875, "IQ3_KT": 3.125, "IQ3_KS": 3.1875, "IQ3_K": 3.4375,
    "IQ3_KL": 4.0, "IQ4_KSS": 4.0, "IQ4_KT": 4.0, "IQ4_KS": 4.25, "IQ4_K": 4.5, "IQ5_KS": 5.25, "IQ5_K": 5.5, "IQ6_K": 6.6,
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4_MOE": "MXFP4"}
LARGE = {
    "Q2_K_L": "Q2_K",
    "Q3_K_XL": "Q3_K_L",
    "Q4_K_L": "Q4_K_M",
    "Q5_K_L": "Q5_K_M",
    "Q6_K_L": "Q6_K",
}  # with embeddings and output in Q8_0
_QUANT = re.compile(
    r"(?:UD-)?(?:IQ\d_(?:XXS|XS|S|M|NL|KSS|KS|KT|KL|K)(?:_XL|_L)?|TQ\d_0|Q\d_(?:K(?:_XXL|_XL|_XS|_S|_M|_L)?|0|1)(?:_XL|_L)?|MXFP4(?:_MOE)?"
    r"|BF16|F16|F32)(?:_R[48]|_R16)?(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_EIGHT = (
    "Q2_K",
    "IQ3_XS",
    "Q3_K_S",
    "IQ4_NL",
    "Q4_K_S",
    "Q4_K_M",
    "IQ3_S",
    "IQ3_M",
)  # more for attention's output where there are 8 experts


@dataclass(frozen=True, slots=True)
class Mix:
    """The formats that llama.cpp's quantiser gives the parts. Empty: the base.

    ``v`` and ``v_shared`` are the value projection in the layers that ``v_in`` names, the second where at least four heads share one;
    ``down`` of FFNs and experts, in the layers that ``down_in`` names; ``gate_up`` of those in the layers between the first and the last eighth. ``i`` tells the mixes of
    1 and 2 bits, which have rules of their own for models with 4 experts and more.
    """

    base: str
    head: str = "Q6_K"
    embeddings: str = ""
    v: str = ""
    v_shared: str = ""
    v_in: str = "all"
    qk: tuple[str, str] = ("", "")
    o: str = ""
    down: str = ""
    down_in: str = "all"
    gate_up: str = ""
    i: bool = False


MIXES = {
    "Q2_K": Mix("Q2_K", v="Q3_K", v_shared="Q4_K", o="Q3_K", down="Q3_K"),
    "Q2_K_S": Mix("Q2_K", v_shared="Q4_K", down="Q4_K", down_in="first eighth"),
    "Q3_K_S": Mix("Q3_K"),
    "Q3_K_L": Mix("Q3_K", v="Q5_K", v_shared="Q5_K", o="Q5_K", down="Q5_K"),
    "Q4_1": Mix("Q4_1"),
    "Q4_K_S": Mix("Q4_K", v="Q5_K", v_shared="Q5_K", v_in="first four", down="Q5_K", down_in="first eighth"),
    "Q4_K_M": Mix("Q4_K", v="Q6_K", v_shared="Q6_K", v_in="more", down="Q6_K", down_in="more"),
    "Q5_0": Mix("Q5_0"),
    "Q5_1": Mix("Q5_1"),
    "Q5_K_S": Mix("Q5_K"),
    "Q5_K_M": Mix("Q5_K", v="Q6_K", v_shared="Q6_K", v_in="more", down="Q6_K", down_in="more"),
    "Q6_K": Mix("Q6_K"),
    "IQ1_S": Mix("IQ1_S", "Q5_K", "Q2_K", o="IQ2_XXS", down="Q2_K", down_in="first eighth", i=True),
    "IQ1_M": Mix("IQ1_M", "Q5_K", "Q2_K", o="IQ2_XXS", down="Q2_K", down_in="first eighth", i=True),
    "IQ2_XS": Mix("IQ2_XS", "Q5_K", "Q2_K", down="Q2_K", down_in="first eighth", i=True),
    "IQ2_S": Mix("IQ2_XS", "Q5_K", "IQ3_S", o="IQ3_S", down="IQ3_S", down_in="first eighth", i=True),
    "IQ2_M": Mix("IQ2_S", "Q5_K", "IQ3_S", o="IQ3_S", down="IQ3_S", down_in="first eighth", i=True),
    "IQ3_XS": Mix("IQ3_S", v_shared="Q4_K", qk=("IQ3_XXS", "IQ3_XXS"), gate_up="IQ3_XXS"),
    "IQ3_S": Mix("IQ3_S", v_shared="Q4_K"),
    "IQ3_M": Mix("IQ3_S", v="Q4_K", v_shared="Q4_K", o="Q4_K", down="Q4_K", down_in="first eighth"),
    "IQ4_NL": Mix("IQ4_NL", v_shared="Q5_K"),
    "TQ1_0": Mix("TQ1_0", embeddings="Q4_K"),
    "TQ2_0": Mix("TQ2_0", embeddings="Q4_K"),
}


def quant_of(file: str) -> str:
    """Return the name of a file's quantisation in capitals, or ""."""
    found = _QUANT.findall(PurePosixPath(file.replace("\\", "/")).name)
    return str(found[-1]).upper() if found else ""


def precision_of(model: ModelSpec, quant: str, kv: str) -> tuple[dict[str, Any], str] | None:
    """Return a precision as plain data, and how it was found; None where the name is not known.

    Parameters
    ----------
    model : ModelSpec
    quant : str
        As ``quant_of`` returns it.
    kv : str
        Format of the K/V cache.
    """
    name = re.sub(r"_R(4|8|16)$", "", quant)  # rows interleaved, of the same size
    name = ALIASES.get(name, name)
    if name in PLAIN:
        return dict(PLAIN[name]), ""
    if name in BITS:
        return _data(plan_of(model, name, BITS[name], kv)), (
            f"{quant}: {BITS[name]:g} bits per weight, the median of public files; a file's own header would be exact"
        )
    if name in MIXES:
        return mixed(model, name, MIXES[name]), f"{quant}: formats by llama.cpp's rules for that name; a file's own header would be exact"
    if name in LARGE:
        data = mixed(model, LARGE[name], MIXES[LARGE[name]]) | {"head": "Q8_0", "embeddings": "Q8_0"}
        return data, f"{quant}: formats by llama.cpp's rules for {LARGE[name]}, with embeddings and output in Q8_0"
    name = name.replace("Q8_K", "Q8_0")
    base = re.sub(r"^UD-", "", name)
    while base and base not in NOMINAL:
        base = base.rpartition("_")[0]
    if not base:
        return None
    bits = NOMINAL[base]
    said = f"{quant}: {bits:g} bits per weight for the routed experts, the nominal figure of {base}; the rest of its mix is assumed"
    unknown = (
        "" if base in FORMATS or name.startswith("UD-") else f"; {base} itself is not modelled, the nearest known formats stand for it"
    )
    return _data(plan_of_experts(model, name, bits, kv)), said + unknown


def known_names() -> list[str]:
    """Return the names that are understood, without UD- and _XL variants."""
    return sorted({*BITS, *PLAIN, *MIXES, *NOMINAL})


def _data(plan: Any) -> dict[str, Any]:
    data: dict[str, Any] = plan.model_dump(mode="json", exclude_none=True)
    overrides = [o | ({"layers": spans(o["layers"])} if "layers" in o else {}) for o in data.pop("overrides")]
    data.pop("kv", None)
    return data | ({"overrides": overrides} if overrides else {})


def spans(layers: Any) -> str:
    """Return layers as a scenario writes them: ``0-3, 7``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _more_bits(i: int, n: int) -> bool:
    """Layers to which llama.cpp gives more: the first and last eighth, and every third between (use_more_bits)."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_WHERE: dict[str, Callable[[int, int], bool]] = {
    "all": lambda i, n: True,
    "first eighth": lambda i, n: i < n // 8,
    "first four": lambda i, n: i < 4,
    "middle": lambda i, n: n // 8 <= i < 7 * n // 8,
    "more": _more_bits,
}


def mixed(model: ModelSpec, name: str, mix: Mix) -> dict[str, Any]:
    n, eight = model.n_layers, model.n_experts == 8
    shared = isinstance(model.attention, FullAttention) and model.attention.n_heads >= 4 * model.attention.n_kv_heads
    value = "Q4_K" if mix.i and model.n_experts >= 4 else mix.v_shared if shared else mix.v
    q, k, o, v_in, down_in = *mix.qk, mix.o, mix.v_in, mix.down_in
    if eight:
        value, k = (value, "Q4_K") if mix.i else ("Q8_0", "Q8_0")
        o = "Q5_K" if mix.i or name in _EIGHT else ""
        v_in, down_in = "all", "more" if name == "IQ3_M" else down_in
    ffn = [p for p in ("routed_experts", "shared_expert", "dense_ffn") if any(model.layer_params(i, p) for i in range(n))]
    changes = [
        (["attention"], "q", q, "all"),
        (["attention"], "k", k, "all"),
        (["attention"], "v", value, v_in),
        (["attention"], "o", o, "all"),
    ]
    changes += [(ffn, "down", mix.down, down_in), (ffn, "gate", mix.gate_up, "middle"), (ffn, "up", mix.gate_up, "middle")]
    overrides = []
    for parts, matrix, form, where in changes:
        layers = [i for i in range(n) if _WHERE[where](i, n)]
        if form and layers:
            limits = {"layers": spans(layers)} if len(layers) < n else {}
            overrides += [{"part": part, "matrix": matrix, "format": form, **limits} for part in parts]
    embeddings = mix.head if model.tied_embeddings else mix.embeddings or mix.base
    data: dict[str, Any] = {"default": mix.base, "head": mix.head, "embeddings": embeddings}
    return data | ({"overrides": overrides} if overrides else {})
