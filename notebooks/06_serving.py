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
# # Serving: how many people does one machine bear?
#
# So far one sequence had the machine for itself. Here requests arrive when they like, wait, join the running batch at a step's border and leave
# when their answer ends. More people share each read of the weights, so throughput grows; each of them waits longer. Where is the knee?

# %%
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown

from moesim.plots import serving as pictures
from moesim.serving import load_serving
from moesim.serving.curve import RATE, saturation

FEW = (  # enough to see the shape; the bundled scenarios serve more and longer requests
    "serving.requests=24",
    "serving.most_sequences=4",
    "serving.levels={quick: {ttft: 150 ms, tpot: 15 ms}}",
    "serving.prompt={distribution: lognormal, mean: 96, sigma: 0.5, low: 16, high: 256}",
    "serving.output={distribution: lognormal, mean: 20, sigma: 0.5, low: 8, high: 48}",
)
case, requests = load_serving("chat-resident", FEW)
Markdown(
    f"{case.model.name} in 4 bit, whole in the memory of a 24 GB card. {len(requests.prompt)} requests with {requests.prompt.mean():.0f} tokens of "
    f"prompt and {requests.output.mean():.0f} of answer in the mean arrive at random (Poisson)."
)

# %% [markdown]
# ## The picture: the saturation curve
#
# The same requests, arriving at several rates, at most four of them in a batch. *Goodput* counts only those that were served within a level: a limit for the time to the first token
# (TTFT) and for the time per token after it (TPOT). *quick* is stated above, the others come with the program.

# %%
RATES = (2, 5, 10, 20, 40)
curve = saturation(case, RATES)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
ax = pictures.throughput(curve, RATE, left)
ax = pictures.latency(curve, RATE, middle)
last = curve.curve(RATE)[-1]
ax = pictures.over_time(last[1], f"at {last[0]:g} requests/s", right)

# %% [markdown]
# Left: as long as the line follows the dashed one, what is offered is served. Middle: what each person feels. Right: at the highest rate, who runs,
# who waits, and how full the KV cache is.

# %%
rows = []
for offered, data in curve.curve(RATE):
    metrics = data["metrics"]
    rows.append(
        {
            "offered, requests/s": offered,
            "output tokens/s": metrics["output_throughput_tok_s"],
            "TTFT median, ms": metrics["ttft_ms"]["median"],
            "TTFT p99, ms": metrics["ttft_ms"]["p99"],
            "TPOT median, ms": metrics["tpot_ms"]["median"],
        }
    )
table = pd.DataFrame(rows).set_index("offered, requests/s")
table.style.format("{:,.1f}").format_index("{:g}")

# %% [markdown]
# ## The number to remember
#
# The knee is the rate with the highest *power*, throughput over mean latency: before it throughput grows faster than latency, behind it latency
# grows faster.

# %%
knee, capacity = curve.knee(RATE), curve.capacity(RATE)
least, most = table.iloc[0], table.iloc[-1]
held = ", ".join(f"{name} {'at none of these rates' if rate is None else f'up to {rate:g}/s'}" for name, rate in capacity.items())
end = ", the highest that was tried" if knee == RATES[-1] else ""
Markdown(
    f"**To remember: {knee:g} requests/s**, the knee{end}. From {table.index[0]:g} to {table.index[-1]:g} requests/s the machine makes "
    f"{most['output tokens/s'] / least['output tokens/s']:.1f} times the tokens, and a token takes "
    f"{most['TPOT median, ms'] / least['TPOT median, ms']:.1f} times as long. Levels that hold: {held}."
)

# %% [markdown]
# ## The same model in 16 bit, where not all experts have room on the card
#
# A batch of several people asks for more different experts in each layer than one person does. What does not lie on the card must be fetched, and
# the fetches of all are in everybody's way.

# %%
offloaded, _ = load_serving("chat-offloaded", (*FEW, "serving.requests=8"))
slow = saturation(offloaded, (0.1, 1))
rows = []
for offered, data in slow.curve(RATE):
    metrics = data["metrics"]
    rows.append({"offered": offered, "tokens/s": metrics["output_throughput_tok_s"], "TPOT": metrics["tpot_ms"]["median"]})
one, many = rows
Markdown(
    f"At {one['offered']:g} requests/s a token takes {one['TPOT']:.0f} ms, at {many['offered']:g} it takes {many['TPOT']:.0f} ms: "
    f"{many['TPOT'] / one['TPOT']:.1f} times as long for {many['tokens/s'] / one['tokens/s']:.1f} times the tokens/s. On the card alone, above, it "
    f"was {most['TPOT median, ms'] / least['TPOT median, ms']:.1f} times as long for {most['output tokens/s'] / least['output tokens/s']:.1f} times the tokens: "
    "who serves many people needs the room first."
)

# %% [markdown]
# ## Try next
#
# * `moesim serve-sim chat-resident --rates 0.5,1,2,4,8 --plot curve.png`: the bundled requests in full; `--concurrency 1,4,16` for a closed loop.
# * `serving.most_sequences` and `serving.step_tokens` bound the batch: what do they do to TTFT, what to TPOT?
# * `docs/serving.md` says what is modelled: paged caches, preemption, shared prefixes, service levels.
