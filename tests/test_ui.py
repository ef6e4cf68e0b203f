"""The what-if page in a real browser: its numbers are those of ``moesim run``, wrong input is explained, keys reach every control."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from small_runs import write_scenario

from moesim.cli.main import run
from moesim.ui.screen import LABELS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [name for name in ("streamlit", "playwright") if find_spec(name) is None] + ([] if CHROMIUM else ["chromium"])
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install 'moesim[ui]' playwright; apt install chromium"
)
STARTS_S, ANSWERS_MS = 60, 60_000  # a first run compiles, and the machine may be busy


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the page of the small scenario is served."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scenario = write_scenario(tmp_path_factory.mktemp("ui"))
    log = tmp_path_factory.mktemp("log") / "log"
    with log.open("w") as out:
        asked = [sys.executable, "-m", "moesim", "ui", scenario, "--port", str(port), "--no-browser"]
        server = subprocess.Popen(asked, stdout=out, stderr=out)
        try:
            yield wait_for(f"http://127.0.0.1:{port}/", server, log)
        finally:
            server.terminate()
            server.wait(10)
    assert "Traceback" not in log.read_text()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + STARTS_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return url
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the page did not start: {log.read_text()}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The loaded page; afterwards there must have been no error in the console, and no request to another machine."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, accept_downloads=True)
    page.set_default_timeout(ANSWERS_MS)
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.get_by_test_id("stMetric").first.wait_for()
    settled(page)
    yield page
    page.close()
    assert errors == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:", "about:", address.replace("http", "ws")))] == []


def settled(page: Any) -> None:
    """Wait until the script has run to its end."""
    page.wait_for_timeout(300)
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for()


def change(page: Any, label: str, value: str, at: int = 0) -> None:
    field = page.get_by_label(label, exact=True).nth(at)
    field.fill(value)
    field.press("Enter")
    settled(page)


def metric(page: Any, label: str, at: int = 0, other_than: str = "") -> str:
    """What a metric shows, once it is something else."""
    value = page.get_by_test_id("stMetric").filter(has_text=label).nth(at).get_by_test_id("stMetricValue")
    value.wait_for()
    end = time.monotonic() + ANSWERS_MS / 1000
    while value.inner_text() == other_than and time.monotonic() < end:
        page.wait_for_timeout(50)
    return str(value.inner_text())


def downloaded(page: Any, folder: Path) -> str:
    """Save the scenario that the page offers and return its path."""
    page.get_by_text("The same from the command line").first.click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the scenario").first.click()
    path = folder / "what-if.yaml"
    waiting.value.save_as(path)
    return str(path)


def run_of(scenario: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["run", scenario, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_against(page: Any, data: dict[str, Any]) -> None:
    """What the page shows is what a result says."""
    found = data["metrics"]
    assert metric(page, "Decode") == f"{found['decode_tok_s']:.3g}"
    assert metric(page, "First token") == f"{found['ttft_ms']['mean']:.3g}"
    assert metric(page, "Load waits") == f"{found['io_wait_ms_per_token']:.3g}"
    assert metric(page, "Limited by") == data["critical_path"][0]["lane"]


def test_it_loads_and_says_what_run_says(page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_against(page, run_of(write_scenario(tmp_path), capsys))
    page.get_by_text("tinymoe on laptop-8gb: fits").wait_for()
    glance, ahead = page.frame_locator("iframe").first, page.frame_locator("iframe").nth(1)
    glance.get_by_text("Lanes over time").wait_for()
    assert glance.locator(".bar").count() == 2  # vram, ram
    assert glance.locator(".lanes > svg").count() == 3  # gpu, h2d, ssd
    ahead.get_by_text("infinitely fast").first.wait_for()
    before = glance.locator(".axis span").last.inner_text()
    glance.get_by_role("button", name="zoom in").click()
    assert glance.locator(".axis span").last.inner_text() != before


def test_numbers_change_and_the_file_gives_them(page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = metric(page, "Decode")
    change(page, "ssd bandwidth (GB/s)", "14")
    drive = metric(page, "Decode", other_than=slow)
    assert float(drive) > float(slow)
    change(page, LABELS["model"], "olmoe-1b-7b")
    page.get_by_text("olmoe-1b-7b on laptop-8gb").wait_for()
    assert metric(page, "Decode", other_than=drive) != drive
    settled(page)
    data = run_of(downloaded(page, tmp_path), capsys)
    assert data["provenance"]["model"] == "olmoe-1b-7b"
    check_against(page, data)


@pytest.mark.parametrize(
    ("label", "value", "said"),
    [
        (LABELS["hardware"], "rtx-9999 + ryzen-9950x", 'did you mean "rtx-5090"'),
        (LABELS["users"], "0", "greater than or equal to 1"),
        (LABELS["hold"], "lots <b>*of* them", "lots <b>*of* them"),
    ],
)
def test_impossible_input_is_explained(label: str, value: str, said: str, page: Any) -> None:
    change(page, label, value)
    alert = page.get_by_test_id("stAlert")
    alert.get_by_text("This cannot be simulated").wait_for()
    words = alert.inner_text()
    assert said in words and "expected" in words and "got" in words and "Traceback" not in page.content()
    settled(page)
    assert page.get_by_test_id("stMetric").count() == 0


def test_what_does_not_fit_says_so(page: Any) -> None:
    change(page, "vram size (GB)", "0.54")
    page.get_by_text("Out of memory in vram").wait_for()
    page.frame_locator("iframe").first.get_by_text("too many").wait_for()


def test_every_control_is_reached_by_keys_and_has_a_name(page: Any) -> None:
    seen = set()
    name = "e => (e.getAttribute('aria-label') || (e.labels && [...e.labels].map(l => l.innerText).join(' ')) || e.innerText || '').trim()"
    page.get_by_label(LABELS["scenario"], exact=True).focus()
    for _ in range(90):
        handle = page.evaluate_handle("document.activeElement")
        text, tag = handle.evaluate(name), handle.evaluate("e => e.tagName")
        assert text or tag in ("BODY", "IFRAME", "DIV", "SECTION"), handle.evaluate("e => e.outerHTML.slice(0, 200)")
        seen.add(text)
        page.keyboard.press("Tab")
    wanted = {*LABELS.values(), "Compare two configurations", "vram size (GB)", "ssd bandwidth (GB/s)", "Try every change (takes a while)"}
    assert {label for label in wanted if not any(label in text for text in seen)} == set()


def test_two_configurations_side_by_side(page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.get_by_text("Compare two configurations").click()
    settled(page)
    page.get_by_role("tab", name="B").click()
    change(page, "ssd bandwidth (GB/s)", "14", at=1)
    slow = metric(page, "Decode", 0)
    assert float(metric(page, "Decode", 1, other_than=slow)) > float(slow)
    settled(page)
    assert page.get_by_test_id("stMetric").count() == 8
    check_against(page, run_of(write_scenario(tmp_path), capsys))
    assert page.get_by_test_id("stMetricDelta").first.inner_text().startswith("+")
    table = page.frame_locator("iframe").first
    table.get_by_text("B is the fastest").wait_for()
    assert metric(page, "Decode", 1) in table.locator("tr", has_text="decode").first.inner_text()


def test_a_dropped_config_is_a_model(page: Any) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "num_local_experts": 16, "vocab_size": 1000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    page.locator('input[type="file"]').set_input_files(
        {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(config).encode()}
    )
    page.get_by_text("dropped on laptop-8gb").wait_for()
    settled(page)
    assert page.get_by_label(LABELS["model"], exact=True).count() == 0


def test_every_change_is_tried_when_asked(page: Any) -> None:
    page.get_by_role("button", name="Try every change").click()
    page.frame_locator("iframe").nth(1).get_by_text("a perfect predictor").wait_for()


def test_a_phone_shows_the_verdict_first(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.get_by_test_id("stMetric").first.wait_for()
    box = page.get_by_test_id("stAlert").bounding_box()
    assert box["y"] < 200 and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_taken_port_is_refused(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    assert run(["ui", write_scenario(tmp_path), "--port", port]) == 2
    assert "--port: expected a free port" in capsys.readouterr().err
