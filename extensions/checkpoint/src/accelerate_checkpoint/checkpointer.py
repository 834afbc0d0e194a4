"""`DirectoryCheckpointer`: the part of an Accelerator that saves and loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate_checkpoint.background import Background
from accelerate_checkpoint.load import load_state
from accelerate_checkpoint.model import save_model, save_object
from accelerate_checkpoint.numbering import Numbering
from accelerate_checkpoint.preemption import Preemption, read_signals
from accelerate_checkpoint.replay import CycleStart
from accelerate_checkpoint.save import save_state
from accelerate_checkpoint.training_state import TrainingState

if TYPE_CHECKING:
    import torch

    from accelerate_core.contract.parts import Checkpointer, RunParts

__all__ = ["DirectoryCheckpointer"]


class DirectoryCheckpointer:
    """Checkpoints that are directories, each there whole or not at all.

    Args:
        project: the `ProjectConfiguration`.
        signals: text of `preemption_signals`.

    Raises:
        ConfigurationError: one of the signals is none that can be caught.
    """

    name = "directory"
    api_version = (1, 0)

    def __init__(self, project: Any, signals: str | None) -> None:
        self._signals = read_signals(signals)
        #: The save that goes on beside the training.
        self.background = Background()
        self._preemption: Preemption | None = None

    def attach(self, run: RunParts) -> None:
        """Take the run; what has to watch its loop begins here."""
        self._state = state = TrainingState(run)
        self._numbering = Numbering(state)
        self._cycle_start = None if state.gives_gradients else CycleStart(state)
        if self._signals:
            self._preemption = Preemption(state, self._signals, self.wait, self.save_state)

    def save_state(
        self,
        /,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write models, optimizers, schedulers, scaler, registered objects and each rank's own.

        Raises:
            CheckpointError: on every rank, if any of them failed; what stood before still stands.
        """
        return save_state(
            self._state,
            self._numbering,
            self.background,
            self._cycle_start,
            output_dir,
            safe_serialization=safe_serialization,
            max_shard_size=max_shard_size,
            blocking=blocking,
            options=save_model_func_kwargs,
        )

    def load_state(
        self,
        /,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Read what `save_state` wrote into the same objects.

        Raises:
            CheckpointError: the directory or a file of it is missing or damaged, by name. Nothing
                has been changed then.
        """
        self.background.wait()
        return load_state(
            self._state,
            self._numbering,
            input_dir,
            load_kwargs or {},
            trust=trust,
            verify=verify,
            options=load_model_func_kwargs,
        )

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model once, where `load_checkpoint_in_model` finds them."""
        save_model(self._state, model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object once, with torch or safetensors."""
        if self._state.saves_here:
            save_object(obj, f, safe_serialization)

    @property
    def preemption_requested(self) -> bool:
        """Whether one of the signals has come."""
        return self._preemption is not None and self._preemption.requested

    def wait(self) -> None:
        """Return when the save under way is complete; raise what it failed with, once."""
        self.background.wait()

    def release(self) -> None:
        """Wait, and give back the memory of the copies."""
        self.background.wait()
        self.background.staging.release()

    def close(self, failed: bool) -> None:
        """End; of a run that failed the save under way is left to its thread."""
        if self._preemption is not None:
            self._preemption.close()
        if not failed:
            self.release()


if TYPE_CHECKING:  # that it keeps to the protocol
    _: type[Checkpointer] = DirectoryCheckpointer
