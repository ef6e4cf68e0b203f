"""Owns the comparison of predictions with measured runs: cold and warm, with intervals, against closed formulas on the same rows.

Cold: nothing measured on the host of a row is used; rates that were fitted on runs of that host are replaced by those fitted without it.
Warm: one measured row of each host and engine corrects the others: the first decode row at the smallest depth where there is one, else the
first row at the smallest depth. It carries ``calibrates`` and is not scored. Its deviation belongs in part to what the host's CPU, GPU and
drive do otherwise than was predicted, in part to that row alone. All four are taken to deviate equally (``deviation``, a normal spread in
logarithms), so with the shares w of the row's time on CPU, GPU and drive

    correction of device k = w_k / (1 + w.w) x log(measured time / predicted time of the row)

A row that is off by more than ``CREDIBLE`` of these spreads counts as one that is off by so much: what is beyond is its own.

Closed formulas, for decode: active bytes over 0.6 of the bandwidth that they pass, and the same with three coefficients (share of the
GPU's bandwidth, of main memory's, seconds per layer), fitted by leaving host groups out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moesim.backtest.data import METRICS, FieldRuns, Lacking, Row
from moesim.backtest.run import FieldCase, FieldCases
from moesim.ranks import rank_correlation
from moesim.runtimes import Rates, load_rates, was_fitted

PLAN_SHARE = 0.6  # claim B1: what to plan with
DECODE = ("decode", "batched decode")
CREDIBLE = 2.0
RISE = 0.05  # of the mean time over a series: slopes below are noise, not growth


@dataclass(frozen=True)
class Prediction:
    """One row, predicted. ``ratio`` is the half width of the 80 % interval as a factor; ``closed`` are the formulas' tokens/s, by name."""

    case: FieldCase
    predicted: float
    parts: dict[str, float]
    ratio: float
    calibrates: bool = False
    closed: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        return self.case.row.value

    @property
    def log_error(self) -> float:
        """Natural logarithm of predicted over measured speed."""
        return math.log(self.predicted / self.measured)

    @property
    def inside(self) -> bool:
        """Whether the measured value lies in the 80 % interval."""
        return abs(self.log_error) <= math.log(self.ratio)


@dataclass(frozen=True)
class Skipped:
    """One row that was not predicted, and why."""

    row: Row
    reason: str


@dataclass(frozen=True)
class Backtest:
    """All rows of a folder: predicted or skipped, none dropped."""

    data: FieldRuns
    warm: bool
    predictions: tuple[Prediction, ...]
    skipped: tuple[Skipped, ...]
    fitted_hosts: int

    @property
    def scored(self) -> tuple[Prediction, ...]:
        """Predictions that count: all but the calibrating rows."""
        return tuple(p for p in self.predictions if not p.calibrates)

    def __repr__(self) -> str:
        return f"Backtest({'warm' if self.warm else 'cold'}, {len(self.scored)} scored, {len(self.skipped)} skipped)"


def backtest(data: FieldRuns, *, warm: bool = False, rates: Callable[[str], Rates] = load_rates) -> Backtest:
    """Predict every row of a folder.

    Parameters
    ----------
    data : FieldRuns
    warm : bool
        Whether one measured row of each host and engine may be used.
    rates : callable
        Host to rates; by default those fitted without it.
    """
    builder = FieldCases(data)
    base = rates("")
    predictions: list[Prediction] = []
    skipped: list[Skipped] = []
    by_host: dict[str, Rates] = {}
    for row in data.runs:
        try:
            case = builder.case(row, base)
        except Lacking as lacking:
            skipped.append(Skipped(row, str(lacking)))
            continue
        host = case.machine.host
        if host not in by_host:
            by_host[host] = rates(host)
        parts = case.seconds(by_host[host])
        predictions.append(
            Prediction(case, case.tokens_per_s(sum(parts.values())), parts, by_host[host].interval(case.placement, case.mode, False))
        )
    if warm:
        predictions = _calibrated(predictions, base)
    predictions = _with_closed_forms(predictions)
    return Backtest(data, warm, tuple(predictions), tuple(skipped), sum(was_fitted(host) for host in by_host))


