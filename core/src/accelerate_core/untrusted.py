"""Read small files that others may have written, with limits on their size, kind and content."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

#: Bytes that a small file may have, such as a manifest or a config file.
LARGEST_FILE = 16 << 20

#: Values and keys in one file. Each needs up to 100 bytes of memory.
MOST_VALUES = 500_000


def read_limited(path: Path, limit: int = LARGEST_FILE, *, regular: bool = True) -> bytes:
    """Return the content of a small file.

    Args:
        limit: the most bytes that it may have.
        regular: refuse pipes, sockets and devices, which may never end, or block forever.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or not a regular file.
    """

    def open_at_once(name: str, flags: int) -> int:
        waiting = getattr(os, "O_NONBLOCK", 0) if regular else 0
        return os.open(name, flags | waiting)

    with open(path, "rb", opener=open_at_once) as file:
        if regular and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data


def parse_json(text: bytes | str) -> Any:
    """Parse JSON of limited size.

    Raises:
        ValueError: it is not JSON, has too many values, or is nested too deeply.
    """
    text = text.decode() if isinstance(text, bytes) else text
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_count(value: object, limit: int = 1 << 62) -> bool:
    """Return whether a value is an integer from 0 to `limit`, and not a boolean."""
    return type(value) is int and 0 <= value <= limit
