"""The settings objects of the core that user code constructs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

from accelerate_core.config.schema import KwargsHandler, option, settings

#: The modes of torch.compile.
_Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@settings
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    With `upcast_outputs=False`, half-precision outputs of a prepared model are not converted to fp32.
    `None` uses the Accelerator's setting.
    """

    enabled: bool = option(default=True, help="turn autocast on")
    cache_enabled: bool | None = option(default=None, help="cache cast weights within a region")
    upcast_outputs: bool | None = option(
        default=None, help="convert half-precision outputs to fp32"
    )


@settings
class GradScalerKwargs(KwargsHandler):
    """How `torch.amp.GradScaler` scales the loss under fp16."""

    init_scale: float = option(default=65536.0, help="initial scale", gt=0)
    growth_factor: float = option(default=2.0, help="factor by which the scale grows", gt=1)
    backoff_factor: float = option(default=0.5, help="scale factor after an overflow", gt=0, lt=1)
    growth_interval: int = option(default=2000, help="good steps before the scale grows", ge=1)
    enabled: bool = option(default=True, help="turn loss scaling on")


@settings
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is started.

    `backend=None` uses torch's default for the device. `timeout` is a `timedelta` or a number of seconds.
    """

    backend: str | None = option(default=None, help="communication backend, such as gloo")
    init_method: str | None = option(
        default=None, help="rendezvous URL to use instead of the launcher's store"
    )
    timeout: timedelta | None = option(default=None, help="time limit of a collective")


@settings
class DataLoaderConfiguration:
    """How prepared data loaders split data between ranks."""

    split_batches: bool = option(default=False, help="the batch size is for all ranks together")
    dispatch_batches: bool | None = option(
        default=None, help="one rank reads and sends; default: True for iterable datasets"
    )
    even_batches: bool = option(
        default=True, help="repeat samples so that every rank has equal batches"
    )
    use_seedable_sampler: bool = option(
        default=False, help="shuffle depending only on seed and epoch"
    )
    data_seed: int | None = option(default=None, help="seed of the seedable sampler")
    non_blocking: bool = option(default=False, help="copy batches to the device asynchronously")
    use_stateful_dataloader: bool = option(default=False, help="use torchdata's StatefulDataLoader")
    #: None means True. In scripts that import `accelerate`, it means the value of use_stateful_dataloader.
    restore_positions: bool | None = option(default=None, help="load_state continues mid-epoch")
    read_ahead: bool = option(
        default=True, help="when dispatching, read the next step in a background thread"
    )


@settings
class ProjectConfiguration:
    """Where checkpoints and logs go."""

    project_dir: str | os.PathLike[str] | None = option(
        default=None, help="root directory of logs and checkpoints"
    )
    logging_dir: str | os.PathLike[str] | None = option(default=None, help="default: project_dir")
    automatic_checkpoint_naming: bool = option(
        default=False, help="save_state chooses numbered directories"
    )
    total_limit: int | None = option(
        default=None, help="number of numbered checkpoints to keep", ge=1
    )
    iteration: int = option(default=0, help="number of the next checkpoint", ge=0)
    save_on_each_node: bool = option(default=False, help="save once on each machine")

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and also `logging_dir` if it is not set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@settings
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over several micro-batches."""

    num_steps: int | None = option(default=None, help="micro-batches per optimizer step", ge=1)
    adjust_scheduler: bool = option(
        default=True, help="schedulers count optimizer steps, not micro-batches"
    )
    sync_with_dataloader: bool = option(
        default=True, help="the last batch of a loader ends the cycle"
    )
    sync_each_batch: bool = option(default=False, help="reduce gradients at every micro-batch")


@settings(
    env_prefix="ACCELERATE_DYNAMO_",
    section="dynamo_config",
    argument="dynamo_plugin",
    yaml_prefix="dynamo_",
)
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled with `torch.compile`.

    Raises:
        ConfigurationError: `mode` is not one of torch's.
    """

    backend: str | None = option(
        default=None, help="compiler, such as inductor or aot_eager; 'no' turns it off"
    )
    mode: _Mode | None = option(default=None, help="default, reduce-overhead or max-autotune")
    fullgraph: bool | None = option(
        default=None,
        help="raise an error if the graph breaks",
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        yaml="dynamo_use_fullgraph",
    )
    dynamic: bool | None = option(
        default=None,
        help="trace dynamic shapes",
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        yaml="dynamo_use_dynamic",
    )
    options: Any = option(default=None, help="options of the compiler")
    disable: bool = option(default=False, help="keep the settings, but don't compile")
    use_regional_compilation: bool | None = option(
        default=None, help="compile repeated blocks instead of the whole model"
    )

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = str(self.backend).lower()

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend not in (None, "no") and not self.disable
