"""The table of mutants equals what is registered, and what runs say."""

from __future__ import annotations

import pytest
from mutant_table import ABORTS, CHECKS, measured, read_table

TABLE = read_table()


def test_table_has_every_mutant_and_its_check() -> None:
    assert {name: row[0] for name, row in TABLE.items()} == CHECKS


@pytest.mark.soak  # test_mutants.py checks the same mutants; this is about the text of their README
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("debug", [False, True], ids=["ordinary", "debug mode"])
def test_runs_say_what_the_table_says(debug: bool) -> None:
    """Mutants about which runs say nothing are left out, because they only take time."""
    said = {name: row[1 + debug] for name, row in TABLE.items() if row[1 + debug] != "nothing"}
    assert len(said) > 20
    found = measured(list(said), debug)
    for name, note in ABORTS.items():
        assert found.pop(name) in ("the process dies", said.pop(name).removesuffix(note))
    assert found == said
