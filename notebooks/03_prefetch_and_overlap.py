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
# # Prefetch and overlap: how much of the loading can hide behind computing?
#
# An expert that is not in memory must be read before it can be used. If somebody knew earlier which expert a layer will choose, the read could
# run while another layer computes. How much is there to win, and how much of it does a real predictor get?

# %%
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown

from moesim import plots
from moesim.simulate import Result, load_case, simulate

HALF = ("workload.prompt_tokens=16", "workload.output_tokens=32", "placement.pools.unified.hold=8")  # half of the experts in memory


def run(*changes: str) -> Result:
    """The quickstart with half of its experts in memory, and other changes."""
    return simulate(load_case("quickstart", (*HALF, *changes)))


runs = {
    "no prefetch": run(),
    "co-occurrence, one layer ahead": run("prefetch.predictor=cooccurrence"),
    "co-occurrence, only if likely": run("prefetch.predictor=cooccurrence", "prefetch.threshold=0.5"),
    "next layer's router, asked early": run("prefetch.predictor=gate-lookahead"),
    "perfect, one layer ahead": run("prefetch.predictor=oracle"),
    "perfect, three layers ahead": run("prefetch.predictor=oracle", "prefetch.distance=3"),
}

# %% [markdown]
# *Co-occurrence* learns from another part of the trace which experts follow which, from one layer to the next. *Next layer's router* is asked with
# what this layer knows; how often it is right is stated here and not measured (`prefetch.recall`). *Perfect* reads the future; no machine can, but
# it tells how much there is to win.
#
# ## The picture
#
# The same token three times, on one scale. Without prefetch the drive (the lowest row) idles while others compute, and the others wait while it
# reads (hatched). A prefetch (yellow) fills the gaps of the drive. But what it brings needs room: an expert that had to leave for it may be asked
# for next, and then the drive reads more than without.

# %%
step = plots.middle_steps(runs["co-occurrence, one layer ahead"].tasks)[0]
shown = ["no prefetch", "co-occurrence, one layer ahead", "perfect, one layer ahead"]
figure, axes = plt.subplots(len(shown), 1, figsize=(11, 8), layout="constrained")
for ax, name in zip(axes, shown, strict=True):
    plots.lanes_over_time(runs[name], ax, (step, step))
    ax.set_title(f"{name}: {runs[name].as_dict()['metrics']['decode_tok_s']:.2f} tokens/s over the run", fontsize=10, loc="left")
    for text in [text for text in ax.texts if "token" in text.get_text()]:
        text.remove()
boxes = [ax.get_legend() for ax in axes]
handles = {text.get_text(): handle for box in boxes for text, handle in zip(box.get_texts(), box.legend_handles, strict=True)}
widest = max(ax.get_xlim()[1] for ax in axes)
for ax, box in zip(axes, boxes, strict=True):
    ax.set(xlim=(0, widest), xlabel=axes[-1].get_xlabel() if ax is axes[-1] else "")
    box.remove()
legend = figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)

# %% [markdown]
# ## What happened to the bytes

# %%
rows = []
for name, it in runs.items():
    data = it.as_dict()
    metrics, drive = data["metrics"], data["transfers"]["ssd"]
    rows.append(
        {
            "prefetch": name,
            "tokens/s": metrics["decode_tok_s"],
            "wait for loads, ms a token": metrics["io_wait_ms_per_token"],
            "loading that computing covers": metrics["overlap_coverage"],
            "read, GB": drive["bytes"] / 1e9,
            "of it in vain": drive["prefetch_wasted_bytes"] / drive["bytes"],
        }
    )
table = pd.DataFrame(rows).set_index("prefetch")
table.style.format("{:.2f}").format("{:.0%}", subset=["loading that computing covers", "of it in vain"])

# %% [markdown]
# ## The number to remember
#
# Loading and computing can at best run at the same time, so no prefetch makes a token faster than the longer of the two. Three figures say
# whether prefetch is worth it: the wait for loads, what perfect prediction leaves of it, and what a real predictor leaves.

# %%
wait = table["wait for loads, ms a token"]
base, best, real = wait["no prefetch"], wait.filter(like="perfect").min(), wait.filter(like="co-occurrence").min()
early = wait["next layer's router, asked early"]
data = runs["no prefetch"].as_dict()
load = data["transfers"]["ssd"]["busy_s"] / data["metrics"]["makespan_s"]
Markdown(
    f"**To remember: {1 - best / base:.0%}.** So much of the wait ({base:.0f} ms a token) does perfect prediction win back. Co-occurrence wins "
    f"{1 - real / base:.0%}, the early router {1 - early / base:.0%}: what counts is how good the prediction is. The drive is busy for {load:.0%} of the run without prefetch; what exceeds the computing beside it "
    "cannot be hidden by anybody, and only fewer misses or a faster drive help."
)

# %% [markdown]
# ## How far ahead?
#
# Further ahead leaves more time for the read, but is known less surely, and early arrivals take room from experts that are still needed.

# %%
distances = [1, 2, 3, 4]
figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
for predictor, style in (("oracle", "o-"), ("cooccurrence", "s--")):
    speeds = [run(f"prefetch.predictor={predictor}", f"prefetch.distance={d}").as_dict()["metrics"]["decode_tok_s"] for d in distances]
    ax.plot(distances, speeds, style, label="perfect prediction" if predictor == "oracle" else "co-occurrence")
ax.axhline(table["tokens/s"]["no prefetch"], color="#777777", linestyle=":", label="no prefetch")
ax.set(xlabel="prefetch distance (layers)", ylabel="tokens/s", xticks=distances, ylim=(0, None))
ax.set_title("How far ahead pays is a matter of how good the prediction still is there", fontsize=10, loc="left")
legend = ax.legend(fontsize=8, frameon=False)

# %% [markdown]
# ## Try next
#
# * `"prefetch.into=buffers", "prefetch.buffers=3"`: prefetched experts in buffers of their own instead of in the cache.
# * `"hardware_scale.ssd=2"`: with a faster drive, how much is left for prefetch to win?
# * Notebook 04 looks at the other way to fewer waits: which experts to keep.
