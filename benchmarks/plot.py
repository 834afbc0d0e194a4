"""Draw the figures of the other scripts as one PNG."""

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
    "one bare collective": "#9aa0a6",
    "accelerate-core": "#1a73e8",
    "Hugging Face Accelerate": "#f9ab00",
    "Lightning Fabric": "#a142f4",
}


def bars(axis: Any, result: dict[str, Any]) -> None:
    names = list(result["rounds"])
    values = [median(result["rounds"][name]) for name in names]
    bars = axis.barh(names, values, color=[COLOURS.get(name, "#5f6368") for name in names])
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=7)
    axis.set_title(f"{result['title']}\nµs per {result['unit']}", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.spines[["top", "right"]].set_visible(False)


def lines(axis: Any, results: list[dict[str, Any]], kind: str) -> None:
    rows = [r for r in results if r["title"].startswith(f"own batch {kind}")]
    worlds = [int(row["title"].rsplit(", ", 1)[1].split()[0]) for row in rows]
    for name in rows[0]["rounds"]:
        values = [median(row["rounds"][name]) for row in rows]
        axis.plot(worlds, values, "o-", label=name, color=COLOURS.get(name), markersize=3)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"own batch of indices, {kind}\nµs, by number of processes", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=6)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/performance.png"))
    options = parser.parse_args()
    loaded = {path.stem: json.loads(path.read_text()) for path in options.results.glob("*.json")}
    plain = [
        result
        for name in ("step_overhead", "collectives", "loaders")
        for result in loaded.get(name, {"results": []})["results"]
    ]
    scale = loaded.get("sampler_scale", {"results": []})["results"]
    plain += [result for result in scale if "skipping" in result["title"]]
    panels = len(plain) + (2 if scale else 0)
    rows = -(-panels // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 2.3 * rows), layout="constrained")
    spots = list(axes.flat)
    for axis, result in zip(spots, plain, strict=False):
        bars(axis, result)
    for axis, kind in zip(
        spots[len(plain) :], ("in order", "shuffled") if scale else (), strict=False
    ):
        lines(axis, scale, kind)
    for axis in spots[panels:]:
        axis.axis("off")
    figure.savefig(options.out, dpi=110)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    main()
