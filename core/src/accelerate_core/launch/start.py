"""Turn a plan into a running program; the launcher's process becomes that program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from accelerate_core.errors import ConfigurationError
from accelerate_core.launch.mpi import MpirunLauncher
from accelerate_core.launch.plan import LaunchPlan
from accelerate_core.launch.simple import SimpleLauncher
from accelerate_core.launch.slurm import SrunLauncher
from accelerate_core.launch.torchrun import TorchrunLauncher

__all__ = ["LAUNCHERS", "Launcher", "child_environment", "choose_launcher", "start"]


class Launcher(Protocol):
    """Turns plans into commands; a plugin of kind `launcher` is a class of this form.

    It may also have `launch_environment(plan)`, a mapping of variables for the children, and
    states `api_version`, the version of the contract it was written for. One with `Settings`, a
    class made with `settings`, is made with an instance of them.
    """

    name: str

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        ...

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this machine."""
        ...


#: Asked in this order, unless the plan names one.
LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher
    for launcher in (MpirunLauncher(), SrunLauncher(), SimpleLauncher(), TorchrunLauncher())
}


def choose_launcher(plan: LaunchPlan) -> Launcher:
    """Return the launcher that starts `plan`: the one it names, else the first that accepts it.

    A plugin's launcher goes before ours if one of its triggers is among what the plan says to
    plugins, and it accepts the plan.
    """
    from accelerate_core.plugins.discovery import find, installed

    if plan.launcher is None:
        for record in installed().of_kind("launcher"):
            if record.triggers & plan.contributed.keys():
                theirs = _made(record, plan)
                if theirs.accepts(plan):
                    return theirs
        return next(launcher for launcher in LAUNCHERS.values() if launcher.accepts(plan))
    if plan.launcher in LAUNCHERS:
        return LAUNCHERS[plan.launcher]
    origin = plan.because["launcher"].origin if "launcher" in plan.because else "the launch plan"
    record = find("launcher", plan.launcher, because=origin)
    launcher = _made(record, plan)
    if not launcher.accepts(plan):
        raise ConfigurationError(
            f"The launcher {record.label} (asked for by {origin}) does not take this launch: "
            f"{plan.num_processes} processes on {plan.num_machines} machine(s)."
        )
    return launcher


def _made(record: Any, plan: LaunchPlan) -> Launcher:
    from accelerate_core.plugins.discovery import check_api_version

    cls = record.load()
    if getattr(cls, "api_version", None) is not None:
        check_api_version(record, cls)
    launcher: Launcher = cls(*_settings_of(cls, record.name, plan))
    return launcher


def _settings_of(launcher: Any, name: str, plan: LaunchPlan) -> list[Any]:
    """Resolve the `Settings` of a launcher that has some, from environment and config file."""
    if getattr(launcher, "Settings", None) is None:
        return []
    from accelerate_core.configuration.resolve import Sources, resolve_settings

    sources = Sources.of({**os.environ, **plan.environment})
    return [resolve_settings(launcher.Settings, None, sources, owner=name)[0]]


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the children; `environ` is left as it is."""
    contribute = getattr(choose_launcher(plan), "launch_environment", None)
    return {**environ, **plan.environment, **(contribute(plan) if contribute else {})}


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the plan's command, so that signals reach it directly."""
    command = choose_launcher(plan).launch_command(plan)
    environment = child_environment(plan, environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # exec on Windows detaches from the console
        sys.exit(subprocess.call(command, env=environment))
    os.execvpe(command[0], command, environment)
