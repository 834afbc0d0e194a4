"""Checks that a suite with `short` leaves out run in `make soak` only."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        short = getattr(getattr(item, "cls", None), "short", None)
        if short is not None and item.name.removeprefix("test_") not in short:
            item.add_marker(pytest.mark.soak)
