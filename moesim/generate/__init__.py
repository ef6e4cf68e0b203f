"""Owns synthetic routing traces: independent draws, uniform or from a popularity profile.

It must not know about caches or models. K experts of a cell are drawn one after another without replacement, each with probability
in proportion to its popularity among those left (successive sampling), by the Gumbel-top-k identity: the K largest of
log p_e + Gumbel noise are such a draw, in order (Yellott 1977, J. Math. Psychol. 15(2); Kool et al. 2019, arXiv 1903.06059).

Two limits. Rows and layers are independent, so consecutive tokens share experts by popularity alone; real routers repeat
themselves more, and a generated trace understates cache hits and predictability. And with K > 1 the shares that come out are
flatter than the profile, because an expert can enter a cell once only.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError, did_you_mean
from moesim.trace import DECODE, PREFILL, RoutingTrace

_BLOCK = 2**22  # random numbers at a time (32 MB); the draws do not depend on it
_COLUMNS = ("model", "dataset", "layer", "expert", "count", "unit")


def uniform(
    n_rows: int,
    n_layers: int,
    n_experts: int,
    top_k: int,
    rng: np.random.Generator,
    *,
    n_sequences: int = 1,
    prefill_rows: int = 0,
) -> RoutingTrace:
    """Generate a trace in which every set of K experts is equally likely: the router that balances perfectly.

    Parameters
    ----------
    n_rows, n_layers, n_experts, top_k : int
        Shape (T, L, E, K); rows over all sequences.
    rng : numpy.random.Generator
        Source of all randomness.
    n_sequences : int
        Sequences of equal length (the first ones one row longer where it does not divide).
    prefill_rows : int
        First rows of each sequence that are marked as prefill.

    Raises
    ------
    InputError
        On an impossible shape.
    """
    for what, value in (("n_layers", n_layers), ("n_experts", n_experts)):
        if value < 1:
            raise InputError(what, expected="at least 1", got=str(value))
    popularity = np.ones((n_layers, n_experts))
    return _draw(popularity, top_k, n_rows, rng, n_sequences, prefill_rows, "uniform")


def from_popularity(
    popularity: NDArray[Any],
    top_k: int,
    n_rows: int,
    rng: np.random.Generator,
    *,
    n_sequences: int = 1,
    prefill_rows: int = 0,
) -> RoutingTrace:
    """Generate a trace from a popularity profile, such as selection counts.

    Parameters
    ----------
    popularity : (L, E) float or int
        Relative popularity of each expert in its layer; 0 = never chosen.
    top_k, n_rows, rng, n_sequences, prefill_rows
        As in ``uniform``.

    Raises
    ------
    InputError
        If a value is negative or not finite, or a layer has fewer than K experts of positive popularity.
    """
    return _draw(np.asarray(popularity), top_k, n_rows, rng, n_sequences, prefill_rows, "popularity")


def zipf_popularity(n_layers: int, n_experts: int, exponent: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return (L, E) popularity that falls as rank ** -exponent, with the ranks dealt to experts at random in each layer."""
    ranks = np.arange(1, n_experts + 1, dtype=np.float64) ** -exponent
    return np.stack([rng.permutation(ranks) for _ in range(n_layers)])


def _draw(
    popularity: NDArray[Any], top_k: int, n_rows: int, rng: np.random.Generator, n_sequences: int, prefill_rows: int, method: str
) -> RoutingTrace:
    if popularity.ndim != 2 or popularity.dtype.kind not in "iuf" or not popularity.size:
        raise InputError("popularity", expected="numbers (L, E)", got=f"{popularity.dtype} {popularity.shape}")
    bad = np.argwhere(~(np.isfinite(popularity) & (popularity >= 0)))
    if len(bad):
        layer, expert = bad[0].tolist()
        got = f"{popularity[layer, expert]} at layer {layer}, expert {expert}"
        raise InputError("popularity", expected="finite values of at least 0", got=got)
    n_layers, n_experts = popularity.shape
    usable = (popularity > 0).sum(axis=1)
    if not 1 <= top_k <= usable.min():
        layer = int(usable.argmin())
        expected = f"1 to {usable[layer]}, the experts of positive popularity in layer {layer}"
        raise InputError("top_k", expected=expected, got=str(top_k))
    if not 1 <= n_sequences <= n_rows:
        raise InputError("n_rows", expected=f"at least one row for each of {n_sequences} sequences (at least 1)", got=str(n_rows))
    lengths = [len(part) for part in np.array_split(np.arange(n_rows), n_sequences)]
    if not 0 <= prefill_rows <= lengths[-1]:
        raise InputError("prefill_rows", expected=f"0 to {lengths[-1]}, the rows of a sequence", got=str(prefill_rows))
    with np.errstate(divide="ignore"):
        log_popularity = np.log(popularity.astype(np.float64))
    ids = np.concatenate(list(_gumbel_top_k(log_popularity, top_k, n_rows, rng)))
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    entropy = getattr(rng.bit_generator.seed_seq, "entropy", None)
    meta = {
        "model": "generated",
        "dataset": method,
        "captured_by": f"moesim.generate, {method}: independent successive sampling",
        "generated": True,
        "seed": entropy if isinstance(entropy, int) else str(entropy),
        "bit_generator": type(rng.bit_generator).__name__,
        "n_layers": n_layers,
        "n_experts": n_experts,
        "top_k": top_k,
        "caveats": ["rows and layers are independent: reuse and predictability are those of popularity alone"],
    }
    return RoutingTrace(
        expert_ids=ids,
        weights=None,
        seq_id=np.repeat(np.arange(n_sequences, dtype=np.int32), lengths),
        position=position,
        phase=np.where(position < prefill_rows, PREFILL, DECODE).astype(np.uint8),
        meta=meta,
    )


