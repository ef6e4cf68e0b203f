"""Pictures: they render, they are not empty, their titles say the finding, their axes have units."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.image import imread
from small_runs import small_result, write_scenario

from moesim import bottleneck, metrics, plots
from moesim.errors import InputError
from moesim.simulate import load_case, simulate


@pytest.fixture(autouse=True)
def _close() -> object:
    yield
    plt.close("all")


def test_plot_run_renders_at_standard_size(tmp_path: Path) -> None:
    plots.plot_run(small_result(), tmp_path / "run.png")
    pixels = imread(tmp_path / "run.png")
    assert pixels.shape[:2] == tuple(round(x * plots.DPI) for x in reversed(plots.SIZE_INCHES))
    assert (pixels[:, :, :3] < 0.9).any(axis=2).mean() > 0.05  # not a white page


def test_title_says_which_lane_limits_and_by_how_much() -> None:
    title = plots.finding(small_result())
    assert title.startswith("ssd limits the run: 6") and "% of the critical path, busy" in title and "ms per token for loads" in title


def test_lanes_over_time() -> None:
    ax = plots.lanes_over_time(small_result())
    assert isinstance(ax, Axes)
    assert ax.get_xlabel().endswith("(ms)")
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == ["gpu", "h2d", "ssd"] and all("% busy" in label for label in labels)
    legend = ax.get_legend()
    assert legend is not None
    kinds = {text.get_text() for text in legend.get_texts()}
    assert {"attention", "expert and dense FFN", "demand load", "compute waits for loads"} <= kinds
    assert sum(len(c.get_paths()) for c in ax.collections if isinstance(c, PolyCollection)) > 50


def test_kinds_differ_without_colour() -> None:
    def grey(colour: str) -> float:
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * r + 0.587 * g + 0.114 * b

    looks = [(round(grey(style.colour) / 40), style.hatch) for style in plots.STYLES.values()]
    assert len(set(looks)) == len(looks)


def test_steps_can_be_chosen() -> None:
    result = small_result()
    ends = result.tasks.end[result.tasks.steps[:, 2]] * plots.MS
    ax = plots.lanes_over_time(result, plt.figure().add_subplot(), steps=(1, 2))
    assert ax.get_xlim() == (0, pytest.approx(ends[2] - ends[0]))
    assert "decode token 1" in ax.get_xlabel()
    with pytest.raises(InputError, match="steps"):
        plots.lanes_over_time(result, steps=(3, 99))


def test_stalls_add_up_to_the_metric() -> None:
    result = small_result()
    assert result.meter is not None
    spans = plots.load_waits(result.tasks)
    assert (spans[:, 1] - spans[:, 0]).sum() * metrics.PS == pytest.approx(metrics.io_wait_s(result.meter))


def test_memory_watermark() -> None:
    result = small_result()
    ax = plots.memory_watermark(result, "vram")
    assert "GB" in ax.get_ylabel() and "(s)" in ax.get_xlabel() and "peak" in ax.get_title(loc="left")
    assert ax.get_ylim()[1] >= result.case.layout.capacities["vram"].total_bytes / 1e9
    with pytest.raises(InputError, match="tier"):
        plots.memory_watermark(result, "ssd")


def test_levels_equal_the_watermark() -> None:
    result = small_result()
    assert result.meter is not None
    for i, _ in enumerate(result.memory.tiers):
        _, levels = plots._levels(result.memory, i)
        assert int(levels.sum(axis=0).max()) == result.meter.peak_bytes[i]


def test_steps_that_stand_for_the_run() -> None:
    tasks = small_result().tasks
    assert tasks is not None
    first, last = plots.middle_steps(tasks)
    assert 1 <= first <= last < len(tasks.steps)
    assert (tasks.steps[first : last + 1, 3] == 1).all()


def test_a_run_of_prefill_only_is_drawn(tmp_path: Path) -> None:
    result = simulate(load_case(write_scenario(tmp_path), ("workload={prompt_tokens: 8, output_tokens: 1}",)))
    plots.plot_run(result, tmp_path / "p.png")
    assert "prefill chunk 1" in plots.lanes_over_time(result).get_xlabel()


def test_nothing_ran(tmp_path: Path) -> None:
    result = simulate(load_case(write_scenario(tmp_path), ("hardware_set.tiers.vram.capacity.value=515 MiB",)))
    with pytest.raises(InputError, match="plot"):
        plots.plot_run(result, tmp_path / "p.png")


def test_bottleneck_of_a_compute_bound_run(tmp_path: Path) -> None:
    result = simulate(load_case(write_scenario(tmp_path), ("placement={pools: {vram: {hold: all}}}", "prefetch={predictor: none}")))
    found = bottleneck.find(result, result.as_dict())
    assert found is not None and found.lane == "gpu" and found.share == pytest.approx(1.0) and np.isclose(found.wait_ms, 0)
    assert "The GPU sets the pace" in found.finding and "kernel launches" in found.advice


def test_parts_of_a_token_add_up_to_its_time() -> None:
    result = small_result()
    assert result.meter is not None
    parts = plots.token_parts(result.tasks)
    ends = result.tasks.end[result.tasks.steps[:, 2]]
    assert parts.shape == (5, 3) and (parts >= 0).all()
    assert parts.sum(axis=1).tolist() == np.diff(ends).tolist()
    waits = plots.load_waits(result.tasks)
    late = result.tasks.start > ends[0]  # one device computes: nothing hides a wait
    assert parts[:, 1].sum() == (waits[late, 1] - waits[late, 0]).sum()


def test_spans_are_covered_once() -> None:
    spans = np.array([[0, 4], [1, 2], [3, 6], [9, 9], [8, 10], [20, 30]])
    assert plots._covered(spans, np.array([0, 1, 5, 7, 9, 15, 25, 40])).tolist() == [0, 1, 5, 6, 7, 8, 13, 18]
    assert plots._covered(spans[:0], np.array([3, 7])).tolist() == [0, 0]


def test_token_latency() -> None:
    result = small_result()
    itl = result.as_dict()["metrics"]["itl_ms"]
    ax = plots.token_latency(result)
    assert ax.get_xlabel() == "output token" and ax.get_ylabel().endswith("(ms)")
    assert f"{itl['median']:.3g} ms in the median, {itl['p99']:.3g} ms at p99" in ax.get_title(loc="left")
    legend = ax.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[-3:] == [f"{name}, {itl[name]:.3g} ms" for name in ("median", "p95", "p99")]
    assert labels[0].startswith("computing, ") and labels[1].startswith("waiting for loads, ")
    assert ax.get_xlim() == (1.5, 6.5)


def test_latency_needs_two_tokens(tmp_path: Path) -> None:
    result = simulate(load_case(write_scenario(tmp_path), ("workload={prompt_tokens: 8, output_tokens: 1}",)))
    with pytest.raises(InputError, match="two output tokens"):
        plots.token_latency(result)


def test_large_lines_have_colours_of_their_own() -> None:
    looks = plots.line_colours({f"line {i}": 100 * i for i in range(12)})
    assert [looks[f"line {i}"] for i in range(11, 3, -1)] == list(range(8)) and looks["line 0"] == 7