def _calibrated(predictions: Sequence[Prediction], rates: Rates) -> list[Prediction]:
    """Correct each host and engine by one of its rows, which then no longer counts."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, p in enumerate(predictions):
        groups[p.case.machine.host, p.case.row.text("engine") or p.case.runtime.name].append(i)
    out = list(predictions)
    for members in groups.values():
        decode = [i for i in members if predictions[i].case.mode in DECODE] or members
        first = min(decode, key=lambda i: (predictions[i].case.row.number("depth_n_kv") or 0.0, i))
        corrections = _corrections(predictions[first], rates["deviation"])
        for i in members:
            p = predictions[i]
            if (p.case.mode in DECODE) == (predictions[first].case.mode in DECODE):
                parts = {name: seconds * math.exp(corrections.get(p.case.device(name), 0.0)) for name, seconds in p.parts.items()}
                ratio = rates.interval(p.case.placement, p.case.mode, True)
                out[i] = replace(p, predicted=p.case.tokens_per_s(sum(parts.values())), parts=parts, ratio=ratio)
        out[first] = replace(out[first], calibrates=True)
    return out


def _corrections(p: Prediction, deviation: float) -> dict[str, float]:
    """Logarithm by which the times of each device are corrected, from one measured row."""
    shares: dict[str, float] = defaultdict(float)
    for name, seconds in p.parts.items():
        shares[p.case.device(name)] += seconds / sum(p.parts.values())
    spread = 1 + sum(share**2 for share in shares.values())  # in units of the variance of one of them
    limit = CREDIBLE * deviation * math.sqrt(spread)
    seen = min(max(p.log_error, -limit), limit)
    return {device: share / spread * seen for device, share in shares.items()}


# ---- closed formulas


def _terms(case: FieldCase) -> tuple[float, float, float]:
    """Seconds at full bandwidth on the GPU and on the CPU, and layers: what a spreadsheet knows of a row."""
    model, bits = case.model, case.row.number("bits_per_weight") or 16.0
    experts = sum(model.expert_params(layer) for layer in model.moe_layers) * model.top_k
    on_cpu = case.cpu_layers / max(len(model.moe_layers), 1) * experts
    if case.layout.attention_device[0] == "cpu":
        on_cpu = float(model.params_active)
    on_gpu = model.params_active - on_cpu
    gpu, cpu = case.machine.gpu_bytes_per_s or math.inf, case.machine.ram_bytes_per_s or math.inf
    return on_gpu * bits / 8 / gpu, on_cpu * bits / 8 / cpu, float(model.n_layers)


def _with_closed_forms(predictions: Sequence[Prediction]) -> list[Prediction]:
    out = list(predictions)
    rows = [i for i, p in enumerate(predictions) if p.case.mode in DECODE]
    if not rows:
        return out
    terms = np.array([_terms(predictions[i].case) for i in rows])
    tokens = np.array([predictions[i].case.step.sequences for i in rows], float)
    seconds = tokens / np.array([predictions[i].measured for i in rows])
    hosts = np.array([predictions[i].case.machine.host for i in rows])
    fitted = np.zeros(len(rows))
    for host in dict.fromkeys(hosts.tolist()):
        mine = hosts == host
        if mine.all():
            fitted[mine] = (terms[mine][:, 0] + terms[mine][:, 1]) / PLAN_SHARE
        else:
            fitted[mine] = terms[mine] @ _three(terms[~mine], seconds[~mine])
    for j, i in enumerate(rows):
        plan = float(terms[j, 0] + terms[j, 1]) / PLAN_SHARE
        closed = {"0.6 x bandwidth": tokens[j] / plan, "three coefficients": tokens[j] / float(fitted[j])}
        out[i] = replace(predictions[i], closed={k: float(v) for k, v in closed.items()})
    return out


def _three(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients of the three terms that minimise the squared logarithmic error (Gauss-Newton in their logarithms)."""
    x = np.log([1 / PLAN_SHARE, 1 / PLAN_SHARE, 5e-5])
    for _ in range(50):
        weighted = terms * np.exp(x)
        total = np.maximum(weighted.sum(axis=1), 1e-12)
        jac = weighted / total[:, None]
        residual = np.log(total / seconds)
        step = np.linalg.solve(jac.T @ jac + 1e-3 * np.eye(3), -jac.T @ residual)
        x = x + np.clip(step, -0.5, 0.5)
    return np.asarray(np.exp(x))


