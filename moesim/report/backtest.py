"""Owns what a backtest says: tables by placement, engine and machine beside the closed formulas, slopes, skipped rows, worst rows, memory.

It predicts nothing. Every number of the JSON is a ratio, a count or in the unit that its name ends in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moesim import __version__, text_table
from moesim.backtest import DECODE, Backtest, Prediction, Score, Slope, cpu_layers_of, depth_of, modes, score, slopes
from moesim.backtest.data import METRICS, Row
from moesim.backtest.memory import MemoryPrediction
from moesim.backtest.run import as_plain, describe
from moesim.errors import InputError
from moesim.runtimes import attained_file
from moesim.text_table import percent

ALL = "all"
DEPTHS = ((ALL, 0.0, float("inf")), ("below 1k", 0.0, 1000.0), ("1k to 8k", 1000.0, 8000.0), ("from 8k", 8000.0, float("inf")))
WORST = 25
PLAIN = "-"


def as_data(run: Backtest, memory: Sequence[MemoryPrediction], ablation: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return everything as plain data: groups, baselines, rows and the rest."""
    rows = run.scored
    fitted = sum(rate.basis == "fitted" for rate in attained_file().rates.values())
    slope_list = [*slopes(rows, "depth", depth_of, 3), *slopes(rows, "layers on CPU", cpu_layers_of, 2)]
    return {
        "provenance": {
            "moesim": __version__,
            "folder": run.data.folder.name,
            "use": "warm" if run.warm else "cold",
            "fitted_rates": fitted,
            "hosts_predicted_by_rates_fitted_without_them": run.fitted_hosts,
        },
        "overall": _score(rows)
        | {"n_rows": len(run.data.runs), "n_calibrating": sum(p.calibrates for p in run.predictions), "n_skipped": len(run.skipped)},
        "groups": _groups(run, _score, depths=True),
        "baselines": [
            {"name": name, **group}
            for name in ("0.6 x bandwidth", "three coefficients")
            for group in _groups(run, _closed_score(name), depths=True)
            if group["mode"] in DECODE
        ],
        "engines": _by(rows, lambda p: p.case.row.text("engine_family")),
        "machines": _by(rows, lambda p: p.case.machine.name),
        "slopes": _slopes(slope_list),
        "skipped": [{"reason": reason, "placement": placement, "n": n} for (placement, reason), n in _reasons(run).most_common()],
        "memory": _memory(memory),
        "ablation": list(ablation),
        "rows": [_row(p) for p in run.predictions]
        + [
            {"row_id": s.row.row_id, "placement": s.row.text("offload_kind"), "machine": s.row.text("machine"), "skipped": s.reason,
             "where": s.row.where.rpartition("/")[2]}
            for s in run.skipped
        ],
    }  # fmt: skip


def _score(rows: Sequence[Prediction]) -> dict[str, Any]:
    found = score([(p.predicted, p.measured, p.case.machine.name) for p in rows])
    inside = float(np.mean([p.inside for p in rows])) if rows else None
    width = float(np.median([p.ratio for p in rows])) if rows else None
    return _named(found) | {"interval_coverage": inside, "median_interval_ratio": width}


def _closed_score(name: str) -> Callable[[Sequence[Prediction]], dict[str, Any]]:
    def scored(rows: Sequence[Prediction]) -> dict[str, Any]:
        return _named(score([(p.closed[name], p.measured, p.case.machine.name) for p in rows if name in p.closed]))

    return scored


def _named(found: Score) -> dict[str, Any]:
    data = asdict(found)
    data["mean_over_machines_of_median_ape"] = data.pop("machine_mean")
    return data


