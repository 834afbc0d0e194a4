"""What a process has once: its ranks, its device and its process group.

The first Accelerator (or `PartialState`) starts the runtime, later ones reuse
it if they fit, and the end of the last one ends the group.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelerate_core.errors import ConfigurationError, RuntimeConflictError

if TYPE_CHECKING:
    import torch

__all__ = [
    "close_before_end",
    "GroupStart",
    "Runtime",
    "Topology",
    "acquire",
    "current_runtime",
    "current_user",
    "default_device",
    "read_topology",
    "release",
    "running",
    "start_group",
]

#: (rank, world size, local rank, local world size) as each launcher spells them.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Topology:
    """Which of how many processes this is, as the launcher said."""

    process_index: int = 0
    num_processes: int = 1
    local_process_index: int = 0
    local_num_processes: int = 1
    because: str = "not started by a launcher"


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Read the ranks from the variables of torchrun or an MPI.

    Raises:
        ConfigurationError: a variable is not a number, or the rank is outside the world.
    """
    for rank_name, size_name, local_name, local_size_name in _RANK_VARIABLES:
        for name in (rank_name, size_name):
            if environ.get(name):
                _number(environ, name)  # also where the other one is not set
        if rank_name not in environ or size_name not in environ:
            continue
        rank, size = _number(environ, rank_name), _number(environ, size_name)
        local = _number(environ, local_name) if local_name in environ else rank
        local_size = _number(environ, local_size_name) if local_size_name in environ else size
        if not 0 <= rank < size:
            raise ConfigurationError(
                f"{rank_name}={rank} is outside a world of {size_name}={size}."
            )
        because = f"environment variables {rank_name}={rank}, {size_name}={size}"
        return Topology(rank, size, local, local_size, because)
    return Topology()


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"Environment variable {name}={environ[name]!r} must be a number."
        ) from None


@dataclass(frozen=True)
class GroupStart:
    """All that is needed to start the default process group."""

    topology: Topology
    device: torch.device
    store: Any
    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(eq=False)
class Runtime:
    """The ranks, device and process group of this process."""

    topology: Topology
    device: torch.device
    debug: bool = False
    store: Any = None
    owns_group: bool = False
    timeout: timedelta | None = None
    comm_backend: str | None = None
    users: list[weakref.ref[Any]] = field(default_factory=list)
    #: Accelerators that have begun and not ended, dead ones too: unlike `users` it does not
    #: depend on when the garbage collector runs, which differs between ranks.
    unended: int = 0
    handshakes: int = 0

    @property
    def process_index(self) -> int:
        """Rank in the world."""
        return self.topology.process_index

    @property
    def num_processes(self) -> int:
        """World size."""
        return self.topology.num_processes

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self.topology.local_process_index

    @property
    def local_num_processes(self) -> int:
        """Number of processes on this machine."""
        return self.topology.local_num_processes

    def live_users(self) -> list[Any]:
        """Return the Accelerators that use this runtime, oldest first."""
        alive = [(ref, ref()) for ref in self.users]
        self.users = [ref for ref, user in alive if user is not None]
        return [user for _, user in alive if user is not None]


_current: Runtime | None = None
_generation = 0
_stores: dict[tuple[str, int], Any] = {}


def running() -> Runtime | None:
    """Return the runtime of this process if one has been started."""
    return _current


def current_runtime() -> Runtime:
    """Return the runtime of this process, starting a default one if there is none."""
    return _current or acquire(None)


def current_user() -> Any | None:
    """Return the Accelerator made last that is still alive, else None."""
    users = _current.live_users() if _current else []
    return users[-1] if users else None


DeviceChooser = Callable[[Topology, bool], "torch.device"]


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
    choose_device: DeviceChooser | None = None,
    init_group: Callable[[GroupStart], None] | None = None,
) -> Runtime:
    """Start the runtime, or join the one that runs if it fits.

    Raises:
        RuntimeConflictError: the process already runs on another device or group.
    """
    global _current
    if _current is None:
        _current = _start(
            cpu,
            debug,
            device,
            timeout,
            comm_backend,
            init_method,
            needs_group,
            choose_device,
            init_group,
        )
    else:
        _check_fits(_current, cpu, device, timeout, comm_backend)
        if needs_group and not _has_group():
            # One process, whose first Accelerator could do without.
            _current.timeout = timeout or _current.timeout
            _current.comm_backend = comm_backend or _current.comm_backend
            _open_group(_current, init_method, init_group)
    if user is not None:
        _current.users.append(weakref.ref(user))
        _current.unended += 1
    return _current