# ---- scores


@dataclass(frozen=True)
class Score:
    """How far predictions of a group of rows are off; None where there are too few rows to say."""

    n: int
    median_ape: float | None
    mean_ape: float | None
    within_20: float | None
    bias: float | None  # exp(median log error) - 1: above 0 predictions are too fast
    rank_corr: float | None
    machine_mean: float | None  # mean over machines of each machine's median error


def score(pairs: Sequence[tuple[float, float, str]]) -> Score:
    """Score (predicted, measured, machine) triples."""
    if not pairs:
        return Score(0, None, None, None, None, None, None)
    predicted, measured = np.array([p for p, _, _ in pairs]), np.array([m for _, m, _ in pairs])
    ape = np.abs(predicted / measured - 1)
    by_machine: dict[str, list[float]] = defaultdict(list)
    for value, (_, _, machine) in zip(ape.tolist(), pairs, strict=True):
        by_machine[machine].append(value)
    return Score(
        len(pairs),
        float(np.median(ape)),
        float(ape.mean()),
        float((ape <= 0.2).mean()),
        float(np.expm1(np.median(np.log(predicted / measured)))),
        rank_correlation(predicted, measured),
        float(np.mean([np.median(v) for v in by_machine.values()])),
    )


@dataclass(frozen=True)
class Slope:
    """Growth of the time of a token with a setting, in one series of runs: seconds per unit."""

    name: str
    series: str
    placement: str
    mode: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the slope."""
        return abs(self.predicted / self.measured - 1)


def slopes(predictions: Iterable[Prediction], name: str, setting: Callable[[Prediction], float | None], least: int) -> list[Slope]:
    """Fit a line to the time per token over a setting, in each series of at least ``least`` values of it that differs in nothing else.

    Series whose measured time does not rise by ``RISE`` of its mean are left out.
    """
    series: dict[tuple[str, ...], dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for p in predictions:
        value = setting(p)
        if value is None:
            continue
        row = p.case.row
        if name == "depth":
            same: tuple[str, ...] = (row.text("run_id"), row.text("concurrency"))
        else:
            same = (
                p.case.machine.name,
                *(row.text(c) for c in ("engine", "model", "quant", "kv_type", "depth_n_kv", "prompt_tokens", "threads")),
            )
        series[(p.case.placement, p.case.mode, *same)][value].append((1 / p.predicted, 1 / p.measured))
    out = []
    for (placement, mode, *same_), points in series.items():
        if len(points) < least:
            continue
        x = np.array(list(points))
        y = np.array([np.mean(v, axis=0) for v in points.values()])
        predicted, measured = (float(np.polyfit(x, y[:, i], 1)[0]) for i in (0, 1))
        if measured * float(np.ptp(x)) > RISE * float(y[:, 1].mean()):
            out.append(Slope(name, " ".join(same_[:2]), placement, mode, predicted, measured))
    return out


def depth_of(p: Prediction) -> float | None:
    """Tokens cached before the measurement."""
    return p.case.row.number("depth_n_kv")


def cpu_layers_of(p: Prediction) -> float | None:
    """MoE layers on the CPU."""
    return p.case.cpu_layers


def modes() -> tuple[str, ...]:
    """All modes, in order."""
    return tuple(METRICS.values())
