"""The process-wide runtime: ranks, device, process group, and the global state of libraries.

The first Accelerator (or `PartialState`) starts the runtime. Later ones reuse it if their settings match,
and the group ends with the last one. Before anything else, the ranks compare their settings
(`check_consistent`).
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from accelerate_core import failures
from accelerate_core.contract.topology import Process, Topology, check_launched, read_topology
from accelerate_core.errors import ConfigurationError, RuntimeConflictError, warn
from accelerate_core.plugins.discovery import disabled_names, installed

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Runtime(Process):
    """The ranks, device and process group of this process, and the objects that use them."""

    debug: bool = False
    owns_group: bool = False
    users: list[weakref.ref[Any]] = field(default_factory=list)
    #: The number of Accelerators that have started but not ended, including deleted ones. Unlike `users`,
    #: it does not depend on when the garbage collector runs, which differs between ranks.
    unended: int = 0
    #: The history of communicators that are created without an Accelerator.
    history: Any = None
    #: Numbers the comparisons of this group. A group that user code started keeps its store and its
    #: contents, so its numbers continue for the whole process.
    comparisons: Iterator[int] = field(default_factory=lambda: _comparisons)


_current: Runtime | None = None
_stores: dict[tuple[str, int], Any] = {}
_comparisons: Iterator[int] = itertools.count(1)


def running() -> Runtime | None:
    """Return the runtime of this process, or None if it hasn't started."""
    return _current


def current_runtime() -> Runtime:
    """Return the runtime of this process, starting it with defaults if necessary."""
    return _current or acquire(None)


def current_user() -> Any | None:
    """Return the newest Accelerator that is still alive, or None."""
    refs = reversed(_current.users if _current else [])
    return next((user for ref in refs if (user := ref()) is not None), None)


def acquire(
    user: Any | None,
    *,
    cpu: bool = False,
    debug: bool = False,
    device: str | None = None,
    timeout: timedelta | None = None,
    comm_backend: str | None = None,
    init_method: str | None = None,
    needs_group: bool = False,
    choose_device: Callable[[Topology, bool], torch.device] | None = None,
    init_group: Callable[[Process], None] | None = None,
) -> Runtime:
    """Start the runtime, or reuse the running one if it matches the arguments.

    Raises:
        RuntimeConflictError: the process already runs on another device or group.
    """
    global _current
    failures.report_uncaught()
    runtime = _current
    if runtime is not None:
        _check_fits(runtime, cpu, device, timeout, comm_backend)
    try:
        if runtime is None:
            topology, store = _adopted() if _has_group() else (launched_topology(), None)
            choose = choose_device or default_device
            chosen = choose(topology, cpu) if device is None else _named_device(device)
            runtime = Runtime(
                **vars(topology),
                device=chosen,
                debug=debug,
                store=store,
                timeout=timeout,
                comm_backend=comm_backend,
            )
            needs_group = needs_group or topology.num_processes > 1
        if needs_group and not _has_group():
            # The first Accelerator may have needed no group, because a single process can run without.
            runtime.timeout = timeout or runtime.timeout
            runtime.comm_backend = comm_backend or runtime.comm_backend
            runtime.init_method = init_method
            _open_group(runtime, init_group or start_group)
            if user is None:  # an Accelerator compares its settings later
                check_consistent(runtime, {})
    except BaseException:
        if _current is None:
            _end_globals()  # no Accelerator exists that could end them later
        raise
    _current = runtime
    if user is not None:
        runtime.users.append(weakref.ref(user))
        runtime.unended += 1
    return runtime


def launched_topology() -> Topology:
    """Return the ranks that a launcher or a scheduler assigned.

    Raises:
        ConfigurationError: several processes were started without ranks.
    """
    if not _has_group() and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        os.environ.update(_scheduled_ranks())
    topology = read_topology(os.environ)
    if not _has_group():
        check_launched(topology, os.environ)
    return topology


def _scheduled_ranks() -> Mapping[str, str]:
    """Return the rank variables that follow from the variables of a scheduler, if one started us."""
    for record in installed().of_kind("scheduler"):
        if record.triggers & os.environ.keys() and record.name not in disabled_names():
            ranks: Mapping[str, str] = record.load()(os.environ)
            if ranks:
                return ranks
    return {}


def _has_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def release(user: Any) -> None:
    """Stop using the runtime. The last user ends the process group, if the runtime started it."""
    global _current
    runtime = _current
    if runtime is None:
        return
    if any(ref() is user for ref in runtime.users):
        runtime.unended -= 1
    runtime.users = [ref for ref in runtime.users if ref() is not None and ref() is not user]
    # A group must end at the same call on every rank. A single process has no such constraint.
    over = runtime.unended == 0 if runtime.owns_group else not runtime.users
    if over:
        try:
            _end_group(runtime)
        finally:
            _current = None