def _has_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def release(user: Any) -> None:
    """Give the runtime back; the last user to do so ends the group we started."""
    global _current
    runtime = _current
    if runtime is None:
        return
    if any(ref() is user for ref in runtime.users):
        runtime.unended -= 1
    runtime.users = [ref for ref in runtime.users if ref() is not None and ref() is not user]
    # A group ends at the same call on every rank; a process alone needs no such care.
    over = runtime.unended == 0 if runtime.owns_group else not runtime.users
    if over:
        _end_group(runtime)
        _current = None


def _start(
    cpu: bool,
    debug: bool,
    device: str | None,
    timeout: timedelta | None,
    comm_backend: str | None,
    init_method: str | None,
    needs_group: bool,
    choose_device: DeviceChooser | None,
    init_group: Callable[[GroupStart], None] | None,
) -> Runtime:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        topology = _adopted_topology()
    else:
        topology = read_topology(os.environ)
    if device is not None:
        chosen = _named_device(device)
        _select(chosen)
    else:
        chosen = (choose_device or default_device)(topology, cpu)
    runtime = Runtime(topology, chosen, debug, timeout=timeout, comm_backend=comm_backend)
    if dist.is_available() and dist.is_initialized():
        runtime.store = dist.distributed_c10d._get_default_store()
        return runtime
    if topology.num_processes > 1 or needs_group:
        _open_group(runtime, init_method, init_group)
    return runtime


def _open_group(
    runtime: Runtime, init_method: str | None, init_group: Callable[[GroupStart], None] | None
) -> None:
    from accelerate_core.distributed.failures import install

    install()
    topology, timeout = runtime.topology, runtime.timeout
    store = None if init_method else _store(topology, timeout)
    start = GroupStart(topology, runtime.device, store, runtime.comm_backend, init_method, timeout)
    (init_group or start_group)(start)
    runtime.store = store
    runtime.owns_group = True
    atexit.register(_end_at_exit, weakref.ref(runtime))


def _adopted_topology() -> Topology:
    """Describe a group that user code has started before us."""
    import torch.distributed as dist

    said = read_topology(os.environ)
    size = dist.get_world_size()
    local_size = said.local_num_processes if said.num_processes == size else size
    local = said.local_process_index if said.num_processes == size else dist.get_rank()
    return Topology(
        dist.get_rank(), size, local, local_size, "a process group that was there already"
    )


def default_device(topology: Topology, cpu: bool) -> torch.device:
    """Choose and select this process's device by `torch.accelerator`, without a list of vendors.

    Raises:
        ConfigurationError: more processes on this machine than devices.
    """
    import torch
    import torch.distributed as dist

    kind = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    several = topology.num_processes > 1
    if several and kind.type not in dist.Backend.default_device_backend_map:
        warnings.warn(
            f"torch has no collectives for {kind.type} devices; the processes run on the CPU.",
            stacklevel=2,
        )
        return torch.device("cpu")
    if topology.local_num_processes > count:
        raise ConfigurationError(
            f"{topology.local_num_processes} processes were started on this machine, which has "
            f"{count} {kind.type} device(s). Start at most {count}, or run on the CPU "
            "(Accelerator(cpu=True), ACCELERATE_USE_CPU=1, or launch --cpu)."
        )
    index = topology.local_process_index if several else torch.accelerator.current_device_index()
    chosen = torch.device(kind.type, index)
    _select(chosen)
    return chosen


