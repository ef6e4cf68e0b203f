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
# # Which SSD, which RAM? A hardware study
#
# Qwen3-30B-A3B in 16 bit takes some 60 GB. A PC with a 12 GB card keeps the hottest experts there; what RAM does not hold waits on the drive. There
# is money for one thing: more RAM, faster RAM, or a faster drive. Which one?

# %%
import json

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown

from moesim.plots.whatif import plot_curve
from moesim.prices import load_prices, price_lines, total
from moesim.simulate import Case, load_case, simulate
from moesim.whatif.curves import curve
from moesim.whatif.replay import Replay

MEMORIES = {
    "32 GiB DDR4-3200": "ddr4-3200x2:32GiB",
    "32 GiB DDR5-4800": "ddr5-4800x2:32GiB",
    "64 GiB DDR4-3200": "ddr4-3200x2:64GiB",
    "64 GiB DDR5-4800": "ddr5-4800x2:64GiB",
}
DRIVES = ("sata", "nvme-gen3", "nvme-gen4", "nvme-gen5")
POOLS = ("placement.pools.ram.hold=fit", "placement.pools.ram.policy=lru", "placement.pools.ram.warm=true")
WORK = ("workload.prompt_tokens=0", "workload.output_tokens=16")


def machine(memory: str, drive: str) -> str:
    """A PC of parts from the catalogue; every figure of a part has its source there."""
    return f"rtx-3060 + i7-12700k + {MEMORIES[memory]} + {drive}"


def case(memory: str, drive: str) -> Case:
    """The model on such a PC; experts that are not on the card are fetched or computed by the CPU, what is done sooner."""
    return load_case("qwen3-30b-hybrid", (f"hardware={json.dumps(machine(memory, drive))}", *POOLS, *WORK))


# %% [markdown]
# A machine is a line of parts, such as `rtx-3060 + i7-12700k + ddr5-4800x2:64GiB + nvme-gen4`; `moesim hardware --parts` lists them.
#
# ## The picture: every memory with every drive

# %%
prices = load_prices()
rows = []
for memory in MEMORIES:
    for drive in DRIVES:
        data = simulate(case(memory, drive), keep=False).as_dict()
        speed, lanes = data["metrics"]["decode_tok_s"], data["lanes"]
        busiest = max(lanes, key=lambda lane: lanes[lane]["utilisation"])
        cost = total(price_lines(machine(memory, drive), prices))
        rows.append({"memory": memory, "drive": drive, "tokens/s": speed, "busiest lane": busiest, "price, USD": cost})
runs = pd.DataFrame(rows)
grid = runs.pivot(index="memory", columns="drive", values="tokens/s").loc[list(MEMORIES), list(DRIVES)]

figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
shown = ax.imshow(grid, cmap="Blues", vmin=0, vmax=grid.to_numpy().max() * 1.25, aspect="auto")
for y, memory in enumerate(grid.index):
    for x, drive in enumerate(grid.columns):
        lane = runs.set_index(["memory", "drive"]).loc[(memory, drive), "busiest lane"]
        speed = grid.loc[memory, drive]
        ax.text(x, y, f"{speed:.1f}\n{lane}", ha="center", va="center", color="white" if speed > grid.to_numpy().max() / 2 else "black")
ax.set_xticks(range(len(DRIVES)), DRIVES)
ax.set_yticks(range(len(MEMORIES)), MEMORIES)
ax.set_title("Tokens/s, and the lane that is busiest", fontsize=10, loc="left")
bar = figure.colorbar(shown, label="tokens/s")

# %% [markdown]
# Read a row from left to right: what does a faster drive bring? Then a column from top to bottom: what does memory bring? Where the busiest lane is
# no longer the drive, a better drive brings nothing.
#
# ## The number to remember: what each step buys, by its price

# %%
START = ("32 GiB DDR4-3200", "nvme-gen3")
STEPS = {
    "a faster drive": (START[0], "nvme-gen5"),
    "faster RAM": ("32 GiB DDR5-4800", START[1]),
    "more RAM": ("64 GiB DDR4-3200", START[1]),
    "more and faster RAM": ("64 GiB DDR5-4800", START[1]),
}
known = runs.set_index(["memory", "drive"])
base = known.loc[START]
steps = pd.DataFrame(
    {
        name: {
            "tokens/s": known.loc[to, "tokens/s"],
            "gain, tokens/s": known.loc[to, "tokens/s"] - base["tokens/s"],
            "costs, USD": known.loc[to, "price, USD"] - base["price, USD"],
        }
        for name, to in STEPS.items()
    }
).T
steps["tokens/s per 100 USD"] = 100 * steps["gain, tokens/s"] / steps["costs, USD"]
steps.style.format("{:.1f}")

# %%
best = steps["tokens/s per 100 USD"].idxmax()
Markdown(
    f"**To remember: {best}**, from {base['tokens/s']:.1f} to {steps.loc[best, 'tokens/s']:.1f} tokens/s for {steps.loc[best, 'costs, USD']:.0f} USD. "
    f"With {START[0]} a faster drive brings {steps.loc['a faster drive', 'gain, tokens/s']:+.1f} tokens/s; once all experts have room in RAM, "
    f"it brings {grid.loc['64 GiB DDR4-3200', 'nvme-gen5'] - grid.loc['64 GiB DDR4-3200', 'nvme-gen3']:+.1f}. Prices are class prices "
    "(`hardware_profiles/parts/prices.yaml`), and a board for other RAM is not in them: put in those of your shop."
)

# %% [markdown]
# ## How far does it go?
#
# No catalogue has every drive. A curve turns one figure of the machine alone; a knee is where more of it begins to bring less than half as much, or
# where another lane takes over.

# %%
replay = Replay(case(*START))
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4), layout="constrained")
ax = plot_curve(curve(replay, "ssd.bandwidth=0.5..16GB/s", 6), left)
ax = plot_curve(curve(replay, "ram.bandwidth=40..150GB/s", 4), right)

# %% [markdown]
# ## Try next
#
# * `moesim whatif SCENARIO` turns all figures, gives an interval for those that are assumed, and tries changes.
# * A smaller format (`precision={default: bf16, routed_experts: int8}`) makes the same RAM hold twice the experts, for no money: notebook 07.
# * `moesim sweep desktop-upgrades` computes all combinations and their Pareto front; notebook 10 starts from the need instead of the parts.
