"""The table at the end: how far each client is from what is recorded."""

from __future__ import annotations

from typing import Any

import pytest

Row = tuple[str, float, str]
ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section("clients: largest difference from the original")
        for name, off, where in rows:
            terminalreporter.write_line(f"{name:44} {off:8.1e}  {where if off else 'equal'}"[:160])
