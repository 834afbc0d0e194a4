"""How notebooks and terminals show an Accelerator and settings."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from accelerate_core import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs, settings


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True, mixed_precision="bf16")
    yield made
    made.end_training()


def html_rows(shown: object) -> list[list[str]]:
    """Return the cells of the HTML for notebooks, parsed as XML to check that all tags are closed."""
    table = ElementTree.fromstring(shown._repr_html_())
    assert table.findtext("caption") == type(shown).__name__
    return [[cell.text or "" for cell in row] for row in table.iter("tr")]


def printed(shown: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue().splitlines()


def test_accelerator_html_shows_values_and_their_sources(accelerator) -> None:
    rows = html_rows(accelerator)
    assert rows[0] == ["", "value", "from"]
    assert ["rank", "0 of 1", "not started by a launcher"] in rows
    assert ["device", "cpu", ""] in rows
    assert ["mixed_precision", "'bf16'", "constructor argument mixed_precision"] in rows
    assert {row[0] for row in rows} >= {"plugin backend", "plugin precision"}
    explained = accelerator.explain().splitlines()
    assert "mixed_precision = 'bf16'  (constructor argument mixed_precision)" in explained
    for name, value, origin in rows[3:]:  # the same values as in explain()
        assert f"{name} = {value}  ({origin})" in explained


def test_accelerator_repr_is_one_line(accelerator) -> None:
    assert repr(accelerator) == (
        f"Accelerator(backend={accelerator.backend.name}, mixed_precision=bf16, num_processes=1, "
        "process_index=0, device=cpu)"
    )


def test_repr_works_on_an_uninitialised_accelerator() -> None:
    """Debuggers call repr() during construction."""
    assert "backend=None" in repr(Accelerator.__new__(Accelerator))


@pytest.mark.parametrize("width", [40, 80])
def test_printed_setup_fits_a_terminal(accelerator, width: int) -> None:
    lines = printed(accelerator, width)
    assert max(map(len, lines)) <= width
    assert "'bf16'" in "".join(lines)
    assert "…" not in "".join(lines)


def test_settings_repr_shows_values_that_were_passed() -> None:
    rows = html_rows(DataLoaderConfiguration(split_batches=True))
    assert ["split_batches", "True", "DataLoaderConfiguration(split_batches=...)"] in rows
    assert ["even_batches", "True", "default"] in rows
    assert "split_batches" in "".join(printed(DataLoaderConfiguration(), 80))


def test_settings_values_are_escaped_in_html() -> None:
    @settings(env_prefix="SHOWN_")
    class Mine:
        text: str = "<b>&"

    assert html_rows(Mine()) == [["", "value", "from"], ["text", "'<b>&'", "default"]]
    assert "<b>" not in Mine()._repr_html_()
    assert ["backend", "'gloo'", "InitProcessGroupKwargs(backend=...)"] in html_rows(
        InitProcessGroupKwargs(backend="gloo")
    )
