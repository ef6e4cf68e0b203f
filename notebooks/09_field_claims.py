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
# # Field claims
#
# Three practitioner write-ups on running MoE models on small machines make some fifty claims, with figures. Several contradict each other or the
# arithmetic. Here each one meets a simulation and gets a verdict:
#
# * **holds** — simulation gives the claim's figure, or its direction where it has none;
# * **holds when** — true under a condition that the claim does not state;
# * **refuted** — simulation gives something else;
# * **contradicts itself** — its own figures cannot all be true.
#
# A verdict is computed: each cell compares figures and would say otherwise if they changed. All runs use bundled scenarios, so each figure can be
# had on the command line too, by `moesim run NAME --set path=value`.

# %%
import re
from pathlib import Path

import pandas as pd

from moesim.simulate import load_case, simulate

GB = 1e9
found: list[dict[str, str]] = []


def verdict(claim: str, says: str, holds: bool | str, evidence: str) -> None:
    """Note a verdict; True and False stand for "holds" and "refuted"."""
    word = {True: "holds", False: "refuted"}.get(holds, holds)
    found.append({"claim": claim, "says": says, "verdict": word, "evidence": evidence})


def show(group: str) -> pd.DataFrame:
    """The verdicts on one group of claims."""
    rows = pd.DataFrame([row for row in found if row["claim"].startswith(group)]).set_index("claim")
    return rows.style.set_properties(**{"text-align": "left", "white-space": "normal"})


def run(name: str, *sets: str) -> dict:
    """The result of a bundled scenario with some switches changed."""
    return simulate(load_case(name, sets)).as_dict()


def speed(name: str, *sets: str) -> float:
    """Decode speed in tokens/s."""
    return run(name, *sets)["metrics"]["decode_tok_s"]


def near(value: float, target: float, by: float = 0.02) -> bool:
    """Whether two figures agree."""
    return abs(value / target - 1) <= by


# %% [markdown]
# ## M: memory
#
# The reference model has a shared part of 4.0 B parameters and 16 experts of 1.2 B each; plan C keeps the shared part in INT8 and half of the
# experts in INT4 in 16 GB, and leaves the other half on the SSD.

# %%
plan_c = load_case("ref-23b-plan-c")
model, precision = plan_c.model, plan_c.plan
fp16 = load_case("ref-23b-plan-c", ("precision=fp16",))
weights = model.weight_bytes(precision)
scaled = load_case("quickstart").plan
verdict(
    "M1",
    "46.4 GB in FP16, 13.6 GB mixed",
    near(fp16.model.weight_bytes(fp16.plan), 46.4e9, 1e-6) and near(weights, 13.6e9, 1e-6),
    f"{weights / GB:.1f} GB without scales; {model.weight_bytes(scaled) / GB:.1f} GB with the scales that INT8 rows and INT4 groups of 128 need",
)

cache = model.kv_bytes(precision, 8192)
verdict(
    "M2",
    "1.074 GB of KV cache at 8,192 tokens",
    near(cache, 1.074e9, 1e-3),
    f"{cache / GB:.3f} GB; the plan's 2 GB are for {2e9 / (cache / 8192):,.0f} tokens",
)

workspace = load_case("ref-23b-plan-c", ("memory.workspace=null", "workload.prompt_tokens=512", "workload.prefill_chunk=512")).layout.ledger
counted = sum(line.bytes for line in workspace.lines if line.name == "workspace" or "activation" in line.name)
rough = 1 * 512 * model.hidden_size * 2 * model.n_layers * 1.2
verdict(
    "M3",
    "batch x seq x hidden x 2 x layers + 20 % for activations",
    "holds when" if counted < rough else False,
    f"as an upper bound: it gives {rough / 1e6:,.0f} MB for a chunk of 512 tokens, the buffers that are live at once are {counted / 1e6:,.0f} MB; layers take turns",
)

