"""Pictures as they were looked at and approved: each plot of a fixed small input against a stored picture, within a tolerance.

Stored pictures are small and lie in ``golden/``. ``python tests/test_golden_plots.py`` draws them anew; look at each before it is committed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from small_runs import small_result, write_scenario

from moesim import plots
from moesim.generate import from_popularity
from moesim.plots import backtest as plots_backtest
from moesim.plots import sweep as plots_sweep
from moesim.plots import trace as plots_trace
from moesim.plots import validate as plots_validate
from moesim.plots import whatif as plots_whatif
from moesim.simulate import load_case, simulate
from moesim.trace import RoutingTrace
from moesim.whatif import WhatIf, whatif

FOLDER = Path(__file__).parent / "golden"
TOLERANCE = 8.0  # root mean square over pixels of 0 to 255: another version of matplotlib moves letters, a lost line or legend is more
MOST_BYTES = 400_000
FIXED = {"font.family": "DejaVu Sans", "text.antialiased": True, "path.simplify": False, "figure.dpi": 60, "savefig.dpi": 60}


def run_page(figure: Figure) -> None:
    """The picture of ``moesim run --plot``, as it is put together."""
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    plots.lanes_over_time(small_result(), figure.add_subplot(grid[0, :]))
    for i, tier in enumerate(("vram", "ram")):
        plots.memory_watermark(small_result(), tier, figure.add_subplot(grid[1, i]))
    figure.suptitle(plots.finding(small_result()), fontsize=12, fontweight="bold", ha="left", x=0.01)


def full_memory(figure: Figure) -> None:
    """A card that the run just fits on, so that each line of the ledger is seen."""
    with TemporaryDirectory() as folder:
        case = load_case(write_scenario(Path(folder)), ("hardware_set.tiers.vram={capacity: 5 MB, reserved: 300 kB, channel: vram}",))
        plots.memory_watermark(simulate(case), "vram", figure.subplots())


@cache
def trace() -> RoutingTrace:
    rng = np.random.default_rng(5)
    return from_popularity(rng.gamma(0.5, size=(3, 12)) + 0.01, 2, 160, rng, n_sequences=4)


@cache
def answer() -> WhatIf:
    with TemporaryDirectory() as folder:
        path = write_scenario(Path(folder))
        return whatif(load_case(path), path, vary=("ssd.bandwidth=1..14GB/s",), draws=32, points=7, quick=True)


@cache
def swept() -> Any:
    from sweep_cases import write_sweep

    from moesim.sweep import plan_sweep, sweep

    with TemporaryDirectory() as folder:
        return sweep(plan_sweep(write_sweep(Path(folder), more="objectives: {maximise: [speed], minimise: [memory]}\n")), workers=1)


def validated() -> list[dict[str, Any]]:
    rows = []
    for i, error in enumerate((0.02, -0.05, 0.31, 0.08)):
        took = 10.0 * 3**i
        rows.append({
            "name": f"case {i}", "failed": "", "latency_ms": {"measured": took, "predicted": took * (1 + error), "noise": 0.03, "error": error},
            "baselines_ms": {"sum": took * 1.5, "overlap": took * 0.7, "active bytes": took * 0.4},
        })  # fmt: skip
    return rows


def backtested() -> Any:
    cases = [("cpu_only", 8.0, 1.1), ("cpu_only", 15.0, 0.9), ("full_gpu", 120.0, 1.05), ("full_gpu", 90.0, 0.97), ("ssd", 1.2, 1.4)]
    rows = [
        SimpleNamespace(case=SimpleNamespace(mode="decode", placement=where), measured=took, predicted=took * off, ratio=1.3)
        for where, took, off in cases
    ]
    return SimpleNamespace(scored=rows, warm=False)


def executed() -> Any:
    from test_validate import SAID, costs, two_tokens

    from moesim.validate.comparison import Executed, Measured

    schedule = two_tokens()
    slower = replace(SAID, start_ps=SAID.start_ps * 5 // 4, end_ps=SAID.end_ps * 5 // 4)
    return Executed(None, schedule, costs(schedule, [0] * 6), SAID, [Measured(slower, True, True)])  # type: ignore[arg-type]


def on_axes(draw: Callable[[Axes], Any]) -> Callable[[Figure], None]:
    return lambda figure: draw(figure.subplots()) and None


PICTURES: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
    "run": ((11, 7.2), run_page),
    "memory": ((7, 3.4), full_memory),
    "token_latency": ((9, 3.1), on_axes(lambda ax: plots.token_latency(small_result(), ax))),
    "popularity": ((6, 3.6), on_axes(lambda ax: plots_trace.popularity_map(trace(), ax))),
    "hit_rate_by_capacity": ((6, 3.6), on_axes(lambda ax: plots_trace.hit_rate_by_capacity(trace(), ax))),
    "reuse_by_lag": ((6, 3.6), on_axes(lambda ax: plots_trace.reuse_by_lag(trace(), ax))),
    "tornado": ((7, 4.2), on_axes(lambda ax: plots_whatif.tornado(answer(), ax))),
    "curve": ((6, 3.6), on_axes(lambda ax: plots_whatif.plot_curve(answer().curves[0], ax))),
    "pareto": ((6, 4), on_axes(lambda ax: plots_sweep.pareto_front(swept(), ax))),
    "axis_effects": ((6, 4), on_axes(lambda ax: plots_sweep.axis_effects(swept(), ax=ax))),
    "predicted_measured": ((6, 5.5), on_axes(lambda ax: plots_validate.suite_overview(validated(), ax))),
    "backtest": ((6, 5.5), on_axes(lambda ax: plots_backtest.plot_backtest(backtested(), "decode", ax))),
    "both_timelines": ((9, 3.6), on_axes(lambda ax: plots_validate.both_timelines(executed(), 0, ax))),
}


def draw(name: str, path: Path) -> None:
    size, fill = PICTURES[name]
    with plt.rc_context(FIXED):
        figure = Figure(figsize=size, dpi=FIXED["figure.dpi"], layout="constrained")
        fill(figure)
        figure.savefig(path, format="png", metadata={"Software": None})
    plt.close("all")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_it_was_approved(name: str, tmp_path: Path) -> None:
    draw(name, tmp_path / f"{name}.png")
    (tmp_path / "approved.png").write_bytes((FOLDER / f"{name}.png").read_bytes())  # the comparison writes beside what it reads
    assert compare_images(str(tmp_path / "approved.png"), str(tmp_path / f"{name}.png"), TOLERANCE) is None


def test_a_lost_legend_is_seen(tmp_path: Path) -> None:
    """The test above would pass with a tolerance that is too wide."""
    size, _ = PICTURES["token_latency"]
    with plt.rc_context(FIXED):
        figure = Figure(figsize=size, dpi=FIXED["figure.dpi"], layout="constrained")
        ax = plots.token_latency(small_result(), figure.subplots())
        ax.get_legend().set_visible(False)  # type: ignore[union-attr]
        figure.savefig(tmp_path / "bare.png")
    (tmp_path / "approved.png").write_bytes((FOLDER / "token_latency.png").read_bytes())
    assert "RMS Value" in str(compare_images(str(tmp_path / "approved.png"), str(tmp_path / "bare.png"), TOLERANCE))


def test_approved_pictures_are_small() -> None:
    stored = sorted(FOLDER.glob("*.png"))
    assert [path.stem for path in stored] == sorted(PICTURES) and sum(path.stat().st_size for path in stored) < MOST_BYTES


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or PICTURES:
        draw(each, FOLDER / f"{each}.png")
