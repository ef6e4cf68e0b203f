"""The page of ``moesim report``: one file without requests, text escaped, figures those of the result, results read from files refused well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, small_result, write_scenario

from moesim import report
from moesim.cli.main import run
from moesim.errors import InputError
from moesim.plots import MS, load_waits, middle_steps
from moesim.report import page as report_page
from moesim.report.page import Entry
from moesim.report.result_file import read_result
from moesim.text_table import number
from moesim.units import show
from moesim.whatif import whatif

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "link", "img", "br", "rect", "path", "line", "wbr"}
DOES_NOT_FIT = ("--set", "hardware_set.tiers.vram.capacity.value=515 MiB")


class Reader(HTMLParser):
    """Tags with attributes, and text; complains where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or (tag == "rect" and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.words += data + "\n"


@cache
def small_entry() -> Entry:
    result = small_result()
    return Entry(
        "small.yaml", result.as_dict(), result, whatif(result.case, "small.yaml", draws=8, quick=True), "moesim run small.yaml -o json"
    )


@cache
def small_page() -> str:
    return report_page.page_html([small_entry()])


def from_file(name: str = "r.json", **provenance: str) -> Entry:
    data = small_result().as_dict()
    data["provenance"] |= provenance
    return Entry(name, data)


def test_a_page_is_one_file_that_asks_for_nothing() -> None:
    read = Reader(small_page())
    for tag, attrs in read.tags:
        assert tag not in ("iframe", "object", "embed") and not (tag == "script" and "src" in attrs)
        for name in ("src", "href", "action", "xlink:href", "data", "srcset"):
            assert (attrs.get(name) or "data:").startswith("data:"), (tag, attrs)
    assert not re.search(r"url\((?!#)", small_page()) and "@import" not in small_page() and "http" not in small_page()
    assert len(small_page()) < 2_000_000
    assert report_page.page_html([small_entry()]) == small_page()


def test_a_page_says_what_run_says() -> None:
    words, data = Reader(small_page()).words, small_result().as_dict()
    assert report.headline(data) in words
    assert number(data["metrics"]["decode_tok_s"], "tok/s") in words and number(data["metrics"]["ttft_ms"]["mean"], "ms") in words
    for tier in data["memory"].values():
        for line in tier["lines"]:
            assert line["bytes"] == 0 or (line["name"] in words and show(line["bytes"], "bytes") in words)
    for text in data["provenance"]["assumed"] + data["provenance"]["adaptations"]:
        assert text in words
    assert data["provenance"]["scenario_hash"] in words and "moesim run small.yaml -o json" in words
    assert "one lane without limit" in words and "infinitely fast" in words


def test_bars_of_memory_are_to_scale() -> None:
    entry = small_entry()
    for name, tier in entry.data["memory"].items():
        bar = next(x for x in small_page().split('<div class="bar"') if f'aria-label="{name}:' in x[:100]).split("</div>")[0]
        widths = [float(x) for x in re.findall(r'<i class="m\d" style="width:([\d.]+)%', bar)]
        assert sum(widths) == pytest.approx(100 * tier["planned_bytes"] / tier["capacity_bytes"], abs=0.01)
        limit = re.search(r'<u style="left:([\d.]+)%', bar)
        assert limit and float(limit[1]) == pytest.approx(100 * (1 - tier["reserved_bytes"] / tier["capacity_bytes"]), abs=0.01)


def test_the_timeline_holds_every_task_of_its_steps() -> None:
    tasks = small_result().tasks
    first, last = middle_steps(tasks)
    ends = [0, *tasks.end[tasks.steps[:, 2]].tolist()]
    begin, end = ends[first], ends[last + 1]
    seen = (tasks.start < end) & (tasks.end > begin) & (tasks.end > tasks.start)
    waits = load_waits(tasks)
    stalls = (tasks.start < end) & (tasks.end > begin) & (waits[:, 1] > waits[:, 0])
    bars = [attrs for tag, attrs in Reader(small_page()).tags if tag == "rect" and "data-b" in attrs]
    assert len(bars) == int(seen.sum() + stalls.sum())
    spent = sum(float(x["data-b"]) - float(x["data-a"]) for x in bars if "stall" not in x["fill"])  # type: ignore[arg-type, operator]
    assert spent * (end - begin) * MS == pytest.approx(float((tasks.end - tasks.start)[seen].sum()) * MS, rel=1e-5)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_the_timeline_zooms_in_a_real_browser(tmp_path: Path) -> None:
    clicks = "for (const b of ['zoom=\"2\"', 'move=\"0.5\"']) document.querySelector(`[data-${b}]`).click();"
    (tmp_path / "p.html").write_text(small_page().replace("</body>", f"<script>{clicks}</script></body>"), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'user'}")
    asked = [str(CHROMIUM), *flags, "--dump-dom", (tmp_path / "p.html").as_uri()]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    ticks = [float(x) for x in re.findall(r"<span>([\d.]+)</span>", done.stdout.split('class="axis"')[1].split("</div>")[0])]
    whole = float(re.findall(r'class="lanes" data-ms="([\d.]+)"', small_page())[0])
    assert ticks[0] == pytest.approx(0.5 * whole, rel=1e-3) and ticks[-1] == pytest.approx(whole, rel=1e-3)  # the second half
    bar = re.search(r'<rect data-a="([\d.e-]+)" data-b="([\d.e-]+)" x="([\d.e-]+)"', done.stdout)
    assert bar and float(bar[3]) == pytest.approx((float(bar[1]) - 0.5) / 0.5 * 1000, abs=0.01)


def test_names_are_escaped() -> None:
    bad = '<script>alert("1")</script>&<b>'
    entry = from_file(f"{bad}.json", model=bad, hardware=bad, trace=bad)
    entry.data["memory"]["vram"]["lines"][0]["name"] = bad
    entry.data["provenance"]["assumed"].append(bad)
    for page in (report_page.page_html([entry]), report_page.page_html([entry, from_file()])):
        read = Reader(page)
        assert [tag for tag, _ in read.tags].count("script") == 1 and bad in read.words
        assert "<script>alert" not in page
    text = report_page.page_markdown([entry])
    assert "<" not in text
    assert f"| model | {bad.replace('<', '&lt;')} |" in text


def test_runs_are_compared() -> None:
    slow = from_file("slow.json")
    slow.data["metrics"]["decode_tok_s"] /= 2  # type: ignore[index]
    words = Reader(report_page.page_html([slow, small_entry()])).words
    assert "2 runs compared" in words and "small.yaml is the fastest" in words and "2 times slow.json" in words
    assert number(slow.data["metrics"]["decode_tok_s"], "tok/s") in words
    twice = Reader(report_page.page_html([small_entry(), small_entry()])).words
    assert "small.yaml (1)" in twice and "small.yaml (2)" in twice
    with pytest.raises(InputError, match="report"):
        report_page.page([])


def test_markdown_holds_the_same_tables() -> None:
    text = report_page.page_markdown([small_entry()])
    assert text.startswith(f"# {report.headline(small_entry().data)}\n") and "<div" not in text and "```bash\nmoesim run small.yaml" in text
    for heading in ("Memory", "Speed and latency", "What the time goes to", "What if", "Assumptions", "Provenance"):
        assert f"### {heading}\n" in text


def test_report_of_a_scenario_and_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, page = write_scenario(tmp_path), tmp_path / "p.html"
    assert run(["run", scenario, "-o", "json"]) == 0
    (tmp_path / "r.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert run(["report", scenario, str(tmp_path / "r.json"), "-o", str(page), "--set", "workload.output_tokens=4"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "wrote" in err
    words = Reader(page.read_text(encoding="utf-8")).words
    assert "workload.output_tokens=4 -o json" in words and "This gives the result again, where the scenario" in words
    assert run(["report", str(tmp_path / "r.json"), "-o", str(tmp_path / "p.md")]) == 0
    assert (tmp_path / "p.md").read_text(encoding="utf-8").startswith("# tinymoe on laptop-8gb: fits")


def test_a_file_gives_what_the_result_gave(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(report.run_json(small_result()), encoding="utf-8")
    assert read_result(path) == json.loads(json.dumps(small_result().as_dict()))


def test_a_run_that_does_not_fit_has_a_page(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    assert run(["report", write_scenario(tmp_path), "-o", str(page), *DOES_NOT_FIT]) == 3
    words = Reader(page.read_text(encoding="utf-8")).words
    assert "does not fit. Out of memory in vram" in words and "too many" in words


def test_a_run_of_one_token_has_a_page(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, SMALL.replace("output_tokens: 6", "output_tokens: 1"))
    assert run(["report", scenario, "-o", str(tmp_path / "p.html")]) == 0
    assert "Lanes over time" in (tmp_path / "p.html").read_text(encoding="utf-8")


def broken(change: Any) -> str:
    data = small_result().as_dict()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("not json", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected a result of moesim run"),
        ("{}", "provenance"),
        (broken(lambda d: d["metrics"].pop("itl_ms")), "metrics.itl_ms"),
        (broken(lambda d: d["memory"]["vram"].update(planned_bytes="many")), "memory.vram.planned_bytes"),
        (broken(lambda d: d["lanes"]["gpu"].update(utilisation=float("nan"))), "lanes.gpu.utilisation"),
        (broken(lambda d: d.update(metrics=None)), "together"),
        (broken(lambda d: d.update(metrics=None, lanes=None, transfers=None, critical_path=None)), "why there are none"),
    ],
)
def test_files_that_are_no_results(text: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    assert run(["report", str(path), "-o", str(tmp_path / "p.html")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and what in err and "bad.json" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["absent.json"], "No such file"),
        (["quickstart", "-o", "page.pdf"], "--output"),
        (["quickstart", "-o", "absent/page.html"], "--output"),
        ([], "Missing argument"),
    ],
)
def test_bad_usage(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", *arguments]) == 2
    assert what in capsys.readouterr().err


def test_settings_need_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(report.run_json(small_result()), encoding="utf-8")
    assert run(["report", str(tmp_path / "r.json"), "-o", str(tmp_path / "p.md"), "--set", "seed=1"]) == 2
    assert "results alone" in capsys.readouterr().err
