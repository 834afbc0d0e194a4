"""Find machine 0 before torch's rendezvous does, which waits for minutes and says nothing."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from accelerate_core.errors import ConfigurationError
from accelerate_launch.plan import DEFAULT_PORT

#: Seconds for a name service that does not answer.
_RESOLVE = 5.0
#: Seconds after which a machine that does not answer at all is taken for a wrong address.
UNANSWERED = 6.0
#: Seconds in which a connection to itself reaches this machine.
_SELF = 5.0
#: Seconds without a listener after which a waiting machine says that it waits.
_QUIET = 2.0
#: Per rendezvous backend: the key of `rdzv_conf` for how long to wait, and torch's default for it.
_TIMEOUTS = {"static": ("timeout", 900.0), "c10d": ("join_timeout", 600.0)}


@dataclass(frozen=True)
class MachineZero:
    """Where machine 0 listens.

    Attributes:
        source: where host and port came from, for messages.
        conf: settings of the rendezvous, as in `rdzv_conf`.
    """

    host: str
    port: int
    source: str
    backend: str
    conf: Mapping[str, Any]

    def __str__(self) -> str:
        return f"machine 0 at {self.host}, port {self.port} ({self.source})"


def find_machine_0(machine: MachineZero, *, is_machine_0: bool | None = None) -> None:
    """Return once the rendezvous can start: machine 0 listens, or this is machine 0.

    A machine that is up and does not listen yet is waited for as long as `rdzv_conf` says: `timeout`
    for static (default 900 seconds), `join_timeout` for c10d (600). A machine that does not answer is
    waited for only if `rdzv_conf` has that key, else the address is taken to be wrong.

    Args:
        is_machine_0: whether this machine opens the port; None finds out by its addresses.

    Raises:
        ConfigurationError: the name does not resolve, or nothing answered in time.
    """
    check_resolves(machine.host, machine.port, machine.source)
    if machine.backend not in _TIMEOUTS:
        return  # a service of its own, such as etcd, whose client has time limits
    local = is_here(machine.host)
    if is_machine_0 is None:
        is_machine_0 = local
    if not is_machine_0:
        _wait_for_listener(machine)
    elif not local and not _reaches_itself(machine):
        raise ConfigurationError(
            f"This is {machine}, but {socket.gethostname()} cannot reach itself under that address. "
            "Give the address under which the other machines reach it."
        )


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; the host of an IPv6 address may be in brackets."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        return endpoint.strip("[]"), DEFAULT_PORT
    return host.strip("[]"), int(port)


def check_resolves(host: str, port: int, source: str) -> None:
    """Raise ConfigurationError if a host name does not resolve."""
    try:
        resolve(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"The host name {host!r} of machine 0, port {port} ({source}), does not resolve on "
            f"{socket.gethostname()}: {reason}. Give a name that every machine resolves, or an IP "
            "address."
        ) from None


def resolve(host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[Any]:
    """Return what `getaddrinfo` does, within a few seconds.

    Raises:
        OSError: the name is not known, or no name service answers.
    """
    found: list[Any] = []
    problems: list[OSError] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=kind))
        except UnicodeError:
            problems.append(OSError(errno.EINVAL, "it is not a valid host name"))
        except OSError as error:
            problems.append(error)

    asking = threading.Thread(target=ask, name="accelerate-resolve", daemon=True)
    asking.start()
    asking.join(_RESOLVE)
    if found:
        return found
    if problems:
        raise problems[0]
    raise TimeoutError(errno.ETIMEDOUT, f"no name service answered within {_RESOLVE:.0f} s")


def is_here(host: str) -> bool:
    """Tell whether a host name or address is one of this machine; an unknown name is not."""
    try:
        found = resolve(host, 0)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        with closing(socket.socket(family, kind, protocol)) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def _wait_for_listener(machine: MachineZero) -> None:
    key, default = _TIMEOUTS[machine.backend]
    asked = key in machine.conf
    wait = float(machine.conf.get(key, default))
    began = time.monotonic()
    said = False
    while True:
        error = _try(machine)
        waited = time.monotonic() - began
        if error is None:
            return
        refused = isinstance(error, ConnectionRefusedError)
        limit = wait if refused or asked else UNANSWERED
        if waited >= limit:
            raise _gave_up(machine, error, waited, key)
        if waited >= _QUIET and limit == wait and not said:
            said = True
            sys.stderr.write(
                f"Waiting for {machine}: {_reason(error)}. It may still be starting; this machine "
                f"gives up after {wait:.0f} s (--rdzv_conf {key}=SECONDS).\n"
            )
            sys.stderr.flush()
        time.sleep(min(0.5, max(0.0, limit - waited)))


class _OtherService(OSError):
    """Something listens on the port that is not torch's store."""


def _try(machine: MachineZero) -> OSError | None:
    """Connect once; return what went wrong."""
    try:
        with socket.create_connection((machine.host, machine.port), timeout=2.0) as connection:
            return _other_service(connection)
    except OSError as error:
        return error


def _other_service(connection: socket.socket) -> _OtherService | None:
    """Ask what torch's store answers with the same number; return an error for a text.

    Anything else is left to torch, whose protocol may change.
    """
    validate = 0
    magic = 0x3C85F7CE
    ping = 13
    number = 24701
    try:
        connection.sendall(struct.pack("=BIBI", validate, magic, ping, number))
        reply = connection.recv(32)
    except OSError:
        return None
    if reply and reply[:20].isascii() and reply[:4].decode("ascii", "replace").isprintable():
        first = reply.splitlines()[0].decode("ascii", "replace")
        return _OtherService(errno.EPROTO, f"another service answers there: {first!r}")
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there yet"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return error.strerror or str(error)


def _gave_up(machine: MachineZero, error: OSError, waited: float, key: str) -> ConfigurationError:
    return ConfigurationError(
        f"This machine did not meet {machine}: {_reason(error)}; tried for {waited:.0f} s. Check "
        "address and port, which must be the same on every machine, and firewalls. If machine 0 "
        f"starts later, wait longer for it with --rdzv_conf {key}=SECONDS."
    )


def _reaches_itself(machine: MachineZero) -> bool:
    """Open the port for a moment and connect to it by the address that the others use."""
    family = resolve(machine.host, machine.port)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", machine.port))
        except OSError:
            return True  # something listens there already; torch says what is wrong with that
        listener.listen()
        listener.settimeout(_SELF)
        with socket.socket(family, socket.SOCK_STREAM) as caller:
            caller.setblocking(False)
            caller.connect_ex((machine.host, machine.port))
            try:
                listener.accept()[0].close()
            except TimeoutError:
                return False
            return True
