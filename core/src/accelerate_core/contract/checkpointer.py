"""The checkpointer as a replaceable part, and what it gets from a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from accelerate_core.config.handlers import ProjectConfiguration
from accelerate_core.contract.members import (
    BackendView,
    CommunicatorView,
    GradientStateView,
    PreparedOptimizer,
    Scheduler,
    Stateful,
)
from accelerate_core.contract.parts import Tracking
from accelerate_core.contract.topology import Process
from accelerate_core.contract.view import PrecisionView
from accelerate_core.errors import WarnOnce

if TYPE_CHECKING:
    import torch

    from accelerate_core.contract.owner_hooks import OwnerHooks

__all__ = ["Checkpointer", "RunParts"]


class TokenCountView(Stateful, Protocol):
    """The items of one accumulation cycle."""

    @property
    def open(self) -> bool:
        """Whether items are counted in the current cycle."""


class CycleView(Protocol):
    """The accumulation cycle of the training loop."""

    #: Number of micro-batches so far.
    step: int

    @property
    def tokens(self) -> TokenCountView:
        """The items that are counted in this cycle."""

    def update_scale(self) -> None:
        """Apply a pending update of the loss scale. Call this before you read the scaler."""


class Contribution(Protocol):
    """One plugin's implementation of a hook that several plugins may implement."""

    @property
    def key(self) -> str:
        """Kind and name of the plugin, as `kind:name`."""

    @property
    def names(self) -> Iterable[str]:
        """The hook's arguments that the implementation takes."""

    def __call__(self, arguments: Mapping[str, object]) -> object:
        """Call the implementation with the hook's arguments by name, including the Accelerator."""


class SharedHooksView(Protocol):
    """The hooks that several plugins may implement, bound to one Accelerator."""

    def implementations(self, hook: str) -> Sequence[Contribution]:
        """Return the implementations of a hook, ordered by plugin name."""

    def call(self, implementation: Contribution, **arguments: object) -> object:
        """Call one implementation with the hook's arguments, and return its result."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that a checkpointer saves; `accelerate_checkpoint.TrainingState` reads them.

    Attributes:
        hooks: the backend's owner hooks, bound to the Accelerator.
        backend: the declarations of the active backend.
        precision: the active precision.
        process: rank, world size, device and store.
        communicator: collectives among all ranks.
        models, optimizers, schedulers, loaders: the prepared objects; the lists grow.
        scaler: the gradient scaler, or None if losses are not scaled.
        gradient_state: counters of the training loop, and its callback `loop_body_end`.
        cycle: the current accumulation cycle.
        project: returns directories, naming and retention. Scripts may replace them at any time.
        registered: the objects passed to `register_for_checkpointing`.
        save_hooks: the script's `hook(models, weights, output_dir)`, by number. Pass it inner models.
        load_hooks: the script's `hook(models, input_dir)`, by number. Pass it inner models.
        restore_positions: returns whether loaders continue at the position of the checkpoint.
        inner_model: returns a model without the wrappers of the backend and of `torch.compile`.
        whole_state: returns the full state dict of a model. Call it on every rank, in the same order.
        plugins: kind, name, distribution and version of each active plugin.
        shared_hooks: the implementations of `on_save` and `on_load`.
        tracking: the active `Tracking`.
        warn_once: warns once per text, on the main process, or on every rank with `every_rank=True`.
        end_training: ends the run.
    """

    hooks: OwnerHooks
    backend: BackendView
    precision: PrecisionView
    process: Process
    communicator: CommunicatorView
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[PreparedOptimizer]
    schedulers: Sequence[Scheduler]
    loaders: Sequence[Any]
    scaler: torch.amp.GradScaler | None
    gradient_state: GradientStateView
    cycle: CycleView
    project: Callable[[], ProjectConfiguration]
    registered: Sequence[Stateful]
    save_hooks: Mapping[int, Callable[..., None]]
    load_hooks: Mapping[int, Callable[..., None]]
    restore_positions: Callable[[], bool]
    inner_model: Callable[[torch.nn.Module], torch.nn.Module]
    whole_state: Callable[[torch.nn.Module], dict[str, Any]]
    plugins: Sequence[Mapping[str, str]]
    shared_hooks: SharedHooksView
    tracking: Tracking
    warn_once: WarnOnce
    end_training: Callable[[], None]


