"""Pictures of a trace: the curves are those of replayed caches, titles say the finding, grey prints read."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.generate import from_popularity
from moesim.plots import trace as plots_trace
from moesim.plots.trace import by_popularity, hit_rates, recall_by_distance, reuse_curve
from moesim.policies.cache import ExpertPool, future_uses, hottest, make_policy
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import analyse


@pytest.fixture(autouse=True)
def _close() -> object:
    yield
    plt.close("all")


def skewed(n_rows: int = 160, n_layers: int = 3, absent: bool = True) -> RoutingTrace:
    rng = np.random.default_rng(5)
    trace = from_popularity(rng.gamma(0.5, size=(n_layers, 12)) + 0.01, 2, n_rows, rng, n_sequences=4)
    ids = trace.expert_ids.copy()
    if absent:
        ids[: n_rows // 5, -1] = -1
    return RoutingTrace(ids, None, trace.seq_id, trace.position, trace.phase, dict(trace.meta))


def replayed(trace: RoutingTrace, policy: str, size: int) -> float:
    """Hit rate of a pool a layer, access by access."""
    hits = total = 0
    for layer in range(trace.n_layers):
        rows = np.flatnonzero(trace.present[:, layer])
        sets = list(zip(rows.tolist(), trace.expert_ids[rows, layer].tolist(), strict=True))
        pool = ExpertPool(size, lambda key: 1, make_policy(policy, future_uses(sets) if policy == "belady" else None), policy)
        if policy == "static":
            pool.preload(hottest(trace.counts()[layer : layer + 1], [1], size, per_layer=True))
        hits += sum(len(pool.access(experts, row).hits) for row, experts in sets)
        total += sum(len(experts) for _, experts in sets)
    return hits / total


@pytest.mark.parametrize("absent", [False, True])
def test_one_pass_curves_equal_replaying_each_capacity(absent: bool) -> None:
    trace = skewed(absent=absent)
    table = hit_rates(trace)
    assert table["capacity_slots"].tolist() == list(range(2, 13))
    for _, row in table.iterrows():
        size = int(row["capacity_slots"])
        assert row["lru"] == replayed(trace, "lru", size)
        assert row["static"] == replayed(trace, "static", size)
        if np.isfinite(row["belady"]):
            assert row["belady"] == replayed(trace, "belady", size)
    known = table.dropna()
    assert len(known) >= 9 and 6 in known["capacity_slots"].tolist() and (known["belady"] >= known["lru"]).all()


@pytest.mark.parametrize("name", ["gptoss20b_Polyglot-or-Not_Fact-Completion.npz", "qwen3_30b_a3b_bmoe.npz"])
def test_curves_agree_with_the_reference_figures(shared: Path, name: str) -> None:
    trace = load_trace(shared / "traces" / name)
    found = json.loads((shared / "traces" / "oracle_shared.json").read_text())["traces"][name]["all"]
    table = hit_rates(trace).set_index("capacity_slots")
    for entry in found["cache"].values():
        if entry is not None:
            at = table.loc[entry["slots_per_layer"]]
            for policy in ("lru", "static", "belady"):
                assert np.isnan(at[policy]) or at[policy] == pytest.approx(entry[policy]["hit_rate"], abs=1e-6)
    for _, row in reuse_curve(trace).iterrows():
        if str(int(row["lag_tokens"])) in found["reuse"]:
            assert row["reuse"] == pytest.approx(found["reuse"][str(int(row["lag_tokens"]))]["micro"], abs=1e-6)
    for _, row in recall_by_distance(trace).iterrows():
        if str(int(row["distance_layers"])) in found["prediction"]:
            for name in ("popularity", "previous", "cooccurrence"):
                known = found["prediction"][str(int(row["distance_layers"]))][name]["recall"]
                assert row[name] == pytest.approx(known, abs=1e-4)


def test_reuse_of_independent_draws_is_what_popularity_gives() -> None:
    """The dashed line, on a trace without memory."""
    trace = skewed(20_000, absent=False)
    assert by_popularity(trace) == pytest.approx(reuse_curve(trace)["reuse"].mean(), abs=0.01)


def test_one_page_of_standard_size(tmp_path: Path) -> None:
    plots_trace.plot_trace(skewed(), tmp_path / "t.png")
    pixels = imread(tmp_path / "t.png")
    assert pixels.shape[:2] == tuple(round(x * plots_trace.DPI) for x in reversed(plots_trace.SIZE_INCHES))
    assert (pixels[:, :, :3] < 0.9).any(axis=2).mean() > 0.05


@pytest.mark.parametrize("name", ["popularity_map", "reuse_by_lag", "hit_rate_by_capacity", "predictability"])
def test_panels_say_their_finding_and_units(name: str) -> None:
    ax = getattr(plots_trace, name)(skewed())
    assert isinstance(ax, Axes)
    assert " %" in ax.get_title(loc="left") and ax.get_xlabel().endswith(")") and ax.get_ylabel().endswith(")")


def test_titles_carry_the_figures() -> None:
    trace = skewed()
    table = hit_rates(trace).set_index("capacity_slots").loc[6]
    title = plots_trace.hit_rate_by_capacity(trace).get_title(loc="left")
    assert f"{100 * table['lru']:.0f} %" in title and f"{100 * table['static']:.0f} %" in title and "6 of 12" in title
    mean = analyse(trace)["top_half_share"]["mean"]
    assert f"takes {100 * mean:.0f} %" in plots_trace.popularity_map(trace).get_title(loc="left")


def test_lines_differ_without_colour() -> None:
    def grey(colour: str) -> float:
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * r + 0.587 * g + 0.114 * b

    for names in (("belady", "static", "lru"), ("cooccurrence", "popularity", "previous")):
        looks = [plots_trace._LINES[name] for name in names]
        assert len({dash for _, dash, _ in looks}) == len({marker for _, _, marker in looks}) == 3
        lightness = sorted(grey(colour) for colour, _, _ in looks)
        assert min(np.diff(lightness)) > 25


@pytest.mark.parametrize(("n_rows", "n_layers"), [(4, 1), (4, 2), (12, 3)])
def test_small_traces_are_drawn(n_rows: int, n_layers: int, tmp_path: Path) -> None:
    plots_trace.plot_trace(skewed(n_rows, n_layers, absent=False), tmp_path / "t.png")
    one = skewed(n_rows, n_layers, absent=False).slice_rows(0, 1)
    plots_trace.plot_trace(one, tmp_path / "one.png")


def test_a_trace_without_routing_is_refused() -> None:
    trace = skewed()
    empty = RoutingTrace(np.full_like(trace.expert_ids, -1), None, trace.seq_id, trace.position, trace.phase, {"n_experts": 12})
    with pytest.raises(InputError, match="none in the rows"):
        hit_rates(empty)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.png"
    assert run(["trace", "plot", "tinymoe", "-o", str(out), "--rows", "300"]) == 0, capsys.readouterr().err
    assert out.stat().st_size > 10_000 and str(out) in capsys.readouterr().out
    assert run(["trace", "plot", "tinymoe", "-o", str(tmp_path / "t.pdf")]) == 2
    assert run(["trace", "plot", "not-there", "-o", str(out)]) == 2
