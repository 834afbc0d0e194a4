"""Saving, loading and tracking."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from accelerate_core import checkpoint
from accelerate_core.errors import ConfigurationError
from accelerate_core.facade.place import Place
from accelerate_core.tracking import GeneralTracker

__all__ = ["Keeping"]


class Keeping(Place):
    """Saving, loading and tracking."""

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict of a prepared model.

        Args:
            unwrap: keys as the user's own model has them; False: as the wrapper has them.
        """
        if not unwrap:
            return dict(model.state_dict())
        return cast("dict[str, Any]", self.hooks.consolidate(self, model))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once (per machine, with `save_on_each_node`), in place of `torch.save`."""
        checkpoint.save_object(obj, f, here=self.saves_here, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights where `load_checkpoint_in_model` finds them.

        Args:
            max_shard_size: bytes, or a text such as "5MB".
            safe_serialization: safetensors; False: torch's pickle.
        """
        checkpoint.save_model(
            self._whole, model, save_directory, max_shard_size, safe_serialization
        )

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before models are saved by `save_state`."""
        handle = RemovableHandle(self.save_state_pre_hooks)
        self.save_state_pre_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded by `load_state`."""
        handle = RemovableHandle(self.load_state_pre_hooks)
        self.load_state_pre_hooks[handle.id] = hook
        return handle

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load objects with `state_dict` and `load_state_dict` in `save_state`.

        Raises:
            ConfigurationError: an object lacks one of the two; all such are named.
        """
        bad = [
            o for o in objects if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))
        ]
        if bad:
            names = ", ".join(type(one).__name__ for one in bad)
            raise ConfigurationError(
                f"register_for_checkpointing needs objects with state_dict and load_state_dict; "
                f"these lack them: {names}."
            )
        self.registered_objects.extend(objects)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write everything that going on needs into a directory; return the directory.

        Args:
            output_dir: not with automatic naming (`ProjectConfiguration`).
            save_model_func_kwargs: for backends that write checkpoints themselves.
        """
        return checkpoint.save_state(
            self._whole, output_dir, safe_serialization, save_model_func_kwargs
        )

    def load_state(
        self,
        input_dir: Any = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trust: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read what `save_state` wrote into the same prepared objects.

        Args:
            input_dir: with automatic naming the newest one if None.
            load_kwargs: for `torch.load`.
            trust: also unpickle Python objects; only for directories you wrote yourself.
            load_model_func_kwargs: for backends that read checkpoints themselves.

        Raises:
            CheckpointError: something is missing or unreadable, by name.
        """
        checkpoint.load_state(
            self._whole, input_dir, load_kwargs or {}, trust, load_model_func_kwargs
        )

    @property
    def log_with(self) -> list[str]:
        """Names of the trackers asked for."""
        return self._hub.names

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that run."""
        return self._hub.trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start a run in every tracker asked for, with a configuration.

        Args:
            init_kwargs: per tracker name, arguments of its constructor.
        """
        self._hub.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` the library's own object."""
        return self._hub.get(name, unwrap=unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Log values to all trackers, on the main process.

        Args:
            log_kwargs: per tracker name, arguments of its `log`.
        """
        self._hub.log(values, step, log_kwargs)
