"""Owns the short table that a run shows of itself in a notebook, from its data as ``moesim run -o json`` has it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moesim.html_table import html_table
from moesim.units import show

LANES = 3  # of the critical path


def result_table(title: str, data: dict[str, Any]) -> str:
    """Return what ran out, or the speed and what it hangs on, and the memory of each tier, as HTML."""
    rows: list[tuple[str, str]] = []
    if (oom := data["oom"]) is not None:
        rows.append(("out of memory", f"{oom['asked_by']} in {oom['tier']}, step {oom['step']}"))
    if (found := data["metrics"]) is not None:
        rows += [("decode", f"{found['decode_tok_s']:.3g} tokens/s")] if found["decode_tok_s"] else []
        rows += [("first token", f"{found['ttft_ms']['median']:,.3g} ms")] if found["ttft_ms"] else []
        rows += [("expert hits", f"{found['expert_hit_rate']:.1%}")] if found["expert_hit_rate"] is not None else []
        shares = Counter[str]()
        for part in data["critical_path"]:
            shares[part["lane"]] += part["share"]
        rows.append(("critical path", ", ".join(f"{lane} {share:.0%}" for lane, share in shares.most_common(LANES) if share >= 0.005)))
    for tier, use in data["memory"].items():
        usable_bytes = use["capacity_bytes"] - use["reserved_bytes"]
        rows.append((f"memory, {tier}", f"{show(use['planned_bytes'], 'bytes')} of {show(usable_bytes, 'bytes')}"))
    return html_table(title, rows)
