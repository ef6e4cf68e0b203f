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
# # Memory ledger: where do the bytes go, and how long may the context be?
#
# A run fits if everything that must be in memory at the same time does. The ledger plans that as lines of bytes for each tier of memory, at
# the worst moment, before anything runs. Experts are the line that gives: as many stay in memory as the other lines leave room for.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

from moesim import plots
from moesim.simulate import load_case, simulate

GB = 1e9
case = load_case("quickstart")
display(case.layout.ledger)

# %% [markdown]
# *Basis* says where a figure comes from: `spec` follows from the model's shapes and the formats, `assumed` is a guess that you should replace.
# Formats count whole: an INT4 weight with one FP16 scale for each group of 128 takes more than four bits.
#
# ## The picture: context against experts
#
# The cache of keys and values (KV) grows with every token of context, and what it takes the experts lose.

# %%
names = {"weights": "shared weights", "kv": "KV cache", "experts": "experts", "workspace": "work space", "runtime": "runtime"}
contexts = [2**n * 1024 for n in range(1, 7)]
layouts = {tokens: load_case("quickstart", (f"memory.context_tokens={tokens}",)).layout for tokens in contexts}
sizes = {pool: np.array([sum(x.bytes for x in it.ledger.lines if x.pool == pool) for it in layouts.values()]) / GB for pool in names}
usable = case.layout.ledger.capacities["unified"].usable_bytes / GB

figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
below = np.zeros(len(layouts))
for (pool, label), colour in zip(names.items(), plots.LINE_COLOURS, strict=False):
    ax.bar(range(len(layouts)), sizes[pool], bottom=below, color=colour, edgecolor="white", label=label)
    below += sizes[pool]
for i, it in enumerate(layouts.values()):
    held = it.pools["unified"].counts
    ax.annotate(f"{np.mean(held):.1f} experts\nof {case.model.n_experts} a layer", (i, usable + 0.3), ha="center", fontsize=8)
ax.axhline(usable, color="#b00020", label=f"usable, {usable:.0f} GB")
ax.set_xticks(range(len(layouts)), [f"{tokens:,}" for tokens in layouts])
ax.set_title("Every token of context takes room from experts", fontsize=10, loc="left")
ax.set(xlabel="planned context (tokens)", ylabel="memory (GB)", ylim=(0, usable * 1.15))
legend = ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)

# %% [markdown]
# ## The number to remember
#
# What one expert takes, in tokens of context: for so many tokens more, every layer must do without one expert.

# %%
tokens = 8192
per_token = case.model.kv_bytes(case.plan, tokens) / tokens
expert = sum(case.model.expert_bytes(case.plan, layer) for layer in case.model.moe_layers)
Markdown(
    f"**To remember: {expert / per_token:,.0f} tokens.** A token of context takes {per_token / 1e3:.0f} kB over all layers, "
    f"one expert of every layer takes {expert / GB:.2f} GB. So much context costs one expert in every layer, in this model and precision."
)

# %% [markdown]
# ## Plan and watermark
#
# The plan is the worst case. What a run really holds is its watermark, and the simulator follows it. Here a run that begins with no expert in
# memory, with a cache that takes all of its room at once (`maximum`), and with one that grows with the text (`live`).

# %%
runs = {how: simulate(load_case("ref-23b-plan-c", (f"memory.kv={how}", "workload.output_tokens=48"))) for how in ("maximum", "live")}
for how, run in runs.items():
    use = run.as_dict()["memory"]["unified"]
    print(f"{how}: planned {use['planned_bytes'] / GB:.2f} GB, peak {use['peak_bytes'] / GB:.2f} GB of {use['capacity_bytes'] / GB:.0f} GB")
ax = plots.memory_watermark(runs["live"], "unified", plt.subplots(figsize=(9, 3.4), layout="constrained")[1])

# %% [markdown]
# ## Out of memory is a result
#
# A plan that does not fit is no crash: the result says which tier, what asked for how much, and what would have fitted. Here the quickstart is
# told to hold in every layer as many experts as only some layers have room for.

# %%
most = max(case.layout.pools["unified"].counts)
oom = simulate(load_case("quickstart", (f"placement.pools.unified.hold={most}",))).as_dict()["oom"]
Markdown(
    f"With {most} experts in every layer, {oom['asked_by']} finds no room in {oom['tier']}: {oom['needed_bytes'] / GB:.2f} GB are needed and "
    f"{oom['usable_bytes'] / GB:.2f} GB can be had. With a context of at most {oom['max_context_tokens']:,} tokens it would fit."
)

# %% [markdown]
# ## Try next
#
# * `load_case("quickstart", ("precision=int8",)).layout`: how many experts stay in memory then?
# * `moesim budget MODEL --precision int4-g128 --precision int8` compares formats; with `--check` a plan that does not fit ends with exit code 3.
# * Notebook 07 asks what fewer bits cost in quality, notebook 10 which machine has the room.
