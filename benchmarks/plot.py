"""Draw the two figures of `docs/performance.md` from the results of the other scripts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "raw PyTorch": "#9aa0a6",
    "accelerate-core": "#1a73e8",
    "Hugging Face Accelerate": "#f9ab00",
    "Lightning Fabric": "#a142f4",
}


def draw_step(result: dict[str, Any], path: Path) -> None:
    """Draw the time of one training step with each library as a bar."""
    medians = sorted(
        (median(rounds), name) for name, rounds in result["rounds"].items() if name in COLOURS
    )
    names = [name for _, name in medians]
    figure, axis = plt.subplots(figsize=(6.5, 2.1), layout="constrained")
    bars = axis.barh(
        names, [value for value, _ in medians], color=[COLOURS[name] for name in names]
    )
    axis.bar_label(bars, [f"{value:,.0f} µs" for value, _ in medians], padding=4)
    axis.set_title("Time of one training step on the CPU (shorter is better)", fontsize=10)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


def draw_indices(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the time for a rank's next batch of indices by the number of processes."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), layout="constrained")
    for axis, kind in zip(axes, ("in order", "shuffled"), strict=True):
        rows = [row for row in results if row["title"].startswith(f"own batch {kind}")]
        worlds = [int(row["title"].rsplit(", ", 1)[1].split()[0]) for row in rows]
        for name in rows[0]["rounds"]:
            values = [median(row["rounds"][name]) for row in rows]
            axis.plot(worlds, values, "o-", label=name, color=COLOURS.get(name), markersize=3)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"own batch of indices, {kind}\nµs, by number of processes", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    print(f"drawn: {path}")


def main() -> None:
    """Draw the figures whose results exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the figures")
    options = parser.parse_args()
    loaded = {path.stem: json.loads(path.read_text()) for path in options.results.glob("*.json")}
    if "step_overhead" in loaded:
        step = loaded["step_overhead"]["results"][0]
        draw_step(step, options.out / "performance_step.svg")
    if "sampler_scale" in loaded:
        draw_indices(loaded["sampler_scale"]["results"], options.out / "performance_indices.png")


if __name__ == "__main__":
    main()