line = plan_c.layout.ledger.tiers()["unified"]
queues = sum(part["bytes"] for part in line["lines"] if part["pool"] == "buffers")
planned, left = line["planned_bytes"] - queues, line["left_bytes"] + queues
verdict(
    "M4",
    "plan C needs 13.3 GB, 2.7 GB are left",
    near(planned, 13.3e9, 1e-3),
    f"{planned / GB:.2f} GB and {left / GB:.2f} GB, and {queues / 1e6:.1f} MB of hand-over queues that the plan forgets",
)

fixed = run("ref-23b-plan-c", "workload.prompt_tokens=0", "workload.cached_tokens=15255", "workload.output_tokens=8")["oom"]
live = load_case("ref-23b-plan-c", ("memory.kv=live", "workload.prompt_tokens=0")).layout
grown = run(
    "ref-23b-plan-c",
    "workload.prompt_tokens=0",
    "workload.cached_tokens=36500",
    "workload.output_tokens=4",
    "memory.kv=live",
    "memory.kv_bytes=null",
    "memory.kv_from_experts=true",
)
verdict(
    "M5",
    "2 GB last to 15,258 tokens, with the margin to 35,858; a KV budget that follows the length cures it",
    fixed is not None and abs(live.max_context_tokens - 35_858) <= 1 and grown["oom"] is None,
    f"out of memory at step {fixed['step']} after 15,255 tokens; live: {live.max_context_tokens:,} tokens (queues take the last one); 36,500 run when KV takes room from experts",
)

most = [
    run("ref-23b-plan-c", "workload.prompt_tokens=0", "workload.output_tokens=2", f"memory.arena={how}")["memory"]["unified"]
    for how in ("grown", "maximum")
]
verdict(
    "M6",
    "an arena at its maximum runs out though the sum is right",
    most[1]["peak_bytes"] > most[0]["peak_bytes"],
    f"watermark {most[0]['peak_bytes'] / GB:.2f} GB grown, {most[1]['peak_bytes'] / GB:.2f} GB reserved at the maximum, for the same two tokens",
)

deep = [
    load_case(
        "ref-23b-npu-pipeline",
        (f"pipeline.queue_depth={d}", "workload.prefill_chunk=512", "workload.prompt_tokens=512", "trace.sequences=repeat"),
    ).layout.ledger.tiers()["unified"]
    for d in (2, 64)
]
held = [sum(part["bytes"] for part in tier["lines"] if "queue" in part["name"]) for tier in deep]
verdict(
    "M7",
    "an unbounded queue eats what the ledger saved",
    held[1] > 20 * held[0],
    f"hand-over queues of 512-token chunks: {held[0] / 1e6:.0f} MB at depth 2, {held[1] / 1e6:.0f} MB at depth 64; without a bound there is no such line to plan",
)

more = model.expert_bytes(precision, 0) * 32 * 2
margin = left - (model.kv_bytes(precision, 30_000) - 2e9)  # of 16 experts, with a live cache of 30,000 tokens
verdict(
    "M8",
    "16 to 20 experts break the deployment",
    near(more, 1.2e9, 1e-3) and 0 < margin < more,
    f"half of four more experts are {more / GB:.1f} GB; with 30,000 tokens of live KV {margin / GB:.1f} GB are left for them (`moesim budget` exits with 3: a gate for CI)",
)

n, k = 64, 4  # experts and choices of a 70 B model with 8 B active; other numbers change the expert's size, not the sum
expert = 62e9 / (n - k)
whole, fetched, kv = 70e9 / 2, k * expert / 2, 2e9 / 2048 / (2 * 80 * 8 * 128 * 2)
verdict(
    "M9",
    "a 70 B MoE with 8 B active needs memory for 8 B",
    "contradicts itself" if whole > 8e9 and kv > 2 else True,
    f"70 B in INT4 are {whole / GB:.0f} GB; with only active weights kept, {fetched / GB:.2f} GB of experts are fetched again for each token: under {24e9 / fetched:.0f} tokens/s at 24 GB/s of PCIe; 2 GB of KV at 2,048 tokens is {kv:.1f} times what 80 GQA layers need",
)

