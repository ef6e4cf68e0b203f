"""Statistics against the reference figures of the real traces, and on cases computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import InputError
from moesim.generate import from_popularity
from moesim.policies.cache import ExpertPool, make_policy
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import analyse, analyse_phases, first_sequences, gini, lru_hits, reuse, top_half_share

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
ORACLE = TRACES / "oracle_shared.json"
FILES = (
    "gptoss20b_Polyglot-or-Not_Fact-Completion.npz",
    "gptoss20b_mmlu_dev.npz",
    "gptoss20b_mmlu_pro_validation.npz",
    "gptoss20b_mmlu_validation.npz",
    "gptoss20b_sorry_bench_base.npz",
    "qwen3_30b_a3b_bmoe.npz",
    "switch_base_8_encoder.npz",
)


def compare(got: Any, want: Any, path: str, wrong: list[str]) -> None:
    if isinstance(want, dict):
        if set(got) != set(want):
            wrong.append(f"{path}: keys {sorted(set(got) ^ set(want))}")
        for key in set(want) & set(got):
            compare(got[key], want[key], f"{path}/{key}", wrong)
    elif isinstance(want, list):
        if len(got) != len(want):
            wrong.append(f"{path}: {len(got)} entries, not {len(want)}")
        for i, (a, b) in enumerate(zip(got, want, strict=False)):
            compare(a, b, f"{path}[{i}]", wrong)
    elif isinstance(want, float) and got is not None:
        # sums of float scores may tie differently, the reference says so
        if abs(got - want) > (1e-4 if "cooccurrence" in path else 1e-6):
            wrong.append(f"{path}: {got}, not {want}")
    elif got != want:
        wrong.append(f"{path}: {got}, not {want}")


@pytest.mark.parametrize("name", FILES)
def test_reference_figures(name: str) -> None:
    """Every figure of every real trace; integers exactly. Cache figures come from the pools that the planner uses."""
    if not ORACLE.is_file() or not (TRACES / name).is_file():
        pytest.skip(f"the reference traces are not at {TRACES}")
    reference = json.loads(ORACLE.read_text())
    want = {key: value for key, value in reference["traces"][name].items() if key in ("all", "decode")}
    wrong: list[str] = []
    compare(analyse_phases(load_trace(TRACES / name), reference["cache_rows_limit"]), want, name, wrong)
    assert not wrong, "\n".join(wrong[:20])


def test_no_reference_trace_is_left_out() -> None:
    if not ORACLE.is_file():
        pytest.skip(f"the reference traces are not at {TRACES}")
    assert sorted(json.loads(ORACLE.read_text())["traces"]) == sorted(FILES)


def skewed(n_rows: int = 120, absent: bool = True) -> RoutingTrace:
    rng = np.random.default_rng(11)
    trace = from_popularity(rng.gamma(0.5, size=(3, 12)) + 0.01, 2, n_rows, rng, n_sequences=4)
    if not absent:
        return trace
    ids = trace.expert_ids.copy()
    ids[rng.random(ids.shape[:2]) < 0.2] = -1
    return RoutingTrace(ids, None, trace.seq_id, trace.position, trace.phase, trace.meta)


@pytest.mark.parametrize("absent", [False, True])
def test_one_pass_lru_equals_the_pool(absent: bool) -> None:
    trace = skewed(absent=absent)
    sizes = list(range(2, 14))
    fast = lru_hits(trace, sizes)
    for size in sizes:
        for layer in range(trace.n_layers):
            pool = ExpertPool(size, lambda key: 1, make_policy("lru"))
            cells = [(t, trace.sets(t, layer)) for t in range(trace.n_rows) if trace.present[t, layer]]
            assert fast[size][layer] == sum(len(pool.access(cell, t).hits) for t, cell in cells), (size, layer)


def test_one_pass_lru_refuses_a_cache_below_top_k() -> None:
    with pytest.raises(InputError, match="at least top_k = 2"):
        lru_hits(skewed(), [1])


def test_skew_by_hand() -> None:
    assert top_half_share(np.array([1, 5, 2, 2])) == 0.7
    assert top_half_share(np.array([3, 1, 1])) == 0.6  # floor(3/2) = 1 expert
    assert gini(np.array([2, 2, 2])) == 0.0
    assert gini(np.array([0, 0, 0, 8])) == 0.75  # (E - 1) / E
    assert top_half_share(np.zeros(4)) is None and gini(np.zeros(4)) is None


def tiny(ids: list[Any], seq: list[int], n_experts: int = 4) -> RoutingTrace:
    array = np.array(ids, dtype=np.int16)
    position = np.arange(len(seq), dtype=np.int32)
    return RoutingTrace(array, None, np.array(seq, dtype=np.int32), position, np.ones(len(seq), np.uint8), {"n_experts": n_experts})


def test_reuse_by_hand() -> None:
    trace = tiny([[[0, 1]], [[1, 2]], [[-1, -1]], [[2, 1]], [[1, 2]]], [0, 0, 0, 0, 1])
    assert reuse(trace, 1)["micro"] == 0.5  # rows 0-1 only: absent cells and borders take no part
    assert reuse(trace, 2)["per_layer"] == [1.0]  # rows 1-3
    assert reuse(trace, 3)["micro"] == 0.5  # rows 0-3
    assert reuse(trace, 4)["micro"] is None


def test_analyse_by_hand() -> None:
    trace = tiny([[[0], [1]], [[1], [1]], [[0], [2]], [[0], [1]]], [0, 0, 1, 1])
    result = analyse(trace, cache_rows=4)
    assert result["cache"]["0.125"] is None  # no slot at all
    quarter = result["cache"]["0.25"]
    assert quarter["slots_per_layer"] == 1
    assert quarter["lru"] == {"hit_rate": 0.25, "hits": 2, "accesses": 8, "hits_per_layer": [1, 1]}
    assert quarter["lru_full"] == quarter["lru"]
    assert quarter["lru_reset"]["hits_per_layer"] == [1, 1]
    assert quarter["static"]["hits_per_layer"] == [3, 3]
    # keys a..d = (layer, expert) (0,0) (0,1) (1,1) (1,2); order a c | b c | a d | a c, two slots: c in row 1 and a in row 3 hit
    assert quarter["lru_global"] == {"hit_rate": 0.25, "hits": 2, "accesses": 8, "slots": 2}
    assert result["prediction"]["1"]["previous"] == {"recall": 0.0, "per_target_layer": [0.0]}
    assert list(result["prediction"]) == ["1"]


def test_cache_rows_take_whole_sequences() -> None:
    trace = skewed()  # 4 sequences of 30 rows
    assert [first_sequences(trace, n).n_rows for n in (1, 30, 31, 500)] == [30, 30, 60, 120]
    assert analyse(trace, 31)["cache_rows"] == 60
    with pytest.raises(InputError, match="cache_rows"):
        analyse(trace, 0)


def test_phases() -> None:
    trace = from_popularity(np.ones((2, 4)), 2, 20, np.random.default_rng(0), n_sequences=2, prefill_rows=3)
    both = analyse_phases(trace)
    assert (both["all"]["rows"], both["decode"]["rows"], both["decode"]["sequences"]) == (20, 14, 2)
    assert list(analyse_phases(trace.decode_rows())) == ["all"]
