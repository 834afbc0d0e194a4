"""One S3 server for each file: its variables must not reach other tests, and it exits after a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("moto")
pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def s3() -> Iterator[Mapping[str, str]]:
    """Environment variables for a server with a bucket "tests"."""
    from s3_server import s3_server

    with s3_server() as environ:
        yield environ
