"""One S3 server for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest


@pytest.fixture(scope="session")
def s3() -> Iterator[Mapping[str, str]]:
    """Environment variables for a server with a bucket "tests"."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from servers import s3_server

    with s3_server() as environ:
        yield environ
