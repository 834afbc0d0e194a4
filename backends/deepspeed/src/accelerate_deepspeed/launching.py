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

from accelerate_core.plugin import ConfigurationError

#: DeepSpeed's runner exports these to other machines by itself.
_EXPORTED = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX")


class DeepSpeedLauncher:
    """Starts the processes of a host file with `deepspeed.launcher.runner`."""

    name = "deepspeed"
    api_version = (1, 0)

    def accepts(self, plan: Any) -> bool:
        """Whether a host file or a launcher of DeepSpeed's is asked for."""
        kind = _said(plan, "multinode_launcher")
        # "standard" is Accelerate's word for torchrun on each machine.
        return kind != "standard" and bool(kind or _said(plan, "hostfile"))

    def launch_command(self, plan: Any) -> list[str]:
        """Return the command that starts the plan on all machines.

        Raises:
            ConfigurationError: no host file, one that is not there, or both filters.
        """
        names = ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")
        hosts, include, exclude, kind = (_said(plan, name) for name in names)
        if hosts is None and kind != "nossh":
            raise ConfigurationError(
                f"multinode_launcher={kind!r} needs a host file: lines of a host and "
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
        if kind == "nossh":
            command += ["--no_ssh", "--node_rank", str(plan.machine_rank)]
        else:
            command += ["--launcher", kind or "pdsh"]
        if arguments := _said(plan, "multinode_launcher_args"):
            command += [f"--launcher_args={arguments}"]
        options = {
            "--hostfile": hosts,
            "--include": include,
            "--exclude": exclude,
            "--master_addr": plan.main_process_ip,
            "--master_port": plan.main_process_port,
        }
        for option, value in options.items():
            if value:
                command += [option, str(value)]
        flags = {"script": [], "module": ["--module"], "program": ["--no_python"]}
        return [*command, *flags[plan.target.kind], plan.target.path, *plan.target.arguments]

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


def _said(plan: Any, field: str) -> str | None:
    """Return what options, the config file or the environment say of a field of `DeepSpeedPlugin`."""
    name = f"ACCELERATE_DEEPSPEED_{field.upper()}"
    if name in plan.contributed:
        return str(plan.contributed[name].value)
    return plan.environment.get(name) or os.environ.get(name) or None
