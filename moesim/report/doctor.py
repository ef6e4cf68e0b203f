"""Owns what ``moesim doctor`` says: text, Markdown, JSON, CSV. Pure: a diagnosis in, a string out."""

from __future__ import annotations

import csv
import io
import math
import shlex

from moesim.doctor import Diagnosis, Finding
from moesim.text_table import number, to_json, wrap

LONG = 120  # characters of settings that text still shows


def doctor_json(diagnosis: Diagnosis) -> str:
    """Return the findings as a JSON list, the stable contract of ``doctor -o json``."""
    return to_json(diagnosis.as_dict())


def doctor_csv(diagnosis: Diagnosis) -> str:
    """Return one row a finding."""
    out = io.StringIO()
    rows = diagnosis.as_dict()
    head = ["code", "claims", "what", "evidence", "speed_now_tok_s", "speed_changed_tok_s", "gain_tok_s", "problem", "set", "advice"]
    writer = csv.DictWriter(out, head, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "set": " ".join(row["set"])} for row in rows)
    return out.getvalue()


def doctor_text(diagnosis: Diagnosis) -> str:
    """Return the findings, the costliest first."""
    lines = wrap(headline(diagnosis))
    for finding in diagnosis.findings:
        it = finding.suspicion
        lines += ["", *wrap(f"{it.what} ({it.code}; {it.claims})", "- ")]
        lines += wrap(it.evidence, "  evidence  ") + wrap(cost(finding), "  effect    ")
        shown = "  ".join(f"--set {shlex.quote(text)}" for text in finding.assignments)
        if shown:
            lines += wrap(shown if len(shown) <= LONG else f"{it.advice or 'see the command'} (settings: -o md)", "  change    ")
        elif it.advice:
            lines += wrap(it.advice, "  change    ")
    return "\n".join(lines) + "\n"


def doctor_markdown(diagnosis: Diagnosis) -> str:
    """Return the findings as Markdown with their commands."""
    lines = [f"# {headline(diagnosis)}", ""]
    for finding, row in zip(diagnosis.findings, diagnosis.as_dict(), strict=True):
        lines += [f"## {row['what']}", "", f"- code: {row['code']} (claims {row['claims']})", f"- evidence: {row['evidence']}"]
        lines += [f"- effect: {cost(finding)}"]
        lines += [f"- change: {row['advice']}"] if row["advice"] else []
        lines += [f"- command: `{row['command']}`"] if row["command"] else []
        lines.append("")
    return "\n".join(lines)


def headline(diagnosis: Diagnosis) -> str:
    """Return the number of findings, and the speed now, in one line."""
    case = diagnosis.result.case
    speed = number(diagnosis.speed, "tok/s") if math.isfinite(diagnosis.speed) else "does not fit"
    n = len(diagnosis.findings)
    return f"{case.model.name} on {case.hardware.name}: {speed}; {n} finding{'s' if n != 1 else ''}"


def cost(finding: Finding) -> str:
    """Say what a fault costs."""
    if finding.gain is None or finding.speed is None:
        return finding.problem or "not a matter of speed"
    if abs(finding.gain) < 1e-3 * finding.speed:
        return "nothing here: the speed stays the same"
    size, then = number(abs(finding.gain), "tok/s"), number(finding.speed, "tok/s")
    return f"costs {size}: {then} with the change" if finding.gain > 0 else f"the change would take {size}: {then} with it"