def _groups(run: Backtest, scored: Callable[[Sequence[Prediction]], dict[str, Any]], depths: bool) -> list[dict[str, Any]]:
    """Scores of every placement and mode that occurs, over all depths and by depth, with what was skipped.

    A skipped row whose metric is not known is counted under its metric, one whose depth cannot be read over all depths only.
    """
    out = []
    unknown = sorted({_mode(s.row.text("metric")) for s in run.skipped} - set(modes()))
    placements = sorted({r.text("offload_kind") for r in run.data.runs})
    for placement in placements:
        for mode in (*modes(), *unknown):
            rows = [p for p in run.scored if (p.case.placement, p.case.mode) == (placement, mode)]
            skipped = [s for s in run.skipped if s.row.text("offload_kind") == placement and _mode(s.row.text("metric")) == mode]
            if not rows and not skipped:
                continue
            for name, low, high in DEPTHS if depths else DEPTHS[:1]:
                here = [p for p in rows if low <= (depth_of(p) or 0.0) < high]
                lacking = [s for s in skipped if name == ALL or low <= _depth(s.row) < high]
                if here or lacking:
                    reasons = dict(Counter(s.reason for s in lacking).most_common())
                    group = {"placement": placement, "mode": mode, "depth_range": name}
                    out.append(group | scored(here) | {"n_skipped": len(lacking), "skipped": reasons})
    return out


def _mode(metric: str) -> str:
    return METRICS.get(metric, metric)


def _depth(row: Row) -> float:
    """A row's depth, not a number where the cell is none."""
    try:
        return row.number("depth_n_kv") or 0.0
    except InputError:
        return float("nan")


def _by(rows: Sequence[Prediction], key: Callable[[Prediction], str]) -> list[dict[str, Any]]:
    keys = sorted({(key(p), p.case.placement, p.case.mode) for p in rows})
    return [
        {"name": name, "placement": placement, "mode": mode}
        | _score([p for p in rows if (key(p), p.case.placement, p.case.mode) == (name, placement, mode)])
        for name, placement, mode in keys
    ]


def _slopes(found: Sequence[Slope]) -> list[dict[str, Any]]:
    out = []
    for key in sorted({(s.name, s.placement, s.mode) for s in found}):
        here = [s for s in found if (s.name, s.placement, s.mode) == key]
        bias = float(np.median([s.predicted / s.measured for s in here])) - 1
        out.append(
            {
                "setting": key[0],
                "placement": key[1],
                "mode": key[2],
                "n": len(here),
                "median_error": float(np.median([s.error for s in here])),
                "bias": bias,
            }
        )
    for name in sorted({s.name for s in found}):
        here = [s for s in found if s.name == name and s.mode in DECODE]
        if here:
            bias = float(np.median([s.predicted / s.measured for s in here])) - 1
            out.append(
                {
                    "setting": name,
                    "placement": "all",
                    "mode": "decode",
                    "n": len(here),
                    "median_error": float(np.median([s.error for s in here])),
                    "bias": bias,
                }
            )
    return out


def _reasons(run: Backtest) -> Counter[tuple[str, str]]:
    return Counter((s.row.text("offload_kind"), s.reason) for s in run.skipped)


def _memory(memory: Sequence[MemoryPrediction]) -> list[dict[str, Any]]:
    out = []
    for metric in sorted({m.row.text("metric") for m in memory}):
        here = [m for m in memory if m.row.text("metric") == metric]
        errors = [abs(m.error) for m in here if m.error is not None]
        reasons = dict(Counter(m.reason for m in here if m.reason).most_common())
        out.append({
            "metric": metric, "n": len(errors), "n_skipped": sum(reasons.values()), "skipped": reasons,
            "median_error": float(np.median(errors)) if errors else None, "p90_error": float(np.quantile(errors, 0.9)) if errors else None,
        })  # fmt: skip
    return out


def _row(p: Prediction) -> dict[str, Any]:
    return as_plain(p.case) | {
        "measured_tok_s": p.measured, "predicted_tok_s": p.predicted, "low_tok_s": p.predicted / p.ratio, "high_tok_s": p.predicted * p.ratio,
        "ape": abs(p.predicted / p.measured - 1), "calibrates": p.calibrates, "closed_tok_s": p.closed, "parts_s": p.parts,
    }  # fmt: skip


# ---- tables