paged = {
    how: load_case("ref-23b-plan-c", (f"memory.kv={how}", "memory.kv_bytes=null", "memory.context_tokens=32768"))
    for how in ("maximum", "paged")
}
peaks = {how: simulate(case).as_dict()["memory"]["unified"]["peak_bytes"] for how, case in paged.items()}
verdict(
    "M10",
    "a paged KV cache cuts the waste",
    peaks["paged"] < peaks["maximum"],
    f"planned for 32,768 tokens and used for 192: watermark {peaks['maximum'] / GB:.2f} GB reserved, {peaks['paged'] / GB:.2f} GB paged",
)
show("M")

# %% [markdown]
# ## T: tiers, placement, caches
#
# Routing is that of a small MoE trained on real text (`tinymoe`), tiled to the model's layers.

# %%
from moesim import resources
from moesim.hardware import load_hardware
from moesim.trace import load_trace
from moesim.trace_stats import analyse

DESKTOP = "qwen3-30b-hybrid"  # Qwen3-30B-A3B in 16 bit on a 24 GB card with 64 GB of RAM
SHORT = ("workload.output_tokens=32",)
fetch = (*SHORT, "placement.site=fetch", "workload.prompt_tokens=0")

hot, cold = speed(DESKTOP, *fetch), speed(DESKTOP, *fetch, "placement.pools.vram.hold=none")
verdict(
    "T1",
    "hot experts in VRAM, the rest in RAM, the whole file on storage",
    hot > cold,
    f"{hot:.1f} tokens/s with the hottest experts in VRAM, {cold:.1f} with none there",
)

stats = analyse(load_trace(resources.find("traces", "tinymoe")))
share = stats["top_half_share"]["mean"]
verdict(
    "T2",
    "80 % of tokens fall on half of the experts",
    "holds when" if near(share, 0.8, 0.05) else False,
    f"{share:.0%} in the bundled trace (each layer by itself); a router with perfect balance gives 50 %",
)

three = ("placement.pools.ram.hold=50 %", "placement.pools.ram.policy=lru", "placement.pools.ram.inclusive=true")
levels = run(DESKTOP, *fetch, "placement.pools.vram.policy=lru", *three)
bounded = all(tier["peak_bytes"] <= tier["capacity_bytes"] for tier in levels["memory"].values())
verdict(
    "T3",
    "an LRU manager of three levels (VRAM over RAM over SSD)",
    "holds when" if bounded else False,
    f"a correct one (bounded, recency refreshed, promotions evict) runs at {levels['metrics']['decode_tok_s']:.1f} tokens/s with {levels['metrics']['expert_hit_rate']:.0%} hits and stays within both tiers; the published sketch does none of the three",
)

lru, static = stats["cache"]["0.25"]["lru"], stats["cache"]["0.25"]["static_first_half"]
speeds = {how: speed("ref-23b-plan-c", *SHORT, f"placement.pools.unified.policy={how}") for how in ("static", "lru")}
small = {
    how: speed("ref-23b-plan-c", *SHORT, f"placement.pools.unified.policy={how}", "placement.pools.unified.hold=4")
    for how in ("static", "lru")
}
verdict(
    "T4",
    "static placement by frequency beats LRU",
    "holds when" if speeds["static"] < speeds["lru"] or small["static"] < small["lru"] else True,
    f"8 of 16 experts: static {speeds['static']:.2f}, LRU {speeds['lru']:.2f} tokens/s; 4 of 16: {small['static']:.2f} and {small['lru']:.2f}. It depends on how much reuse within a text exceeds popularity",
)

rows = plan_c.model.part_bytes(plan_c.plan, "attention")
routed = plan_c.model.expert_bytes(plan_c.plan, 0) * 32 * 2
per_byte = 1.0, share * 2 / 8
moved = {tier: speed(DESKTOP, *fetch, f"placement.embeddings={tier}") for tier in ("vram", "ram")}
verdict(
    "T5",
    "shared part first, then hot experts; embeddings may lie anywhere",
    moved["ram"] > 0.995 * moved["vram"],
    f"each byte of the shared part is read once a token, of a hot expert {per_byte[1]:.2f} times; embeddings in RAM: {moved['ram']:.2f} against {moved['vram']:.2f} tokens/s, since experts get their room",
)
verdict(
    "T6",
    "the more bytes per token and the more often, the nearer",
    per_byte[0] > per_byte[1],
    "follows from T5: benefit per byte of memory is reads per token",
)

