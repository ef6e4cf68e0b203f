"""Owns what a serving run means: latencies as people feel them, goodput, queueing, batches and memory over time.

Names are vLLM's (DESIGN.md section 6). Of a request: TTFT from its arrival to its first token, TPOT (last - first token) / (tokens - 1),
ITL the gaps between its tokens, E2EL from its arrival to its last token, queueing delay from its arrival to the step that first takes it up.
Rates count from the first arrival to the last token. Goodput is the rate of requests that stay within a level's TTFT and TPOT (a request
of one token has no TPOT to miss); a level *holds* as in MLPerf, if the 99th percentile of both does.

Little's law, L = lambda W, is checked in whole picoseconds: the time integral of the number of requests in the system equals the sum of
their times in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim import metrics
from moesim.energy import summary as energy_summary
from moesim.errors import InputError, MoesimError
from moesim.metrics import PS, percentiles
from moesim.serving.loop import ServingRun
from moesim.serving_spec import LEVELS
from moesim.simulate import provenance

Ints = NDArray[np.int64]
POINTS = 120  # of curves over time
MS_PER_PS = 1e-9


class ServingResult:
    """What a finished run gave.

    Raises
    ------
    InputError
        If the run has not finished.
    MoesimError
        If Little's law does not hold: a bug.
    """

    def __init__(self, run: ServingRun) -> None:
        if not run.finished:
            raise InputError("a serving run", expected="one that has finished", got=f"{run.n_steps} steps", fix="call run()")
        self.run = run

    def as_dict(self) -> dict[str, Any]:
        """Return the result in a stable shape; computed once, each caller gets a copy."""
        return copy.deepcopy(self._data)

    @property
    def oom(self) -> dict[str, Any] | None:
        found = self.run.planner.out_of_memory
        return None if found is None else found.as_dict()

    # ---- times of requests, int64 ps

    @cached_property
    def emitted(self) -> tuple[Ints, Ints]:
        """Request and time of every token, by request, then time."""
        formed = self.run.record.formed
        request = _flat(one.emits for one in formed)
        at = np.repeat(np.array(self.run.record.end_ps, np.int64), [len(one.emits) for one in formed])
        order = np.lexsort((at, request))
        return request[order], at[order]

    @cached_property
    def ended(self) -> Ints:
        """Numbers of the requests that got their answer, ascending."""
        return np.unique(self.emitted[0])

    @cached_property
    def times_ps(self) -> dict[str, Ints]:
        """Of each request that ended: arrival, begin (of the step that first takes it up), first and last token."""
        request, at = self.emitted
        n = len(self.ended)
        first = np.searchsorted(request, self.ended)
        last = np.append(first[1:], len(request)) - 1 if n else first
        formed = self.run.record.formed
        begin = np.repeat(np.array(self.run.record.begin_ps, np.int64), [len(one.parts) for one in formed])
        taken, where = np.unique(_flat([part[0] for part in one.parts] for one in formed), return_index=True)
        begins = begin[where[np.searchsorted(taken, self.ended)]] if n else np.zeros(0, np.int64)
        return {"arrival": self.run.arrival_ps[self.ended], "begin": begins, "first": at[first], "last": at[last]}

    @cached_property
    def tokens(self) -> Ints:
        """Tokens that each request that ended has got."""
        return np.bincount(self.emitted[0], minlength=len(self.run.requests))[self.ended]

    @cached_property
    def ttft_ms(self) -> NDArray[np.float64]:
        return np.asarray((self.times_ps["first"] - self.times_ps["arrival"]) * MS_PER_PS, np.float64)

    @cached_property
    def tpot_ms(self) -> NDArray[np.float64]:
        """(ended,); NaN of answers of one token."""
        span = (self.times_ps["last"] - self.times_ps["first"]) * MS_PER_PS
        return np.where(self.tokens > 1, span / np.maximum(self.tokens - 1, 1), np.nan)

    @cached_property
    def waiting(self) -> Ints:
        """Requests that have come and do not run, at the beginning of each step, (steps,)."""
        formed, refused = self.run.record.formed, np.array(self.run.refused, np.int64)
        came = np.sort(np.delete(self.run.arrival_ps, refused))
        ended = np.cumsum([0, *(len(one.ends) for one in formed[:-1])])
        running = np.array([one.running for one in formed])
        return np.asarray(np.searchsorted(came, self.run.record.begin_ps, "right") - ended - running, np.int64)

    # ---- the answer

    @cached_property
    def _data(self) -> dict[str, Any]:
        run = self.run
        out: dict[str, Any] = {
            "provenance": self._provenance(), "oom": self.oom,
            "requests": {"offered": len(run.requests), "ended": len(self.ended), "refused": len(run.refused)},
        }  # fmt: skip
        parts: dict[str, Callable[[], Any]] = {
            "metrics": self._metrics, "levels": self._levels, "queue": self._queue, "batch": self._batch, "kv": self._kv, "little": self._little,
            "lanes": lambda: metrics.lane_use(run.meter), "transfers": lambda: metrics.transfers(run.meter),
            "critical_path": lambda: metrics.critical_shares(run.meter), "energy": self._energy, "over_time": self.over_time,
        }  # fmt: skip
        return out | {name: part() if len(self.ended) else None for name, part in parts.items()}

    def _energy(self) -> dict[str, Any]:
        meter = self.run.meter
        return energy_summary(self.run.power, meter.makespan_ps * PS, len(self.emitted[0]), len(self.ended))

    def _provenance(self) -> dict[str, Any]:
        run = self.run
        made = provenance(run.case)
        streams = f"arrivals from seed {run.case.scenario.seed}; lengths, prefixes and generated routing from serving.content_seed {run.spec.content_seed}"
        return made | {"adaptations": [*made["adaptations"], *run.rows.notes, *run.requests.notes, streams]}

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token."""
        times = self.times_ps
        return int(times["last"].max() - self.run.arrival_ps[self.run.arrival_ps >= 0].min()) * PS

    def _metrics(self) -> dict[str, Any]:
        run, times, span = self.run, self.times_ps, self.span_s
        request, at = self.emitted
        gaps = np.asarray(np.diff(at)[np.diff(request) == 0] * MS_PER_PS, np.float64)
        tpot = self.tpot_ms[~np.isnan(self.tpot_ms)]
        meter = run.meter
        counts = metrics.accesses(meter)
        accesses = sum(counts.values())
        coverage, _ = metrics.transfers_overlap(meter, run.case.scenario.io.engine == "mmap")
        return {
            "ttft_ms": percentiles(self.ttft_ms), "tpot_ms": percentiles(tpot), "itl_ms": percentiles(gaps),
            "e2el_ms": percentiles(np.asarray((times["last"] - times["arrival"]) * MS_PER_PS, np.float64)),
            "user_tok_s": percentiles(1e3 / tpot), "output_throughput_tok_s": len(at) / span, "request_throughput_s": len(self.ended) / span,
            "total_throughput_tok_s": (len(at) + int(run.requests.prompt[self.ended].sum())) / span, "output_tokens": len(at), "span_s": span,
            "steps": run.n_steps, "tasks": meter.n_tasks, "makespan_s": meter.makespan_ps * PS,
            "expert_hit_rate": (accesses - counts["miss"]) / accesses if accesses else None, "accesses": counts,
            "overlap_coverage": coverage, "io_wait_s": metrics.io_wait_s(meter),
        }  # fmt: skip

    def _levels(self) -> dict[str, Any]:
        out = {}
        for name, level in (LEVELS | self.run.spec.levels).items():
            ttft_ms, tpot_ms = level.ttft * 1e3, level.tpot * 1e3
            tpot = self.tpot_ms[~np.isnan(self.tpot_ms)]
            good = (self.ttft_ms <= ttft_ms) & ~(self.tpot_ms > tpot_ms)
            holds = np.percentile(self.ttft_ms, 99) <= ttft_ms and (not len(tpot) or np.percentile(tpot, 99) <= tpot_ms)
            out[name] = {
                "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "good_requests": int(good.sum()), "goodput_s": int(good.sum()) / self.span_s,
                "good_share": int(good.sum()) / len(self.run.requests), "holds": bool(holds),
            }  # fmt: skip
        return out

    def _queue(self) -> dict[str, Any]:
        waiting = self.waiting
        delays = np.asarray((self.times_ps["begin"] - self.times_ps["arrival"]) * MS_PER_PS, np.float64)
        return {"delay_ms": percentiles(delays), "mean_waiting": self._mean(waiting), "most_waiting": int(waiting.max())}

    def _mean(self, values: Ints) -> float:
        """Mean over the time in which steps run."""
        spent = (np.array(self.run.record.end_ps) - np.array(self.run.record.begin_ps)).astype(np.float64)
        return float((values * spent).sum() / spent.sum())

    def _batch(self) -> dict[str, Any]:
        formed = self.run.record.formed
        running = np.array([one.running for one in formed], np.int64)
        tokens = np.array([sum(count for _, _, count in one.parts) for one in formed], np.int64)
        prompts = int(sum(not one.decodes for one in formed))
        return {
            "mean_sequences": self._mean(running), "most_sequences": int(running.max()), "mean_tokens": float(tokens.mean()),
            "steps_with_prompts": prompts,
        }  # fmt: skip

    def _kv(self) -> dict[str, Any]:
        formed, plan = self.run.record.formed, self.run.kv
        used = np.array([one.kv_blocks for one in formed], np.int64)
        computed = sum(tokens for one in formed for _, _, tokens in one.parts)
        needed = int((self.run.requests.prompt[self.ended] + self.tokens - 1).sum())
        return {
            "blocks": plan.blocks, "block_tokens": plan.block_tokens, "block_bytes": plan.block_bytes, "mean_occupancy": self._mean(used) / plan.blocks,
            "peak_occupancy": int(used.max()) / plan.blocks, "preemptions": sum(one.gave_way for one in formed),
            "swapped_blocks": sum(one.swapped_out + one.swapped_in for one in formed),
            "computed_tokens": computed, "needed_tokens": needed,  # more: computed anew; fewer: shared prefixes
        }  # fmt: skip

    def _little(self) -> dict[str, float]:
        """L, lambda and W; the two sides of the law are summed apart from each other, in whole numbers."""
        arrival, last = self.times_ps["arrival"].tolist(), self.times_ps["last"].tolist()
        spent = sum(last) - sum(arrival)
        area = inside = 0
        before = min(arrival)
        for at, change in sorted([*((at, 1) for at in arrival), *((at, -1) for at in last)]):
            area += inside * (at - before)
            inside, before = inside + change, at
        if area != spent or inside:
            raise MoesimError(f"invariant 7: {area} ps of requests in the system, {spent} ps of time spent in it")
        span = max(last) - min(arrival)
        return {"mean_in_system": area / span, "arrivals_per_s": len(arrival) / (span * PS), "mean_time_s": spent / len(arrival) * PS}

    def over_time(self, points: int = POINTS) -> list[dict[str, float]]:
        """Sequences, queue and cache at the ends of some steps, evenly spread over them."""
        formed, ends, waiting = self.run.record.formed, self.run.record.end_ps, self.waiting.tolist()
        some = np.unique(np.linspace(0, len(formed) - 1, min(points, len(formed))).astype(int)).tolist()
        return [
            {"time_s": ends[i] * PS, "running": formed[i].running, "waiting": waiting[i], "kv_share": formed[i].kv_blocks / self.run.kv.blocks}
            for i in some
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"ServingResult({self.run.case.scenario.name}: {len(self.ended)} of {len(self.run.requests)} requests in {self.run.n_steps} steps)"


def _flat(lists: Iterable[list[int]]) -> Ints:
    return np.array([x for one in lists for x in one], np.int64)
