"""The core's own settings, each with the names every source knows it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CORE_SETTINGS", "SETTINGS_BY_NAME", "Setting"]


@dataclass(frozen=True)
class Setting:
    """One value of the core.

    `kind` is the type texts are converted to; `choices`, where closed, the
    allowed values. Older environment names stand after the current one.
    """

    name: str
    kind: Any
    default: Any
    help: str
    env: tuple[str, ...]
    yaml: tuple[str, ...]
    cli: tuple[str, ...]
    choices: tuple[str, ...] | None = None
    minimum: int | None = None


def _setting(name: str, kind: Any, default: Any, help: str, **names: Any) -> Setting:
    env = names.pop("env", None) or (f"ACCELERATE_{name.upper()}",)
    yaml = names.pop("yaml", (name,))
    cli = names.pop("cli", (f"--{name}",))
    return Setting(name, kind, default, help, env, yaml, cli, **names)


CORE_SETTINGS: tuple[Setting, ...] = (
    _setting("backend", str, None, "name of the backend plugin; default: detected"),
    _setting(
        "mixed_precision",
        str,
        "no",
        "precision of forward and backward: no, fp16, bf16, or one a plugin adds",
        env=("ACCELERATE_MIXED_PRECISION", "USE_FP16"),
    ),
    _setting("gradient_accumulation_steps", int, 1, "micro-batches per optimizer step", minimum=1),
    _setting(
        "cpu",
        bool,
        False,
        "run on the CPU whatever devices are there",
        env=("ACCELERATE_USE_CPU",),
        yaml=("use_cpu",),
    ),
    _setting("torch_device", str, None, "device of this process, such as cuda:1", cli=()),
    _setting(
        "debug", bool, False, "check shapes before collectives", env=("ACCELERATE_DEBUG_MODE",)
    ),
    _setting("process_group_timeout", float, None, "seconds a collective may wait", minimum=1),
    _setting("upcast_outputs", bool, True, "convert half precision outputs of models to fp32"),
    _setting(
        "preemption_signals",
        str,
        None,
        "signals on which the run saves and leaves with status 75, such as SIGTERM,SIGUSR1",
    ),
    _setting("checkpointer", str, None, "plugin that saves and loads; default: directory"),
    _setting("tracking", str, None, "plugin that feeds the trackers; default: queued"),
)

SETTINGS_BY_NAME = {setting.name: setting for setting in CORE_SETTINGS}
