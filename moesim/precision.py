"""Owns number formats with their true bytes, and precision plans: which part of which layer is kept in which format.

It must not know any model. The size of a matrix of ``rows`` output channels by ``cols`` input channels is

    bytes = rows * (ceil(cols / block) * block_bytes + row_bytes) + ceil(rows / tile) * ceil(cols / tile) * tile_bytes

so scales, zero points and the padding of the last block are counted. Sources of the layouts: GGUF block sizes from the GGML
type table (ggml/docs/gguf.md and gguf-py's GGML_QUANT_SIZES, which a test compares); MXFP4 from the OCP Microscaling
Formats specification 1.0; NVFP4 from NVIDIA's block-scaled format (16 E2M1 values, one E4M3 scale); NF4 from QLoRA
(arXiv:2305.14314); FP8 with 128 x 128 tiles from the DeepSeek-V3 report (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moesim.config import Document, Spec, build, content_hash, problem, read_yaml
from moesim.errors import InputError, did_you_mean
from moesim.stated_quality import StatedQuality, find_published

Part = Literal[
    "attention", "router", "shared_expert", "routed_experts", "dense_ffn", "embeddings", "head", "norms", "kv", "lookup", "vision"
]  # fmt: skip
PARTS: tuple[str, ...] = get_args(Part)
"""Parts of a model. ``norms`` holds norm weights, biases and every other vector; expert biases stay with their expert."""

REFERENCE_COLS = 4096  # the width at which bits_per_weight of a per-channel format is stated; no layout depends on it
MAX_LAYERS = 10_000  # far above any published model; bounds the work that a wrong spec can cause


def refuse(expected: str, got: str, fix: str = "") -> NoReturn:
    """Raise ``config.problem``, inside a validator."""
    raise problem(expected, got, fix)


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format of numbers.

    Parameters
    ----------
    name : str
        Canonical name, e.g. ``"int4-g128"`` or ``"Q4_K"``.
    block, block_bytes : int
        Elements per block along a row, and the bytes of one block, its scales included.
    kind : str
        ``"float"``, ``"int"`` or ``"gguf"``.
    compute : str
        Arithmetic of a matrix product with such weights: fp32, fp16, bf16, fp8, int8, int4 or fp4. Weight-only formats are
        dequantised to fp16; GGUF block formats multiply in int8, because the activations are quantised to 8 bits first.
    row_bytes : int
        Bytes per output channel (per-channel scale).
    tile, tile_bytes : int
        Side of a square tile of the matrix and the bytes of its scale; 0 where there is none.
    note : str
        What is not counted, or how the layout was chosen.
    """

    name: str
    block: int
    block_bytes: int
    kind: str
    compute: str
    row_bytes: int = 0
    tile: int = 0
    tile_bytes: int = 0
    note: str = ""

    def bytes_for(self, rows: int, cols: int) -> int:
        """Return the bytes of ``rows`` output channels by ``cols`` input channels."""
        size = rows * (-(-cols // self.block) * self.block_bytes + self.row_bytes)
        if self.tile:
            size += -(-rows // self.tile) * -(-cols // self.tile) * self.tile_bytes
        return size

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales included; per-channel scales are spread over ``REFERENCE_COLS`` weights."""
        bits = 8 * self.block_bytes / self.block + 8 * self.row_bytes / REFERENCE_COLS
        return bits + 8 * self.tile_bytes / self.tile**2 if self.tile else bits

    @property
    def quantised(self) -> bool:
        """True below 16 bits per weight."""
        return self.bits_per_weight < 16

    @property
    def dequantised(self) -> bool:
        """True where weights are turned into the numbers of the arithmetic before they are multiplied (claim Q9)."""
        return self.quantised and (self.kind == "gguf" or self.compute in ("fp16", "bf16"))


def _formats() -> dict[str, Format]:
    out = [
        Format("fp32", 1, 4, "float", "fp32"),
        Format("fp16", 1, 2, "float", "fp16"),
        Format("bf16", 1, 2, "float", "bf16"),
        Format("fp8", 1, 1, "float", "fp8", note="E4M3, one scale per tensor, whose 4 bytes are not counted"),
        Format("fp8-b128", 1, 1, "float", "fp8", tile=128, tile_bytes=4, note="E4M3, one fp32 scale per 128 x 128 tile"),
        Format("int8", 1, 1, "int", "int8", row_bytes=2, note="symmetric, one fp16 scale per output channel"),
        Format("nf4", 64, 36, "float", "fp16", note="one fp32 absmax per 64 weights; double quantisation, not used here, gives 4.127 bits"),
        Format("mxfp4", 32, 17, "float", "fp4", note="E2M1, one E8M0 scale byte per 32 weights; same layout size in GGUF"),
        Format("nvfp4", 16, 9, "float", "fp4", note="E2M1, one E4M3 scale per 16 weights; the fp32 scale per tensor is not counted"),
        Format("raw-int8", 1, 1, "int", "int8", note="no quantisation scales counted"),
        Format("raw-int4", 2, 1, "int", "int4", note="no quantisation scales counted"),
    ]
    for group in (32, 64, 128):
        out.append(Format(f"int8-g{group}", group, group + 2, "int", "fp16", note="symmetric, one fp16 scale per group"))
        for bits in (4, 3, 2):
            # a whole byte for the zero point keeps groups addressable; packing it at the weights' width would save at most 0.75 byte
            note = "one fp16 scale and one uint8 zero point per group, values packed without gaps"
            out.append(Format(f"int{bits}-g{group}", group, group * bits // 8 + 3, "int", "fp16", note=note))
        note = "the layout of torch's weight-only kernel on CPUs: two values a byte, one bf16 scale and one bf16 zero per group"
        out.append(Format(f"int4-g{group}-torch", group, group // 2 + 4, "int", "bf16", note=note))
    blocks = {
        "Q1_0": (128, 18), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 40),
        "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
        "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98),
        "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "TQ1_0": (256, 54), "TQ2_0": (256, 66),
    }  # fmt: skip
    out += [Format(name, block, size, "gguf", "int8") for name, (block, size) in blocks.items()]
    # the integers hold tables of indices in some files; they are listed so that such files can be counted
    plain = {"F32": 4, "F16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
    out += [Format(name, 1, size, "gguf", "fp16" if name == "F16" else "fp32") for name, size in plain.items()]
    return {f.name: f for f in out}


FORMATS: dict[str, Format] = _formats()
_BY_LOWER = {name.lower(): f for name, f in FORMATS.items()}


def get_format(name: str) -> Format:
    """Return a format by name, in any case.

    Raises
    ------
    InputError
        If no format has that name, with the nearest one.
    """
    found = _BY_LOWER.get(name.lower())
    if found is None:
        raise InputError("format", expected="a known format", got=f'"{name}"', fix=_hint(name))
    return found


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _BY_LOWER, n=3, cutoff=0.6)
    known = ", ".join(FORMATS)
    return "did you mean " + " or ".join(f'"{_BY_LOWER[c].name}"' for c in close) + "?" if close else f"known: {known}"


def _check_name(value: str) -> str:
    found = _BY_LOWER.get(value.lower())
    if found is None:
        refuse("a known format", f'"{value}"', _hint(value))
    return found.name


FormatName = Annotated[str, AfterValidator(_check_name), Field(json_schema_extra={"examples": ["bf16", "int8", "int4-g32", "q4_k_m"]})]

_ITEM = re.compile(r"(?P<all>all)|(?P<from>\d{1,6})-(?P<to>\d{1,6})?|every (?P<every>\d{1,6}) from (?P<start>\d{1,6})|(?P<one>\d{1,6})")


def _check_layers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
            refuse("layer numbers from 0", repr(value)[:60])
        if len(set(value)) != len(value):
            refuse("each layer once", repr(value)[:60])
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return (value,)
    if isinstance(value, str):
        for item in value.split(","):
            match = _ITEM.fullmatch(item.strip())
            if not match or match["every"] == "0" or match["to"] and int(match["to"]) < int(match["from"]):
                refuse('layers such as [0, 5], "0-3, 30", "1-" (to the last), "every 4 from 3" or "all"', f'"{value[:60]}"')
        return value
    refuse('layers such as [0, 5], "0-3, 30", "1-" (to the last), "every 4 from 3" or "all"', repr(value)[:60])


LayerSet = Annotated[str | tuple[int, ...], BeforeValidator(_check_layers)]
"""Layers of a model: a list of numbers, or text of items ``5``, ``0-3``, ``1-``, ``every 4 from 3``, ``all`` between commas."""


def resolve_layers(layers: str | tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Return the sorted layer numbers of a LayerSet in a model of ``n_layers`` layers.

    Raises
    ------
    InputError
        If a layer is named that the model does not have.
    """
    found: set[int] = set()
    if isinstance(layers, tuple):
        found.update(layers)
    else:
        for item in layers.split(","):
            match = _ITEM.fullmatch(item.strip())
            if not match:
                raise InputError("layers", expected='items such as 5, 0-3, 1-, "every 4 from 3" or all', got=f'"{item.strip()[:40]}"')
            if match["all"]:
                found.update(range(n_layers))
            elif match["every"]:
                found.update((int(match["start"]), *range(int(match["start"]), n_layers, int(match["every"]))))
            elif match["one"]:
                found.add(int(match["one"]))
            else:
                last = int(match["to"]) if match["to"] else n_layers - 1
                found.update((int(match["from"]), *range(int(match["from"]), min(last, n_layers) + 1)))
    if found and max(found) >= n_layers:
        raise InputError("layers", expected=f"layers 0 to {n_layers - 1}", got=f"{max(found)}", fix="the model has no such layer")
    return tuple(sorted(found))


def as_tuple(value: Any) -> Any:
    """Turn a YAML list into the tuple that a frozen spec holds."""
    return tuple(value) if isinstance(value, list) else value


class CachedSpec(Spec):
    """A spec with ``cached_property`` values, which a copy (``model_copy(update=...)``) must not inherit."""

    def __copy__(self) -> Self:
        return self._without_cache(super().__copy__())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self._without_cache(super().__deepcopy__(memo))

    @classmethod
    def _without_cache(cls, copied: Self) -> Self:
        for name in set(copied.__dict__) - set(cls.model_fields):
            del copied.__dict__[name]
        return copied


class PrecisionOverride(Spec):
    """A format for one part, where given only in some ``layers`` and only for one ``matrix`` (gate, up, down, q, k, v, o, ...)."""

    part: Part
    format: FormatName
    layers: LayerSet | None = None
    matrix: str | None = None


class Adapters(Spec):
    """Low-rank corrections beside quantised experts: rank x (rows + cols) values in bf16 for each of their matrices.

    ``experts`` is how many of each layer have one, the most routed first (null: all). They lie beside the shared weights, always in memory.
    """

    rank: Annotated[int, Field(ge=1, le=4096)]
    experts: Annotated[int, Field(ge=1, le=100_000)] | None = None

    def params(self, rows: int, cols: int) -> int:
        """Values that correct one matrix."""
        return self.rank * (rows + cols)


class PrecisionPlan(CachedSpec):
    """Which format each part of each layer is kept in.

    ``default`` covers the matrices: attention, shared_expert, routed_experts, dense_ffn, embeddings, head, lookup. Where they are
    not named, ``router`` and ``norms`` (with all biases) are fp32 under a quantised default, as GGUF and most quantisers keep them, and
    like the default under a float of 16 or 32 bits; ``kv`` and ``vision`` are fp16. Vectors of experts (``gate_bias`` ...) and
    the recurrent state of linear attention (part kv, matrix ``state``) are never quantised by a part's format: the former follow
    ``norms``, the latter is fp32, unless an override names that matrix.

    ``rounding`` says how values were chosen when the weights were quantised, which changes no byte: to nearest, with the range of each group
    clipped for the least squared error, or activation-aware. ``quality`` is what is known of the loss (``stated_quality.py``).
    """

    default: FormatName
    attention: FormatName | None = None
    router: FormatName | None = None
    shared_expert: FormatName | None = None
    routed_experts: FormatName | None = None
    dense_ffn: FormatName | None = None
    embeddings: FormatName | None = None
    head: FormatName | None = None
    norms: FormatName | None = None
    kv: FormatName | None = None
    lookup: FormatName | None = None
    vision: FormatName | None = None
    overrides: Annotated[tuple[PrecisionOverride, ...], BeforeValidator(as_tuple), Field(max_length=100_000)] = ()
    rounding: Literal["nearest", "clip", "aware"] = "nearest"
    adapters: Adapters | None = None
    quality: StatedQuality | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"default": data} if isinstance(data, str) else data

    @classmethod
    def short_schema(cls, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        return dict(fields["default"])

    @cached_property
    def memo(self) -> dict[tuple[str, int, str], Format]:
        """Formats already looked up, by (part, layer, matrix); a cache, not part of the value."""
        return {}

    def format(self, part: str, layer: int = -1, matrix: str = "") -> Format:
        """Return the format of a part: of its overrides that apply, the one with most selectors wins, and of equals the last.

        Parameters
        ----------
        part : str
            One of ``PARTS``.
        layer : int
            Layer number, -1 for what belongs to no layer.
        matrix : str
            Name of the matrix, as in ``TensorSpec.matrix``; for part kv: k, v or state.
        """
        key = (part, layer, matrix)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._resolve(part, layer, matrix)
        return found

    def _resolve(self, part: str, layer: int, matrix: str) -> Format:
        if part not in PARTS:
            raise InputError("part", expected="a part of a model", got=f'"{part}"', fix=did_you_mean(part, PARTS))
        never_quantised = matrix.endswith("_bias") or (part == "kv" and matrix == "state")
        best, name = -1, ""
        for o in self.overrides:
            if o.part != part or (o.matrix is not None and o.matrix != matrix) or (never_quantised and o.matrix is None):
                continue
            if o.layers is not None and not _contains(o.layers, layer):
                continue
            score = (o.layers is not None) + (o.matrix is not None)
            if score >= best:
                best, name = score, o.format
        if best >= 0:
            return FORMATS[name]
        if never_quantised and part != "norms":
            return FORMATS["fp32"] if part == "kv" else self.format("norms", layer, matrix)
        named = getattr(self, part)
        if named is not None:
            return FORMATS[named]
        if part in ("kv", "vision"):
            return FORMATS["fp16"]
        default = FORMATS[self.default]
        return FORMATS["fp32"] if part in ("router", "norms") and default.quantised else default

    def formats_used(self) -> tuple[str, ...]:
        """Return the names of all formats that the plan mentions, sorted."""
        named: Iterable[str | None] = [self.default, *(getattr(self, part) for part in PARTS), *(o.format for o in self.overrides)]
        return tuple(sorted({name for name in named if name is not None}))

    @property
    def hash(self) -> str:
        """What tells plans apart that store or round anything differently; what is stated of their quality does not count."""
        return content_hash(self.model_dump(mode="json", exclude={"quality"}))

    def known_quality(self, model: str) -> StatedQuality | None:
        """Return what is measured or published of this plan for a model of that name, or None: then it is unknown.

        A measured figure holds for the very plan that was measured, a published one for large matrices all in one format.
        """
        stated = self.quality
        if stated is not None:
            return stated if stated.model == model and (stated.basis == "published" or stated.plan_hash == self.hash) else None
        plain = self.rounding == "nearest" and self.adapters is None and not self.overrides
        names = {self.format(part, 0).name for part in ("attention", "routed_experts")}
        return find_published(model, names.pop()) if plain and len(names) == 1 else None

    def check_layers(self, n_layers: int) -> None:
        """Refuse, with an InputError, overrides that name a layer which a model of ``n_layers`` layers does not have."""
        for i, o in enumerate(self.overrides):
            if o.layers is not None:
                try:
                    resolve_layers(o.layers, n_layers)
                except InputError as error:
                    raise InputError(f"overrides.{i}.layers", expected=error.expected, got=error.got, fix=error.fix) from None


def _contains(layers: str | tuple[int, ...], layer: int) -> bool:
    """True if a LayerSet has that layer; the length of the model does not matter."""
    if isinstance(layers, tuple):
        return layer in layers
    return layer >= 0 and any(_item_contains(item.strip(), layer) for item in layers.split(","))


def _item_contains(item: str, layer: int) -> bool:
    match = _ITEM.fullmatch(item)
    if not match:
        return False
    if match["all"]:
        return True
    if match["every"]:
        return layer >= int(match["start"]) and (layer - int(match["start"])) % int(match["every"]) == 0
    if match["one"]:
        return layer == int(match["one"])
    return layer >= int(match["from"]) and (match["to"] is None or layer <= int(match["to"]))


def plan_from(value: PrecisionPlan | str | Mapping[str, Any], where: str = "", base: Path | None = None) -> PrecisionPlan:
    """Return a plan from a plan, a format name (``"Q4_K"``: that format as the default), a YAML file, or a mapping of its fields.

    Parameters
    ----------
    value : PrecisionPlan, str or Mapping
    where : str
        Where it was written, for messages.
    base : Path, optional
        Folder that relative names of files are also tried in.

    Raises
    ------
    InputError
        For an unknown format, part or key, with ``where``; for a file with its own place.
    """
    if isinstance(value, PrecisionPlan):
        return value
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        path = Path(value) if base is None or Path(value).is_file() else base / value
        return build(PrecisionPlan, read_yaml(path))
    data = {"default": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else value
    return build(PrecisionPlan, Document(data, where or "precision"))
