"""The launcher `tpu_pod`: the same launch on every host of a TPU pod, with gcloud or ssh.

It was never used with a real pod. Tests replace both programs by fakes.
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
from accelerate_xla.launch.tpu_settings import TPUPod

#: Set on the hosts of a pod.
IN_POD = "ACCELERATE_IN_TPU_POD"
#: Path of the config file.
CONFIG = "ACCELERATE_CONFIG_FILE"
#: Prefixes of variables that are settings of the run.
_SETTINGS = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_", "XLA_")
#: Prefixes of variables that only concern this machine or this launch.
_OWN = ("ACCELERATE_CONFIG_", "ACCELERATE_PROVENANCE", "ACCELERATE_TPU_", SWITCH)


class TPUPodLauncher:
    """Start the script on every host of a TPU pod."""

    name = "tpu_pod"
    api_version = (1, 0)
    #: Higher than the launcher for one host.
    priority = 110
    Settings = TPUPod
    uses = frozenset({"main_training_function"})

    def __init__(self, settings: TPUPod) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Return whether a pod is requested and this machine is not already one of its hosts."""
        on_host = self.settings.no_tpu_cluster or parse_bool(os.environ.get(IN_POD, ""))
        return not on_host and (self.settings.tpu_use_cluster or plan.launcher == self.name)

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on all hosts.

        Raises:
            ConfigurationError: neither a TPU nor hosts are given, or a variable has no value.
        """
        command = self._on_each_host(plan)
        if self.settings.tpu_vm:
            hosts = [word for host in self.settings.tpu_vm for word in ("--host", host)]
            return [sys.executable, "-m", "accelerate_xla.launch.hosts", *hosts, command]
        return gcloud(self.settings.tpu_name, self.settings.tpu_zone, command, "--vm HOST")

    def _on_each_host(self, plan: LaunchPlan) -> str:
        """Return this launch as a shell command for the hosts.

        It uses the same folder and the same path of the interpreter as on this machine.
        """
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
        # Each host gets a copy of the config file, because variables cannot express all settings.
        text = shlex.quote(Path(file).read_text(encoding="utf-8"))
        line = f'{shlex.join(start)} --config_file "$config" {shlex.join(launch)}'
        return (
            f'cd {folder} && config=$(mktemp) && printf %s {text} > "$config" && '
            f'{{ {line}; status=$?; rm -f "$config"; exit $status; }}'
        )


def _carried(plan: LaunchPlan) -> Mapping[str, str]:
    """Return the variables with settings of this launch, which the hosts don't have."""
    around = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    made = {**around, **plan.environment}
    threads = plan.provenance.get("OMP_NUM_THREADS")
    if threads is None or not threads.origin.startswith("command line"):
        made.pop("OMP_NUM_THREADS", None)  # computed for this machine
    return {name: value for name, value in made.items() if not name.startswith(_OWN)}


def gcloud(
    name: str | None, zone: str | None, command: str, other: str = "", *, alpha: bool = False
) -> list[str]:
    """Return the gcloud command that runs a shell command on all hosts of a TPU.

    Args:
        other: an alternative to the TPU's name, for the error message.

    Raises:
        ConfigurationError: the name or the zone is missing.
    """
    missing = [key for key, value in {"tpu_name": name, "tpu_zone": zone}.items() if not value]
    if missing:
        options, keys = (sign.join(missing) for sign in (" and --", " and "))
        instead = f", or its hosts with {other}" if other else ""
        raise ConfigurationError(
            f"The TPU is not fully specified. Name it with --{options} (in a config file: {keys})"
            f"{instead}."
        )
    program: Sequence[str] = ["gcloud", "alpha"] if alpha else ["gcloud"]
    ssh = ["compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)]
    return [*program, *ssh, "--command", command, "--worker", "all"]
