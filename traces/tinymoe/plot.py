"""Draws curve.png from curve.csv: bits per byte of training and held-out text over the tokens seen.

    python plot.py [--folder FOLDER]

Needs matplotlib, which nothing else in this folder does.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot: no backend to choose, no screen needed


def read_curve(path: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(million tokens, bits per byte) of the training text and of the held-out text."""
    train, heldout = [], []
    with open(path, encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            tokens = int(row["tokens"]) / 1e6
            if row["train_bits_per_byte"]:  # empty before the first step
                train.append((tokens, float(row["train_bits_per_byte"])))
            heldout.append((tokens, float(row["heldout_bits_per_byte"])))
    return train, heldout


def draw(folder: Path) -> None:
    """Read `folder`/curve.csv, write `folder`/curve.png."""
    train, heldout = read_curve(folder / "curve.csv")
    figure = Figure(figsize=(7, 4), dpi=110)
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), marker="o", markersize=3, label="training text, mean since the last point")
    axes.plot(*zip(*heldout, strict=True), marker="s", markersize=3, label="held-out text, mean of five domains")
    last_x, last_y = heldout[-1]
    axes.annotate(f"{last_y:.2f}", (last_x, last_y), textcoords="offset points", xytext=(-4, -14), ha="right")
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("tinymoe: training curve")
    figure.tight_layout()
    figure.savefig(folder / "curve.png", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the training curve")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    draw(parser.parse_args().folder)


if __name__ == "__main__":
    main()
