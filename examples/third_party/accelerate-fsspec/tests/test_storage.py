"""The conformance suite for stores, with files, memory, archives and S3."""

from __future__ import annotations

import aiohttp
import botocore.exceptions as boto
import pytest
from accelerate_fsspec import FsspecStorage

from accelerate_testing import StorageSuite


class TestFiles(StorageSuite):
    """Local files."""

    storage = "servers:storage"
    place = "file://{path}"


class TestMemory(StorageSuite):
    """Memory, which other processes cannot see."""

    storage = "servers:storage"
    place = "memory://suite/{name}"
    one_process = True


class TestZip(StorageSuite):
    """An archive, which other processes cannot see while it is built."""

    storage = "servers:storage"
    place = "zip://{path}"
    one_process = True


@pytest.mark.usefixtures("s3")
class TestS3(StorageSuite):
    """S3, emulated by moto's server."""

    storage = "servers:storage"
    place = "s3://tests/suite/{name}"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (boto.EndpointConnectionError(endpoint_url="http://s3"), True),
        (boto.ReadTimeoutError(endpoint_url="http://s3"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (OSError(16, "Please reduce your request rate."), True),
        (boto.NoCredentialsError(), False),
        (boto.ParamValidationError(report="no bucket"), False),
        (PermissionError("Forbidden"), False),
    ],
)
def test_network_errors_of_clients_are_retried(error: Exception, again: bool) -> None:
    assert FsspecStorage().is_transient(error) is again
