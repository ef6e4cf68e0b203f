"""Owns the scenario file: which model runs how on which machine, as strict data. It decides nothing.

Every switch of a run is here (claim W1) and can be set from the command line as ``--set path=value``. What the switches
mean for bytes is ``layout.py``'s business, what they mean for the order of work ``planner.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from moesim import config, resources
from moesim.config import Document, Spec, problem
from moesim.errors import did_you_mean
from moesim.policies.eviction import CACHE_POLICIES
from moesim.policies.prefetch import PREDICTORS
from moesim.precision import LayerSet
from moesim.serving_spec import Serving
from moesim.units import Bytes, Seconds

MOST = 2**40  # of anything that is counted; a product of two such sizes is a mistake, and would pass 64 bits
MOST_ROWS = 20_000_000  # tokens of all sequences of a run; plans and timelines of more would not fit this program's own memory
Count = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Few = Annotated[int, Field(ge=1, le=1024)]  # of what each one costs objects: threads, buffers
Size = Annotated[Bytes, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
TIER_NAMES = r"vram\d*|ram|unified"
TierName = Annotated[str, Field(pattern=f"^({TIER_NAMES})$")]


def _one_of(table: Mapping[str, Any]) -> Callable[[str], str]:
    """Check a name against a table of policies as it is when a scenario is read: what a user added to it counts."""

    def check(name: str) -> str:
        if name not in table:
            raise problem("a known name", f'"{name}"', did_you_mean(name, table))
        return name

    return check


def _names(table: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda schema: schema.update(enum=list(table))


CachePolicyName = Annotated[str, AfterValidator(_one_of(CACHE_POLICIES)), Field(json_schema_extra=_names(CACHE_POLICIES))]


def _above_zero(factor: float) -> float:
    if not 0 < factor < math.inf:
        raise problem("a factor above 0", f"{factor:g}")
    return factor


Factor = Annotated[float, AfterValidator(_above_zero), Field(json_schema_extra={"exclusiveMinimum": 0})]
PredictorName = Annotated[str, AfterValidator(_one_of(PREDICTORS)), Field(json_schema_extra=_names(PREDICTORS))]


class TraceUse(Spec):
    """Where the routing comes from, and how it may be adapted to the model; every adaptation goes into provenance."""

    source: str = ""  # bundled name or .npz
    generate: Literal["", "uniform", "zipf", "popularity", "like"] = ""
    profile: str = ""  # for like: a bundled routing profile or a file (moesim trace fit)
    if_absent: Literal["", "uniform", "zipf", "like"] = ""  # generate this where the source is not there; the result says so
    zipf_exponent: Annotated[float, Field(ge=0, le=4)] = 1.0
    counts: str = ""  # for popularity: a .csv of selections per (layer, expert) or an .npz whose popularity is taken
    counts_model: str = ""  # the model's name in that .csv
    layers: Literal["exact", "tile"] = "exact"
    top_k: Literal["exact", "truncate"] = "exact"
    sequences: Literal["exact", "chain", "repeat"] = "exact"  # chain: an answer may go on in the next sequence; repeat: and start over
    prefill: Literal["exact", "decode"] = "exact"  # decode: prompts are routed by decode rows, where a trace has no prompts
    train_fraction: Share = 0.5  # sequences that predictors and static placement learn from; the run uses the others

    @model_validator(mode="after")
    def _check(self) -> TraceUse:
        if bool(self.source) == bool(self.generate):
            raise problem("either a source or generate", f'source "{self.source}" and generate "{self.generate}"', "name one of the two")
        if "like" in (self.generate, self.if_absent) and not self.profile:
            raise problem("profile beside like", "none", "name a bundled profile or a file")
        if self.generate == "popularity" and not self.counts:
            raise problem("counts beside generate: popularity", "none", "name a .csv of counts or an .npz")
        return self


class Workload(Spec):
    """Sequences in lockstep: a prompt in chunks, then tokens one by one."""

    prompt_tokens: Natural = 0
    output_tokens: Natural = 128
    batch: Count = 1
    prefill_chunk: Count = 512
    cached_tokens: Natural = 0  # context that is in the KV cache before the run starts

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if self.prompt_tokens == 0 and self.output_tokens == 0:
            raise problem("prompt_tokens or output_tokens above 0", "both 0", "give the run something to do")
        rows = self.batch * (self.prompt_tokens + self.output_tokens)
        if rows > MOST_ROWS:
            raise problem(f"batch x (prompt_tokens + output_tokens) of at most {MOST_ROWS}", str(rows), "simulate fewer tokens")
        return self


class MemoryPlan(Spec):
    """What memory is reserved for besides weights."""

    context_tokens: Natural = 0  # the context the plan must hold; 0: what the workload reaches
    kv: Literal["maximum", "live", "paged"] = "maximum"
    kv_block_tokens: Count = 16
    kv_bytes: Bytes | None = None  # a fixed allowance instead of the computed size
    kv_from_experts: bool = False  # a growing KV cache takes its bytes from the expert pool (claim M5)
    mla_compressed: bool = True  # false: the runtime keeps uncompressed K and V of latent attention
    workspace: Bytes | None = None  # activations and scratch; null: computed
    runtime: Bytes = 0
    arena: Literal["grown", "maximum"] = "grown"  # maximum: pools take their full size at the start (claim M6)


class Pool(Spec):
    """Experts that a tier holds, and who leaves when another must enter."""

    hold: str | int = "fit"  # all | fit | none | experts per layer | "50 %" | "4.8 GB"
    policy: CachePolicyName = "static"
    scope: Literal["layer", "global"] = "layer"
    refresh_tokens: Natural = 0  # static: choose the hottest anew every n tokens of the run
    transient_slots: Natural = 0  # room for misses of a static pool; 0: one layer-set of a token (top_k)
    warm: bool = False  # all but static: start filled with the hottest of the training part, not empty
    inclusive: bool = True  # ram under vram: an expert in vram keeps its place in ram


class LayerRule(Spec):
    """An exception to where a part of some layers lies or runs (claim W1)."""

    layers: LayerSet  # "0-3, 30", "every 4 from 3" or a list
    part: Literal["attention", "routed_experts", "shared_expert"] = "routed_experts"
    device: str


class Placement(Spec):
    """Which device runs what, and which tiers hold the routed experts."""

    attention: str = ""  # device; empty: gpu, or cpu where there is none
    experts: str = ""  # device of the expert FFNs; empty: as attention
    split: list[str] = []  # devices that the experts of every layer are dealt out to, expert e to number e mod n; in place of ``experts``
    # of experts that are not in their device's memory; in-place: the CPU computes them; hybrid: it does, or they are fetched, what is done sooner
    site: Literal["fetch", "in-place", "hybrid"] = "fetch"
    # steps of at least so many tokens fetch all experts that the CPU would compute; cheaper: a layer does so where it is then done sooner
    stream_from: Literal["never", "cheaper"] | Count = "never"
    embeddings: str = ""  # tier of the input embedding; empty: that of attention
    lookup: str = ""  # tier of large lookup tables (claim T5); empty: that of attention
    layers: list[LayerRule] = []
    pools: dict[TierName, Pool] = {}


class Prefetch(Spec):
    """Loads issued before they are needed. Distance 0 or predictor none: off."""

    predictor: PredictorName = "none"
    threshold: Share = 0.0  # least confidence of a prediction that is fetched; 0: off
    recall: Share = 0.886  # gate-lookahead: recall one layer ahead, published for Qwen3-30B-A3B (see policies/predictors.py)
    recall_loss: Share = 0.0375  # gate-lookahead: lost per further layer
    distance: Natural = 1
    into: Literal["cache", "buffers"] = "cache"
    buffers: Few = 2  # layer-set buffers; distance is at most buffers - 1

    @property
    def on(self) -> bool:
        return self.predictor != "none" and self.distance > 0

    @model_validator(mode="after")
    def _check(self) -> Prefetch:
        if self.on and self.into == "buffers" and self.distance > self.buffers - 1:
            fix = f"one buffer is always in use: set prefetch.buffers to {self.distance + 1}, or distance to {self.buffers - 1}"
            raise problem(f"distance at most buffers - 1 = {self.buffers - 1}", str(self.distance), fix)
        return self


class Io(Spec):
    """How experts are read and copied."""

    engine: Literal["direct", "buffered", "mmap"] = "direct"
    layout: Literal["merged", "scattered"] = "merged"  # one aligned extent an expert, or one a matrix in small pieces (claim P5)
    scattered_piece: Size = 131072  # size of a contiguous piece in a scattered file
    align: Size = 1  # extents of the expert file start and end at multiples of this; direct reads need the drive's block, 4096
    request: Size = 1048576
    depth: Count = 8
    threads: Few = 1  # width of the ssd lane
    pinned: bool = True
    fast_map: Literal["file-order", "refreshed"] = "file-order"  # which experts lie in the drive's fast region (claim P6)
    fast_map_refresh_tokens: Count = 64


class Pipeline(Spec):
    """How devices hand over to each other (claims H1 to H3)."""

    hidden_states: Literal["shared", "staged"] = "shared"
    queue_depth: Count = 2
    micro_batches: Count = 1
    handoff_s: Seconds = 0.0  # synchronisation at each end of a queue


class Background(Spec):
    """What others take of a channel, from a time on until the channel's next entry; it changes with the first step that begins after."""

    channel: str
    share: Annotated[float, Field(ge=0, lt=1)]
    from_s: Seconds = 0.0


