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
# # Placement against caches: keep the popular experts, or the recent ones?
#
# Memory holds some of a layer's experts. A *static placement* keeps those that were chosen most often before, and never changes. A *cache* lets
# the least recently (LRU) or least frequently used one leave for each that must be loaded. Popularity favours the first, topics that come and
# go the second. Which is stronger is a matter of fact: what do real routers do?

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown

from moesim import resources
from moesim.plots.trace import hit_rate_by_capacity, reuse_by_lag
from moesim.simulate import load_case, simulate
from moesim.trace import load_trace
from moesim.trace_stats import cache_statistics, first_sequences, reuse, top_half_share

ROWS = 2000  # tokens that caches are judged on
SHARED = Path("../../shared/traces")  # public recordings beside the repository, where somebody put them
OTHERS = {
    "gpt-oss-20b, exam answers": "gptoss20b_mmlu_validation.npz",
    "gpt-oss-20b, refusals": "gptoss20b_sorry_bench_base.npz",
    "gpt-oss-20b, facts": "gptoss20b_Polyglot-or-Not_Fact-Completion.npz",
}
traces = {"tinymoe (bundled)": load_trace(resources.find("traces", "tinymoe"))}
traces |= {name: load_trace(SHARED / file) for name, file in OTHERS.items() if (SHARED / file).is_file()}
missing = len(OTHERS) + 1 - len(traces)
Markdown(
    f"{len(traces)} trace{'s' if len(traces) > 1 else ''}."
    + (f" {missing} public ones are not beside this checkout and are left out." if missing else "")
)

# %% [markdown]
# A trace is what each router chose, token by token: no text and no weights. The bundled one was recorded from a small model trained on real text.
#
# ## The picture: hits by size of the cache, and how soon experts are used again

# %%
shown = list(traces)[:2]
figure, axes = plt.subplots(len(shown), 2, figsize=(12, 4.4 * len(shown)), layout="constrained", squeeze=False)
for (left, right), name in zip(axes, shown, strict=True):
    hit_rate_by_capacity(traces[name], left, ROWS)
    reuse_by_lag(traces[name], right)
    left.set_title(f"{name}\n{left.get_title(loc='left')}", fontsize=9, loc="left")

# %% [markdown]
# Left: the nearer a curve is to the upper left corner, the fewer loads. *Belady* knows the future: no policy hits more. Right: were routing only a
# matter of popularity, the measured curve would lie on the dashed line; what it has above that is what a cache lives on.
#
# ## All traces, half of each layer's experts in memory
#
# The static set is chosen by the first half of the rows and judged on the second, as one would have to do it; the caches start empty.

# %%
rows = []
for name, trace in traces.items():
    part = first_sequences(trace, ROWS)
    cache = cache_statistics(part, part)["0.5"]
    policies = {"static": "static_first_half", "LRU": "lru", "LFU": "lfu", "Belady": "belady"}
    halves = [half for counts in part.counts() if (half := top_half_share(counts)) is not None]
    rows.append(
        {
            "trace": name,
            "experts a layer": trace.n_experts,
            "uses of the busier half": sum(halves) / len(halves),
            "used by the token before": reuse(part, 1)["micro"],
            **{label: cache[key]["hit_rate"] for label, key in policies.items()},
        }
    )
table = pd.DataFrame(rows).set_index("trace")
table.style.format("{:.1%}", subset=table.columns[1:])

# %% [markdown]
# ## The number to remember

# %%
gap = 100 * (table["LRU"] - table["static"])
wins = int((gap > 0).sum())
left = 100 * (table["Belady"] - table[["LRU", "LFU", "static"]].max(axis=1))
Markdown(
    f"**To remember: {gap.median():+.0f} points.** So many more hits than the static set does LRU have in the median of these traces "
    f"({gap.min():+.0f} to {gap.max():+.0f}; LRU wins in {wins} of {len(gap)}). The best of the three stays {left.min():.0f} to {left.max():.0f} points "
    "below perfect eviction."
)

# %% [markdown]
# ## From hits to speed
#
# Misses are what costs time. The same policies in a run of a 23-billion-parameter model that reads from a drive; all of them begin with the most
# popular experts in memory.

# %%
HOLDS = (4, 6, 8, 10, 12)
STYLES = {"static": "s--", "lru": "o-", "lfu": "^-.", "belady": "x:"}
figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
speeds = {}
for policy, style in STYLES.items():
    pool = [f"placement.pools.unified.policy={policy}"] + ([] if policy == "static" else ["placement.pools.unified.warm=true"])
    for hold in HOLDS:
        changes = ("workload.prompt_tokens=0", "workload.output_tokens=32", f"placement.pools.unified.hold={hold}", *pool)
        speeds[policy, hold] = simulate(load_case("ref-23b-plan-c", changes), keep=False).as_dict()["metrics"]["decode_tok_s"]
    ax.plot(HOLDS, [speeds[policy, hold] for hold in HOLDS], style, label=policy)
half = {policy: speeds[policy, 8] for policy in STYLES}
ax.set(xlabel="experts of each layer in memory, of 16", ylabel="tokens/s", ylim=(0, None))
ax.set_title(f"With 8 of 16: {', '.join(f'{policy} {speed:.2f}' for policy, speed in half.items())} tokens/s", fontsize=10, loc="left")
legend = ax.legend(fontsize=8, frameon=False)

# %%
best = max(speed for policy, speed in half.items() if policy != "belady")
Markdown(
    f"Perfect eviction would be {half['belady'] / best - 1:.0%} faster than the best of the others. It hits only a few points more, but it is misses that "
    "cost time, and of few misses a few points are many."
)

# %% [markdown]
# ## Try next
#
# * `moesim trace analyse FILE` computes these figures for a recording of your own; `moesim trace import` reads what other tools write.
# * `placement.pools.unified.policy=lru` with `warm=false`: what does a cold start cost, and after how many tokens is it forgotten?
# * A policy of your own takes thirty lines: see *How to: own policy* in the documentation.
