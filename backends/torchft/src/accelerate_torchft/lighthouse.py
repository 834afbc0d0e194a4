"""Run a lighthouse, which finds out which replicas are alive, until stdin closes."""

from __future__ import annotations

import argparse
import sys

from torchft.coordination import LighthouseServer


def main(arguments: list[str] | None = None) -> None:
    """Start the server, and wait until the process that started this one is gone."""
    parser = argparse.ArgumentParser(prog="accelerate_torchft.lighthouse")
    parser.add_argument("--port", type=int, default=29510)
    parser.add_argument("--min_replicas", type=int, default=1)
    parser.add_argument("--join_timeout", type=float, default=60.0)
    parser.add_argument("--heartbeat_timeout", type=float, default=5.0)
    given = parser.parse_args(arguments)
    server = LighthouseServer(
        bind=f"[::]:{given.port}",
        min_replicas=given.min_replicas,
        join_timeout_ms=int(given.join_timeout * 1000),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(given.heartbeat_timeout * 1000),
    )
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
