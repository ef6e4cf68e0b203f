"""Owns the guess of which part of a file is stored in which format, from the name of its quantisation and its average bits per weight.

Files mix formats: attention, shared experts and the head get more bits than routed experts. The name says what the first get (each
recipe below is what its quantiser writes by default); the routed experts get what is left of the file, as a mix of the two nearest
formats over the layers, so that the sum of all parts is the size of the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.precision import FORMATS, PrecisionOverride, PrecisionPlan

# Formats that routed experts are given, by rising bits; of formats of about the same size the commoner one.
LADDER = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a quantiser gives the parts that are not routed experts."""

    pattern: str
    dense: str  # attention, shared expert, dense FFN
    head: str = "Q6_K"
    embeddings: str = ""  # empty: as dense
    value: str = ""  # the value projection, where it gets more
    source: str = ""


_DEFAULT = "default mixes of llama-quantize"
RECIPES = (
    Recipe(r"F16 rest|BF16|FP16|^F16", "F16", "F16", source="stated by the name"),
    Recipe(r"MXFP4", "Q8_0", "Q8_0", source="the makers' GGUF files of gpt-oss keep all but the experts in Q8_0"),
    Recipe(r"fp8", "Q8_0", "F16", source="fp8 weights have about the size of Q8_0"),
    Recipe(r"NVFP4|AWQ|GPTQ", "Q4_K", "F16", source="checkpoints of this kind quantise all linear layers and keep the head in 16 bit"),
    Recipe(r"^MLX|affine|^mlx|int4|4-bit", "Q4_K", "Q4_K", source="group-wise 4 bit for all matrices"),
    Recipe(r"Q8_0", "Q8_0", "Q8_0", source=_DEFAULT),
    Recipe(r"_R4|_KT\b", "Q8_0", "Q8_0", source="published ik_llama.cpp mixes of DeepSeek: all that is read for every token in Q8_0"),
    Recipe(r"mix", "Q6_K", "Q6_K", "Q8_0", source="published ik_llama.cpp mixes of Qwen3: loader logs give 6.5 bits for attention and head, 8.5 for the embeddings"),
    Recipe(r"Q6_K", "Q6_K", "Q6_K", source=_DEFAULT),
    Recipe(r"UD-.*(Q[56])", "Q6_K", "Q6_K", "Q5_K", source="unsloth dynamic files: attention above the experts"),
    Recipe(r"UD-.*(Q4)", "Q5_K", "Q6_K", "Q4_K", "Q6_K", source="unsloth dynamic files: attention above the experts"),
    Recipe(r"UD-", "Q4_K", "Q6_K", "Q4_K", "Q6_K", source="unsloth dynamic files: attention above the experts"),
    Recipe(r"Q5_K|Q5_", "Q5_K", "Q6_K", value="Q6_K", source=_DEFAULT),
    Recipe(r"Q4_K|IQ4", "Q4_K", "Q6_K", value="Q6_K", source=_DEFAULT),
    Recipe(r"Q4_0|Q4_1", "Q4_0", "Q6_K", source=_DEFAULT),
    Recipe(r"Q3_K|IQ3", "Q3_K", "Q6_K", "Q3_K", "Q5_K", source=_DEFAULT),
    Recipe(r"Q2_K|IQ2|IQ1", "Q3_K", "Q5_K", "Q2_K", "Q4_K", source=_DEFAULT),
)  # fmt: skip
_STATED = re.compile(r"(?P<dense>[A-Z0-9_]+) attn(?:.*?(?P<head>[A-Z0-9_]+) output)?")