class Timing(Spec):
    """What makes real times vary."""

    jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    background: list[Background] = []


class RuntimeUse(Spec):
    """An engine whose attained rates take the place of the machine's assumed ones; measured figures stay."""

    name: str  # as in moesim/runtimes: llama.cpp, ik_llama.cpp, ktransformers, vllm, mlx, ...
    threads: Count | None = None  # of the CPU; null: all cores


class Scenario(Spec):
    """A whole run, as its file states it."""

    name: str = ""
    description: str = ""
    model: str  # a bundled name, a config.json, a GGUF file or a spec
    precision: str | dict[str, Any] = "fp16"  # a format, a plan (formats by part), or a YAML file of one; file: a GGUF's own
    hardware: str  # a bundled name, a profile, or parts joined by +
    runtime: RuntimeUse | None = None
    hardware_set: dict[str, Any] = {}  # figures to change, nested as in the profile: {storage: {ssd: {latency: "60 us"}}}
    hardware_scale: dict[str, Factor] = {}  # channel -> factor on all that was measured through it (HardwareProfile.scaled)
    derate: Annotated[float, Field(gt=0, le=1)] | None = None  # null: the profile's own
    trace: TraceUse
    workload: Workload = Workload()
    serving: Serving | None = None  # requests that arrive, in place of a workload (moesim serve-sim)
    memory: MemoryPlan = MemoryPlan()
    placement: Placement = Placement()
    prefetch: Prefetch = Prefetch()
    io: Io = Io()
    pipeline: Pipeline = Pipeline()
    lanes: Literal["fifo", "priority"] = "fifo"  # discipline of the transfer lanes
    granularity: Literal["expert", "matrix", "layer"] = "expert"
    timing: Timing = Timing()
    engine: Literal["des", "fast", "auto"] = "auto"  # auto: fast for long runs, des for short ones; the same result
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        if self.serving is not None and "workload" in self.model_fields_set:
            raise problem("a workload or serving", "both", "remove one of the two")
        return self

    @property
    def content_seed(self) -> int:
        """The seed of what is drawn beside arrivals: generated routing, jitter, simulated predictions."""
        return self.seed if self.serving is None else self.serving.content_seed


def load_scenario(name: str | Path, assignments: tuple[str, ...] = (), kind: str = "scenarios") -> tuple[Scenario, Document, Path]:
    """Load a scenario by bundled name (of a kind of scenarios) or path, with ``path=value`` assignments applied.

    Returns
    -------
    Scenario, Document, Path
        The spec, where each of its values stood, and the folder that relative names refer to.

    Raises
    ------
    InputError
        If there is no such scenario, or it is wrong.
    """
    path = resources.find(kind, str(name))
    document = config.read_yaml(path).set(assignments)
    scenario = config.build(Scenario, document)
    if not scenario.name:
        scenario = scenario.model_copy(update={"name": path.stem})
    return scenario, document, path.parent
