"""Recorded memory beside a ledger: what each kind of record says, and which lines of the plan it covers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.llama.flags import to_scenario
from moesim.llama.options import parse_command
from moesim.memory_log import MIB, compare
from moesim.simulate import load_case

LOG = """\
load_tensors:   CPU_Mapped model buffer size =  100.00 MiB
load_tensors:   CPU_Mapped model buffer size =  200.00 MiB
load_tensors:        CUDA0 model buffer size =  {gpu:.2f} MiB
llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB
llama_context:      CUDA0 compute buffer size =   90.00 MiB
llama_context:      CUDA0 compute buffer size =   110.00 MiB
llama_context:  CUDA_Host  output buffer size =     0.58 MiB
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    said = parse_command("llama-cli -m olmoe-1b-7b-Q8_0.gguf -ncmoe 4 -c 4096")
    path.write_text(yaml.safe_dump(to_scenario(said, "laptop-8gb").scenario))
    return path


def test_buffers_of_a_loader_stand_beside_their_lines(scenario: Path, tmp_path: Path) -> None:
    layout = load_case(scenario).layout
    planned = sum(x.bytes for x in layout.ledger.lines if x.tier == "vram" and x.pool in ("weights", "experts"))
    log = tmp_path / "log.txt"
    log.write_text(LOG.format(gpu=planned / MIB / 1.1))
    found = {item.recorded.name: item for item in compare(layout, log)}
    assert found["CUDA0 model buffer"].planned_bytes == planned and found["CUDA0 model buffer"].error == pytest.approx(0.1, abs=1e-4)
    assert found["CPU_Mapped model buffer"].recorded.bytes == 300 * MIB and "every page" in found["CPU_Mapped model buffer"].note
    assert found["CUDA0 KV buffer"].recorded.bytes == 80 * MIB  # two caches add up
    assert found["CUDA0 KV buffer"].planned_bytes == layout.kv_bytes("vram", 4096)
    assert found["CUDA0 compute buffer"].recorded.bytes == 110 * MIB  # reserved twice, the larger counts
    assert found["CUDA_Host output buffer"].lines == () and found["CUDA_Host output buffer"].error is None


def test_samples_of_a_card_are_compared_with_all_that_is_planned_there(scenario: Path, tmp_path: Path) -> None:
    layout = load_case(scenario).layout
    log = tmp_path / "smi.csv"
    log.write_text("timestamp, index, memory.used [MiB]\n2026/01/01, 0, 500 MiB\n2026/01/01, 0, 7000 MiB\n2026/01/01, 0, 6000 MiB\n")
    (item,) = compare(layout, log)
    assert item.recorded.bytes == 7000 * MIB
    assert item.planned_bytes == layout.ledger.planned_bytes("vram") + layout.capacities["vram"].reserved_bytes
    log.write_text("memory.used [MiB]\n7000\n")
    assert compare(layout, log)[0].recorded.bytes == 7000 * MIB


def test_samples_without_their_header_are_read_where_they_say_enough(scenario: Path, tmp_path: Path) -> None:
    layout, log = load_case(scenario).layout, tmp_path / "smi.csv"
    for text in ("0, 500 MiB\n0, 7000 MiB\n", "500 MiB\n7000 MiB\n", "2026/01/01 10:00:00.000, 0, 7000 MiB\n"):
        log.write_text(text)
        (item,) = compare(layout, log)
        assert (item.recorded.bytes, item.recorded.tier) == (7000 * MIB, "vram")
    for text in ("7000 MiB, 8188 MiB\n", "0, 45, 7000 MiB\n", "0, 7000 MiB\n7000 MiB, 0\n"):
        log.write_text(text)
        with pytest.raises(InputError, match="record with the header"):
            compare(layout, log)


def test_weights_are_read_where_the_loader_does_not_call_them_a_model(scenario: Path, tmp_path: Path) -> None:
    """As ik_llama.cpp and older llama.cpp print them."""
    log = tmp_path / "log.txt"
    log.write_text(
        "llm_load_tensors:        CPU buffer size =  100.00 MiB\nllm_load_tensors:      CUDA0 buffer size = 13857.55 MiB\n"
        "llama_kv_cache_init:      CUDA0 KV buffer size =    64.00 MiB\nllama_new_context_with_model:  CUDA_Host  output buffer size = 0.58 MiB\n"
    )
    found = {item.recorded.name: item for item in compare(load_case(scenario).layout, log)}
    assert set(found) == {"CPU model buffer", "CUDA0 model buffer", "CUDA0 KV buffer", "CUDA_Host output buffer"}
    assert found["CUDA0 model buffer"].recorded.bytes == round(13857.55 * MIB) and found["CUDA0 model buffer"].planned_bytes > 0


def test_samples_of_a_process_are_compared_with_main_memory(scenario: Path, tmp_path: Path) -> None:
    layout = load_case(scenario).layout
    log = tmp_path / "rss.csv"
    log.write_text("time,bytes\n0,100\n1,3000000000\n2,2000000000\n")
    (item,) = compare(layout, log)
    assert (item.recorded.tier, item.recorded.bytes, item.planned_bytes) == ("ram", 3_000_000_000, layout.ledger.planned_bytes("ram"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing\n", "none of the known kinds"),
        ("index, memory.used [MiB]\n0, n/a\n", "smi.csv:2"),
        ("index, memory.used [MiB]\n3, 100 MiB\n", "one of the machine's 1"),
        ("index, memory.used [MiB]\n", "at least one sample"),
        ("time,bytes\n0,many\n", "a number of bytes last"),
        ("CUDA1 KV buffer size = 3.00 MiB\n", "number 1"),
    ],
)
def test_broken_records_are_refused(scenario: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "smi.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        compare(load_case(scenario).layout, path)


@pytest.mark.parametrize("form", ["text", "md", "json", "csv"])
def test_the_command_prints_every_line(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG.format(gpu=4000.0))
    assert run(["budget", str(scenario), "--against", str(log), "-o", form]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("CUDA0 model buffer", "weights: attention", "routed experts"))
    if form == "json":
        assert {"name", "tier", "recorded_bytes", "planned_bytes", "lines", "error", "note", "reserved_bytes"} == set(
            json.loads(out)["compared"][0]
        )
