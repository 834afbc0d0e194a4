"""An accelerator for tests, in host memory: `torch.device("fake")`.

The device has kernels, streams, events, pinned memory, generators, autocast, memory statistics and
collectives, so code for accelerators runs on it unchanged. It counts and records what such code does:
kernels, copies, reads back to the host, synchronizations and collectives, in the order in which the host
issued them. It is compiled when it is first installed in an environment.

`install()` makes it this process's accelerator. In `with record() as log:`, `log.host_waits` lists the lines
that made the host wait.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from accelerate_core.plugin import ConfigurationError
from accelerate_testing.fake_device.name import NAME

__all__ = [
    "DEVICES",
    "MEMORY",
    "NAME",
    "Entry",
    "Log",
    "counts",
    "install",
    "record",
    "set_memory_limit",
]

#: Variable with the number of devices, 2 by default. Importing `accelerate_testing.fake_device.auto`
#: installs as many.
DEVICES = "ACCELERATE_TESTING_FAKE_DEVICES"
#: Variable with the bytes of memory of each device; unlimited by default.
MEMORY = "ACCELERATE_TESTING_FAKE_MEMORY"

#: Kinds of entries during which the host waits for the device.
_WAITS = ("read", "download", "synchronize")


@dataclass(frozen=True)
class Entry:
    """One request of the host to a device.

    Attributes:
        kind: "kernel", "collective", "upload" and "blocking_upload" (host to device), "download" and
            "async_download" (device to host), "device_copy", "read" (`.item()`, or an operator with a
            result of unknown size), "synchronize", "record" and "wait" (events), "record_stream",
            "pin", or "race" (two streams use the same memory without waiting for each other).
        name: the operator, the collective, or a description.
        stream: number of the stream; 0 is the device's default stream.
        bytes: size of a copy, a read, pinned memory or what a collective sends.
        where: the line of Python code that made the host wait, and the thread if it isn't the main
            one; "" for other entries.
    """

    kind: str
    name: str
    device: int
    stream: int
    bytes: int
    where: str

    def __str__(self) -> str:
        size = f", {self.bytes} bytes" if self.bytes else ""
        where = f", at {self.where}" if self.where else ""
        return f"{self.kind} {self.name} (stream {self.stream}{size}){where}"


@dataclass
class Log:
    """The recorded entries, in the order in which the host issued them. Complete after the `with` block."""

    entries: list[Entry] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Entry]:
        """Return the entries of these kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def host_waits(self) -> list[Entry]:
        """Entries during which the host waited for the device."""
        return self.of(*_WAITS)

    @property
    def races(self) -> list[Entry]:
        """Uses of memory that another stream may be using at the same time."""
        return self.of("race")


def install(devices: int | None = None, memory: int | None = None) -> None:
    """Make `fake` this process's accelerator. Calling it again has no effect.

    Args:
        devices: how many of them; by default the variable ACCELERATE_TESTING_FAKE_DEVICES, or 2.
        memory: bytes of memory of each; by default the variable ACCELERATE_TESTING_FAKE_MEMORY, or no limit.

    Raises:
        ConfigurationError: there is no C++ compiler, this process has another accelerator, or a variable
            isn't a number.
    """
    from accelerate_testing.fake_device import module

    module.install(
        _number(DEVICES, 2) if devices is None else devices,
        _number(MEMORY, 0) if memory is None else memory,
    )


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigurationError(f"{variable}={text!r} must be a whole number.")
    return int(text)


@contextmanager
def record() -> Iterator[Log]:
    """Yield a `Log` of what happens on all devices of this process while the block runs."""
    from accelerate_testing.fake_device import build

    native = build.load()
    log = Log()
    native.record(True)
    try:
        yield log
    finally:
        log.entries = [Entry(*entry) for entry in native.record(False)]


def counts() -> Counter[str]:
    """Return how often each kind of entry has happened in this process, and `KIND_bytes`."""
    from accelerate_testing.fake_device import build

    return Counter(build.load().counts())


def set_memory_limit(limit: int, device: int = 0) -> None:
    """Change the bytes that a device has; 0 means no limit. Memory in use is kept."""
    from accelerate_testing.fake_device import build

    build.load().set_memory_limit(device, limit)
