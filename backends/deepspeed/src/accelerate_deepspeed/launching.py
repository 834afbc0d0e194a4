"""The launcher for host files. It runs DeepSpeed's launcher with pdsh, MPI or SLURM, or on this machine.

You don't need it for one machine, or if you start each machine yourself: torchrun is enough.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError

#: Prefixes of variables that DeepSpeed's runner already exports to other machines.
_EXPORTED = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX")
#: Names a network interface of this machine. Other machines may have another one.
_LOCAL = "GLOO_SOCKET_IFNAME"
#: The launchers that call mpirun, which doesn't give the ranks the address of rank 0.
_MPI = ("openmpi", "mpich", "impi", "mvapich")


class DeepSpeedLauncher:
    """Start processes on the hosts of a host file with `deepspeed.launcher.runner`."""

    name = "deepspeed"
    api_version = (1, 0)

    def accepts(self, plan: Any) -> bool:
        """Return whether a host file or one of DeepSpeed's launchers is requested."""
        kind = _value(plan, "multinode_launcher")
        # In Accelerate, "standard" means torchrun on each machine.
        return kind != "standard" and bool(kind or _value(plan, "hostfile"))

    def launch_command(self, plan: Any) -> list[str]:
        """Return the command that starts the plan on all machines.

        Raises:
            ConfigurationError: the host file is missing, or both filters are given.
        """
        names = ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")
        hosts, include, exclude, kind = (_value(plan, name) for name in names)
        if hosts is None and kind != "nossh":
            raise ConfigurationError(
                f"multinode_launcher={kind!r} needs a host file. Pass --deepspeed_hostfile with a "
                "file that has one line `HOST slots=N` per host."
            )
        if hosts is not None and not Path(hosts).is_file():
            raise ConfigurationError(f"The host file {hosts!r} does not exist.")
        if include and exclude:
            raise ConfigurationError(
                f"inclusion_filter={include!r} and exclusion_filter={exclude!r} cannot be combined. "
                "Leave one of them out."
            )
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
        if kind == "nossh":
            command += ["--no_ssh", "--node_rank", str(plan.machine_rank)]
        else:
            command += ["--launcher", kind or "pdsh"]
        if arguments := _value(plan, "multinode_launcher_args"):
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
        """Write a file with the variables for other machines, and return the variable that names it.

        By default, DeepSpeed reads `.deepspeed_env` in the home and in the working directory. The
        variables in these files are kept, unless this launch sets them.
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
            if not name.startswith((*_EXPORTED, _LOCAL)) and "\n" not in value
        }
        if _value(plan, "multinode_launcher") in _MPI:
            lines["MASTER_ADDR"] = plan.main_process_ip or _first_host(_value(plan, "hostfile"))
            lines["MASTER_PORT"] = str(plan.main_process_port or 29500)
        handle, path = tempfile.mkstemp(prefix="deepspeed_env-")
        with os.fdopen(handle, "w") as out:
            out.writelines(f"{name}={value}\n" for name, value in lines.items())
        return {"DS_ENV_FILE": path}


def _first_host(file: str | None) -> str:
    """Return the first host in a host file, which `launch_command` has checked."""
    lines = Path(str(file)).read_text().splitlines()
    hosts = [line.split()[0] for line in lines if line.split("#")[0].strip()]
    return hosts[0] if hosts else "127.0.0.1"


def _value(plan: Any, field: str) -> str | None:
    """Return the value of a field of `DeepSpeedPlugin` from options, config file or environment."""
    name = f"ACCELERATE_DEEPSPEED_{field.upper()}"
    if name in plan.contributed:
        return str(plan.contributed[name].value)
    return plan.environment.get(name) or os.environ.get(name) or None
