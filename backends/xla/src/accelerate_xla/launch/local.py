"""The launcher `tpu`: one process per TPU of this host, or one process for all of them."""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError, parse_bool
from accelerate_launch import LaunchPlan, PrepareForLaunch, target_command
from accelerate_xla import library
from accelerate_xla.launch.tpu_settings import TPULaunch

logger = logging.getLogger(__name__)

#: Requests this launcher.
SWITCH = "ACCELERATE_USE_TPU"
#: Requests a mesh of devices.
_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
#: Options that only torchrun supports.
_TORCHRUN_OPTIONS = ("max_restarts", "log_dir", "tee")


class TPULauncher:
    """Start one process per TPU of this host."""

    name = "tpu"
    api_version = (1, 0)
    Settings = TPULaunch
    uses = frozenset({"main_training_function"})

    def __init__(self, settings: TPULaunch) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Return whether a TPU is requested, or available when the plan launches a function."""
        if plan.launcher == self.name:
            return True
        if "RANK" in plan.environment:  # another launcher started this process
            return False
        on_cpu = _value(plan, "cpu") or parse_bool(os.environ.get("ACCELERATE_USE_CPU", ""))
        if (asked := plan.contributed.get(SWITCH)) is not None:
            given = asked.origin.startswith("command line")
            return bool(parse_bool(asked.value)) and (given or not on_cpu)
        kind = os.environ.get("PJRT_DEVICE", "")
        there = kind.startswith("TPU") or (not kind and library.has_tpu(os.environ))
        return plan.target.kind == "function" and there and not on_cpu

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this host.

        Raises:
            ConfigurationError: torch_xla does not support the plan.
        """
        one = self._in_one_process(plan)
        function = self._function(plan)
        if one and function is None:
            return target_command(plan.target)
        command = [sys.executable, "-m", "accelerate_xla.launch.run"]
        if one:
            command.append("--here")
        elif number := plan.asked_processes:
            command += ["--num_processes", str(number.value)]
        if function is not None:
            command += ["--function", function]
        command += ["-m"] if plan.target.kind == "module" else []
        return [*command, plan.target.path, *plan.target.arguments]

    def launch_environment(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Return variables for the processes, which select the xla backend and the TPU."""
        around = {**os.environ, **plan.environment}
        made = {"ACCELERATE_BACKEND": "xla", "PJRT_DEVICE": around.get("PJRT_DEVICE") or "TPU"}
        if self.settings.downcast_bf16:
            made["ACCELERATE_DOWNCAST_BF16"] = "true"
        if plan.main_process_port:
            made["MASTER_PORT"] = str(plan.main_process_port)
        return made

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> None:
        """Run a function in the processes of the plan.

        Raises:
            ConfigurationError: torch_xla does not support the plan.
            RuntimeConflictError: this process has used a device or has an Accelerator.
            RankFailedError: a process failed.
        """
        from accelerate_xla.launch import spawning

        environment = self.launch_environment(plan)
        if self._in_one_process(plan):
            PrepareForLaunch(function, environment=environment)(*args)
            return
        number = plan.asked_processes
        spawn = partial(
            spawning.spawn,
            start_method=plan.start_method,
            num_processes=None if number is None else int(number.value),
        )
        PrepareForLaunch(spawn, environment=environment)(function, args)

    def _in_one_process(self, plan: LaunchPlan) -> bool:
        """Return whether the plan has one process, after checking that it is supported."""
        _refuse(plan)
        number = plan.asked_processes
        mesh = asks_for_spmd(plan)
        if mesh:
            if number is not None and number.value > 1:
                logger.warning(
                    "num_processes=%s is ignored: one process is started for all devices (SPMD, "
                    "because of %s).",
                    number,
                    mesh,
                )
            return True
        around = {**os.environ, **plan.environment}
        if around.get("PJRT_DEVICE", "").upper().startswith("CPU"):
            _refuse_unconnected(number, around)
        return number is not None and number.value == 1

    def _function(self, plan: LaunchPlan) -> str | None:
        """Return the function of the script to call, or None to run the script as a program.

        Accelerate writes `main` into every config file, so `main` is only called if the script
        defines it without calling it.
        """
        if (name := _value(plan, "main_training_function")) is not None:
            return str(name)
        name = self.settings.main_training_function
        if name != "main":
            return name
        calls_nothing = plan.target.kind == "script" and _only_defines(plan.target.name, name)
        return name if calls_nothing else None


def _only_defines(script: str, name: str) -> bool:
    """Return whether a script defines a function without calling it at the top level."""
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
        defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
        calls = {
            node.func.id
            for one in tree.body
            if isinstance(one, ast.Expr | ast.If)
            for node in ast.walk(one)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        return name in defined and name not in calls
    return False


def asks_for_spmd(plan: LaunchPlan) -> str:
    """Return the variable that requests one process for all devices, or an empty string."""
    around = {**os.environ, **plan.environment}
    spmd = around.get("ACCELERATE_XLA_SPMD")
    if spmd is not None:
        return "ACCELERATE_XLA_SPMD" if parse_bool(spmd) else ""
    sizes = (
        name
        for name, value in around.items()
        if name.startswith("PARALLELISM_CONFIG_")
        and name.endswith("_SIZE")
        and value not in ("", "1", "None")
    )
    return next(sizes, _MESH if parse_bool(around.get(_MESH, "")) else "")


def _refuse(plan: LaunchPlan) -> None:
    backend = _value(plan, "backend") or os.environ.get("ACCELERATE_BACKEND") or "xla"
    if backend != "xla":
        raise ConfigurationError(
            f"The launcher tpu only supports the backend 'xla', but {_source(plan, 'backend')} "
            f"requests {backend!r}. Leave one of them out."
        )
    if _value(plan, "cpu"):
        raise ConfigurationError(
            f"--tpu contradicts running on the CPU ({_source(plan, 'cpu')}). To try a script without "
            "a TPU, set PJRT_DEVICE=CPU."
        )
    if plan.target.kind == "program":
        raise ConfigurationError(
            "--no_python cannot be used with --tpu, because torch_xla's processes run Python and "
            f"{plan.target.name!r} is another program."
        )
    if plan.num_machines > 1:
        raise ConfigurationError(
            f"num_machines={plan.num_machines} is not supported with --tpu, because the hosts of a "
            "TPU pod find each other. Leave it out, and pass --tpu_cluster to start the script on "
            "all hosts."
        )
    given = [name for name in _TORCHRUN_OPTIONS if getattr(plan, name)]
    if given:
        raise ConfigurationError(
            f"--{given[0]} is an option of torchrun and not supported with --tpu, where torch_xla "
            "starts the processes. Leave it out."
        )


def _refuse_unconnected(number: Any, around: Mapping[str, str]) -> None:
    """Reject several processes or threads on the CPU, which would hang or train alone."""
    devices = around.get("CPU_NUM_DEVICES") or "1"
    asked = f"num_processes={number}" if number and number.value > 1 else ""
    asked = asked or (f"CPU_NUM_DEVICES={devices}" if devices != "1" else "")
    if asked:
        count = number.value if number and number.value > 1 else devices
        raise ConfigurationError(
            f"{asked} is not supported with PJRT_DEVICE=CPU: XLA does not connect processes on the "
            "CPU, so each would train alone without an error. For several devices, use one process "
            f"(SPMD) with CPU_NUM_DEVICES={count} and --parallelism_config_dp_replicate_size {count}."
        )


def _value(plan: LaunchPlan, name: str) -> Any:
    sourced = plan.provenance.get(name)
    return None if sourced is None else sourced.value


def _source(plan: LaunchPlan, name: str) -> str:
    sourced = plan.provenance.get(name)
    return "ACCELERATE_BACKEND" if sourced is None or sourced.value is None else sourced.origin