big = run(
    DESKTOP, "model=gpt-oss-120b", "precision={default: bf16, routed_experts: mxfp4}", "hardware=rtx-5090 + ryzen-9950x + ddr5-6000x2:128GiB + pcie5x16",
    "trace={generate: like, profile: gpt-oss-120b}", "placement.site=in-place", "workload.output_tokens=16", "workload.prompt_tokens=0",
)  # fmt: skip
verdict(
    "T7",
    "32 GB card + 128 GB RAM: tens of tokens/s far beyond VRAM",
    big["metrics"]["decode_tok_s"] > 10,
    f"gpt-oss-120b (61 GB) on an RTX 5090 and dual-channel DDR5: {big['metrics']['decode_tok_s']:.0f} tokens/s, experts computed where they lie",
)

resident = run(DESKTOP, "placement.site=fetch", "workload.output_tokens=8")["metrics"]
on_ssd = run(DESKTOP, "placement.site=fetch", "workload.output_tokens=8", "placement.pools.ram.hold=16", "placement.pools.ram.policy=lru")[
    "metrics"
]
slower = on_ssd["ttft_ms"]["mean"] / resident["ttft_ms"]["mean"], resident["decode_tok_s"] / on_ssd["decode_tok_s"]
verdict(
    "T8",
    "experts on SSD hurt prefill badly",
    slower[0] > 1.5,
    f"first token of a 128-token prompt {slower[0]:.1f} times later, decode {slower[1]:.1f} times slower, when RAM holds an eighth of the experts",
)
show("T")

# %% [markdown]
# ## P: prefetch and overlap

# %%
from moesim.errors import InputError

none = ("workload.prompt_tokens=0", "workload.output_tokens=24", "placement.site=fetch", "placement.pools.vram.hold=none")
alone = run(DESKTOP, *none)
perfect = run(DESKTOP, *none, "prefetch.predictor=oracle", "prefetch.into=buffers", "prefetch.buffers=3", "prefetch.distance=2")
ms = {name: 1e3 * alone["lanes"][name]["busy_s"] / 24 for name in ("gpu", "h2d")}
both = alone["metrics"]["tpot_ms"]["mean"], perfect["metrics"]["tpot_ms"]["mean"]
verdict(
    "P1",
    "compute + I/O without overlap, the longer of the two with it",
    "holds when" if max(ms.values()) < both[0] < sum(ms.values()) and near(both[1], max(ms.values()), 0.05) else False,
    f"compute {ms['gpu']:.1f} ms, copies {ms['h2d']:.1f} ms a token: {both[0]:.1f} ms without, {both[1]:.1f} ms with perfect prefetch. The sum is an upper bound: the first experts of a layer compute while its others are copied",
)

expert = 32 * model.expert_bytes(precision, 0)
drive = load_hardware("ref-16gb").read_bandwidth("ssd", 2**20, 8)
verdict(
    "P2",
    "8 experts of 600 MB are 2.4 s at 2 GB/s",
    near(8 * expert / drive, 2.4, 0.01),
    f"{expert / 1e6:.0f} MB an expert over all layers, {expert / 32e6:.2f} MB in one: {8 * expert / drive:.2f} s at {drive / GB:.1f} GB/s",
)

try:
    load_case(DESKTOP, ("prefetch.predictor=oracle", "prefetch.into=buffers", "prefetch.buffers=2", "prefetch.distance=2"))
    refusal = ""
except InputError as error:
    refusal = str(error)
verdict(
    "P3",
    "two buffers, read two layers ahead",
    "contradicts itself" if refusal else True,
    "distance d needs d + 1 buffers, as one is in use: the sketch overwrites it; refused here with that advice",
)

