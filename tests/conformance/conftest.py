"""One S3 server for the suite of object stores. Checks that `short` leaves out run in `make soak` only."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from forked_ranks import fork_ranks
from warm_python import MORE


@pytest.fixture(autouse=True, scope="class")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the ranks of the checks. A suite's `more` names further modules to import before the fork.

    Checks in one process have new interpreters, because one of them measures what the plugin imports.
    """
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        patch.setenv(MORE, getattr(request.cls, "more", ""))
        yield


@pytest.fixture(scope="class")
def s3() -> Iterator[Mapping[str, str]]:
    """Environment variables for a server with a bucket "tests"."""
    from s3_server import s3_server

    with s3_server() as environ:
        yield environ


@pytest.fixture(scope="class")
def lighthouse() -> Iterator[str]:
    """Run a lighthouse of torchft, and return its address."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "accelerate_torchft.lighthouse", "--port", str(port)]
    # It forgets the replicas of earlier checks soon.
    command += ["--heartbeat_timeout", "1", "--join_timeout", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        short = getattr(getattr(item, "cls", None), "short", None)
        if short is not None and item.name.removeprefix("test_") not in short:
            item.add_marker(pytest.mark.soak)