def group_table(run: Backtest) -> tuple[list[str], list[list[str]]]:
    """One line per placement and mode, the closed formulas beside it."""
    data = _groups(run, _score, depths=False)
    closed = {
        name: {(g["placement"], g["mode"]): g for g in _groups(run, _closed_score(name), depths=False)}
        for name in ("0.6 x bandwidth", "three coefficients")
    }
    head = [
        "placement",
        "mode",
        "n",
        "skipped",
        "median",
        "mean",
        "within 20 %",
        "bias",
        "rank",
        "machines",
        "in interval",
        "interval",
        "0.6 bw",
        "3 coef.",
    ]
    rows = []
    for g in data:
        key = (g["placement"], g["mode"])
        shown = [percent(closed[name][key]["median_ape"]) for name in closed] if g["mode"] in DECODE else [PLAIN, PLAIN]
        rows.append([g["placement"], g["mode"], str(g["n"]), str(g["n_skipped"]), *_cells(g), *shown])
    return head, rows


def _cells(g: dict[str, Any]) -> list[str]:
    rank = PLAIN if g["rank_corr"] is None else f"{g['rank_corr']:.2f}"
    width = PLAIN if g["median_interval_ratio"] is None else f"x/÷ {g['median_interval_ratio']:.2f}"
    return [percent(g["median_ape"]), percent(g["mean_ape"]), percent(g["within_20"], 0), percent(g["bias"]), rank, percent(g["mean_over_machines_of_median_ape"]),
            percent(g["interval_coverage"], 0), width]  # fmt: skip


def _depth_rows(run: Backtest) -> list[list[str]]:
    return [
        [g["placement"], g["mode"], g["depth_range"], str(g["n"]), *_cells(g)]
        for g in _groups(run, _score, depths=True)
        if g["depth_range"] != ALL
    ]


