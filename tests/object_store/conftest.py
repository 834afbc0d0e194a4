"""One S3 server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("moto")
pytest.importorskip("obstore")


@pytest.fixture(scope="session")
def s3() -> Iterator[Mapping[str, str]]:
    """Environment variables for a server with a bucket "tests"."""
    from s3_server import s3_server

    with s3_server() as environ:
        yield environ