steps = {
    d: speed("quickstart", *SHORT, "placement.pools.unified.hold=8", "prefetch.predictor=cooccurrence", f"prefetch.distance={d}")
    for d in range(4)
}
ahead = {
    d: speed("quickstart", *SHORT, "placement.pools.unified.hold=8", "prefetch.predictor=oracle", f"prefetch.distance={d}")
    for d in range(4)
}
best = max(steps, key=steps.get), max(ahead, key=ahead.get)
verdict(
    "P4",
    "prefetch distance 2 is best",
    "holds when" if best[1] >= 2 > best[0] or best[0] == 2 else False,
    "tokens/s at distance 0 to 3: "
    + ", ".join(f"{v:.2f}" for v in steps.values())
    + " by co-occurrence, "
    + ", ".join(f"{v:.2f}" for v in ahead.values())
    + " with perfect prediction: how far ahead pays is a matter of how good the prediction still is there",
)

perfectly = ("workload.prompt_tokens=0", "prefetch.predictor=oracle", "prefetch.distance=2", "placement.pools.unified.hold=12")
merged, scattered = (
    run("quickstart", *SHORT, *perfectly, f"io.layout={how}", "io.scattered_piece=16 KiB", "io.depth=1")["metrics"]
    for how in ("merged", "scattered")
)
verdict(
    "P5",
    "one merged, aligned file lifts overlap from under 50 % to over 80 %",
    merged["overlap_coverage"] > 0.8 and scattered["overlap_coverage"] < 0.5,
    f"overlap {scattered['overlap_coverage']:.0%} in pieces of 16 KiB read one after the other, {merged['overlap_coverage']:.0%} merged; {scattered['decode_tok_s']:.2f} and {merged['decode_tok_s']:.2f} tokens/s. With many reads in flight scattered files lose far less",
)

mapped = (
    "workload.prompt_tokens=0",
    "prefetch.predictor=none",
    "trace={generate: like, profile: gpt-oss-20b}",
    "io.fast_map_refresh_tokens=8",
)
kept = {"half": "{vram: {hold: fit, policy: lru}, ram: {hold: 50 %, policy: lru}}", "nothing": "{vram: {hold: none}, ram: {hold: none}}"}
maps = {
    (what, how): run("gpt-oss-20b-laptop", *SHORT, *mapped, f"placement.pools={pools}", f"io.fast_map={how}")["metrics"]["io_wait_ms_per_token"]
    for what, pools in kept.items() for how in ("file-order", "refreshed")
}  # fmt: skip
verdict(
    "P6",
    "a hot/cold map of the drive cuts I/O wait from 25 to 7 ms",
    "holds when" if maps["nothing", "refreshed"] < 0.98 * maps["nothing", "file-order"] else False,
    f"wait a token {maps['nothing', 'file-order']:.0f} ms in file order, {maps['nothing', 'refreshed']:.0f} ms with the map when nothing is cached, far from the claim's gain; {maps['half', 'file-order']:.0f} and {maps['half', 'refreshed']:.0f} ms when RAM holds half: what is hot enough for the fast region is in memory already",
)

engines = {how: speed("ref-23b-plan-c", *SHORT, f"io.engine={how}") for how in ("direct", "buffered", "mmap")}
verdict(
    "P7",
    "read into memory that the compute unit addresses: one copy, not two",
    engines["direct"] >= engines["buffered"],
    f"{engines['direct']:.2f} tokens/s direct, {engines['buffered']:.2f} through the page cache",
)
verdict(
    "P8",
    "asynchronous copies, not mmap reads",
    engines["direct"] > engines["mmap"],
    f"{engines['direct']:.2f} tokens/s direct, {engines['mmap']:.2f} by page faults, which compute waits for",
)
show("P")

# %% [markdown]
# ## H: heterogeneous pipeline
#
# More on these in the docs, under *Machines of several devices*.

