"""Check the connection to machine 0 before torch's rendezvous, which waits for minutes silently."""

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

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.plan import DEFAULT_PORT

#: How many seconds to wait for a name service.
_RESOLVE = 5.0
#: If a machine does not answer at all for this many seconds, the address is considered wrong.
UNANSWERED = 6.0
#: How many seconds a connection from this machine to itself may take.
_SELF = 4.0
#: How many seconds to wait for another machine 0, if this machine was called machine 0 as well.
_ANOTHER = 4.0
#: After waiting this many seconds for a listener, a machine prints that it is waiting.
_QUIET = 2.0
#: For each rendezvous backend, the timeout's key in `rdzv_conf` and torch's default for it.
_TIMEOUTS = {"static": ("timeout", 900.0), "c10d": ("join_timeout", 600.0)}


@dataclass(frozen=True)
class MachineZero:
    """The address of machine 0.

    Attributes:
        source: where host and port came from, for messages.
        conf: settings of the rendezvous, as in `rdzv_conf`.
        claim: the setting that called this machine number 0 although the rendezvous numbers the
            machines itself; empty if there is none.
        own_address: the address of this machine on the route to that host, if known.
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

    If machine 0 is up but does not listen yet, this waits as long as `rdzv_conf` says: `timeout` for
    static (default 900 seconds), `join_timeout` for c10d (600). If machine 0 does not answer at all
    or its name is unknown, this waits that long only if `rdzv_conf` has the key. Otherwise the address
    is considered wrong after a few seconds. The same applies if this machine was explicitly called
    machine 0 but has another address.

    Args:
        is_machine_0: whether this machine opens the port; None decides by its addresses.

    Raises:
        ConfigurationError: the name does not resolve, nothing answered in time, or this is machine 0
            but has another address or can't open the port.
    """
    _wait_for_name(machine)
    if machine.backend not in _TIMEOUTS:
        return  # a separate service such as etcd, whose client has time limits
    if is_machine_0 is None and is_here(machine.host):
        return  # under c10d, another agent of this machine may have opened the port already
    if is_machine_0:
        check_hosts(machine)
    elif is_machine_0 is None:
        _wait_for_listener(machine, "This machine has another address, so it is not machine 0. ")
    else:
        _wait_for_listener(machine)


def check_hosts(machine: MachineZero) -> None:
    """Check that this machine, as machine 0, can open its port and reach it at its address.

    Raises:
        ConfigurationError: the port is in use, or the address belongs to another machine.
    """
    here = socket.gethostname()
    with _listening(machine) as listener:
        why = "" if is_here(machine.host) else _why_not_reached(machine, listener)
    if why:
        raise ConfigurationError(
            f"This is {machine}, but {here} cannot reach itself at that address: {why}. Set the "
            "address at which the other machines reach this one. If this is not machine 0, set its "
            "number with --machine_rank."
        )


def is_reached_by(machine: MachineZero) -> bool:
    """Return whether a connection to machine 0 reaches this machine.

    Behind NAT, or with a forwarded container port, it can do so even though no network interface of
    this machine has the address.
    """
    try:
        listener = _listening(machine)
    except ConfigurationError:
        return False  # the port is in use or can't be opened
    with listener:
        return not _why_not_reached(machine, listener)


def check_answers(machine: MachineZero) -> None:
    """Check that machine 0 is up, even if it does not listen yet.

    Raises:
        ConfigurationError: nothing answers at that address.
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
    """Return the host and port of `HOST:PORT`. An IPv6 address may be in brackets."""
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
            f"{socket.gethostname()}: {reason}. Use a name that every machine can resolve, or an IP "
            "address."
        ) from None


def resolve(host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[Any]:
    """Call `getaddrinfo` with a time limit of a few seconds.

    Raises:
        OSError: the name is unknown, or no name service answers.
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
    """Return whether a host name or address belongs to this machine. An unknown name does not."""
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


def _wait_for_name(machine: MachineZero) -> None:
    """Check that machine 0's name resolves, repeatedly if `rdzv_conf` says how long to wait.

    A pod of Kubernetes has no name before it has been scheduled.
    """
    key, _ = _TIMEOUTS.get(machine.backend, ("", 0.0))
    until = time.monotonic() + float(machine.conf.get(key, 0.0))
    said = False
    while True:
        try:
            return check_resolves(machine.host, machine.port, machine.source)
        except ConfigurationError:
            if time.monotonic() >= until:
                raise
        if not said:
            said = True
            sys.stderr.write(
                f"Waiting for {machine}: its name does not resolve yet. This machine gives up after "
                f"{machine.conf[key]} s (--rdzv_conf {key}=SECONDS).\n"
            )
            sys.stderr.flush()
        time.sleep(1.0)


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
    """Something other than torch's store listens on the port."""


def _try(machine: MachineZero) -> OSError | None:
    """Connect once, and return the error, or None for a connection to torch's store."""
    try:
        with socket.create_connection((machine.host, machine.port), timeout=2.0) as connection:
            return _other_service(connection)
    except OSError as error:
        return error


def _other_service(connection: socket.socket) -> _OtherService | None:
    """Send torch's store a ping, and return an error if the reply is readable text.

    Any other reply is left to torch, because its protocol may change.
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
    later = f" If machine 0 starts later, allow more time with --rdzv_conf {key}=SECONDS."
    if machine.claim:
        own = machine.own_address
        return ConfigurationError(
            f"{machine.claim} makes this machine, {socket.gethostname()}, machine 0. But "
            f"{machine.host}, port {machine.port} ({machine.source}), is not an address of this "
            f"machine, and no machine 0 answers there: {_reason(error)} (tried for {waited:.0f} s). "
            "If this is machine 0, use its own address on every machine: --main_process_ip "
            f"{own or 'ADDRESS'}. If it is not, leave out --machine_rank, because with c10d the "
            f"machines number themselves.{later}"
        )
    return ConfigurationError(
        f"This machine could not connect to {machine}: {_reason(error)} (tried for {waited:.0f} s). "
        "Check that the address and port are the same on every machine, and that no firewall blocks "
        f"the port.{later if key else ''}"
    )


def _listening(machine: MachineZero) -> socket.socket:
    """Open the port on all addresses of this machine, as torch's store does later."""
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
            why = "another process on it uses the port. Stop that process, or choose another port"
        else:
            why = f"it cannot open the port: {error.strerror or error}. Choose another port"
        raise ConfigurationError(
            f"{socket.gethostname()} is {machine}, but {why} for every machine "
            "(--main_process_port)."
        ) from None
    return listener


def _why_not_reached(machine: MachineZero, listener: socket.socket) -> str:
    """Connect to `listener` at machine 0's address, and return what went wrong, or ""."""
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
