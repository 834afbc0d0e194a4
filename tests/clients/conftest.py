"""Print a table at the end with each client's largest difference from the recorded results."""

from __future__ import annotations

from typing import Any

from clients import ROWS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ROWS:
        terminalreporter.section("clients: largest difference from Accelerate")
        for name, off, where in ROWS:
            terminalreporter.write_line(f"{name:44} {off:8.1e}  {where if off else 'equal'}"[:160])