def _gumbel_top_k(log_popularity: NDArray[np.float64], top_k: int, n_rows: int, rng: np.random.Generator) -> Iterator[NDArray[np.int16]]:
    """Yield blocks (n, L, K) int16 of draws, the first drawn first."""
    n_layers, n_experts = log_popularity.shape
    block = max(1, _BLOCK // (n_layers * n_experts))
    for start in range(0, n_rows, block):
        noisy = rng.gumbel(size=(min(block, n_rows - start), n_layers, n_experts)) + log_popularity
        if top_k < n_experts:
            best = np.argpartition(-noisy, top_k - 1, axis=2)[:, :, :top_k]
        else:
            best = np.broadcast_to(np.arange(n_experts), noisy.shape)
        order = np.argsort(-np.take_along_axis(noisy, best, 2), axis=2, kind="stable")
        yield np.take_along_axis(best, order, 2).astype(np.int16)


def popularity_from_counts_csv(path: str | Path, model: str, dataset: str | None = None) -> NDArray[np.int64]:
    """Read selection counts of one model from a CSV with the columns model, dataset, layer, expert, count and unit.

    Parameters
    ----------
    path : str or Path
        The file; other columns are ignored.
    model : str
        Value of the column ``model``.
    dataset : str, optional
        Value of the column ``dataset``; without it the counts of all the model's datasets are added up, and they must cover the
        same layers.

    Returns
    -------
    (L, E) int64
        Counts; row i is the i-th layer that the file holds, which may number its layers from elsewhere, with gaps.

    Raises
    ------
    InputError
        With ``file:line``: a missing column, a bad number, a unit other than selections, a repeated or a missing (layer, expert).
    """
    where = str(path)
    found: dict[tuple[str, int, int], int] = {}
    models, datasets = set(), set()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError("counts", expected=f"the columns {', '.join(_COLUMNS)}", got=f"no {missing[0]}", where=f"{where}:1")
            for row in reader:
                place = f"{where}:{reader.line_num}"
                models.add(row["model"])
                if row["model"] != model:
                    continue
                datasets.add(row["dataset"])
                if dataset is not None and row["dataset"] != dataset:
                    continue
                if row["unit"] != "selections":
                    raise InputError("unit", expected="selections", got=repr(row["unit"]), where=place)
                layer, expert, count = (_whole(row[name], name, place) for name in ("layer", "expert", "count"))
                key = (row["dataset"], layer, expert)
                if key in found:
                    raise InputError("counts", expected="each layer and expert once per dataset", got=f"{key} again", where=place)
                found[key] = count
    except FileNotFoundError:
        raise InputError("counts", expected="an existing file", got="none", fix="check the path", where=where) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("counts", expected="a readable UTF-8 CSV file", got=str(error)[:120], where=where) from None
    if model not in models:
        raise InputError("model", expected="a model of the file", got=f'"{model}"', fix=did_you_mean(model, models), where=where)
    if not found:
        raise InputError("dataset", expected="one of the model", got=f'"{dataset}"', fix=did_you_mean(str(dataset), datasets), where=where)
    layers = sorted({layer for _, layer, _ in found})
    n_experts = max(expert for _, _, expert in found) + 1
    table = np.zeros((len(layers), n_experts), dtype=np.int64)
    index = {layer: i for i, layer in enumerate(layers)}
    used = sorted({name for name, _, _ in found})
    if len(found) != len(used) * table.size:
        for name in used:
            for layer in layers:
                for expert in range(n_experts):
                    if (name, layer, expert) not in found:
                        fix = "state the dataset" if dataset is None and len(used) > 1 else "give each expert of a layer a row, 0 if unused"
                        got = f"no row for layer {layer}, expert {expert} in dataset {name}"
                        raise InputError("counts", expected="every layer and expert", got=got, fix=fix, where=where)
    for (_, layer, expert), count in found.items():
        table[index[layer], expert] += count
    return table


def _whole(text: str | None, name: str, where: str) -> int:
    limit = 2**31 - 1 if name != "count" else 2**62
    if text is None or not text.strip().isascii() or not text.strip().isdigit() or len(text) > 20 or int(text) > limit:
        raise InputError(name, expected="a whole number of at least 0", got=repr(text)[:40], where=where)
    return int(text)