class Checkpointer(Protocol):
    """Saves and loads the checkpoints of one Accelerator.

    The class declares `name`, which must match its entry point, and `api_version`. If it has a `Settings`
    class, decorated with `accelerate_core.settings`, the constructor gets an instance as its third argument,
    with values from `kwargs_handlers`, the environment and the config file.
    """

    def __init__(self, project: ProjectConfiguration, signals: str | None) -> None:
        """Create the checkpointer; raise an error for invalid settings.

        It is created before the process group starts if the settings affect checkpoints (signals, naming,
        a limit, or a backend that cannot save gradients), otherwise on first use.

        Args:
            project: directories, naming and retention.
            signals: the value of `preemption_signals`, or None.
        """

    def attach(self, run: RunParts) -> None:
        """Set the run to save and load; called once, before any other method."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: object,
    ) -> str:
        """Save everything that is needed to resume the run, and return the directory.

        The directory appears complete or not at all, with a manifest of sizes and checksums. It replaces an
        existing one atomically. Call this on all ranks.

        Args:
            output_dir: the directory to write. Leave it out with automatic naming (`ProjectConfiguration`).
            safe_serialization: whether to write weights as safetensors instead of in torch's format.
            blocking: with False, copy the state to host memory, return, and write it while training
                continues. The next save, `load_state`, `wait_for_checkpoint` or `end_training` waits for
                the write and raises its error.
            max_shard_size: largest size of a weights file, in bytes or as a string such as "5GB".
            save_model_func_kwargs: options for backends that write checkpoints themselves.

        Raises:
            CheckpointError: saving failed on some rank; raised on every rank. Earlier checkpoints are kept.

        """

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: object,
    ) -> str:
        """Load a checkpoint into the prepared objects, and return its directory.

        The checkpoint is verified first. If it is damaged, nothing is changed. A loop over a prepared loader
        then continues at the position where the checkpoint was saved. Checkpoints of Hugging Face
        Accelerate 1.x can be loaded too.

        Args:
            input_dir: the checkpoint. If None, use the newest complete one with an automatic name; damaged
                ones are skipped with a warning.
            load_kwargs: arguments of `torch.load` for optimizers.
            trust: whether to unpickle Python objects in the states of optimizers, schedulers and
                registered objects. Only use this for checkpoints that you wrote yourself.
            verify: with False, compare only sizes, not checksums.
            load_model_func_kwargs: `strict=False`, and options for backends that read checkpoints
                themselves.

        Raises:
            CheckpointError: names what is missing, damaged or incompatible.

        """

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights in the form that `load_checkpoint_in_model` reads.

        Args:
            model: a model, prepared or not.
            save_directory: the folder to write to. It is created if necessary.
            max_shard_size: largest size of a file, in bytes or as a string such as "5MB".
            safe_serialization: whether to write safetensors instead of torch's pickle format.

        Example:
            from safetensors.torch import load_file

            accelerator.save_model(model, "trained")
            weights = load_file("trained/model.safetensors")
        """

    def save(
        self, obj: object, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False
    ) -> None:
        """Save an object like `torch.save`, but only once, or once per machine with `save_on_each_node`.

        Args:
            obj: the object to save.
            f: a path or an open file.
            safe_serialization: whether to write safetensors. The object must then be a dict of tensors.
        """

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the preemption signals was received."""

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error if it failed."""

    def release(self) -> None:
        """Wait for a save in the background, and free the memory that is reserved for such saves."""

    def close(self, failed: bool) -> None:
        """Shut down. If `failed`, other ranks may have exited, so don't communicate with them."""
