"""What is to be started: the plan that launchers turn into a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accelerate_core.config.provenance import SourcedValue

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
#: Ends the origin of a number of processes that nobody gave.
COUNTED = ("no accelerator is visible", "visible accelerator(s) per machine")


@dataclass(frozen=True)
class Target:
    """The program and its arguments, which are passed on untouched; or a function's name alone."""

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program", "function"] = "script"

    @property
    def path(self) -> str:
        """The name as Python takes it for a program, also where it begins with a dash."""
        return f"./{self.name}" if self.kind == "script" and self.name[:1] == "-" else self.name


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, completely decided.

    Attributes:
        num_processes: processes on all machines together.
        main_process_port: None lets the system choose a free one.
        rdzv_id: name of the run for the rendezvous; None has one made from the port.
        local_addr: address under which the other machines reach this one; None lets torch find it.
        mpirun_hostfile: file with the hosts that mpirun starts the processes on.
        launcher: name of the launcher that starts this plan; None for the first that accepts it.
        environment: what children get on top of the parent's environment.
        contributed: what options, variables and the config file say to plugins, by the
            environment variable each reads; a launcher of a plugin decides by it.
        provenance: each value that was decided, with its source.
        rdzv_endpoint, log_line_prefix_template: of a function; as in torch's `LaunchConfig`.
        start_method: of a function: `fork`, or `spawn` for fresh interpreters.
    """

    target: Target
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    rdzv_conf: str = ""
    rdzv_id: str | None = None
    local_addr: str | None = None
    mpirun_hostfile: str | None = None
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str | None = None
    role: str | None = None
    quiet: bool = False
    launcher: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    contributed: Mapping[str, SourcedValue] = field(default_factory=dict)
    provenance: Mapping[str, SourcedValue] = field(default_factory=dict)
    rdzv_endpoint: str | None = None
    log_line_prefix_template: str | None = None
    start_method: str = "fork"

    @property
    def processes_per_machine(self) -> int:
        """Processes started on this machine."""
        return self.num_processes // self.num_machines

    @property
    def asked_processes(self) -> SourcedValue | None:
        """The number of processes that was asked for; None where torch's accelerators were counted."""
        number = self.provenance.get("num_processes")
        counted = number is None or number.value is None or number.origin.endswith(COUNTED)
        return None if counted else number


def counted(number: int, word: str) -> str:
    """Return a number of things in words: "1 process", "2 processes"."""
    plural = word + ("es" if word.endswith("s") else "s")
    return f"{number} {word if number == 1 else plural}"
