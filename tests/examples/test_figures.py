"""The figures of the performance page, which `benchmarks/plot.py` draws from its tables."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_plot", ROOT / "benchmarks" / "plot.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def texts(figure: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", figure.read_text(encoding="utf-8"))


def test_figures_show_the_numbers_of_the_tables(plot: ModuleType, tmp_path: Path) -> None:
    plot.draw_page(PAGE, tmp_path)
    drawn = {figure.name: texts(figure) for figure in tmp_path.glob("*.svg")}
    assert len(drawn) == 6
    stale = {name for name, shown in drawn.items() if texts(DOCS / name) != shown}
    assert stale == set(), "run: python benchmarks/plot.py"


def test_a_changed_number_changes_the_figure(plot: ModuleType, tmp_path: Path) -> None:
    changed = PAGE.replace("| one step | 300 µs | 313 µs |", "| one step | 300 µs | 317 µs |")
    plot.draw_page(changed, tmp_path)
    assert "317 µs" in texts(tmp_path / "performance_step.svg")


def test_each_figure_is_small_and_is_on_the_page_with_an_alt_text() -> None:
    shown = dict(re.findall(r"!\[([^\]]+)\]\((performance_\w+\.\w+)\)", PAGE))
    figures = [*DOCS.glob("performance_*")]
    assert {*shown.values()} == {figure.name for figure in figures}
    assert [figure.name for figure in figures if figure.stat().st_size > 60_000] == []
    assert [name for text, name in shown.items() if len(text) < 60] == []