# %%
PIPE = "ref-23b-npu-pipeline"
ONE = ("workload.batch=1", "workload.output_tokens=24")
sites = {where: speed(PIPE, *ONE, f"placement.experts={where}") for where in ("gpu", "npu")}
prompt = (
    "workload.output_tokens=1",
    "workload.batch=4",
    "workload.prompt_tokens=64",
    "workload.prefill_chunk=64",
    "trace.sequences=repeat",
    "hardware_set.tiers.unified.capacity=24GB",
)
first = {m: run(PIPE, *prompt, f"pipeline.micro_batches={m}")["metrics"]["ttft_ms"]["mean"] for m in (1, 2)}
verdict(
    "H1",
    "attention on the GPU, experts in batches on the NPU",
    "holds when" if first[2] < first[1] else False,
    f"decode {sites['npu']:.2f} tokens/s on the NPU, {sites['gpu']:.2f} on the GPU, as both read one DRAM; prompts gain when both work at once: {first[1]:.0f} ms to {first[2]:.0f} ms",
)
depths = {d: run(PIPE, *prompt, "pipeline.micro_batches=2", f"pipeline.queue_depth={d}")["metrics"]["ttft_ms"]["mean"] for d in (1, 8)}
verdict(
    "H2",
    "two bounded queues with back-pressure",
    near(depths[8], depths[1], 0.05),
    f"{depths[1]:.0f} ms at depth 1, {depths[8]:.0f} ms at depth 8: a bound costs nothing",
)
staged = speed(PIPE, *ONE, "pipeline.hidden_states=staged")
loss = 1 - staged / sites["npu"]
verdict(
    "H3",
    "copying hidden states costs 10 %",
    "holds when" if 0 < loss < 0.1 else near(loss, 0.1, 0.3),
    f"{loss:.0%}, all of it launches; 10 % if a copy takes some 200 us",
)
budget_ms = 8 + 35 + 25 + 5
verdict(
    "H4",
    "8 + 35 + 25 + 5 ms a token and 4 to 6 tokens/s",
    True if 4 <= 1e3 / budget_ms <= 6 else "contradicts itself",
    f"{budget_ms} ms are {1e3 / budget_ms:.1f} tokens/s; 8 ms for 4 GB would be {4 / 8e-3:.0f} GB/s. At 0.6 of all rates: {speed(PIPE, *ONE, 'derate=0.6'):.2f} tokens/s; with 8 of 16 experts in memory: {speed(PIPE, *ONE, 'placement.pools.unified.hold=8'):.2f}",
)
hidden = ("prefetch.predictor=oracle", "prefetch.distance=2")
base, faster = speed(PIPE, *ONE, *hidden), speed(PIPE, *ONE, *hidden, "hardware_scale={ssd: 2}")
verdict(
    "H5",
    "once loading is hidden, faster I/O does not help",
    near(faster, base, 0.01),
    f"{base:.2f} tokens/s, {faster:.2f} with twice the drive",
)
show("H")

# %% [markdown]
# ## B: bandwidth and machines

# %%
from moesim.runtimes import load_rates

rates = load_rates()
shares = {name: rates[f"{name}_memory_share"] for name in ("client", "server", "dual_server")}
verdict(
    "B1",
    "machines deliver half of the data sheet; plan with 0.6",
    "holds when" if min(shares.values()) < 0.6 < max(shares.values()) else False,
    f"public runs attain {shares['client']:.0%} of the RAM peak on desktops, {shares['server']:.0%} on servers, {shares['dual_server']:.0%} on two sockets (fitted, docs/field-accuracy.md)",
)
drives = {x: speed("ref-23b-plan-c", *SHORT, f"hardware_scale={{ssd: {x}}}") for x in (0.5, 1.5, 6)}
verdict(
    "B2",
    "an SSD below 3 GB/s is the bottleneck",
    "holds when" if drives[6] > 1.2 * drives[1.5] else True,
    f"plan C at 1, 3 and 12 GB/s: {', '.join(f'{v:.2f}' for v in drives.values())} tokens/s; where the knee lies is set by bytes missed a token, not by the drive. Dual-channel DDR4-3200: 51 GB/s peak, {51.2 * shares['client']:.0f} attained",
)
peak = {"HBM3 of an H100": 3350, "GDDR7 of an RTX 5090": 1792, "PCIe 5.0 x16": 63, "PCIe 5.0 SSD": 14}  # GB/s, data sheets
link = peak["PCIe 5.0 x16"]
verdict(
    "B3",
    "VRAM >> PCIe >> SSD",
    peak["GDDR7 of an RTX 5090"] > 10 * link > 40 * peak["PCIe 5.0 SSD"],
    ", ".join(f"{name} {rate:,} GB/s ({rate / link:.2g} times PCIe)" for name, rate in peak.items()),
)
verdict(
    "B4",
    "an NPU with wider bandwidth than the GPU of its chip",
    "holds when" if sites["npu"] <= sites["gpu"] * 1.05 else True,
    "only as a larger share of the one DRAM that both read; at once they share it",
)
show("B")

