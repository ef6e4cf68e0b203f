"""Owns the ablation of a backtest: what each mechanism contributes, by taking it away and predicting the same rows again, rates as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moesim.backtest import Backtest, Prediction, score
from moesim.backtest.run import FieldCase
from moesim.runtimes import Rates, load_rates

NEVER, FREE = 1e9, 1e-9  # factors that take a limit, or a cost, away


@dataclass(frozen=True)
class Ablation:
    """A mechanism, and how it is taken away: rates set or scaled, engines taken as of today, parts of a step left out."""

    mechanism: str
    scaled: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    undated: bool = False
    left_out: str = ""


_SHARES = ("client_memory_share", "server_memory_share", "dual_server_memory_share", "measured_memory_share")
_ATTENTION = ("gpu_vector_attention_share", "gpu_tensor_attention_share", "cpu_attention_share", "gpu_prefill_attention_share")
ABLATIONS = (
    Ablation("bandwidth share by class of host (0.6 for all instead)", fixed=dict.fromkeys(_SHARES, 0.6)),
    Ablation("arithmetic limit of CPU kernels in decode", scaled={"cpu_flops": NEVER}),
    Ablation(
        "attention bound by arithmetic (memory alone instead)", scaled=dict.fromkeys(_ATTENTION, NEVER) | {"cpu_serial_head_token": FREE}
    ),
    Ablation("attention's reading of the cache at all", left_out="attention"),
    Ablation("cost of a GPU kernel", scaled={"launch": FREE, "launch_graphs": FREE, "launch_torch": FREE}),
    Ablation("CUDA graphs and kernels by date of the engine", undated=True),
    Ablation("cost of a CPU operator", scaled={"cpu_kernel": FREE}),
    Ablation("hand-over between GPU and CPU", left_out="hand-over"),
    Ablation("padding of experts' tiles in prompts", scaled={"gpu_prefill_tile": FREE}),
    Ablation("slow copies from mapped pages", scaled={"pageable_bytes_per_s": NEVER}),
    Ablation("copies of experts to the GPU in prompts", left_out="copy of experts"),
    Ablation("plain CPU kernels slower than blocked ones in prompts", fixed={"cpu_prefill_plain_share": 1.0}),
    Ablation("experts read from storage", left_out="experts from storage"),
)


def ablate(run: Backtest) -> list[dict[str, Any]]:
    """Return the median error of each placement in decode and prefill without each mechanism, the full model first."""
    out = [{"without": "nothing", **_medians([(p, p.predicted) for p in run.scored])}]
    known: dict[str, Rates] = {}
    for ablation in ABLATIONS:
        pairs = []
        for p in run.scored:
            host = p.case.machine.host
            known.setdefault(host, load_rates(host))
            pairs.append((p, _predict(p.case, known[host], ablation)))
        out.append({"without": ablation.mechanism, **_medians(pairs)})
    return out


def _predict(case: FieldCase, rates: Rates, ablation: Ablation) -> float:
    values = {name: value * ablation.scaled.get(name, 1.0) for name, value in rates.values.items()} | dict(ablation.fixed)
    if ablation.undated:
        case = replace(case, run=replace(case.run, date="9999", version=""))
    parts = case.seconds(Rates(values, rates.spreads))
    return case.tokens_per_s(sum(seconds for name, seconds in parts.items() if name != ablation.left_out))


def _medians(pairs: list[tuple[Prediction, float]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for p, _ in pairs:
        out.setdefault(f"{p.case.placement} {'prefill' if p.case.mode == 'prefill' else 'decode'}", None)
    for key in out:
        placement, mode = key.split(" ")
        here = [
            (predicted, p.measured, p.case.machine.name)
            for p, predicted in pairs
            if p.case.placement == placement and (p.case.mode == "prefill") == (mode == "prefill")
        ]
        out[key] = score(here).median_ape
    return dict(sorted(out.items()))
