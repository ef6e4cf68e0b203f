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
# # Quickstart: which lane limits the run, and by how much?
#
# A model of 23 billion parameters, 16 experts in each of its 32 layers, is to answer on a machine with 16 GB of memory. Its weights do not fit,
# so some experts stay on the drive until a token asks for them. Does it run? How fast? What holds it up?

# %%
import pandas as pd
from IPython.display import Markdown, display

from moesim import bottleneck, plots
from moesim.simulate import load_case, simulate

case = load_case("quickstart", ("workload.output_tokens=64",))
result = simulate(case)
display(result)

# %% [markdown]
# A scenario is a small YAML file that names a model, a precision, a machine, a routing trace and a workload; `load_case` reads one by name or
# path, with the same changes that `moesim run --set path=value` takes. `simulate` plans what happens, expert by expert, and times it.
#
# ## The picture
#
# One row for each *lane*, something that does one piece of work after another. Read the title first, then the row in bold. Orange bars are
# reads that something waited for, and hatched gaps are that waiting.

# %%
ax = plots.lanes_over_time(result)
title = ax.figure.suptitle(plots.finding(result), fontsize=11, ha="left", x=0.01)

# %% [markdown]
# ## The number to remember
#
# A lane that is busy does not always hold the run up: what counts is the *critical path*, the chain of tasks in which each began when the one
# before it ended. A lane with the share $s$ of that path, made 10 % faster, saves at most $s\,(1 - 1/1.1)$ of the time.

# %%
data = result.as_dict()
found = bottleneck.find(result, data)
Markdown(f"**To remember: {found.share:.0%}.** {found.finding} {found.advice}")

# %% [markdown]
# ## Change something
#
# The same run with fewer experts in memory. The drive takes over, and the speed follows the share of experts that are where they are needed.

# %%
rows = []
for hold in (13, 12, 10, 8, 6):
    other = simulate(load_case("quickstart", ("workload.output_tokens=32", f"placement.pools.unified.hold={hold}")))
    data = other.as_dict()
    shares = bottleneck.lane_shares(data["critical_path"])
    lane = next(iter(shares))
    rows.append(
        {
            "experts in memory, of 16": hold,
            "tokens/s": data["metrics"]["decode_tok_s"],
            "expert hits": data["metrics"]["expert_hit_rate"],
            "the limit": lane,
            "its share": shares[lane],
        }
    )
table = pd.DataFrame(rows).set_index("experts in memory, of 16")
table.style.format({"tokens/s": "{:.2f}", "expert hits": "{:.1%}", "its share": "{:.0%}"})

# %%
slow, fast = table["tokens/s"].iloc[[-1, 0]]
change = table.index[table["the limit"] != table["the limit"].iloc[0]]
where = f"; from {change[0]} down, {table.loc[change[0], 'the limit']} is the limit" if len(change) else ""
Markdown(f"With {table.index[-1]} experts instead of {table.index[0]} the run is {fast / slow:.1f} times slower{where}.")

# %% [markdown]
# ## What is assumed
#
# Nobody has measured all the figures behind an answer. The result says which are assumptions.

# %%
assumed = result.as_dict()["provenance"]["assumed"]
Markdown(f"{len(assumed)} figures are assumed, among them: {', '.join(f'`{name}`' for name in assumed[:4])}.")

# %% [markdown]
# ## Try next
#
# * `load_case("quickstart", ("placement.pools.unified.hold=8", "prefetch.predictor=oracle"))`: what would perfect prediction win back?
#   Notebook 03 says why.
# * `moesim report quickstart -o report.html` writes all of this as one page; `moesim run quickstart --timeline run.json` opens in Perfetto.
# * `case.model`, `case.hardware` and `case.layout.ledger` show themselves as tables. Notebook 02 reads the last one.
