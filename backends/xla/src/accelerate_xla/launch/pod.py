"""The launcher `tpu_pod`: the same launch on every host of a pod, by gcloud or by ssh.

Started for real it was on no pod: tests have stand-ins for both programs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate_core.plugin import ConfigurationError, parse_bool
from accelerate_launch import LaunchPlan
from accelerate_xla.launch.local import SWITCH
from accelerate_xla.launch.settings import TPUPod

#: Tells the hosts' processes where they are.
IN_POD = "ACCELERATE_IN_TPU_POD"
#: Names the config file.
CONFIG = "ACCELERATE_CONFIG_FILE"
#: Variables of this machine that are settings of the run.
_SETTINGS = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_", "XLA_")
#: Those that are about this machine, or this launch.
_OWN = ("ACCELERATE_CONFIG_", "ACCELERATE_PROVENANCE", "ACCELERATE_TPU_", SWITCH)


class TPUPodLauncher:
    """Start the script on every host of a TPU pod."""

    name = "tpu_pod"
    api_version = (1, 0)
    #: Before the launcher of one host.
    priority = 110
    Settings = TPUPod
    uses = frozenset({"main_training_function"})

    def __init__(self, settings: TPUPod) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether a pod is asked for, and this is not yet one of its hosts."""
        there = self.settings.no_tpu_cluster or parse_bool(os.environ.get(IN_POD, ""))
        return not there and (self.settings.tpu_use_cluster or plan.launcher == self.name)

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on all hosts.

        Raises:
            ConfigurationError: neither a TPU nor hosts are named, or a variable has no value.
        """
        command = self._on_each_host(plan)
        if self.settings.tpu_vm:
            hosts = [word for host in self.settings.tpu_vm for word in ("--host", host)]
            return [sys.executable, "-m", "accelerate_xla.launch.hosts", *hosts, command]
        return gcloud(self.settings.tpu_name, self.settings.tpu_zone, command, "--vm HOST")

    def _on_each_host(self, plan: LaunchPlan) -> str:
        """Return this launch as a line for the hosts' shells: in this folder, by this interpreter."""
        launch = ["--tpu", "--no_tpu_cluster"]
        if (number := plan.asked_processes) is not None:
            launch += ["--num_processes", str(number.value)]
        if plan.main_process_port:
            launch += ["--main_process_port", str(plan.main_process_port)]
        function = plan.provenance.get("main_training_function")
        if function is not None and function.value is not None:
            launch += ["--main_training_function", str(function.value)]
        launch += {"module": ["--module"], "program": ["--no_python"]}.get(plan.target.kind, [])
        launch += [plan.target.path, *plan.target.arguments]
        variables = [f"{name}={value}" for name, value in sorted(_carried(plan).items())]
        for pair in self.settings.tpu_env or ():
            if not pair.partition("=")[0].isidentifier() or "=" not in pair:
                raise ConfigurationError(f"--env {pair!r} must have the form NAME=VALUE.")
            variables.append(pair)
        start = ["sudo"] if self.settings.tpu_use_sudo else []
        start += ["env", f"{IN_POD}=1", *variables, sys.executable, "-m", "accelerate_core.cli"]
        folder = shlex.quote(str(Path.cwd()))
        start = [*start, "launch"]
        if (file := plan.environment.get(CONFIG)) is None:
            return f"cd {folder} && {shlex.join([*start, *launch])}"
        # A host has a copy of it while it runs: not all that it says fits into variables.
        text = shlex.quote(Path(file).read_text(encoding="utf-8"))
        line = f'{shlex.join(start)} --config_file "$config" {shlex.join(launch)}'
        return (
            f'cd {folder} && config=$(mktemp) && printf %s {text} > "$config" && '
            f'{{ {line}; status=$?; rm -f "$config"; exit $status; }}'
        )


def _carried(plan: LaunchPlan) -> Mapping[str, str]:
    """Return the settings of this launch that the hosts cannot know."""
    around = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    made = {**around, **plan.environment}
    threads = plan.provenance.get("OMP_NUM_THREADS")
    if threads is None or not threads.origin.startswith("command line"):
        made.pop("OMP_NUM_THREADS", None)  # of this machine
    return {name: value for name, value in made.items() if not name.startswith(_OWN)}


def gcloud(
    name: str | None, zone: str | None, command: str, other: str = "", *, alpha: bool = False
) -> list[str]:
    """Return the command that runs a line of a shell on all hosts of a TPU.

    Args:
        other: what may be given instead of the TPU's name, for the error.

    Raises:
        ConfigurationError: name or zone is missing.
    """
    missing = [key for key, value in {"tpu_name": name, "tpu_zone": zone}.items() if not value]
    if missing:
        options, keys = (sign.join(missing) for sign in (" and --", " and "))
        instead = f", or its hosts with {other}" if other else ""
        raise ConfigurationError(
            f"Which TPU is meant is not known: name it with --{options} (in a config file: {keys})"
            f"{instead}."
        )
    program: Sequence[str] = ["gcloud", "alpha"] if alpha else ["gcloud"]
    ssh = ["compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)]
    return [*program, *ssh, "--command", command, "--worker", "all"]
