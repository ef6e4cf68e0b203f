"""Owns the pictures of the pages: lanes over time of small real runs, drawn when the pages are built, so never behind the program."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from moesim import plots
from moesim.simulate import Result, load_case, simulate

HERE = Path(__file__).resolve().parent
FOLDER = "_build/figures"  # below this folder: Sphinx copies what the pages name
SCENARIO = HERE / "examples" / "my-scenario.yaml"

# name -> (what it shows, assignments of examples/my-scenario.yaml for each row)
LANES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "prefetch": (
        "A perfect prediction one layer ahead keeps the link busy without a break; a realistic one also copies experts in vain, and loses here",
        {
            "no prefetch": (),
            "co-occurrence, one layer ahead": ("prefetch={predictor: cooccurrence, distance: 1}",),
            "perfect prediction, one layer ahead": ("prefetch={predictor: oracle, distance: 1}",),
        },
    ),
    "bottleneck": (
        "The same run with a link of twice and of eight times the rate: the wait shrinks, and the GPU becomes the limit",
        {
            "PCIe of 15.8 GB/s": (),
            "31.6 GB/s": ("hardware_set.channels.pcie.bandwidth=31.6 GB/s",),
            "126 GB/s": ("hardware_set.channels.pcie.bandwidth=126 GB/s",),
        },
    ),
    "chain": (
        "With RAM that holds only some experts, a miss crosses two lanes: it is read from the drive, then copied to the card",
        {"experts on the drive": ("placement.pools.ram={hold: 12, policy: lru, warm: true}",)},
    ),
}
STEP = 12  # a decode step in the middle of the run


def draw(name: str) -> tuple[str, str]:
    """Draw one picture; return its path below ``docs`` and what it shows."""
    path = HERE / FOLDER / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):  # the same bytes each time; text stays text
        if name == "quickstart":
            result = simulate(load_case("quickstart"))
            text = " ".join(plots.finding(result).split())
            plots.plot_run(result, path.with_suffix(".png"))
            return f"{FOLDER}/{name}.png", text
        text, runs = LANES[name]
        _lanes(runs).savefig(path, metadata={"Date": None})
    return f"{FOLDER}/{name}.svg", text


def _lanes(runs: dict[str, tuple[str, ...]]) -> Figure:
    figure = Figure(figsize=(9, 0.5 + 2.1 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), squeeze=False)[:, 0]
    results = {label: _run(assignments) for label, assignments in runs.items()}
    for ax, (label, result) in zip(axes, results.items(), strict=True):
        plots.lanes_over_time(result, ax, (STEP, STEP))
        rate = result.as_dict()["metrics"]["decode_tok_s"]
        ax.set_title(f"{label}: {rate:.0f} tokens/s", loc="left", fontsize=10)
    legends = [ax.get_legend() for ax in axes]
    handles = {text.get_text(): handle for box in legends for text, handle in zip(box.get_texts(), box.legend_handles, strict=True)}
    widest = max(ax.get_xlim()[1] for ax in axes)
    for ax, box in zip(axes, legends, strict=True):
        ax.set_xlim(0, widest)
        box.remove()
        for text in [text for text in ax.texts if "token" in text.get_text()]:  # all rows show the same one
            text.remove()
    for ax in axes[:-1]:
        ax.set_xlabel("")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _run(assignments: tuple[str, ...]) -> Result:
    return simulate(load_case(SCENARIO, assignments))
