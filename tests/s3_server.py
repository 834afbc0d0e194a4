"""An S3 server for tests, which moto emulates on a free local port."""

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
from typing import Any

#: Seconds to wait until the server answers, and seconds after which it exits.
STARTED, LIVES = 120.0, 1200

#: Credentials that must never appear in an output.
KEY, SECRET = "AKIAKEYOFTHETESTS", "the-secret-of-the-tests"


@contextmanager
def s3_server() -> Iterator[Mapping[str, str]]:
    """Run a server with a bucket "tests". Yields the environment variables for it."""
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
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "NO_PROXY": "127.0.0.1",
    }
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    try:
        _wait(endpoint, server)
        s3_client().create_bucket(Bucket="tests")
        yield environ
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def s3_client() -> Any:
    """Return a client of another library than the one under test."""
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")


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
    """Return a store with the settings of the environment, for `StorageSuite`."""
    from accelerate_object_store import ObjectStorage, ObjectStoreSettings

    options = json.loads(os.environ.get("ACCELERATE_OBJECT_STORE_OPTIONS", "{}"))
    return ObjectStorage(None, ObjectStoreSettings(options=options))


def damage(target: str) -> Iterator[str]:
    """Damage a checkpoint in several ways and repair it in between, for `CheckpointerSuite`."""
    bucket, _, folder = target.removeprefix("s3://").partition("/")
    client = s3_client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{folder}/")
    for one in listed["Contents"]:
        key = one["Key"]
        name = key.rpartition("/")[2]
        whole = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        middle = len(whole) // 2
        client.delete_object(Bucket=bucket, Key=key)
        yield f"without {name}"
        client.put_object(Bucket=bucket, Key=key, Body=whole[:middle])
        yield f"with half of {name}"
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        client.put_object(Bucket=bucket, Key=key, Body=changed)
        yield f"with another byte in {name}"
        client.put_object(Bucket=bucket, Key=key, Body=whole)