@dataclass(frozen=True)
class _Global:
    """Process-wide state of a library: its settings, the module that asked for it, and its value."""

    wanted: Any
    maker: str
    value: Any


_globals: dict[str, _Global] = {}
_endings = ExitStack()


def process_global(key: str, wanted: Any, start: Callable[[], T], end: Callable[[T], object]) -> T:
    """Return a library's process-wide state. The first Accelerator that needs it creates it.

    Plugins call this in `mesh` or `on_start`, which run for every Accelerator. State that must exist
    before the process group starts is created in `device`, which runs for the first Accelerator only.

    Args:
        key: a name for the state, such as "vendor.parallel_state".
        wanted: its settings, as values that can be compared and printed.
        start: creates the state. All callers with equal settings get the value that it returns.
        end: receives that value and shuts the state down. It is called when the last Accelerator of the
            process ends, before the process group ends, in reverse order of creation.

    Raises:
        RuntimeConflictError: the state exists already, with other settings.

    Example:
        def start():
            return vendor.start(tp=2)

        groups = process_global("vendor.groups", {"tp": 2}, start, vendor.stop)
        again = process_global("vendor.groups", {"tp": 2}, start, vendor.stop)
        assert again is groups
    """
    asking = sys._getframe(1).f_globals.get("__name__", "?")
    there = _globals.get(key)
    if there is None:
        there = _Global(wanted, asking, start())
        _globals[key] = there
        _endings.callback(end, there.value)
    if there.wanted != wanted:
        raise RuntimeConflictError(
            f"{key} exists once per process. {there.maker} created it with {there.wanted!r}, but "
            f"{asking} needs {wanted!r}. End the earlier Accelerators with end_training() first, "
            "or use the same settings."
        )
    return cast(T, there.value)


def _end_globals() -> None:
    _globals.clear()
    _endings.close()


def _open_group(runtime: Runtime, start: Callable[[Process], None]) -> None:
    runtime.store = None if runtime.init_method else _store(runtime)
    runtime.comparisons = itertools.count(1)
    start(runtime)
    runtime.owns_group = True
    atexit.register(_end_at_exit, weakref.ref(runtime))


def _adopted() -> tuple[Topology, Any]:
    """Return the topology and the store of a process group that user code started."""
    import torch.distributed as dist

    said = read_topology(os.environ)
    size = dist.get_world_size()
    local_size = said.local_num_processes if said.num_processes == size else size
    local = said.local_process_index if said.num_processes == size else dist.get_rank()
    topology = Topology(dist.get_rank(), size, local, local_size, "a running process group")
    return topology, dist.distributed_c10d._get_default_store()


def default_device(topology: Topology, cpu: bool) -> torch.device:
    """Choose this process's device with `torch.accelerator`, and make it the current one.

    Raises:
        ConfigurationError: this machine runs more processes than it has devices.
    """
    import torch

    kind = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    several = topology.num_processes > 1
    own = torch.distributed.Backend.default_device_backend_map.get(kind.type, "")
    # For Apple's device, torch names gloo, which can't send that device's tensors.
    if several and kind.type not in torch.distributed.Backend.backend_capability.get(own, ()):
        warn(f"torch has no collectives for {kind.type} devices, so the processes run on the CPU.")
        return torch.device("cpu")
    if topology.local_num_processes > count:
        raise ConfigurationError(
            f"{topology.local_num_processes} processes were started on this machine, which has "
            f"{count} {kind.type} device(s). Start at most {count}, or run on the CPU "
            "(Accelerator(cpu=True), ACCELERATE_USE_CPU=1, or launch --cpu)."
        )
    index = topology.local_process_index if several else torch.accelerator.current_device_index()
    chosen = torch.device(kind.type, index)
    select(chosen)
    return chosen


def select(device: torch.device) -> None:
    """Make this the current device of its type."""
    import torch

    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _store(process: Process) -> Any:
    """Return the rendezvous store, with a key prefix for this attempt and this group.

    The prefix keeps a restarted attempt from reading the addresses that the failed attempt left in the
    agent's store, and a second group from reading those of the first. The store counts the groups of
    each rank, so that a process that replaces another one of the same rank continues its count.
    """
    from torch.distributed import PrefixStore, TCPStore

    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # A single process can use any free port, because several may run on the same machine.
    port = int(os.environ.get("MASTER_PORT", 0 if process.num_processes == 1 else 29500))
    if (address, port) not in _stores:
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _stores[address, port] = TCPStore(
            address,
            port,
            world_size=None,
            is_master=process.process_index == 0 and not agent_hosts,
            timeout=process.timeout or timedelta(minutes=5),
            wait_for_workers=False,
        )
        if not agent_hosts:
            atexit.register(_leave_store, store, process.process_index, process.num_processes)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _stores[address, port]
    generation = store.add(f"accelerate/{attempt}/groups/{process.process_index}", 1)
    return PrefixStore(f"accelerate/{attempt}/{generation}", store)


