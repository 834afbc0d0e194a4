"""Draw the figures of `docs/performance.md`.

The bars show numbers from the page's own tables, so that text and figures agree: after changing a table,
run this script again. The curves of `performance_indices.png` need the results of `sampler_scale.py`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
OURS = "accelerate-core"
ACCELERATE = "Hugging Face Accelerate"
COLOURS = {
    "raw PyTorch": "#9aa0a6",
    "one bare collective": "#9aa0a6",
    OURS: "#1a73e8",
    ACCELERATE: "#f9ab00",
    "Lightning Fabric": "#a142f4",
}
#: Names in the headings of the tables -> names in the figures.
LONG = {"Accelerate": ACCELERATE, "Fabric": "Lightning Fabric"}
# Text stays text: files are small, and readers can search it. Equal input gives equal files.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "accelerate-core", "font.size": 10}


@dataclass(frozen=True)
class Table:
    """A table of the page: label of a row -> heading of a column -> text of the cell."""

    rows: dict[str, dict[str, str]]

    def number(self, row: str, column: str) -> str:
        """Return the first number in a cell as it is written there, or "" if there is none."""
        found = re.search(r"\d[\d,]*(\.\d+)?", self.rows[row][column])
        return found[0] if found else ""

    def row(self, start: str) -> str:
        """Return the label that starts with a text.

        Raises:
            SystemExit: no label or several labels do.
        """
        found = [label for label in self.rows if label.startswith(start)]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} rows of the table start with {start!r}: {found}")
        return found[0]


@dataclass(frozen=True)
class Group:
    """Bars below one title: the number of each contender as the page writes it, and its unit."""

    title: str
    numbers: dict[str, str]
    unit: str = ""

    def draw(self, axis: Any, place: float) -> float:
        """Draw the bars from a place on the vertical axis downwards, and return where they end."""
        for name, number in self.numbers.items():
            bar = axis.barh(place, float(number.replace(",", "")), 0.8, color=COLOURS[name])
            axis.bar_label(bar, [f"{number} {self.unit}".strip()], padding=4)
            place += 1
        return place


def read_table(page: str, section: str, corner: str) -> Table:
    """Return the table of a section whose first heading is `corner`.

    Raises:
        SystemExit: the page has no such section or table.
    """
    _, _, rest = page.partition(f"\n## {section}\n")
    body = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    for block in re.findall(r"(?:^\|.*\n?)+", body, re.MULTILINE):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        (first, *headings), _, *rows = lines
        if first == corner:
            return Table({row[0]: dict(zip(headings, row[1:], strict=True)) for row in rows})
    raise SystemExit(f"docs/performance.md has no table {corner!r} in the section {section!r}.")


def contenders(table: Table, row: str, unit: str, title: str = "") -> Group:
    """Return a group with a bar for each column that has a number."""
    numbers = {LONG.get(column, column): table.number(row, column) for column in table.rows[row]}
    return Group(title or row, {name: text for name, text in numbers.items() if text}, unit)


def draw_bars(
    groups: Sequence[Group], title: str, path: Path, *, line: float | None = None
) -> None:
    """Draw groups of bars with one scale.

    Args:
        line: a value to mark with a vertical line, such as 1 if all values are ratios.
    """
    rows = sum(len(group.numbers) + 1 for group in groups)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5.4, 0.5 + 0.23 * rows), layout="constrained")
        place = 0.0
        for group in groups:
            where = axis.get_yaxis_transform()
            axis.text(0, place, group.title, va="center", transform=where)
            place = group.draw(axis, place + 1) + 0.3
        if line is not None:
            axis.axvline(line, color="#5f6368", linewidth=0.8, linestyle=":", zorder=0)
        tidy(axis)
        save(figure, title, groups, path)


def draw_panels(groups: Sequence[Group], title: str, path: Path) -> None:
    """Draw groups of bars with different units, each in a panel with its own scale."""
    size = 5.4, 0.6 + 0.75 * len(groups)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(groups), 1, figsize=size, layout="constrained")
        for axis, group in zip(axes, groups, strict=True):
            group.draw(axis, 0)
            axis.set_title(group.title, loc="left", fontsize=10, pad=2)
            tidy(axis)
        save(figure, title, groups, path)


def tidy(axis: Any) -> None:
    """Leave room for the labels, and remove axes: every bar has its number."""
    axis.invert_yaxis()
    axis.margins(x=0.22)
    axis.set_axis_off()


def save(figure: Any, title: str, groups: Sequence[Group], path: Path) -> None:
    """Add a title and a legend, and write the figure."""
    names = list(dict.fromkeys(name for group in groups for name in group.numbers))
    figure.suptitle(title, x=0, ha="left", fontsize=10, fontweight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    how = {"ncols": 2, "fontsize": 9, "frameon": False, "handlelength": 1}
    figure.legend(handles, names, loc="outside lower left", **how)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(f"drawn: {path}")


def draw_page(page: str, out: Path) -> None:
    """Draw all figures whose numbers are in the page's tables."""
    step = read_table(page, "Training step", "median time")
    draw_bars(
        [contenders(step, row, "µs") for row in step.rows],
        "Time of a training step on the CPU (shorter is better)",
        out / "performance_step.svg",
    )
    collectives = read_table(page, "Collectives", "median time")
    draw_bars(
        [contenders(collectives, row, "ms", row.replace("`", "")) for row in collectives.rows],
        "Time of a collective (shorter is better)",
        out / "performance_collectives.svg",
    )
    loading = read_table(page, "Loading data", "median time")
    draw_bars(
        [contenders(loading, row, "µs") for row in loading.rows],
        "Time to load a batch (shorter is better)",
        out / "performance_loading.svg",
    )
    draw_bars(
        checkpoint_groups(read_table(page, "Checkpoints", "compared with the raw way")),
        "Time compared with safetensors and torch.save (shorter is better)",
        out / "performance_checkpoints.svg",
        line=1,
    )
    draw_scale(
        read_table(page, "Thousands of ranks", "rank 0, by ranks"), out / "performance_scale.svg"
    )
    draw_panels(
        model_groups(read_table(page, "Models on disk", "8 GB")),
        "A model of 8 GB with all layers on disk (shorter is better)",
        out / "performance_models.svg",
    )


