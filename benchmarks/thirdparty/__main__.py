"""llama.cpp on this machine, as a folder that ``moesim backtest`` reads.

    python -m benchmarks.thirdparty OUT --profile measured.yaml [--models FOLDER] [--only NAME]

Needs ``pip install xllamacpp==2026.10.11549 gguf`` and an idle machine; takes about twenty minutes and 12 GB for the models, which are made
when they are not there. Of the machine, ``--profile`` is what ``moesim calibrate`` found of its memory and drive; what the engine's kernels
do is probed on models of other shapes than those that are predicted (OUT/probe.json). A row that was measured is kept in OUT/measured.jsonl,
and not measured again. Prints measured and predicted side by side; for more:

    moesim backtest OUT --cold; moesim backtest OUT --warm
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.thirdparty.folder import write_folder
from benchmarks.thirdparty.measure import Asked, chances
from benchmarks.thirdparty.models import SHAPES, write
from benchmarks.thirdparty.probe import measured, probe
from benchmarks.thirdparty.report import report


@dataclass(frozen=True)
class Row:
    """One configuration of the suite. ``limit`` is a share of the model's bytes, 0 for none."""

    name: str
    shape: str
    quant: str
    limit: float = 0.0
    threads: int = 1
    depth: int = 0
    kv: str = "f16"
    flash: bool | None = None
    repack: bool = True
    prompt: int = 0


SUITE = (
    Row("wide Q4_0", "wide-qwen3moe", "Q4_0"),
    Row("wide Q4_0, 2 threads", "wide-qwen3moe", "Q4_0", threads=2),
    Row("wide Q4_0, deep", "wide-qwen3moe", "Q4_0", depth=2048),
    Row("wide Q4_0, deep, no flash attention", "wide-qwen3moe", "Q4_0", depth=2048, flash=False),
    Row("wide Q8_0", "wide-qwen3moe", "Q8_0"),
    Row("wide Q8_0, 2 threads", "wide-qwen3moe", "Q8_0", threads=2),
    Row("fine Q4_0", "fine-qwen3moe", "Q4_0"),
    Row("fine Q4_0, deep", "fine-qwen3moe", "Q4_0", depth=4096),
    Row("fine Q8_0, deep, 2 threads", "fine-qwen3moe", "Q8_0", depth=1024, threads=2),
    Row("fine F16", "fine-qwen3moe", "F16"),
    Row("flat Q4_0", "flat-olmoe", "Q4_0"),
    Row("flat Q4_0, deep", "flat-olmoe", "Q4_0", depth=2048),
    Row("flat Q8_0", "flat-olmoe", "Q8_0"),
    Row("flat Q8_0, deep, cache in Q8_0", "flat-olmoe", "Q8_0", depth=2048, kv="q8_0"),
    Row("flat Q8_0, 2 threads", "flat-olmoe", "Q8_0", threads=2),
    Row("wide Q4_0, prompt", "wide-qwen3moe", "Q4_0", prompt=512),
    Row("fine Q8_0, prompt, 2 threads", "fine-qwen3moe", "Q8_0", prompt=512, threads=2),
    Row("flat Q8_0, prompt", "flat-olmoe", "Q8_0", prompt=256),
    Row("fine Q8_0, memory 0.9", "fine-qwen3moe", "Q8_0", limit=0.9, repack=False),
    Row("fine Q8_0, memory 0.75", "fine-qwen3moe", "Q8_0", limit=0.75, repack=False),
    Row("fine Q8_0, memory 0.6", "fine-qwen3moe", "Q8_0", limit=0.6, repack=False),
    Row("flat Q4_0, memory 0.75", "flat-olmoe", "Q4_0", limit=0.75, repack=False),
    Row("wide Q4_0, memory 0.8", "wide-qwen3moe", "Q4_0", limit=0.8, repack=False),
    Row("flat Q8_0, memory 0.65", "flat-olmoe", "Q8_0", limit=0.65, repack=False),
)


def run(row: Row, model: Path) -> dict[str, Any]:
    """Measure one row in a process of its own."""
    limit = round(model.stat().st_size * row.limit)
    context = -(-(row.depth + max(row.prompt, 64)) // 1024) * 1024
    shorter: dict[str, int] = {"tokens": 120, "repeats": 1} if limit else {"repeats": 2} if row.prompt or row.depth else {}
    asked = Asked(
        str(model), row.threads, row.depth, context, 512, row.kv, row.flash, row.repack, prompt=row.prompt, limit_bytes=limit, **shorter
    )
    shape = SHAPES[row.shape]
    found = {"bytes": model.stat().st_size, "chances": chances(str(model), shape.top_k, shape.experts)}
    return asdict(row) | asdict(asked) | found | measured(asked)


def main() -> None:
    """Measure what is missing, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "moesim-thirdparty")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.models.mkdir(parents=True, exist_ok=True)
    probe_file, log = asked.out / "probe.json", asked.out / "measured.jsonl"
    if not probe_file.exists():
        probe_file.write_text(json.dumps(probe(asked.models, lambda text: print(text, file=sys.stderr)), indent=1), encoding="utf-8")
    probed = json.loads(probe_file.read_text(encoding="utf-8"))
    found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    known = {entry["name"] for entry in found}
    for number, row in enumerate(SUITE, start=1):
        if row.name in known or asked.only not in row.name:
            continue
        model = asked.models / f"{row.shape}-{row.quant}.gguf"
        if not model.exists():
            write(SHAPES[row.shape], row.quant, model)
        entry = run(row, model)
        found.append(entry)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(
            f"{number} of {len(SUITE)} {row.name}: {1e3 * entry['cpu_s']:.1f} ms CPU, {1e3 * entry['wall_s']:.1f} ms wall", file=sys.stderr
        )
    write_folder(asked.out, found, asked.profile, probed)
    print(report(asked.out))


if __name__ == "__main__":
    main()