def _leave_store(store: Any, rank: int, count: int) -> None:
    """Count this rank as one that no longer needs the store. Rank 0, which hosts it, waits for the others.

    Otherwise, the other ranks of a short script could still be reading when rank 0 exits.
    """
    with suppress(RuntimeError):  # rank 0 has ended, or another rank takes longer
        if store.add("accelerate/left", 1) == count:
            store.set("accelerate/all_left", "")
        if rank == 0 and not hasattr(sys, "last_value"):
            store.wait(["accelerate/all_left"], timedelta(seconds=5))


def start_group(start: Process) -> None:
    """Start torch.distributed's default group, with gloo for CPU tensors."""
    import torch.distributed as dist

    options: dict[str, Any] = {"backend": start.comm_backend}
    if start.timeout is not None:
        options["timeout"] = start.timeout
    if start.init_method is not None:
        options["init_method"] = start.init_method
    else:
        options["store"] = start.store
    if start.comm_backend is None and start.device.type == "cpu":
        options["backend"] = "gloo"
    elif start.comm_backend is None:
        # With a bound device, torch could create no group with gloo alone on devices that gloo doesn't know.
        if start.device.type in dist.Backend.backend_capability["gloo"]:
            options["device_id"] = start.device
        own = dist.Backend.default_device_backend_map[start.device.type]
        options["backend"] = f"cpu:gloo,{start.device.type}:{own}"
    dist.init_process_group(rank=start.process_index, world_size=start.num_processes, **options)


def _named_device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"torch_device={name!r} (ACCELERATE_TORCH_DEVICE) is not a device that torch supports: {reason}"
        ) from None
    select(device)
    return device


def _check_fits(
    runtime: Runtime,
    cpu: bool,
    device: str | None,
    timeout: timedelta | None,
    comm_backend: str | None,
) -> None:
    def refuse(wanted: str, there: str) -> NoReturn:
        raise RuntimeConflictError(
            f"{wanted} was requested, but {there}. End the earlier Accelerator with "
            "end_training() first, or use the same setting."
        )

    here = f"this process already runs on {runtime.device}"
    if cpu and runtime.device.type != "cpu":
        refuse("cpu=True", here)
    if device is not None and device.split(":")[0] != runtime.device.type:
        refuse(f"Device {device}", here)
    if timeout is not None and runtime.owns_group and timeout != runtime.timeout:
        wanted = f"A process group timeout of {timeout.total_seconds():g} s"
        if runtime.timeout is not None:
            refuse(wanted, f"the group already runs with {runtime.timeout.total_seconds():g} s")
        # A call as simple as set_seed(device_specific=True) may have started it.
        warn(
            f"{wanted} was requested, but the group is already running with torch's default, "
            "which stays in effect. Construct the Accelerator first.",
        )
    if comm_backend and runtime.comm_backend and comm_backend != runtime.comm_backend:
        there = f"the process group already runs on {runtime.comm_backend!r}"
        refuse(f"Communication backend {comm_backend!r}", there)


def check_consistent(runtime: Runtime, facts: Mapping[str, Any]) -> None:
    """Compare `facts` on all ranks through the store. Once this returns, the group runs on all ranks.

    A group that ended before that could not be connected to. A rank sends a few short messages, however many
    ranks there are: it counts itself under the digest of its facts, and the last one to arrive sees whether
    all have the same digest. Facts are only read if they differ.

    Raises:
        ConfigurationError: facts differ. Raised on every rank; the message lists the differences.
        RuntimeConflictError: a rank did not call this within the time limit of the group.
    """
    differences = _compare(runtime, facts, _CONSTRUCTION, runtime.timeout or _FOR_CONSTRUCTION)
    if differences:
        raise ConfigurationError(f"The processes have different settings: {differences}")


def meet(runtime: Runtime, call: str) -> None:
    """Wait until every rank has called this for the same call of a script, such as `scheduler.step(loss)`.

    Raises:
        RuntimeConflictError: a rank made another call, or none within the time limit of the group.
    """
    made = _Call(
        f"called {call}",
        "Every rank must call it, so move it out of blocks such as `if accelerator.is_main_process:`, or "
        "pass Accelerator(scheduler_metric='local').",
        warns=True,
    )
    differences = _compare(runtime, {"call": call}, made, runtime.timeout or _FOR_CALLS)
    if differences:
        raise RuntimeConflictError(
            f"The processes make different calls: {differences} {made.advice}"
        )


@dataclass(frozen=True)
class _Call:
    """What a waiting rank has done, and what to do if others have not."""

    done: str
    advice: str
    #: Whether to warn before the time limit. Ranks may take long to import libraries.
    warns: bool = False


