"""The launcher `tpu`: one process for each TPU of this host, or one that computes on all of them."""

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
from accelerate_xla.launch.settings import TPULaunch

logger = logging.getLogger(__name__)

#: Asks for this launcher.
SWITCH = "ACCELERATE_USE_TPU"
#: Asks for a mesh of devices.
_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
#: Options of torchrun that a failed or watched process would need.
_OF_AN_AGENT = ("max_restarts", "log_dir", "tee")


class TPULauncher:
    """Start one process for each TPU of this host."""

    name = "tpu"
    api_version = (1, 0)
    Settings = TPULaunch
    uses = frozenset({"main_training_function"})

    def __init__(self, settings: TPULaunch) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether a TPU is asked for; a function starts on one that is there, too."""
        if plan.launcher == self.name:
            return True
        if "RANK" in plan.environment:  # this process is one that somebody else has started
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
            ConfigurationError: the plan has what torch_xla cannot do.
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
        """Return what the processes find set: a TPU is what XLA uses, and XLA is the backend."""
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
            ConfigurationError: the plan has what torch_xla cannot do.
            RuntimeConflictError: this process has used a device, or has an Accelerator.
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
        """Tell whether the plan has one process, after a look at what cannot be."""
        _refuse(plan)
        number = plan.asked_processes
        mesh = asks_for_spmd(plan)
        if mesh:
            if number is not None and number.value > 1:
                logger.warning(
                    "num_processes=%s: one process is started, which computes on all devices (SPMD, "
                    "because of %s).",
                    number,
                    mesh,
                )
            return True
        around = {**os.environ, **plan.environment}
        if around.get("PJRT_DEVICE", "").upper().startswith("CPU"):
            _refuse_blind(number, around)
        return number is not None and number.value == 1

    def _function(self, plan: LaunchPlan) -> str | None:
        """Return the function of the script that is to be called, None to run it as a program.

        Accelerate writes `main` into every config file. It is called if the script does not start by
        itself.
        """
        if (name := _value(plan, "main_training_function")) is not None:
            return str(name)
        name = self.settings.main_training_function
        if name != "main":
            return name
        return name if plan.target.kind == "script" and _waits_for(plan.target.name, name) else None


def _waits_for(script: str, name: str) -> bool:
    """Tell whether a script defines a function and does not start by itself."""
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
    """Return what asks for one process on all devices, "" if nothing does."""
    around = {**os.environ, **plan.environment}
    if (said := around.get("ACCELERATE_XLA_SPMD")) is not None:
        return "ACCELERATE_XLA_SPMD" if parse_bool(said) else ""
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
            f"The launcher tpu starts processes for the backend 'xla', and {_said(plan, 'backend')} "
            f"asks for {backend!r}. Leave one of them out."
        )
    if _value(plan, "cpu"):
        raise ConfigurationError(
            f"--tpu contradicts running on the CPU ({_said(plan, 'cpu')}). To try a script without "
            "a TPU set PJRT_DEVICE=CPU."
        )
    if plan.target.kind == "program":
        raise ConfigurationError(
            f"--no_python cannot be used with --tpu: {plan.target.name!r} is no Python, in which "
            "torch_xla's processes run."
        )
    if plan.num_machines > 1:
        raise ConfigurationError(
            f"num_machines={plan.num_machines}: the hosts of a TPU pod know each other by themselves. "
            "Leave it out; --tpu_cluster starts the script on all of them."
        )
    asked = [name for name in _OF_AN_AGENT if getattr(plan, name)]
    if asked:
        raise ConfigurationError(
            f"--{asked[0]} belongs to torchrun; processes on TPUs are started by torch_xla, which "
            "does not have it. Leave it out."
        )


def _refuse_blind(number: Any, around: Mapping[str, str]) -> None:
    """Refuse what trains silently alone, or hangs: several processes or threads on the CPU."""
    devices = around.get("CPU_NUM_DEVICES") or "1"
    asked = f"num_processes={number}" if number and number.value > 1 else ""
    asked = asked or (f"CPU_NUM_DEVICES={devices}" if devices != "1" else "")
    if asked:
        count = number.value if number and number.value > 1 else devices
        raise ConfigurationError(
            f"{asked} with PJRT_DEVICE=CPU: processes on the CPU do not see each other, so that each "
            "would train alone and nothing would fail. For several devices use one process "
            f"(SPMD): CPU_NUM_DEVICES={count} and --parallelism_config_dp_replicate_size {count}."
        )


def _value(plan: LaunchPlan, name: str) -> Any:
    sourced = plan.provenance.get(name)
    return None if sourced is None else sourced.value


def _said(plan: LaunchPlan, name: str) -> str:
    sourced = plan.provenance.get(name)
    return "ACCELERATE_BACKEND" if sourced is None or sourced.value is None else sourced.origin
