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
# # Precision and quality: what do fewer bits cost, and what do they buy?
#
# Fewer bits per weight make room for more experts, and less to read. What that costs in quality cannot be computed from a model's shape: it must be
# measured, on text that nothing was chosen by. Here on the bundled small model, which has real weights.

# %%
import importlib.util

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display

from moesim.plots.quality import pareto
from moesim.precision import FORMATS
from moesim.simulate import load_case, simulate

PLANS = ("fp16", "int8", "mixed", "int4", "int4+clip", "int3", "int2")
TOKENS = 6000  # of held-out text, and of calibration text
data = None
if importlib.util.find_spec("torch") is None:
    print("torch is not installed (pip install 'moesim[validate]'): nothing is measured, and the first half of this notebook stays empty.")
else:
    import torch

    from moesim.quality.answer import answer
    from moesim.quality.plans import ladder
    from moesim.quality.store import Results
    from moesim.quality.study import Study
    from moesim.quality.subject import load_subject
    from moesim.quality.text import Text, read_token_file

    torch.set_num_threads(1)
    subject = load_subject("tinymoe")

    def some(name: str) -> Text:
        """Documents from all over a text, some thousand tokens of them."""
        text = read_token_file(subject.folder / f"{name}.npz")
        return text.take(range(0, len(text.documents), max(len(text.documents) // 24, 1))).head(TOKENS)

    study = Study(subject, some("heldout"), some("calibration"), Results(None))
    data = answer(study, [study.measure(name, ladder(subject.spec)[name]) for name in PLANS])

# %% [markdown]
# *Mixed* keeps what all tokens share in 8 bit and the experts in 4; *+clip* chooses for each group of weights the range that rounds best. Calibration
# text gives the clips; held-out text only measures.
#
# ## The picture: loss over bytes, with intervals

# %%
if data is not None:
    figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ax = pareto(data, ax)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_title(f"{data['provenance']['model']}: few bits cost little, until they cost a lot", fontsize=10, loc="left")

# %%
if data is not None:
    plans = {plan["name"]: plan for plan in data["plans"]}
    table = pd.DataFrame(
        {
            name: {
                "MB": plan["stored_bytes"] / 1e6,
                "loss, %": plan["loss_percent"]["value"],
                "from": plan["loss_percent"]["low"],
                "to": plan["loss_percent"]["high"],
            }
            for name, plan in plans.items()
        }
    ).T
    display(table.style.format("{:.2f}"))

# %% [markdown]
# ## The number to remember

# %%
if data is not None:
    whole, int4 = table.loc["fp16"], table.loc["int4"]
    display(
        Markdown(
            f"**To remember: {int4['loss, %']:.1f} %** ({int4['from']:.1f} to {int4['to']:.1f}) of {data['provenance']['unit']}, for "
            f"{int4['MB'] / whole['MB']:.0%} of the bytes: that is 4 bit with its scales, on this model. 3 bit lose {table.loc['int3', 'loss, %']:.1f} %, "
            f"2 bit {table.loc['int2', 'loss, %']:.0f} %. It is a small model: take the order from here, not the size."
        )
    )

# %% [markdown]
# ## What the bits buy: room and speed
#
# The quickstart's model and machine, with its experts in four formats. As many experts stay in memory as have room; the others are read.

# %%
rows = []
for name in ("int8", "int4-g128", "int3-g128", "int2-g128"):
    case = load_case("quickstart", (f"precision={{default: int8, routed_experts: {name}, kv: fp16}}", "workload.output_tokens=32"))
    held = case.layout.pools["unified"].counts
    metrics = simulate(case, keep=False).as_dict()["metrics"]
    rows.append(
        {
            "experts in": name,
            "bits per weight": FORMATS[name].bits_per_weight,
            "experts in memory, of 16": sum(held) / len(held),
            "expert hits": metrics["expert_hit_rate"],
            "tokens/s": metrics["decode_tok_s"],
        }
    )
speeds = pd.DataFrame(rows).set_index("experts in")
speeds.style.format("{:.2f}").format("{:.1%}", subset=["expert hits"])

# %%
int8, int4, last = (speeds.loc[name] for name in ("int8", "int4-g128", "int2-g128"))
Markdown(
    f"From 8 to 4 bit the weights shrink {int8['bits per weight'] / int4['bits per weight']:.1f} times and the speed grows "
    f"{int4['tokens/s'] / int8['tokens/s']:.1f} times, because misses vanish. From 4 to 2 bit it is {int4['bits per weight'] / last['bits per weight']:.1f} times "
    f"the bits and only {last['tokens/s'] / int4['tokens/s']:.1f} times the speed: where everything has room, fewer bits buy little more."
)

# %% [markdown]
# ## Try next
#
# * `moesim quality tinymoe`: all plans of the ladder on all of the text, and layer by layer which part is sensitive.
# * `moesim quality search --budget "2.9 MiB"`: the best mixed plan for a budget of bytes.
# * Any plan is YAML and goes into a scenario's `precision`, so that one file states both what it costs and what it brings.