_CONSTRUCTION = _Call(
    "constructed an Accelerator or a PartialState",
    "Every rank must construct it, so move it out of blocks that only some ranks run.",
)
#: How long a rank waits for others if the group has torch's time limit.
_FOR_CONSTRUCTION = timedelta(minutes=5)
_FOR_CALLS = timedelta(minutes=30)
#: After this, a waiting rank warns.
_WARN_AFTER = timedelta(seconds=30)


def _compare(runtime: Runtime, facts: Mapping[str, Any], call: _Call, limit: timedelta) -> str:
    """Return how the facts of the ranks differ; "" if they are the same."""
    if runtime.num_processes == 1 or runtime.store is None:
        return ""
    store, count = runtime.store, runtime.num_processes
    prefix = f"consistent/{next(runtime.comparisons)}"
    mine = json.dumps(dict(facts), sort_keys=True, default=str)
    digest = hashlib.sha256(mine.encode()).hexdigest()
    alike = f"{prefix}/alike/{digest}"
    store.set(f"{prefix}/{runtime.process_index}", digest)
    if store.add(alike, 1) == 1:
        store.set(f"{prefix}/facts/{digest}", mine)
    if store.add(f"{prefix}/arrived", 1) == count:
        same = store.add(alike, 0) == count
        store.set(f"{prefix}/verdict", "" if same else _verdict(store, prefix, count))
    _wait_for_verdict(store, runtime, prefix, call, limit)
    verdict: str = store.get(f"{prefix}/verdict").decode()
    return verdict


def _wait_for_verdict(
    store: Any, runtime: Runtime, prefix: str, call: _Call, limit: timedelta
) -> None:
    left = limit
    if call.warns and limit > _WARN_AFTER:
        if _appears(store, f"{prefix}/verdict", _WARN_AFTER) is None:
            return
        # One rank is enough, apart from rank 0, which may be the missing one.
        if runtime.process_index < 2:
            waited = f"has waited {_WARN_AFTER.total_seconds():g} s"
            names = _missing_ranks(store, runtime, prefix)
            warn(
                f"Rank {runtime.process_index} {call.done}, and {waited} for {names} to do the same. "
                f"{call.advice}"
            )
        left -= _WARN_AFTER
    error = _appears(store, f"{prefix}/verdict", left)
    if error is not None:
        names = _missing_ranks(store, runtime, prefix)
        raise RuntimeConflictError(
            f"Rank {runtime.process_index} {call.done} and waited {limit.total_seconds():g} s for {names} "
            f"to do the same. {call.advice} If {names} was still importing, loading or computing, increase "
            "process_group_timeout."
        ) from error


def _appears(store: Any, key: str, limit: timedelta) -> Exception | None:
    """Wait for a key in the store; return the exception if it does not appear."""
    try:
        store.wait([key], limit)
    except Exception as error:  # each store has its own class for a timeout
        return error
    return None


def _missing_ranks(store: Any, runtime: Runtime, prefix: str) -> str:
    # Only rank 0 looks for every rank, because thousands would overload the store.
    seen = range(runtime.num_processes if runtime.process_index == 0 else 1)
    missing = [str(rank) for rank in seen if not store.check([f"{prefix}/{rank}"])]
    return f"rank {', '.join(missing)}" if missing else "the ranks that rank 0's message names"


def _verdict(store: Any, prefix: str, count: int) -> str:
    digests = [store.get(f"{prefix}/{rank}").decode() for rank in range(count)]
    facts = {each: json.loads(store.get(f"{prefix}/facts/{each}")) for each in set(digests)}
    return _differences([facts[each] for each in digests])


def _differences(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the facts of the ranks that differ from those of rank 0."""
    differences = [
        f"{key} is {facts[0].get(key)!r} on rank 0, {others.get(key)!r} on rank {rank}"
        for rank, others in enumerate(facts)
        for key in sorted({*facts[0], *others})
        if facts[0].get(key) != others.get(key)
    ]
    more = [f"and {len(differences) - 5} more"] if len(differences) > 5 else []
    return "; ".join([*differences[:5], *more]) + "."


def _end_group(runtime: Runtime) -> None:
    import torch.distributed as dist

    own = runtime.owns_group and dist.is_initialized()
    runtime.owns_group = False
    try:
        _end_globals()
    finally:
        if own:
            dist.destroy_process_group()
            # A thread of gloo releases its last work item, and thereby a tensor, a moment later. If the
            # interpreter is finalising by then, the process crashes. Let that thread have the GIL.
            time.sleep(0.02)


def _end_at_exit(reference: weakref.ref[Runtime]) -> None:
    runtime = reference()
    # After a failure, the other ranks may not respond, so let the operating system end the group. Python
    # sets `last_value` when an uncaught exception ends the process.
    if runtime is not None and not hasattr(sys, "last_value"):
        _end_group(runtime)