def _select(device: torch.device) -> None:
    import torch

    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _store(topology: Topology, timeout: timedelta | None) -> Any:
    """Return the rendezvous store under a prefix of this attempt and this group.

    A restarted attempt must not read the addresses its dead predecessor left in
    the agent's store, and a second group of one process not those of the first.
    """
    from torch.distributed import PrefixStore, TCPStore

    global _generation
    _generation += 1
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # A process alone meets nobody: any free port, as several such may run beside each other.
    usual = "0" if topology.num_processes == 1 else "29500"
    port = int(os.environ.get("MASTER_PORT", usual))
    if (address, port) not in _stores:
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        _stores[address, port] = TCPStore(
            address,
            port,
            world_size=None,
            is_master=topology.process_index == 0 and not agent_hosts,
            timeout=timeout or timedelta(minutes=5),
            wait_for_workers=False,
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"accelerate/{attempt}/{_generation}", _stores[address, port])


def start_group(start: GroupStart) -> None:
    """Start torch.distributed's default group; gloo serves CPU tensors beside a device's own."""
    import torch.distributed as dist

    options: dict[str, Any] = {"backend": start.backend}
    if start.timeout is not None:
        options["timeout"] = start.timeout
    if start.init_method is not None:
        options["init_method"] = start.init_method
    else:
        options["store"] = start.store
    if start.backend is None and start.device.type == "cpu":
        options["backend"] = "gloo"
    elif start.backend is None:
        options["device_id"] = start.device
        own = dist.Backend.default_device_backend_map[start.device.type]
        options["backend"] = f"cpu:gloo,{start.device.type}:{own}"
    dist.init_process_group(
        rank=start.topology.process_index, world_size=start.topology.num_processes, **options
    )


def _named_device(name: str) -> torch.device:
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"torch_device={name!r} (ACCELERATE_TORCH_DEVICE) is no device of torch: {reason}"
        ) from None


def _check_fits(
    runtime: Runtime,
    cpu: bool,
    device: str | None,
    timeout: timedelta | None,
    comm_backend: str | None,
) -> None:
    how = "End the earlier Accelerator with end_training() first, or ask for the same."
    if cpu and runtime.device.type != "cpu":
        raise RuntimeConflictError(
            f"cpu=True was asked for, but this process already runs on {runtime.device}. {how}"
        )
    if device is not None and device.split(":")[0] != runtime.device.type:
        raise RuntimeConflictError(
            f"Device {device} was asked for, but this process already runs on {runtime.device}. {how}"
        )
    if timeout is not None and runtime.owns_group and timeout != runtime.timeout:
        said = (
            f"A process group timeout of {timeout.total_seconds():g} s was asked for, but the group"
        )
        if runtime.timeout is not None:
            raise RuntimeConflictError(
                f"{said} already runs with {runtime.timeout.total_seconds():g} s. {how}"
            )
        # Something as harmless as a seed per rank may have started it.
        warnings.warn(
            f"{said} was started before, with torch's default, which holds. Construct the "
            "Accelerator first.",
            stacklevel=6,
        )
    if comm_backend and runtime.comm_backend and comm_backend != runtime.comm_backend:
        raise RuntimeConflictError(
            f"Communication backend {comm_backend!r} was asked for, but the process group already "
            f"runs on {runtime.comm_backend!r}. {how}"
        )


def close_before_end(what: Any) -> None:
    """Have `what.close()` called before the group ends, if it is still alive then.

    For transfers that are under way beside the main thread: a group that ends beneath one takes
    the process down.
    """
    _under_way.add(what)


_under_way: weakref.WeakSet[Any] = weakref.WeakSet()


def _end_group(runtime: Runtime) -> None:
    import torch.distributed as dist

    if runtime.owns_group and dist.is_initialized():
        for one in list(_under_way):
            try:
                one.close()
            except Exception as error:  # another rank may be gone; the group ends all the same
                logger.debug("closing %r before the group ends: %s", one, error)
        dist.destroy_process_group()
        # gloo's own thread drops its last work item, and with it a tensor, a moment later; if the
        # interpreter is finalising by then it takes the process down. Let it have the GIL once.
        time.sleep(0.02)
    runtime.owns_group = False


def _end_at_exit(reference: weakref.ref[Runtime]) -> None:
    from accelerate_core.distributed.failures import happened

    runtime = reference()
    # After a crash the other ranks may never answer: leave the group to the kernel.
    if runtime is not None and not happened():
        _end_group(runtime)
