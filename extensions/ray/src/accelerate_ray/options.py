"""What the driver needs to know about a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accelerate_core.plugin import ConfigurationError, env_flag
from accelerate_launch import LaunchPlan, Target, target_command
from accelerate_ray.settings import RaySettings

#: Variables of the launcher's machine that ranks on other machines should not get.
_OF_THIS_MACHINE = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "MAIL"),
        *("TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "DISPLAY", "SHLVL", "_"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE"),
    }
)
_PREFIXES_OF_THIS_MACHINE = ("XDG_", "SSH_", "DBUS_")


@dataclass(frozen=True)
class RunOptions:
    """One run on a Ray cluster.

    Attributes:
        num_processes: the number of ranks; None for one per GPU of the cluster, or one.
        address_source: where the address of the cluster came from, for errors.
        environment: variables that are added to those of the launcher.
        files: contents by name, for a folder on the node of each rank.
        least: the number of ranks with which an elastic run still continues; None needs all of them.
        share: the number of ranks by which an elastic run grows and shrinks.
        port: where rank 0 listens; None for a free port.
        tee: the streams that go to `log_dir`: "1" stdout, "2" stderr, "3" both.
        prefix: how each line of output begins, with `${rank}` and `${local_rank}`.
    """

    settings: RaySettings
    num_processes: int | None
    environment: Mapping[str, str]
    address_source: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    max_restarts: int = 0
    least: int | None = None
    share: int = 1
    port: int | None = None
    log_dir: str | None = None
    tee: str = "3"
    prefix: str = "[rank ${rank}] "
    quiet: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether the run is on the CPU although the cluster may have accelerators."""
        return env_flag({**os.environ, **self.environment}, "ACCELERATE_USE_CPU")


def rank_command(target: Target, *, shipped: bool) -> list[str]:
    """Return the command line of a rank, with "{python}" for the interpreter of its node.

    Raises:
        ConfigurationError: the current directory is shipped, but the script is outside of it.
    """
    if target.kind == "script" and shipped:
        try:
            inside = Path(target.name).resolve().relative_to(Path.cwd().resolve())
        except ValueError:
            raise ConfigurationError(
                f"The script {target.name} is outside of the current directory {Path.cwd()}, which is "
                "shipped to the nodes. Start the run from the script's directory, or use --ray_files "
                "shared if all nodes have the script under this path."
            ) from None
        target = Target(str(inside), target.arguments, target.kind)
    command = target_command(target)
    return command if target.kind == "program" else ["{python}", *command[1:]]


def shipped_variables(environ: Mapping[str, str], *, shipped: bool) -> dict[str, str]:
    """Return the launcher's variables that the ranks get, apart from those about its machine.

    Args:
        shipped: the ranks may run on other machines, which have their own PATH and HOME.
    """
    kept = {name: text for name, text in environ.items() if not name.startswith("RAY_")}
    if not shipped:
        return kept
    return {
        name: text
        for name, text in kept.items()
        if name not in _OF_THIS_MACHINE and not name.startswith(_PREFIXES_OF_THIS_MACHINE)
    }


def processes_of(plan: LaunchPlan) -> int | None:
    """Return the number of ranks, None if it was not set but counted on the launcher's machine."""
    counted = "num_processes" in plan.provenance and plan.asked_processes is None
    return None if counted else plan.num_processes
