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
    "co-occurrence, only if likely": run("prefetch.predictor=cooccurrence", "prefetch.threshold=0.8"),
    "perfect, one layer ahead": run("prefetch.predictor=oracle"),
    "perfect, three layers ahead": run("prefetch.predictor=oracle", "prefetch.distance=3"),
}

# %% [markdown]
# *Co-occurrence* learns from another part of the trace which experts follow which, from one layer to the next. *Perfect* reads the future; no
# machine can, but it tells how much there is to win.
#
# ## The picture
#
# The same token three times, on one scale. Without prefetch the drive (the lowest row) idles while others compute, and the others wait while it
# reads. A prefetch that is used (yellow) fills the gaps; one in vain (crossed) takes the drive from reads that are needed.

# %%
STEP = 18
shown = ["no prefetch", "co-occurrence, one layer ahead", "perfect, one layer ahead"]
figure, axes = plt.subplots(len(shown), 1, figsize=(11, 8), layout="constrained")
for ax, name in zip(axes, shown, strict=True):
    plots.lanes_over_time(runs[name], ax, (STEP, STEP))
    ax.set_title(f"{name}: {runs[name].as_dict()['metrics']['decode_tok_s']:.2f} tokens/s over the run", fontsize=10, loc="left")
    for text in [text for text in ax.texts if "token" in text.get_text()]:
        text.remove()
widest = max(ax.get_xlim()[1] for ax in axes)
for ax in axes:
    ax.set_xlim(0, widest)

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
data = runs["no prefetch"].as_dict()
load = data["transfers"]["ssd"]["busy_s"] / data["metrics"]["makespan_s"]
Markdown(
    f"**To remember: {1 - best / base:.0%} and {1 - real / base:.0%}** of the wait ({base:.0f} ms a token) are what perfect prediction and the better "
    f"of the two real ones win back. The drive is busy for {load:.0%} of the run without prefetch; what exceeds the computing beside it "
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
ax.set(xlabel="prefetch distance (layers)", ylabel="tokens/s", xticks=distances, ylim=(0, None), title="How far ahead pays depends on how good the prediction is")
legend = ax.legend(fontsize=8, frameon=False)

# %% [markdown]
# ## Try next
#
# * `"prefetch.into=buffers", "prefetch.buffers=3"`: prefetched experts in buffers of their own instead of in the cache.
# * `"hardware_scale.ssd=2"`: with a faster drive, how much is left for prefetch to win?
# * Notebook 04 looks at the other way to fewer waits: which experts to keep.
