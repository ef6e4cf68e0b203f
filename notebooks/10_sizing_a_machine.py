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
# # Sizing: which machine for which need?
#
# The other way round: what must be reached is given, and the machine is asked for. A *needs* file states the model, the users, the context, the
# speed that everybody must get, how coarse the weights may be, and the budget.

# %%
import datetime
import math

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display

from moesim.prices import load_prices
from moesim.sizing import Option, size
from moesim.sizing.needs import load_needs

needs, folder = load_needs("chat")
level = needs.level
Markdown(
    f"**{needs.name}**: {needs.description} At least {level.decode_tok_s:g} tokens/s with {needs.context_tokens:,} tokens of context, the first "
    f"token of a prompt of {needs.prompt_tokens:,} within {level.ttft:g} s, for at most {needs.budget.amount:,.0f} {needs.budget.currency}."
)

# %%
prices, today = load_prices(), datetime.date.today()
found = size(needs, folder, prices, today)
display(found)
n = found.counts
Markdown(
    f"{n['considered']} machines were considered. A bound rules out {n['ruled out by a bound']} (no token is faster than reading its weights once), "
    f"{n['above the budget']} cost too much, and {n['machines simulated']} were simulated in {n['runs']} runs."
)

# %% [markdown]
# ## The picture: what money buys
#
# Machines that were simulated, and single upgrades of the recommended one. Above the dashed line decoding is fast enough; a filled mark meets
# *all* needs, the first token among them. Steps to the right that do not lead upwards are money for nothing.

# %%
options = {
    o.machine: o for o in (*(fix.option for fix in found.values), *(miss.option for miss in found.misses), *found.ranked, *found.above)
}


def short(option: Option) -> str:
    """The parts that decide: all but the drive."""
    return option.machine.rpartition(" + ")[0].replace(" + ", "\n")


figure, ax = plt.subplots(figsize=(10, 5), layout="constrained")
for option in options.values():
    if option.cost is None or math.isnan(option.worst.speed):
        continue
    meets = option.reached >= 1
    ax.plot(
        option.cost, option.worst.speed, "o", markersize=8, color="#16324f" if meets else "#c2410c", fillstyle="full" if meets else "none"
    )
named = [*found.ranked, *(miss.option for miss in found.misses[:1])]
for option in named:
    ax.annotate(short(option), (option.cost, option.worst.speed), xytext=(-8, 6), textcoords="offset points", fontsize=8, ha="right")
ax.axhline(level.decode_tok_s, color="#555555", linestyle="--", linewidth=1, label=f"needed, {level.decode_tok_s:g} tokens/s")
ax.axvline(needs.budget.amount, color="#b00020", linewidth=1, label=f"budget, {needs.budget.amount:,.0f} {needs.budget.currency}")
ax.set(xlabel=f"price ({prices.currency})", ylabel="tokens/s of each user", xlim=(0, 3 * needs.budget.amount), ylim=(0, None))
best = found.best
ax.set_title(
    f"Recommended: {best.cost:,.0f} {prices.currency} for {best.worst.speed:.0f} tokens/s",
    fontsize=10,
    loc="left",
)
legend = ax.legend(fontsize=8, frameon=False)

# %% [markdown]
# ## The number to remember
#
# What the recommended machine costs, and how much it has to spare: of the machines that were looked at, the cheapest that meets the needs.

# %%
verdict, (low, high) = best.worst, best.intervals[0]
growth = best.growth
spare = (
    f"{growth.users.times} times the users are too many ({growth.users.why})"
    if growth.users.why
    else "even the largest number of users tried is borne"
)
Markdown(
    f"**To remember: {best.cost:,.0f} {prices.currency}** for {best.machine}, with the experts in {verdict.experts}, {verdict.switches}. It reaches "
    f"{verdict.reached:.2f} times what is needed ({low:.0f} to {high:.0f} tokens/s while assumed figures are open); {spare}."
)

# %% [markdown]
# ## Why not cheaper?
#
# Machines within the budget that do not meet the needs, by how far they get, and the cheapest step that would cure them.

# %%
rows = [
    {
        "machine": miss.option.machine,
        "price": miss.option.cost,
        "tokens/s": miss.option.worst.speed,
        "first token, s": miss.option.worst.ttft_s,
        "reached": miss.option.reached,
        "cure": miss.fix.step.machine if miss.fix else "",
        "costs": miss.fix.cost if miss.fix else math.nan,
    }
    for miss in found.misses
]
pd.DataFrame(rows).set_index("machine").style.format(
    {"price": "{:,.0f}", "tokens/s": "{:.1f}", "first token, s": "{:.2f}", "reached": "{:.0%}", "costs": "{:,.0f}"}, na_rep=""
)

# %% [markdown]
# ## The same model for four people
#
# Needs are data: change one and ask again. Users share the machine in lockstep here; requests that come and go are notebook 06.

# %%
more = size(needs.model_copy(update={"users": 4, "name": "four people"}), folder, prices, today)
if more.best is None:
    text = "No machine that was looked at is enough for four."
else:
    place = "within" if more.ranked else "above"
    text = f"For four people: {more.best.machine} for {more.best.cost:,.0f} {prices.currency} ({place} the budget), {more.best.worst.speed:.0f} tokens/s each."
Markdown(text)

# %% [markdown]
# ## Try next
#
# * `moesim size coding -o md`: a programmer who owns a machine already, where each upgrade is valued by its own price.
# * `moesim size deepseek-home`: what happens when nothing within the budget is enough.
# * `best.worst.command()` is the `moesim run` command behind the figure; run it and look at the lanes, as in notebook 01.
