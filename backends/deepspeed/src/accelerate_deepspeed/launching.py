"""The launcher for host files: DeepSpeed's own, over pdsh, an MPI, SLURM or on this machine.

One machine, and several that are started one by one, need none of this: torchrun does it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_core.errors import ConfigurationError

__all__ = ["DeepSpeedLauncher"]

_HOSTS = "ACCELERATE_DEEPSPEED_HOSTFILE"
_KIND = "ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER"
_INCLUDE = "ACCELERATE_DEEPSPEED_INCLUSION_FILTER"
_EXCLUDE = "ACCELERATE_DEEPSPEED_EXCLUSION_FILTER"
_ARGUMENTS = "ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER_ARGS"
#: DeepSpeed's runner exports these to other machines by itself.
_EXPORTED = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX")


class DeepSpeedLauncher:
    """Starts the processes of a host file with `deepspeed.launcher.runner`."""

    name = "deepspeed"
    api_version = (1, 0)

    def accepts(self, plan: Any) -> bool:
        """Whether a host file or a launcher of DeepSpeed's is asked for."""
        kind = _said(plan, _KIND)
        if kind == "standard":  # the peer's word for torchrun on each machine
            return False
        return bool(_said(plan, _HOSTS) or kind)

    def launch_command(self, plan: Any) -> list[str]:
        """Return the command that starts the plan on all machines.

        Raises:
            ConfigurationError: no host file, one that is not there, or both filters.
        """
        hosts, include, exclude = (_said(plan, name) for name in (_HOSTS, _INCLUDE, _EXCLUDE))
        if hosts is None and _said(plan, _KIND) != "nossh":
            raise ConfigurationError(
                f"multinode_launcher={_said(plan, _KIND)!r} needs a host file: lines of a host and "
                "`slots=N`, given as hostfile (--deepspeed_hostfile)."
            )
        if hosts is not None and not Path(hosts).is_file():
            raise ConfigurationError(f"The host file {hosts!r} is not there.")
        if include and exclude:
            raise ConfigurationError(
                "inclusion_filter and exclusion_filter cannot both be given: hosts are chosen by "
                f"one of them ({include!r}, {exclude!r})."
            )
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
        kind = _said(plan, _KIND) or "pdsh"
        if hosts is not None:
            command += ["--hostfile", hosts]
        if kind == "nossh":
            command += ["--no_ssh", "--node_rank", str(plan.machine_rank)]
        else:
            command += ["--launcher", kind]
        if arguments := _said(plan, _ARGUMENTS):
            command += [f"--launcher_args={arguments}"]
        if include:
            command += ["--include", include]
        if exclude:
            command += ["--exclude", exclude]
        if plan.main_process_ip:
            command += ["--master_addr", plan.main_process_ip]
        if plan.main_process_port:
            command += ["--master_port", str(plan.main_process_port)]
        flag = {"script": [], "module": ["--module"], "program": ["--no_python"]}
        return [*command, *flag[plan.target.kind], plan.target.path, *plan.target.arguments]

    def launch_environment(self, plan: Any) -> Mapping[str, str]:
        """Return the variable that names what other machines get: the plan's, and the user's.

        DeepSpeed reads a file `.deepspeed_env` in the home and the working directory; what stands
        there is kept, and a variable of this launch goes before it.
        """
        lines: dict[str, str] = {}
        for folder in (Path.home(), Path()):
            file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
            if file.is_file():
                for line in file.read_text().splitlines():
                    name, sign, value = line.partition("=")
                    if sign and not line.lstrip().startswith("#"):
                        lines[name.strip()] = value
        lines |= {
            name: value
            for name, value in plan.environment.items()
            if not name.startswith(_EXPORTED) and "\n" not in value
        }
        handle, path = tempfile.mkstemp(prefix="deepspeed_env-")
        with os.fdopen(handle, "w") as out:
            out.writelines(f"{name}={value}\n" for name, value in lines.items())
        return {"DS_ENV_FILE": path}


def _said(plan: Any, name: str) -> str | None:
    contributed = getattr(plan, "contributed", {})
    if name in contributed:
        return str(contributed[name].value)
    return plan.environment.get(name) or os.environ.get(name) or None
