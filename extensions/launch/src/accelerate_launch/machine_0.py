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
_SELF = 4.0
#: Seconds in which another machine may open the port that a machine called number 0 did not open.
_ANOTHER = 4.0
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
        claim: where this machine was explicitly called machine 0, although its rendezvous numbers
            the machines itself; empty if it was not.
        own_address: the address of this machine on the way to that host, if known.
    """

    host: str
    port: int
    source: str
    backend: str
    conf: Mapping[str, Any]
    claim: str = ""
    own_address: str = ""

    def __str__(self) -> str:
        return f"machine 0 at {self.host}, port {self.port} ({self.source})"


def find_machine_0(machine: MachineZero, *, is_machine_0: bool | None = None) -> None:
    """Return once the rendezvous can start: machine 0 listens, or this is machine 0.

    A machine that is up and does not listen yet is waited for as long as `rdzv_conf` says: `timeout`
    for static (default 900 seconds), `join_timeout` for c10d (600). A machine that does not answer is
    waited for only if `rdzv_conf` has that key, else the address is taken to be wrong. The same holds
    for a machine that is up, if this one was explicitly called machine 0 and has another address.

    Args:
        is_machine_0: whether this machine opens the port; None finds out by its addresses.

    Raises:
        ConfigurationError: the name does not resolve, nothing answered in time, or this is machine 0
            and has another address or cannot open the port.
    """
    check_resolves(machine.host, machine.port, machine.source)
    if machine.backend not in _TIMEOUTS:
        return  # a service of its own, such as etcd, whose client has time limits
    if is_machine_0 is None and is_here(machine.host):
        return  # under c10d, another agent of this machine may have opened the port already
    if is_machine_0:
        check_hosts(machine)
    elif is_machine_0 is None:
        _wait_for_listener(machine, "This machine has another address, so it is not machine 0. ")
    else:
        _wait_for_listener(machine)


def check_hosts(machine: MachineZero) -> None:
    """Check that this machine, which is machine 0, can open its port and reaches it by its address.

    Raises:
        ConfigurationError: the port is in use, or the address is that of another machine.
    """
    here = socket.gethostname()
    with _listening(machine) as listener:
        why = "" if is_here(machine.host) else _why_not_reached(machine, listener)
    if why:
        raise ConfigurationError(
            f"This is {machine}, but {here} cannot reach itself under that address: {why}. Give the "
            "address under which the other machines reach this one, or, if this is not machine 0, "
            "its own number (--machine_rank)."
        )


def is_reached_by(machine: MachineZero) -> bool:
    """Tell whether a connection to machine 0 ends here, although no interface has its address.

    This is so behind NAT and for a forwarded port of a container.
    """
    try:
        listener = _listening(machine)
    except ConfigurationError:
        return False  # another process has the port, or it cannot be opened at all
    with listener:
        return not _why_not_reached(machine, listener)


def check_answers(machine: MachineZero) -> None:
    """Check that machine 0 answers at all; it may not listen yet.

    Raises:
        ConfigurationError: nothing answers under that address.
    """
    began = time.monotonic()
    while True:
        error = _try(machine)
        waited = time.monotonic() - began
        if error is None or isinstance(error, ConnectionRefusedError):
            return
        if waited >= UNANSWERED:
            raise _gave_up(machine, error, waited)
        time.sleep(0.5)


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


def _wait_for_listener(machine: MachineZero, role: str = "") -> None:
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
        limit = UNANSWERED
        if asked:
            limit = wait
        elif machine.claim:
            limit = _ANOTHER
        elif isinstance(error, ConnectionRefusedError):
            limit = wait
        if waited >= limit:
            raise _gave_up(machine, error, waited, key)
        if waited >= _QUIET and limit == wait and not said:
            said = True
            sys.stderr.write(
                f"Waiting for {machine}: {_reason(error)}. {role}Machine 0 may still be starting; this "
                f"machine gives up after {wait:.0f} s (--rdzv_conf {key}=SECONDS).\n"
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


def _gave_up(
    machine: MachineZero, error: OSError, waited: float, key: str | None = None
) -> ConfigurationError:
    later = f" If machine 0 starts later, wait longer for it with --rdzv_conf {key}=SECONDS."
    if machine.claim:
        own = machine.own_address
        return ConfigurationError(
            f"This machine, {socket.gethostname()}, was called machine 0 by {machine.claim}, but "
            f"{machine.host}, port {machine.port} ({machine.source}), is not an address of it, and "
            f"no machine 0 answers there: {_reason(error)}; tried for {waited:.0f} s. If this is "
            f"machine 0, give its own address to every machine: --main_process_ip {own or 'ADDRESS'}. "
            "If it is not, leave out --machine_rank: under c10d the machines number themselves."
            f"{later}"
        )
    return ConfigurationError(
        f"This machine did not meet {machine}: {_reason(error)}; tried for {waited:.0f} s. Check "
        "address and port, which must be the same on every machine, and firewalls."
        f"{later if key else ''}"
    )


def _listening(machine: MachineZero) -> socket.socket:
    """Open the port for a moment, on all addresses of this machine, as torch's store will."""
    family = resolve(machine.host, machine.port)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", machine.port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "another process of it uses the port. End that process, or choose another port"
        else:
            why = f"it cannot open the port: {error.strerror or error}. Choose another port"
        raise ConfigurationError(
            f"{socket.gethostname()} is {machine}, but {why} on every machine "
            "(--main_process_port)."
        ) from None
    return listener


def _why_not_reached(machine: MachineZero, listener: socket.socket) -> str:
    """Connect to `listener` by the address that the others use; return what went wrong, if anything."""
    try:
        caller = socket.create_connection((machine.host, machine.port), timeout=_SELF)
    except ConnectionRefusedError:
        return "the connection is refused"
    except OSError as error:
        return _reason(error)
    with caller:
        listener.settimeout(_SELF)
        try:
            listener.accept()[0].close()
        except TimeoutError:
            return "another machine answers there"
    return ""
