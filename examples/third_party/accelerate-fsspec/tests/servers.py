"""An S3 server for tests, on a free local port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import fsspec

#: Seconds to wait until the server answers, and seconds after which it exits.
STARTED, LIVES = 60.0, 900


@contextmanager
def s3_server() -> Iterator[Mapping[str, str]]:
    """Run moto's server with a bucket "tests". Yields the environment variables for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "import signal, sys; from moto.server import main; "
        f"signal.alarm({LIVES}); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    environ = {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "ACCELERATE_FSSPEC_OPTIONS": json.dumps({"endpoint_url": endpoint}),
    }
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        _wait(endpoint, server)
        fsspec.filesystem("s3", endpoint_url=endpoint).mkdir("tests")
        yield environ
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + STARTED
    while True:
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.05)


def storage() -> object:
    """Return a store with the options in the environment, as the plugin creates it."""
    from accelerate_fsspec import FsspecStorage

    return FsspecStorage(None, json.loads(os.environ.get("ACCELERATE_FSSPEC_OPTIONS", "{}")))
