"""`--wheels DIR`: where `make dist` has put the wheels; without it the tests build their own."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheels", default=None, help="directory with the built wheels")
