"""The fixture that creates the two simulated machines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from two_hosts import HOSTS, ip


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Create two namespaces, each with its own loopback device and one end of the cable."""
    names = [f"acc{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            assert ip("netns", "add", name).returncode == 0
        made = ip(
            *("link", "add", "eth7", "netns", names[0], "type", "veth"),
            *("peer", "name", "eth7", "netns", names[1]),
        )
        if made.returncode != 0:
            pytest.skip(f"no veth pair here: {made.stderr.strip()}")
        for name, address in zip(names, HOSTS, strict=True):
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth7"),
                ("link", "set", "eth7", "up"),
                ("link", "set", "lo", "up"),
            ):
                assert ip("-n", name, *words).returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)
