"""The setup and the running process, before the parts of an Accelerator exist."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

from accelerate_core.accelerator.construction import Setup
from accelerate_core.backend import Backend
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.distributed.process import Runtime, meet
from accelerate_core.errors import WarnOnce
from accelerate_core.plugins.manager import BoundHooks
from accelerate_core.state import Ranks


class SetupAndRanks(Ranks):
    """The properties of an Accelerator that are final once its process group runs."""

    _setup: Setup

    @property
    def provenance(self) -> Mapping[str, SourcedValue]:
        """The settings of the core, with their sources."""
        return self._setup.provenance

    @property
    def backend(self) -> Backend:
        """The active backend."""
        return self._setup.backend

    @property
    def mixed_precision(self) -> str:
        """The name of the active precision."""
        return self._setup.mixed_precision

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the dimensions of the device mesh, or None without a mesh."""
        return self._setup.parallelism_config

    @property
    def local_process_count(self) -> int:
        """The number of processes on this machine."""
        return self._runtime.local_num_processes

    @property
    def group_timeout(self) -> timedelta | None:
        """The time limit of a collective, or None for torch's default."""
        return self._runtime.timeout


class StartedRuntime(SetupAndRanks):
    """The argument of the hooks that are called before the parts of the Accelerator exist.

    Args:
        setup: the settings and plugins.
        process: the ranks and the device.
        warn_once: warns once per text.
    """

    def __init__(self, setup: Setup, process: Runtime, warn_once: WarnOnce) -> None:
        self._setup = setup
        self._runtime = process
        self.precision = setup.precision
        self.dynamo_plugin = setup.dynamo_plugin
        self.autocast_handler = setup.autocast_handler
        self.device = process.device
        self.warn_once = warn_once
        self.hooks = BoundHooks(setup.owner_methods, self)

    def meet(self, scheduler: str) -> None:
        """Wait until all ranks have stepped this scheduler with a metric."""
        meet(self._runtime, f"{scheduler}.step(metric)")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name!r} is not available before on_start")