def plan_of(model: ModelSpec, quant: str, bits_per_weight: float, kv: str) -> PrecisionPlan:
    """Return the precision of a file.

    Parameters
    ----------
    model : ModelSpec
    quant : str
        Name of the quantisation as reported, empty where none was.
    bits_per_weight : float
        Average over the whole file.
    kv : str
        Format of the K/V cache.

    Raises
    ------
    InputError
        If no mix of known formats gives the routed experts what the file leaves for them.
    """
    recipe = recipe_of(quant, bits_per_weight)
    base = _plan(recipe, LADDER[0], (), kv)
    others = model.weight_bytes(base) - model.part_bytes(base, "routed_experts")
    params = sum(model.layer_params(layer, "routed_experts") for layer in model.moe_layers)
    wanted = (model.params_total * bits_per_weight / 8 - others) * 8 / params
    sizes = _ladder(model, recipe, kv)
    if not 0.8 * sizes[0][0] < wanted < 1.1 * sizes[-1][0]:
        expected = f"room for routed experts of {sizes[0][0]:.3g} to {sizes[-1][0]:.3g} bits"
        raise InputError("bits_per_weight", expected=expected, got=f"{wanted:.2f} bits")
    return _divided(model, recipe, wanted, kv)


def plan_of_experts(model: ModelSpec, quant: str, bits_per_weight: float, kv: str) -> PrecisionPlan:
    """Return the precision of a file whose routed experts have so many bits per weight on average, the rest as its name's recipe says."""
    return _divided(model, recipe_of(quant, bits_per_weight), bits_per_weight, kv)


def _ladder(model: ModelSpec, recipe: Recipe, kv: str) -> list[tuple[float, str]]:
    """Bits per weight of the routed experts in each format, padding included."""
    params = sum(model.layer_params(layer, "routed_experts") for layer in model.moe_layers)
    return [(model.part_bytes(_plan(recipe, name, (), kv), "routed_experts") * 8 / params, name) for name in LADDER]


def _divided(model: ModelSpec, recipe: Recipe, bits: float, kv: str) -> PrecisionPlan:
    """The plan whose routed experts have so many bits per weight: the two nearest formats, spread over the layers."""
    low, high, share = _between(bits, _ladder(model, recipe, kv))
    layers = model.moe_layers
    count = round(share * len(layers))
    raised = tuple(layer for i, layer in enumerate(layers) if (i + 1) * count // len(layers) > i * count // len(layers))
    return _plan(recipe, low, ((high, raised),) if raised else (), kv)


def recipe_of(quant: str, bits_per_weight: float) -> Recipe:
    """Return what the parts besides routed experts are stored in; without a known name, the file's average."""
    stated = _STATED.search(quant)
    if stated:
        dense, head = _known(stated["dense"]), _known(stated["head"] or "Q6_K")
        if dense and head:
            return Recipe("", dense, head, source="stated by the name")
    for recipe in RECIPES:
        if re.search(recipe.pattern, quant, re.IGNORECASE):
            return recipe
    low, high, share = _between(bits_per_weight, [(FORMATS[name].bits_per_weight, name) for name in LADDER])
    return Recipe("", high if share > 0.5 else low, source="the file's average")


def _known(name: str) -> str:
    return next((n for n in (name, name + "_M", name + "_0", name + "_XS") if n in FORMATS), "")


def _between(bits: float, sizes: list[tuple[float, str]]) -> tuple[str, str, float]:
    """Two neighbours of a ladder of rising sizes, and the share of the upper one that gives these bits on average."""
    for (b0, low), (b1, high) in pairwise(sizes):
        if bits <= b1:
            return low, high, min(max((bits - b0) / (b1 - b0), 0.0), 1.0)
    return LADDER[-1], LADDER[-1], 0.0


def _plan(recipe: Recipe, experts: str, raised: tuple[tuple[str, tuple[int, ...]], ...], kv: str) -> PrecisionPlan:
    overrides = [PrecisionOverride(part="routed_experts", format=name, layers=layers) for name, layers in raised]
    if recipe.value:
        overrides.append(PrecisionOverride(part="attention", format=recipe.value, matrix="v"))
    return PrecisionPlan(default=recipe.dense, routed_experts=experts, head=recipe.head, embeddings=recipe.embeddings or recipe.dense, kv=kv,
                         overrides=tuple(overrides))  # fmt: skip
