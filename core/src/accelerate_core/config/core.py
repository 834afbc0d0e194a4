"""The settings of the core, each with its name in every source."""

from __future__ import annotations

from accelerate_core.booleans import parse_bool
from accelerate_core.config.schema import option, settings, settings_fields


def _precision(text: str, variable: str) -> str:
    if variable == "USE_FP16":  # an older name, which holds a boolean
        return "fp16" if parse_bool(text) else "no"
    return text.lower()


@settings(section=None)
class CoreSettings:
    """The settings of the core, which apply to every backend.

    In a script, they are arguments of `Accelerator`.
    """

    backend: str | None = option(default=None, help="name of the backend plugin; default: detected")
    mixed_precision: str = option(
        default="no",
        help="precision of forward and backward: no, fp16, bf16, or one that a plugin adds",
        env=("ACCELERATE_MIXED_PRECISION", "USE_FP16"),
        read=_precision,
    )
    gradient_accumulation_steps: int = option(
        default=1, help="micro-batches per optimizer step", ge=1
    )
    cpu: bool = option(
        default=False,
        help="run on the CPU even if accelerators are present",
        env="ACCELERATE_USE_CPU",
        key="use_cpu",
    )
    torch_device: str | None = option(
        default=None, help="device of this process, by torch's name and index", cli=()
    )
    debug: bool = option(
        default=False, help="check shapes before collectives", env="ACCELERATE_DEBUG_MODE"
    )
    process_group_timeout: float | None = option(
        default=None, help="time limit of a collective in seconds", ge=1, le=10**9
    )
    upcast_outputs: bool = option(
        default=True, help="convert half-precision outputs of models to fp32"
    )
    scheduler_steps: str = option(
        default="per_process",
        choices=("per_process", "per_step"),
        help="how far a prepared scheduler advances when the optimizer steps: one step for each process "
        "that reads different data, or one step; some backends have a different default",
    )
    scheduler_metric: str = option(
        default="mean",
        choices=("mean", "rank_0", "local"),
        help="the metric that every process passes to a prepared scheduler stepped with one: the mean over "
        "the processes, that of rank 0, or its own, with which learning rates may differ",
    )
    preemption_signals: str | None = option(
        default=None,
        help="signals after which the run saves and exits with status 75, such as SIGTERM,SIGUSR1",
    )
    checkpointer: str | None = option(
        default=None, help="plugin that saves and loads; default: directory"
    )
    tracking: str | None = option(
        default=None, help="plugin that passes values to the trackers; default: queued"
    )
    loaders: str | None = option(
        default=None, help="plugin that prepares data loaders; default: the core"
    )


CORE_SETTINGS = settings_fields(CoreSettings)