# %% [markdown]
# ## S: serving
#
# Requests that arrive, on the same desktop: in 16 bit with experts cached in VRAM over RAM, and in 4 bit with everything in VRAM.

# %%
from moesim.serving import load_serving
from moesim.serving.curve import saturation


def users(name: str, *numbers: int, sets: tuple[str, ...] = ()) -> list[dict]:
    """The metrics of a serving scenario at numbers of users, each of whom asks again when answered."""
    case, _ = load_serving(name, ("serving.requests=8", "serving.output={mean: 16}", *sets))
    return [data["metrics"] for _, _, data in saturation(case, users=numbers).points]


short = ("serving.prompt={mean: 64}",)
offloaded, whole = users("chat-offloaded", 1, 8, sets=short), users("chat-resident", 1, 8, sets=short)
each = [[m["output_throughput_tok_s"] for m in pair] for pair in (offloaded, whole)]
fits = load_serving("chat-offloaded", ("placement.pools.vram.hold=all", "placement.pools.vram.policy=static"))[0].layout.ledger.fits
verdict(
    "S1",
    "offloading lowers the memory threshold of one user; it makes nothing fast, nor many-user",
    not fits and each[0][0] < each[1][0] and each[0][1] < each[1][1] / 5,
    f"in 16 bit the model fits only offloaded: {each[0][0]:.0f} tokens/s for one user, {each[0][1]:.0f} for eight together; in 4 bit and all in VRAM {each[1][0]:.0f} and {each[1][1]:.0f}",
)

quarter, in_vram = (
    users("long-prompts", 1, sets=("serving.requests=2",))[0],
    users("long-prompts", 1, sets=("serving.requests=2", "placement.pools.vram.hold=all", "placement.pools.vram.policy=static"))[0],
)
waits = quarter["ttft_ms"]["median"] / in_vram["ttft_ms"]["median"], quarter["tpot_ms"]["median"] / in_vram["tpot_ms"]["median"]
verdict(
    "S2",
    "prefill touches nearly every expert, so offloading slows it more than decode",
    "holds when" if waits[0] > 2 * waits[1] else False,
    f"with a quarter of the experts in VRAM the first token of 2,048 comes {waits[0]:.1f} times later, later ones {waits[1]:.1f} times; where decode has no cache that hits both suffer alike (docs/serving.md)",
)

verdict(
    "S3",
    "concurrency spreads over experts, PCIe saturates, speed per user collapses",
    each[0][1] / 8 < each[0][0] / 3,
    f"one user gets {each[0][0]:.0f} tokens/s, each of eight {each[0][1] / 8:.1f}: a step loads the union of their experts; with longer prompts even all together get less than one alone (docs/serving.md)",
)

free = users("chat-resident", 1, sets=(*short, "hardware_set.devices.gpu.launch=0 us"))[0]
launches = 1 - free["tpot_ms"]["median"] / whole[0]["tpot_ms"]["median"]
verdict(
    "S4",
    "with all in VRAM the limit moves to small kernels and overhead",
    "holds when" if launches > 0.3 else False,
    f"launches are {launches:.0%} of a step of one user, at an assumed 5 us each; fewer with graphs, and for many users",
)

batches = [
    m["output_throughput_tok_s"]
    for m in users("offline-batch", 1, 8, 64, sets=("serving.requests=64", "serving.prompt={mean: 16}", "serving.output={mean: 8}"))
]
verdict(
    "S5",
    "offline batches trade latency for hardware cost",
    "holds when" if batches[0] < batches[2] < 16 * batches[0] else False,
    f"{batches[0]:.0f}, {batches[1]:.0f} and {batches[2]:.0f} tokens/s at 1, 8 and 64 at a time, a quarter of the experts in VRAM: worth it once a batch needs every expert anyway; before that the union of experts grows as fast as the batch",
)
show("S")