def checkpoint_groups(table: Table) -> list[Group]:
    """Return a group for saving and for loading each size."""
    groups = []
    for verb in ("save", "load"):
        rows = {OURS: f"`{verb}_state`", ACCELERATE: f"Accelerate's {verb}, without checksums"}
        for size in table.rows[rows[OURS]]:
            numbers = {name: table.number(row, size) for name, row in rows.items()}
            groups.append(Group(f"{verb} {size}", numbers))
    return groups


def model_groups(table: Table) -> list[Group]:
    """Return a group for each row that is shown, with the unit of its numbers."""
    shown = {
        "load to the CPU": "s",
        "load to the disk": "s",
        "written to disk": "MB",
        "warm forward, compared with one from memory": "",
    }
    return [contenders(table, table.row(start), unit, start) for start, unit in shown.items()]


def draw_scale(table: Table, path: Path) -> None:
    """Draw a line for each row, by the number of ranks in the headings."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(5.4, 2.8), layout="constrained")
        for row, cells in table.rows.items():
            ranks = [int(column.replace(",", "")) for column in cells]
            values = [float(table.number(row, column)) for column in cells]
            axis.plot(ranks, values, "o-", label=row, markersize=3)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, list(cells))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("ranks", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
        title = "Seconds of CPU time on rank 0 (lower is better)"
        figure.suptitle(title, x=0, ha="left", fontsize=10, fontweight="bold")
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
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
    """Draw the figures from the page, and those whose results exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the figures")
    options = parser.parse_args()
    draw_page((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), options.out)
    scale = options.results / "sampler_scale.json"
    if scale.exists():
        draw_indices(
            json.loads(scale.read_text())["results"], options.out / "performance_indices.png"
        )


if __name__ == "__main__":
    main()
