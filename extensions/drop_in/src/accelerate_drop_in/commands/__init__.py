"""Accelerate's commands, run by accelerate-core."""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from accelerate_drop_in.commands.arguments import run_own
from accelerate_drop_in.commands.config_files import default_config

#: For each section of a config file, Accelerate's `distributed_type` for files with this section.
_SECTIONS = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}


def call(words: list[str]) -> None:
    """Run a command with the config file that Accelerate would use.

    As in Accelerate, `launch --cpu` does not use the default config file. Options of `launch` for a
    plugin that the launch does not use are removed with a warning.
    """
    from accelerate_core.config.files import CONFIG_VARIABLE

    options = takewhile(lambda word: word != "-m" and not word.endswith(".py"), words)
    unwanted = words[:1] == ["launch"] and "--cpu" in options
    path = default_config()
    said = os.environ.get(CONFIG_VARIABLE)
    if not said and (words[:1] == ["config"] or (path.is_file() and not unwanted)):
        os.environ[CONFIG_VARIABLE] = str(path)
    path = Path(_named_file(words) or os.environ.get(CONFIG_VARIABLE) or path)
    before = _text(path)
    try:
        _dispatch(words)
    finally:
        if words[:1] == ["config"] and _text(path) != before:
            _make_readable_for_accelerate(path)
        if not said:
            os.environ.pop(CONFIG_VARIABLE, None)


def _named_file(words: list[str]) -> str | None:
    """Return the value of `--config_file`."""
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            return value or next(iter(words[index + 1 :]), None)
    return None


def _dispatch(words: list[str]) -> None:
    from accelerate_launch.cli import cli

    name, rest = (words[0], words[1:]) if words else ("", [])
    if name == "tpu-config":
        from accelerate_drop_in.commands import tpu

        run_own(tpu.tpu_command_parser(), tpu.tpu_command_launcher, rest)
    elif name == "to-fsdp2":
        from accelerate_drop_in.commands import to_fsdp2

        run_own(to_fsdp2.to_fsdp2_command_parser(), to_fsdp2.to_fsdp2_command, rest)
    else:
        if name == "launch":
            from accelerate_drop_in.commands.unused_options import without_unused

            words = [name, *without_unused(rest)]
        elif name == "env" and not {"--json", "--help", "-h"} & {*rest}:
            from accelerate_drop_in.commands import env

            run_own(env.env_command_parser(), env.env_command, rest)
            print()
        cli.main(args=words, prog_name="accelerate")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _make_readable_for_accelerate(path: Path) -> None:
    """Rewrite a config file so that Accelerate also accepts it.

    Accelerate requires `distributed_type` and `use_cpu`, which are optional here, and refuses keys
    that it doesn't have, even with their default values.
    """
    if path.suffix == ".json":
        return
    text = _text(path)
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        return
    added: dict[str, Any] = {}
    if "use_cpu" not in found:
        from accelerate_drop_in.environment import get_current_device_type

        use_cpu = get_current_device_type()[0] == "cpu"
        found["use_cpu"] = use_cpu
        added["use_cpu"] = use_cpu
    if "distributed_type" not in found:
        added["distributed_type"] = _distributed_type(found)
    lines = [line for line in text.splitlines() if line != "gradient_accumulation_steps: 1"]
    path.write_text("\n".join(lines) + "\n" + yaml.safe_dump(added) * bool(added), encoding="utf-8")


def _distributed_type(found: dict[str, Any]) -> str:
    """Return Accelerate's `distributed_type` for the values of a config file."""
    for section, kind in _SECTIONS.items():
        if found.get(section):
            return kind
    if int(found.get("num_processes") or 1) == 1:
        return "NO"
    from accelerate_drop_in.environment import get_current_device_type

    return "MULTI_CPU" if found["use_cpu"] else get_current_device_type()[1]


def run(*command: str) -> None:
    """Run a command of accelerate-core with the arguments of this process."""
    call([*command, *sys.argv[1:]])


def main() -> None:
    """Run `accelerate`, with all of its commands."""
    run()
