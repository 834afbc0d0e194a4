"""Save a model whose weights are partly on disk, even into the folder that they are read from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from accelerate_big_model.offload import MAPPED, OffloadedWeightsLoader, mapped_key, whole_map
from accelerate_big_model.tensors import joined, offload_hook
from accelerate_checkpoint import checkpoint_files
from accelerate_core.plugin import ConfigurationError, plain_keys


class OffloadedState:
    """The state dict of a model with offloaded parts. Weights on disk are read one at a time.

    Args:
        model: the model, with hooks on its offloaded parts.

    Raises:
        ConfigurationError: a weight is on the meta device, and no hook can load it.
    """

    #: The weights by name. Weights on disk are tensors on the meta device.
    tensors: dict[str, torch.Tensor]

    def __init__(self, model: nn.Module) -> None:
        self.tensors = dict(model.state_dict())
        self._on_disk: dict[str, tuple[OffloadedWeightsLoader, str]] = {}
        for prefix, module in model.named_modules():
            hook = offload_hook(module)
            if hook is None:
                continue
            for name in hook.weights_map:
                full = joined(prefix, name)
                if full not in self.tensors or full in self._on_disk:
                    continue
                if self.tensors[full].device.type == "meta":
                    self._find(full, *whole_map(hook.weights_map, name))
        empty = [
            name
            for name, tensor in self.tensors.items()
            if tensor.device.type == "meta" and name not in self._on_disk
        ]
        if empty:
            raise ConfigurationError(
                f"{', '.join(empty[:10])} cannot be saved: they are on the meta device, and no hook "
                "can load their data. Load a checkpoint first."
            )

        # Files have the names of the model without `torch.compile`.
        self.tensors = plain_keys(model, self.tensors)
        self._on_disk = plain_keys(model, self._on_disk)

    def _find(self, full: str, weights: object, key: str) -> None:
        if isinstance(weights, OffloadedWeightsLoader) and weights.on_disk(key):
            self._on_disk[full] = weights, key
            self.tensors[full] = weights.about(key)
        else:
            self.tensors[full] = weights[key]  # type: ignore[index]

    def read(self, name: str) -> torch.Tensor:
        """Return a weight with its data.

        Raises:
            CheckpointError: its file has changed since it was first used, or can't be read.
        """
        if name not in self._on_disk:
            return self.tensors[name]
        weights, key = self._on_disk[name]
        return weights[key]

    def saved_in(self, directory: Path) -> None:
        """Make the model read its weights from a folder in which they were just saved.

        This changes only weights whose previous files were replaced or removed.
        """
        places: dict[str, Path] | None = None
        for name, (weights, key) in self._on_disk.items():
            if weights.is_unchanged(key):
                continue
            if places is None:
                places = {
                    found: path
                    for path in checkpoint_files(directory.resolve())
                    for found in MAPPED[mapped_key(path)](path).names()
                }
            if name in places:
                weights.relocate(key, mapped_key(places[name]), places[name], name)
