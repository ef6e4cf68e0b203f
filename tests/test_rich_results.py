"""What results show in a notebook: one short table each, with the figures that the result has, and nothing from outside."""

from __future__ import annotations

import datetime
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, small_result, write_scenario

from moesim import prices, resources
from moesim.doctor import doctor
from moesim.html_table import html_table
from moesim.report.budget import Budget, plan_name
from moesim.simulate import load_case, simulate
from moesim.sizing import size
from moesim.sizing.needs import load_needs
from moesim.sweep import plan_sweep, sweep
from moesim.sweep.space import code_identity
from moesim.sweep.store import Store
from moesim.trace import load_trace
from moesim.whatif import whatif

SWEEP = """\
name: two
base: scenario.yaml
axes: {prefetch.distance: [1, 2]}
"""


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown(result: Any) -> str:
    """The HTML of a result, checked: closed tags, one table, nothing fetched, at most a screen of rows."""
    html = str(result._repr_html_())
    tags = Tags()
    tags.feed(html)
    assert tags.open == [] and html.startswith("<table>") and not re.search(r"https?://|<script|<img", html)
    assert html.count("<tr>") <= 40
    return html


def test_a_run_and_what_it_is_made_of() -> None:
    result = small_result()
    html, data = shown(result), result.as_dict()
    assert "small: tinymoe on laptop-8gb" in html
    assert f"{data['metrics']['decode_tok_s']:.3g} tokens/s" in html and f"{data['metrics']['expert_hit_rate']:.1%}" in html
    assert "memory, vram" in html
    case = result.case
    assert f"{case.model.params_total / 1e9:.4g} B" in shown(case.model)
    assert "<th>vram bandwidth</th><td>256 GB/s</td>" in shown(case.hardware)
    assert "routed experts" in shown(case.layout.ledger) and shown(Budget(plan_name(case), case)) == shown(case.layout.ledger)
    trace = load_trace(resources.names("traces")["tinymoe"])
    assert f"<th>T={trace.n_rows} rows in {len(trace.sequences)} sequences</th>" in shown(trace)


def test_out_of_memory(tmp_path: Path) -> None:
    html = shown(simulate(load_case(write_scenario(tmp_path), ("hardware_set.tiers.vram.capacity.value=515 MiB",))))
    assert "out of memory" in html and "tokens/s" not in html


def test_a_sweep(tmp_path: Path) -> None:
    write_scenario(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        found = sweep(plan_sweep(tmp_path / "sweep.yaml"), store)
    html = shown(found)
    assert "2 points, 0 failed, 2 feasible" in html and "<th>prefetch.distance</th>" in html


def test_whatif_and_doctor(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, SMALL.replace("prefetch: {predictor: cooccurrence, distance: 1}", "io: {engine: mmap}"))
    answer = whatif(load_case(path), path, draws=0)
    best = max((o for o in answer.outcomes if o.speed == o.speed), key=lambda o: o.speed)
    assert f"<th>{best.change.name}</th><td>{best.change.group}</td><td>{best.speed:.3g}</td>" in shown(answer)
    diagnosis = doctor(path)
    assert f"{len(diagnosis.findings)} findings" in shown(diagnosis)


@pytest.mark.nightly
def test_a_sizing() -> None:
    needs, folder = load_needs("chat")
    found = size(needs, folder, prices.load_prices(), datetime.date(2026, 7, 1))
    assert found.best is not None and f"<th>{found.best.machine}</th>" in shown(found)


def test_text_is_escaped() -> None:
    assert "<b>" not in html_table("<b>", [("<b>", "<b>")], ("<b>",))
