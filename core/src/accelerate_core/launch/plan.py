"""What is to be started: the plan that launchers turn into a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accelerate_core.configuration.provenance import Because

__all__ = ["LaunchPlan", "Target"]


@dataclass(frozen=True)
class Target:
    """The program and its arguments, which are passed on untouched."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, completely decided.

    Attributes:
        num_processes: processes on all machines together.
        main_process_port: None lets the system choose a free one.
        launcher: name of the launcher that starts this plan; None for the first that accepts it.
        environment: what children get on top of the parent's environment.
        because: each value that was decided, with where it came from.
    """

    target: Target
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str | None = None
    role: str | None = None
    quiet: bool = False
    launcher: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    because: Mapping[str, Because] = field(default_factory=dict)

    @property
    def processes_per_machine(self) -> int:
        """Processes started on this machine."""
        return self.num_processes // self.num_machines
