# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Predicted against measured: how true is it?
#
# A simulator may be wrong in two ways: in *what happens* (which expert is loaded when, what waits for what) and in *how long it takes*. The two can
# be told apart, because the simulator's own schedules can be executed: on real quantised experts, with real reads.

# %%
import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from moesim.backtest import DECODE, backtest, score
from moesim.backtest.data import read_field_runs
from moesim.plots.backtest import plot_backtest
from moesim.plots.validate import both_timelines, suite_overview
from moesim.simulate import load_case


def tables(path: Path) -> dict[str, pd.DataFrame]:
    """The tables of a Markdown page by the heading that they stand under."""
    out: dict[str, list[list[str]]] = {}
    heading = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        if line.startswith("|"):
            out.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {name: pd.DataFrame(rows[2:], columns=rows[0]) for name, rows in out.items()}


def number(cells: pd.Series) -> pd.Series:
    """Figures without their units, of percentages the share."""
    return cells.str.extract(r"([-+]?[\d.]+)", expand=False).astype(float) / np.where(cells.str.contains("%"), 100, 1)


# %% [markdown]
# ## The record
#
# `moesim validate scenarios/validation` runs a suite of cases on the machine at hand and compares. This is the last full record, `docs/validation.md`; it is
# too slow for a notebook. Beside it stand three simpler models that were given the same costs and hits.

# %%
record = tables(Path("../docs/validation.md"))
cases, simpler = record["Cases, the worst first"], record["Simpler models on the same costs and hits"]
rows = []
for (_, case), (_, other) in zip(cases.iterrows(), simpler.iterrows(), strict=True):
    measured, noise, error = number(case[["measured", "noise", "error"]])
    predicted = measured * (1 + error)  # the page rounds milliseconds more coarsely than errors
    times = {"predicted": predicted, "measured": measured, "noise": noise, "error": predicted / measured - 1}
    baselines = {name: measured * (1 + error) for name, error in number(other[["active bytes", "sum", "overlap"]]).items()}
    rows.append({"name": case["case"], "failed": "", "latency_ms": times, "baselines_ms": baselines})
ax = suite_overview(rows, plt.subplots(figsize=(7, 5.5), layout="constrained")[1])

# %% [markdown]
# ## The number to remember

# %%
error = pd.Series([row["latency_ms"]["error"] for row in rows]).abs()
others = {name: number(simpler[name]).abs().median() for name in ("active bytes", "sum", "overlap")}
best = min(others, key=others.get)
Markdown(
    f"**To remember: {error.median():.1%}**, the median error of the mean latency over {len(cases)} cases; {(error <= 0.12).sum()} of them are within "
    f"12 %. The best simpler model, *{best}*, is off by {others[best]:.1%}: it knows the same costs and the same hits, but not what waits for what."
)

# %% [markdown]
# ## A real run, here and now
#
# One small case: the bundled model with its own weights in 4 bit, half of its experts in memory, the others read from a file. The machine that
# runs this notebook was *not* measured before (`moesim calibrate` does that), so expect the times to be off, and look at what is not.

# %%
if importlib.util.find_spec("torch") is None:
    print("torch is not installed (pip install 'moesim[validate]'): no real run.")
else:
    from moesim.validate.case import Stores
    from moesim.validate.comparison import compare
    from moesim.validate.run import execute

    small = ("model=tinymoe", "precision.routed_experts=int4-g64-torch", "workload.output_tokens=48", "memory.context_tokens=256")
    case = load_case(Path("../scenarios/validation/base.yaml"), (*small, "hardware_set.channels.ssd.bandwidth=40 MB/s"))
    with tempfile.TemporaryDirectory() as folder, Stores(Path(folder)) as stores:
        ran = execute([case], stores, repeats=2)[0]
    row = compare(ran)
    times, parts = row["latency_ms"], row["errors"]
    ax = both_timelines(ran)
    display(
        Markdown(
            f"Every hit and eviction as predicted: **{row['hits_equal']}**; every byte: **{row['bytes_equal']}**. A token takes "
            f"{times['predicted']:.2f} ms predicted and {times['measured']:.2f} ms measured ({times['error']:+.0%}). Told how long each task "
            f"took, the same schedule is off by {abs(parts['schedule']):.1%}: what happens was right, and the error is one of durations, on a machine "
            "that nobody calibrated."
        )
    )

# %% [markdown]
# ## Machines of other people
#
# The second check needs no machine: figures that others published, predicted with nothing that was measured on the same host.

# %%
field = Path("../../shared/field_runs")
if not field.is_dir():
    print("No collection of public runs beside this checkout; docs/field-accuracy.md holds the record.")
else:
    data = read_field_runs(field)
    found = backtest(replace(data, runs=data.runs[::3]))
    ax = plot_backtest(found, "decode", plt.subplots(figsize=(6.5, 6), layout="constrained")[1])
    decoded = [p for p in found.scored if p.case.mode in DECODE]
    got = score([(p.predicted, p.measured, p.case.machine.name) for p in decoded])
    plain = score([(p.closed["0.6 x bandwidth"], p.measured, p.case.machine.name) for p in decoded])
    text = f"Every third run of the collection: decoding is off by {got.median_ape:.1%} in the median of {got.n} runs"
    display(Markdown(f"{text}, with the closed formula (active bytes over 0.6 of the bandwidth) by {plain.median_ape:.1%}."))

# %% [markdown]
# ## Try next
#
# * `moesim calibrate -o here.yaml && moesim validate scenarios/validation --quick --profile here.yaml`: the same on your machine, measured.
# * `docs/validation.md` says for each case which kind of task the error comes from; `docs/field-accuracy.md` lists the worst predictions first.
# * Absolute speeds on a machine that nobody measured deserve the least trust, ratios between configurations the most.
