"""Owns the part of a scenario that says which requests arrive and how they are batched, as strict data. It decides nothing.

Lengths are tokens. What is drawn comes from three streams: arrivals from the scenario's ``seed``; lengths and shared prefixes from
``content_seed``; generated routing, jitter and simulated predictions from ``content_seed`` too, each on a stream of its own. So another
``seed`` changes the arrivals and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moesim.config import Spec, problem
from moesim.units import Bytes, Seconds

MOST_TOKENS = 1_048_576  # of one request: the longest context windows published
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Arrivals(Spec):
    """When requests come. ``concurrency`` is a closed loop: a user sends a request, waits for its answer, sends the next."""

    process: Literal["poisson", "gamma", "concurrency", "file"] = "poisson"
    requests_per_s: Positive | None = None  # null: 1, or as the file has them
    burstiness: Positive = 1.0  # gamma: shape of the gaps between arrivals; below 1 they come in bursts, 1 is Poisson
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="after")
    def _check(self) -> Arrivals:
        if self.burstiness != 1.0 and self.process != "gamma":
            raise problem("burstiness with process gamma", self.process, "set process: gamma")
        return self


class Lengths(Spec):
    """Tokens of prompts or answers. ``lognormal`` has ``mean`` before it is cut to ``low`` to ``high``; ``uniform`` is whole numbers of these."""

    distribution: Literal["fixed", "lognormal", "uniform"] = "fixed"
    mean: Tokens = 512
    sigma: Annotated[float, Field(ge=0, le=4)] = 1.0  # lognormal: standard deviation of the logarithm
    low: Tokens = 1
    high: Tokens = 8192

    @model_validator(mode="after")
    def _check(self) -> Lengths:
        if self.low > self.high:
            raise problem("low at most high", f"{self.low} and {self.high}")
        return self


class Level(Spec):
    """A service level: a request is good if its time to first token and its time per output token stay within both."""

    ttft: Annotated[Seconds, Field(gt=0)]
    tpot: Annotated[Seconds, Field(gt=0)]


# MLPerf Inference, server scenario: limits of the 99th percentile for mixtral-8x7b and deepseek-r1 (mlcommons/inference rules); chat: ours.
LEVELS = {
    "mlperf-mixtral": Level.model_construct(ttft=2.0, tpot=0.2),
    "mlperf-deepseek-r1": Level.model_construct(ttft=2.0, tpot=0.08),
    "chat": Level.model_construct(ttft=1.0, tpot=0.1),
}


class Serving(Spec):
    """Requests and batching. How the KV cache is kept is ``memory.kv``: maximum (contiguous), live or paged."""

    requests: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    arrivals: Arrivals = Arrivals()
    prompt: Lengths = Lengths()
    output: Lengths = Lengths(mean=256)
    file: str = ""  # requests of a file instead of drawn lengths: in its order with process file, else drawn from it, both lengths together
    format: Literal["csv", "azure", "sharegpt"] = "csv"
    prefix_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0  # the first tokens of a prompt, which requests of a group share
    prefix_groups: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    batching: Literal["continuous", "static"] = "continuous"  # static: a batch runs to its end before the next begins
    most_sequences: Annotated[int, Field(ge=1, le=1024)] = 16
    step_tokens: Annotated[int, Field(ge=1, le=65_536)] = 512  # of one step; prompts are computed in chunks that fit beside the decode rows
    preemption: Literal["recompute", "swap"] = "recompute"
    swap: Bytes = 0  # memory for the KV cache of sequences that are swapped out
    levels: dict[str, Level] = {}  # beside the bundled ones
    content_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _check(self) -> Serving:
        if self.arrivals.process == "file" and not self.file:
            raise problem("a file with process file", "none", "name the file of requests")
        if self.step_tokens < self.most_sequences:
            raise problem(
                f"step_tokens of at least most_sequences = {self.most_sequences}",
                str(self.step_tokens),
                "each running sequence decodes one token a step",
            )
        if (self.preemption == "swap") != (self.swap > 0):
            raise problem("swap space with preemption swap, and only then", f"preemption {self.preemption}, swap {self.swap} B")
        return self