def _named_rows(groups: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [[g["name"], g["placement"], g["mode"], str(g["n"]), *_cells(g)] for g in groups]


SCORES = ["n", "median", "mean", "within 20 %", "bias", "rank", "machines", "in interval", "interval"]


def worst(run: Backtest, n: int = WORST) -> list[list[str]]:
    """The rows that are furthest off, with what the prediction is made of."""
    rows = sorted(run.scored, key=lambda p: -abs(p.log_error))[:n]
    return [
        [p.case.row.row_id, p.case.machine.name, f"{p.case.row.text('engine')} {p.case.row.text('model')} {p.case.row.text('quant')}"[:70], p.case.placement,
         p.case.mode, f"{depth_of(p) or 0:.0f}", f"{p.measured:.4g}", f"{p.predicted:.4g}", describe(p.parts)]
        for p in rows
    ]  # fmt: skip


WORST_HEAD = ["row", "machine", "run", "placement", "mode", "depth", "measured", "predicted", "predicted time"]


def text(run: Backtest, memory: Sequence[MemoryPrediction], ablation: Sequence[dict[str, Any]] = ()) -> str:
    """The short answer: one line per placement and mode, slopes, memory, reasons, the worst rows."""
    data = as_data(run, memory, ablation)
    all_rows = data["overall"]
    lines = [
        f"{run.data.folder.name}: {all_rows['n']} rows predicted {data['provenance']['use']}, {all_rows['n_calibrating']} used to calibrate, {all_rows['n_skipped']} skipped"
    ]
    lines += [f"rank correlation over all {all_rows['rank_corr']:.3f}" if all_rows["rank_corr"] is not None else "", ""]
    head, rows = group_table(run)
    lines += text_table.columns([head, *rows], right=range(2, len(head)))
    if data["slopes"]:
        lines += [
            "",
            *text_table.columns([["slope with", "placement", "mode", "n", "median error", "bias"], *_slope_rows(data)], right=(3, 4, 5)),
        ]
    if memory:
        lines += ["", *text_table.columns([["memory", "n", "skipped", "median", "worst tenth"], *_memory_rows(data)], right=(1, 2, 3, 4))]
    if ablation:
        head, rows = ablation_table(ablation)
        lines += ["", *text_table.columns([head, *rows], right=range(1, len(head)))]
    lines += ["", "skipped because"] + text_table.columns(
        [[str(s["n"]), s["placement"], s["reason"]] for s in data["skipped"]], right=(0,), indent="  "
    )
    lines += ["", "furthest off"] + text_table.columns([WORST_HEAD, *worst(run, 8)], right=(5, 6, 7), indent="  ")
    return "\n".join(lines)


def _slope_rows(data: dict[str, Any]) -> list[list[str]]:
    return [[s["setting"], s["placement"], s["mode"], str(s["n"]), percent(s["median_error"]), percent(s["bias"])] for s in data["slopes"]]


def ablation_table(ablation: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Median error without each mechanism."""
    keys = [key for key in ablation[0] if key != "without"]
    return ["median error without", *keys], [[row["without"], *(percent(row[key]) for key in keys)] for row in ablation]


def _memory_rows(data: dict[str, Any]) -> list[list[str]]:
    return [[m["metric"], str(m["n"]), str(m["n_skipped"]), percent(m["median_error"]), percent(m["p90_error"])] for m in data["memory"]]


def markdown(run: Backtest, memory: Sequence[MemoryPrediction], ablation: Sequence[dict[str, Any]] = ()) -> str:
    """The whole report, worst rows first."""
    data = as_data(run, memory, ablation)
    out = [f"# Predicted against measured, {data['provenance']['use']}", ""]
    out += [f"Written by `moesim backtest {data['provenance']['folder']} --{data['provenance']['use']} -o md`. {data['overall']['n']} of {data['overall']['n_rows']} rows are predicted "
            f"and scored, {data['overall']['n_calibrating']} calibrate, {data['overall']['n_skipped']} lack a fact.", ""]  # fmt: skip
    out += ["## Furthest off", "", *text_table.markdown_table(WORST_HEAD, worst(run)), ""]
    head, rows = group_table(run)
    out += ["## By placement and mode", "", LEGEND, "", *text_table.markdown_table(head, rows), ""]
    out += ["## By depth", "", *text_table.markdown_table(["placement", "mode", "depth", *SCORES], _depth_rows(run)), ""]
    if data["slopes"]:
        out += [
            "## Slopes",
            "",
            *text_table.markdown_table(["slope with", "placement", "mode", "n", "median error", "bias"], _slope_rows(data)),
            "",
        ]
    if ablation:
        out += [
            "## What each mechanism contributes",
            "",
            "The same rows without it, rates as they are.",
            "",
            *text_table.markdown_table(*ablation_table(ablation)),
            "",
        ]
    out += ["## By engine", "", *text_table.markdown_table(["engine", "placement", "mode", *SCORES], _named_rows(data["engines"])), ""]
    out += ["## By machine", "", *text_table.markdown_table(["machine", "placement", "mode", *SCORES], _named_rows(data["machines"])), ""]
    if memory:
        out += ["## Memory", "", *text_table.markdown_table(["figure", "n", "skipped", "median", "worst tenth"], _memory_rows(data)), ""]
    out += [
        "## Not predicted",
        "",
        *text_table.markdown_table(["reason", "placement", "rows"], [[s["reason"], s["placement"], str(s["n"])] for s in data["skipped"]]),
        "",
    ]
    return "\n".join(out)


LEGEND = (
    "Errors are of speed, |predicted / measured - 1|. *machines*: mean over machines of each machine's median. *in interval*: share of measured values inside the predicted 80 % "
    "interval, whose half width is *interval*. *0.6 bw*: active bytes over 0.6 of the bandwidth; *3 coef.*: the same with three coefficients, fitted without the host."
)


def csv(run: Backtest, memory: Sequence[MemoryPrediction], ablation: Sequence[dict[str, Any]] = ()) -> str:
    """Flat rows of everything but the rows themselves, then one line per row."""
    data = as_data(run, memory, ablation)
    rows = data.pop("rows")
    data["rows"] = [
        {"name": r["row_id"]} | {k: v for k, v in r.items() if k not in ("row_id", "parts_s", "closed_tok_s", "assumed")} for r in rows
    ]
    return text_table.to_csv(data)


def json(run: Backtest, memory: Sequence[MemoryPrediction], ablation: Sequence[dict[str, Any]] = ()) -> str:
    """Everything as JSON."""
    return text_table.to_json(as_data(run, memory, ablation))
