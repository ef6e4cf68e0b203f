"""Owns the table of a folder of this benchmark: every row measured and predicted, cold and warm, and its buffers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from moesim.backtest import backtest
from moesim.backtest.data import read_field_runs
from moesim.backtest.memory import predict_memory

GROUPS = (("decode in memory", "decode", "cpu_only"), ("decode from the drive", "decode", "ssd"), ("prompt", "prefill", "cpu_only"))


def report(out: Path) -> str:
    """Return the table in Markdown."""
    data = read_field_runs(out)
    cold, warm = (backtest(data, warm=it).predictions for it in (False, True))
    log = [json.loads(line) for line in (out / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    spreads = {it["name"]: (max(it["processes_cpu_s"]) - min(it["processes_cpu_s"])) / it["cpu_s"] for it in log}
    lines = ["| run | measured, tok/s | spread | cold | off | warm | off |", "|---|---:|---:|---:|---:|---:|---:|"]
    for a, b in zip(cold, warm, strict=True):
        name = a.case.row.text("run_id")
        spread = "" if spreads[name] == 0 else f"{spreads[name]:.0%}"
        again = "calibrates | " if b.calibrates else f"{b.predicted:.1f} | {_off(b.predicted, b.measured)}"
        lines.append(f"| {name} | {a.measured:.1f} | {spread} | {a.predicted:.1f} | {_off(a.predicted, a.measured)} | {again} |")
    lines.append("")
    for title, mode, placement in GROUPS:
        for word, found in (("cold", cold), ("warm", warm)):
            scored = [p for p in found if (p.case.mode, p.case.placement) == (mode, placement) and not p.calibrates]
            if scored:
                lines.append(f"- {title}, {word}: {_summary([abs(p.predicted / p.measured - 1) for p in scored])}")
    memory = predict_memory(data)
    for metric in sorted({p.row.text("metric") for p in memory}):
        errors = [abs(p.error) for p in memory if p.row.text("metric") == metric and p.error is not None]
        lines.append(f"- {metric}: {_summary(errors)}")
    return "\n".join(lines)


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


def _summary(errors: list[float]) -> str:
    return f"off by {median(errors):.2%} in the median of {len(errors)}, at most {max(errors):.1%}"
