"""The Accelerator's methods for saving and loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accelerate_core.accelerator.saving import Saving
from accelerate_core.config.handlers import ProjectConfiguration


class CheckpointVerbs:
    """The Accelerator's methods for saving and loading."""

    _saving: Saving

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The directories of checkpoints and logs, and how checkpoints are named."""
        return self._saving.project

    @project_configuration.setter
    def project_configuration(self, value: ProjectConfiguration) -> None:
        self._saving.project = value

    @property
    def checkpointer(self) -> Any:
        """The active checkpointer."""
        return self._saving.checkpointer

    @property
    def project_dir(self) -> Any:
        """The root directory of checkpoints and logs."""
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self.project_configuration.iteration

    @property
    def preemption_requested(self) -> bool:
        """Whether one of `preemption_signals` was received. The run ends at the next step boundary."""
        return self._saving.preemption_requested

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object like `torch.save`, but only once, or once per machine with `save_on_each_node`.

        Args:
            obj: the object to save.
            f: a path or an open file.
            safe_serialization: whether to write safetensors. The object must then be a dict of tensors.
        """
        self._saving.checkpointer.save(obj, f, safe_serialization)

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
        self._saving.checkpointer.save_model(
            model, save_directory, max_shard_size, safe_serialization
        )

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        max_shard_size: int | str = "10GB",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that a run needs to resume into a directory, and return its path.

        The directory appears complete or not at all, with a manifest of sizes and checksums. If it
        exists, it is replaced at that moment. Call this on every rank.

        Args:
            output_dir: where to save; leave it out with automatic naming (`ProjectConfiguration`).
            safe_serialization: write weights as safetensors; False uses torch's own format.
            blocking: False copies the state to host memory and returns. A thread writes it while
                training continues. The next save, `load_state`, `wait_for_checkpoint` or
                `end_training` waits for it, and raises its error if it failed.
            max_shard_size: size of the largest weights file: bytes, or a string such as "5GB".
            save_model_func_kwargs: options of backends that write checkpoints themselves.

        Raises:
            CheckpointError: a rank failed to save. Every rank raises it, and earlier checkpoints
                are unchanged.

        Example:
            for epoch in range(2):
                for x, y in loader:
                    accelerator.backward(loss_function(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.save_state(f"checkpoints/epoch_{epoch}")
        """
        return self._saving.save_state(
            output_dir,
            safe_serialization=safe_serialization,
            blocking=blocking,
            max_shard_size=max_shard_size,
            **save_model_func_kwargs,
        )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trust: bool = False,
        verify: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Load a checkpoint of `save_state` into the same prepared objects, and return its path.

        The checkpoint is verified first, and nothing changes if it is damaged. A loop over a
        prepared loader then continues with the next batch. Directories that Hugging Face Accelerate
        1.x wrote can be loaded too.

        Args:
            input_dir: the checkpoint; None is the newest complete one with an automatic name.
                Damaged ones are skipped with a warning.
            load_kwargs: passed to `torch.load` for optimizers.
            trust: also unpickle Python objects in the states of optimizers, schedulers and
                registered objects; only for directories that you wrote yourself.
            verify: False compares only sizes, not checksums.
            load_model_func_kwargs: `strict=False`, and options of backends that read checkpoints
                themselves.

        Raises:
            CheckpointError: a file is missing, damaged or incompatible. The message names it.

        Example:
            accelerator.save_state("checkpoint")
            accelerator.load_state("checkpoint")  # in the next run, after prepare
            for x, y in loader:  # continues with the next batch
                loss = loss_function(model(x), y)
        """
        return self._saving.checkpointer.load_state(
            input_dir, load_kwargs=load_kwargs, trust=trust, verify=verify, **load_model_func_kwargs
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save is complete, and raise its error if it failed."""
        self._saving.wait_for_checkpoint()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects with `state_dict` and `load_state_dict` in checkpoints.

        Raises:
            ConfigurationError: an object lacks one of the two methods. The message names all of them.

        Example:
            average = torch.optim.swa_utils.AveragedModel(model)
            accelerator.register_for_checkpointing(average)
            accelerator.save_state("checkpoint")
        """
        self._saving.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before models are saved by `save_state`.

        `models` are the modules that were passed to `prepare`, without wrappers. A model is not saved
        if the hook removes it, or its weights, from the lists. If the backend saves the models itself,
        `weights` is empty.
        """
        return self._saving.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded by `load_state`.

        `models` are the modules that were passed to `prepare`, without wrappers. A model that the hook
        removes from the list is not loaded, unless the backend loads the models itself.
        """
        return self._saving.register_load_state_pre_hook(hook)
