"""The store by itself: files, memory, an archive and S3."""

from __future__ import annotations

import aiohttp
import botocore.exceptions as boto
import pytest
from accelerate_fsspec import FsspecStorage

from accelerate_testing import StorageSuite


class TestFiles(StorageSuite):
    """Files of this machine."""

    storage = "servers:storage"
    place = "file://{path}"


class TestMemory(StorageSuite):
    """Memory, which other processes do not see."""

    storage = "servers:storage"
    place = "memory://suite/{name}"
    one_process = True


class TestZip(StorageSuite):
    """An archive, which is built where other processes do not see it."""

    storage = "servers:storage"
    place = "zip://{path}"
    one_process = True


@pytest.mark.usefixtures("s3")
class TestS3(StorageSuite):
    """S3, as moto's server has it."""

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
def test_errors_of_clients_are_tried_again_if_the_network_failed(
    error: Exception, again: bool
) -> None:
    assert FsspecStorage().is_transient(error) is again
