"""Accelerate's launch functions, for programs that pass the options as an argparse namespace."""

from __future__ import annotations

import argparse
import os
from typing import Any

from accelerate_launch.contributed import contributed_options
from accelerate_launch.devices import get_free_port
from accelerate_launch.options import LAUNCH_OPTIONS
from accelerate_launch.plan import DEFAULT_PORT, LaunchPlan
from accelerate_launch.planning import draft_plan, make_plan
from accelerate_launch.starting import child_environment, command_of


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the launch options among the attributes of `args`."""
    said = {name: value for name, value in vars(args).items() if value is not None}
    given = {option.name: said[option.name] for option in LAUNCH_OPTIONS if option.name in said}
    if said.get("use_cpu"):
        given["cpu"] = True
    options = [
        (one, next((name for name in one.field.cli if said.get(name)), one.field.cli[0]))
        for one in contributed_options(dict(os.environ))
    ]
    used = {one.schema.name for one, name in options if one.switch and said.get(name)}
    given |= {
        one.key: said[name]
        for one, name in options
        if (one.schema.name in used and name in said and not (one.switch and not said[name]))
        # The switch of one launcher may be used with options of another.
        or (one.schema.kind == "launcher" and said.get(name))
    }
    return given


def validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Return the options unchanged. The config file is read later, when the launch is planned."""
    return args, None, False


def _plan(args: argparse.Namespace) -> LaunchPlan:
    script = args.training_script, list(args.training_script_args or ())
    return make_plan(*script, _given(args), dict(os.environ))


def prepare_simple_launcher_cmd_env(
    args: argparse.Namespace,
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a launch and its environment."""
    plan = _plan(args)
    return command_of(plan), child_environment(plan, dict(os.environ))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a launch, and set the options of torchrun in `args`."""
    if not args.main_process_port:
        args.main_process_port = get_free_port() if args.main_process_port == 0 else DEFAULT_PORT
    several = args.num_machines > 1
    args.nproc_per_node = str(args.num_processes // args.num_machines)
    if several:
        args.nnodes = str(args.num_machines)
        args.node_rank = int(args.machine_rank)
    if several and not getattr(args, "same_network", False):
        args.rdzv_endpoint = f"{args.main_process_ip}:{args.main_process_port}"
    else:
        args.master_port = str(args.main_process_port)
        if several:
            args.master_addr = str(args.main_process_ip)
    plan = draft_plan(_given(args), dict(os.environ))
    return child_environment(plan, dict(os.environ))


def prepare_deepspeed_cmd_env(
    args: argparse.Namespace,
) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command and the environment of a DeepSpeed launch. No command means to use torchrun."""
    several = args.num_machines > 1 and args.deepspeed_multinode_launcher != "standard"
    command, environment = prepare_simple_launcher_cmd_env(args)
    return (command if several else None), environment


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the value of a variable that lists folders, with another folder at the end."""
    paths = os.environ.get(env_var_name, "").split(":")
    return ":".join([*filter(None, paths), str(path_to_add)])


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the options that begin with `fp8_` to an environment, and return it."""
    for name, value in vars(args).items():
        if not name.startswith("fp8_") or value is None:
            continue
        if name == "fp8_override_linear_precision":
            words = ("FPROP", "DGRAD", "WGRAD")
            pairs = dict(zip(words, value, strict=True))
            current_env |= {f"ACCELERATE_FP8_OVERRIDE_{w}": str(v) for w, v in pairs.items()}
        else:
            current_env[f"ACCELERATE_{name.upper()}"] = str(value)
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Add the options that begin with `parallelism_config_` to an environment, and return it."""
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name, value in vars(args).items():
        if name.startswith("parallelism_config_") and value is not None:
            current_env[name.upper()] = str(value)
    return current_env