# %% [markdown]
# ## Q: precision and its compensation
#
# Measured, not simulated: `docs/quality.md` is the record of `moesim quality tinymoe --real --sensitivity` and `moesim quality search` on the held-out
# text of the bundled model (eight minutes on one core). One small model is one case: an order that holds here is evidence, a size is not.

# %%
RECORD = (Path("..") / "docs" / "quality.md").read_text(encoding="utf-8")
rows = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in RECORD.splitlines() if re.match(r"\| Q\d ", line)]
rows += [
    ["Q6", "find the sensitive layers first, then assign precision", word, text]
    for word, text in re.findall(r"- Q6, [^*]*\*\*([^*]*)\*\*\. (.*)", RECORD)
]
for claim in sorted({row[0] for row in rows}):
    mine = [row for row in rows if row[0] == claim]
    words = {"holds" if row[2] == "holds" else "refuted" if row[2].startswith("does not hold") else "holds when" for row in mine}
    verdict(
        claim,
        "; ".join(row[1] for row in mine[:3]),
        words.pop() if len(words) == 1 else "holds when",
        "; ".join(row[3] for row in mine[:3]),
    )
show("Q")

# %% [markdown]
# ## W: way of working

# %%
from moesim.scenario import Scenario


def switches(spec: type) -> int:
    """Number of values that a spec's file may set."""
    inner = [field.annotation for field in spec.model_fields.values()]
    return sum(switches(kind) if hasattr(kind, "model_fields") else 1 for kind in inner)


verdict(
    "W1",
    "everything is a start-up switch",
    switches(Scenario) > 40,
    f"{switches(Scenario)} values of a scenario can be set by `--set path=value`, beside every figure of the machine and rules by layer",
)

options = {
    f"{policy}, distance {d}": (
        "workload.prompt_tokens=0",
        "workload.output_tokens=16",
        f"placement.pools.unified.policy={policy}",
        "prefetch.predictor=cooccurrence",
        f"prefetch.distance={d}",
    )
    for policy in ("static", "lru")
    for d in (0, 1)
}
best = {
    factor: max(options, key=lambda name: speed("ref-23b-plan-c", *options[name], f"hardware_scale={{ssd: {factor}}}"))
    for factor in (0.5, 8)
}
verdict(
    "W2",
    "sweep every combination; for a new device, rerun",
    len(set(best.values())) > 1 or "holds when",
    f"best of {len(options)} on plan C: {best[0.5]} with a 1 GB/s drive, {best[8]} with 16 GB/s (`moesim sweep` with a quality floor as a constraint does this for thousands)",
)
verdict(
    "W3",
    "measure the I/O parameters before trusting a plan",
    drives[1.5] / drives[0.5] > 1.2,
    f"the drive's rate alone moves plan C from {drives[0.5]:.2f} to {drives[1.5]:.2f} tokens/s between 1 and 3 GB/s; calibrated, predictions of real runs are off by 5 % in the median (docs/validation.md)",
)
show("W")

# %% [markdown]
# ## All of them

# %%
table = pd.DataFrame(sorted(found, key=lambda row: ("MTPHSQBW".index(row["claim"][0]), int(row["claim"][1:])))).set_index("claim")
print(table["verdict"].value_counts().to_string())

# %%
from IPython.display import Markdown

cells = ["| claim | says | verdict | evidence |", "|---|---|---|---|"]
Markdown("\n".join(cells + [f"| {claim} | {row.says} | **{row.verdict}** | {row.evidence} |" for claim, row in table.iterrows()]))

# %% [markdown]
# **To remember:** most claims that name a mechanism hold, and most that name a size hold only where something unsaid is true: how much of the routing
# a cache catches, how good a prediction still is that far ahead, which lane the run waits for. **Next:** change one scenario and run this again.
