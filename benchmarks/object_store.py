"""Saving to and loading from an S3 server on this machine, compared with the local disk.

    python benchmarks/object_store.py [--mb 128] [--rounds 3]

Needs accelerate-object-store and moto. Both ways take turns in one process, on one model with AdamW. moto is
a test server in Python, much slower than a real store, so the table also has the requests and the bytes that
reach the server. They don't depend on its speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

WIDTH = 1024
COUNTS = "/benchmark-counts"
#: Seconds to wait for the server, and seconds after which it exits.
STARTED, LIVES = 120.0, 1200


def serve(port: int) -> None:
    """Run moto, count its requests and bytes, and return the counts at `COUNTS`."""
    import signal

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    signal.alarm(LIVES)
    moto = DomainDispatcherApplication(create_backend_app)
    counts: Counter[str] = Counter()

    def counted(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == COUNTS:
            answer = json.dumps(counts).encode()
            counts.clear()
            start("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        method = environ["REQUEST_METHOD"]
        counts["requests"] += 1
        counts["sent"] += int(environ.get("CONTENT_LENGTH") or 0)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if method == "GET":
                lengths = [
                    int(value) for name, value in headers if name.lower() == "content-length"
                ]
                counts["received"] += sum(lengths)
            return start(status, headers, *rest)

        return moto(environ, begin)

    run_simple("127.0.0.1", port, counted, threaded=True)


@contextmanager
def server() -> Iterator[Callable[[], dict[str, int]]]:
    """Run the server in another process. Yields a function that returns the counts since its last call."""
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "NO_PROXY": "127.0.0.1",
    }

    def counts() -> dict[str, int]:
        with urllib.request.urlopen(endpoint + COUNTS, timeout=30) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    try:
        until = time.monotonic() + STARTED
        while True:
            try:
                counts()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.2)
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="benchmark")
        yield counts
    finally:
        process.kill()
        process.wait()


def trained(mb: int) -> Any:
    """Return an Accelerator with a model that has taken one step, for a run in the bucket."""
    from accelerate_core import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, project_dir="s3://benchmark/run")
    layers = max(round(mb * 1e6 / 3 / (WIDTH * WIDTH * 4)), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
    adam.step()
    adam.zero_grad()
    return accelerator


def measure(mb: int, rounds: int) -> None:
    """Save and load in turn on the disk and in the bucket, and print the medians."""
    found: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], Any]) -> None:
        counts()
        cpu, start = time.process_time(), time.perf_counter()
        action()
        took = time.perf_counter() - start
        for what, value in {
            "seconds": took,
            "CPU seconds": time.process_time() - cpu,
            **counts(),
        }.items():
            found.setdefault(f"{name}: {what}", []).append(value)

    with server() as counts, tempfile.TemporaryDirectory() as folder:
        accelerator = trained(mb)
        for _ in range(rounds):
            for where, place in {"disk": f"{folder}/step", "bucket": "step"}.items():
                note(f"save, {where}", lambda place=place: accelerator.save_state(place))
                note(f"load, {where}", lambda place=place: accelerator.load_state(place))
            note("blocked, bucket", lambda: accelerator.save_state("step", blocking=False))
            accelerator.wait_for_checkpoint()
            shutil.rmtree(f"{folder}/step")
        accelerator.end_training()
    show({name: statistics.median(values) for name, values in found.items()}, mb)


def show(middle: dict[str, float], mb: int) -> None:
    """Print one row per action and place."""
    columns = ("seconds", "CPU seconds", "requests", "sent", "received")
    table = Table(
        "", *columns, title=f"{mb} MB of weights and AdamW state; sent and received in MB"
    )
    for name in ("save, disk", "save, bucket", "load, disk", "load, bucket", "blocked, bucket"):
        cells = []
        for column in columns:
            value = middle.get(f"{name}: {column}", 0.0)
            if column in ("sent", "received"):
                value /= 1e6
            cells.append(f"{value:.2f}" if "seconds" in column else f"{value:.0f}")
        table.add_row(name, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=128, help="size of the state, weights a third")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        measure(options.mb, options.rounds)


if __name__ == "__main__":
    main()
