"""One S3 server for the suite of object stores. Checks that `short` leaves out run in `make soak` only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest


@pytest.fixture(scope="class")
def s3() -> Iterator[Mapping[str, str]]:
    """Environment variables for a server with a bucket "tests"."""
    from s3_server import s3_server

    with s3_server() as environ:
        yield environ


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        short = getattr(getattr(item, "cls", None), "short", None)
        if short is not None and item.name.removeprefix("test_") not in short:
            item.add_marker(pytest.mark.soak)
