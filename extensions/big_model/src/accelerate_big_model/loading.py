"""Bringing a checkpoint's weights into a model, each straight to its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_big_model.offload import Index, offload_weight, save_offload_index
from accelerate_big_model.tensors import (
    check_device_map,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    named_module_tensors,
    non_persistent_buffers,
    on_one_device,
    retie_parameters,
    set_module_tensor_to_device,
    torch_dtype,
)
from accelerate_checkpoint.weights import checkpoint_files, device_of, iter_state_dict
from accelerate_core.errors import CheckpointError, ConfigurationError

logger = logging.getLogger(__name__)


@dataclass
class _Loader:
    """Puts named tensors into a model by its device map, and keeps account of the names."""

    model: nn.Module
    device_map: Mapping[str, Any]
    offload_folder: Path | None
    dtype: torch.dtype | None
    keep_in_fp32: Sequence[str]
    offload_buffers: bool
    index: Index = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = dict(named_module_tensors(self.model, recurse=True, remove_duplicate=False))
        self.tied = find_tied_parameters(self.model)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a weight under every name it is known by, itself first."""
        if name not in self.tensors:
            self.unexpected.append(name)
            return
        old = self.tensors[name]
        value = self._cast(name, value, old)
        written = None
        group = next((group for group in self.tied if name in group), [])
        for twin in dict.fromkeys([name, *group]):
            if twin in self.loaded:
                continue
            device = device_of(twin, self.device_map)
            if str(device) == "disk" and (isinstance(old, nn.Parameter) or self.offload_buffers):
                device = "meta"
                if written is None:
                    assert self.offload_folder is not None
                    offload_weight(value, twin, self.offload_folder, self.index)
                    written = twin
                else:
                    self.index[twin] = {**self.index[written], "file": f"{written}.dat"}
            on = "cpu" if str(device) == "disk" else device
            set_module_tensor_to_device(self.model, twin, on, value, value.dtype)
            self.loaded.add(twin)

    def _cast(self, name: str, value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if value.shape != old.shape:
            raise CheckpointError(
                f"{name!r} has the shape {tuple(value.shape)} in the checkpoint and"
                f" {tuple(old.shape)} in the model."
            )
        if not value.is_floating_point():
            return value.to(old.dtype)
        if any(f".{part}." in f".{name}." for part in self.keep_in_fp32):
            return value.to(torch.float32)
        return value.to(self.dtype or old.dtype)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, tensor by tensor; nothing in it is run as code.

    Args:
        model: usually built under `init_empty_weights`.
        checkpoint: a `.safetensors` or `torch.save` file, an index of shards, or a folder
            that holds one of these.
        device_map: device by module name; `"disk"` writes to `offload_folder`. By default
            everything goes to the CPU.
        offload_folder: where weights for the disk are written.
        dtype: cast floating point weights to this; by default to the model's own.
        offload_state_dict: accepted for compatibility; there is never a whole second copy.
        offload_buffers: write the buffers of modules on disk to disk too.
        keep_in_fp32_modules: parts of names whose weights are kept in float32.
        offload_8bit_bnb: not supported here.
        strict: raise if names are missing or too many; otherwise they are logged.
        full_state_dict: the checkpoint holds whole tensors, also for a sharded model. Used
            with `broadcast_from_rank0` only.
        broadcast_from_rank0: only rank 0 reads; the others get the weights from it. Without
            a device map, on a started process group.

    Raises:
        CheckpointError: no checkpoint, or one that does not fit the model.
        ConfigurationError: the arguments do not fit together.
    """
    if offload_8bit_bnb:
        raise ConfigurationError("offload_8bit_bnb=True needs a plugin for 8 bit weights.")
    wanted = None if dtype is None else torch_dtype(dtype)
    if broadcast_from_rank0 and torch.distributed.is_initialized():
        if device_map is not None:
            raise ConfigurationError("broadcast_from_rank0=True goes with device_map=None.")
        _load_from_rank0(model, checkpoint, wanted, strict, full_state_dict)
        return
    if device_map is None:
        device_map = {"": "cpu"}
    else:
        check_device_map(model, device_map)
        check_tied_parameters_on_same_device(find_tied_parameters(model), device_map)
    if offload_folder is None and "disk" in map(str, device_map.values()):
        raise ConfigurationError(
            "The device map puts weights on 'disk': name a folder for them with offload_folder."
        )
    folder = None if offload_folder is None else Path(offload_folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    keep = keep_in_fp32_modules or ()
    loader = _Loader(model, device_map, folder, wanted, keep, offload_buffers)
    for file in checkpoint_files(checkpoint):
        for name, value in iter_state_dict(file):
            loader.put(name, value)
    missing = loader.tensors.keys() - loader.loaded - non_persistent_buffers(model)
    _judge(sorted(missing), loader.unexpected, checkpoint, strict)
    if folder is not None:
        save_offload_index(loader.index, folder)
    retie_parameters(model, [group for group in loader.tied if on_one_device(group, device_map)])


def _judge(missing: list[str], unexpected: list[str], checkpoint: Any, strict: bool) -> None:
    def shown(names: list[str]) -> str:
        return f"{', '.join(names[:10])}{' …' if len(names) > 10 else ''}"

    parts = [f"lacks {shown(missing)}"] if missing else []
    if unexpected:
        parts.append(f"has {shown(sorted(unexpected))}, which were not used when it was loaded")
    if not parts:
        return
    text = f"The checkpoint {checkpoint} {' and '.join(parts)}."
    if strict:
        raise CheckpointError(text)
    logger.warning(text)


def _load_from_rank0(
    model: nn.Module,
    checkpoint: str | Path,
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
) -> None:
    from torch.distributed import broadcast_object_list, get_rank
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    tied = find_tied_parameters(model)
    state: dict[str, Any] = {}
    verdict = [""]
    if get_rank() == 0:
        try:
            found = {
                k: v for file in checkpoint_files(checkpoint) for k, v in iter_state_dict(file)
            }
            for group in tied:
                known = [name for name in group if name in found]
                found |= {name: found[known[0]] for name in group if known and name not in found}
            names = model.state_dict().keys()
            missing, unexpected = sorted(names - found.keys()), sorted(found.keys() - names)
            _judge(missing, unexpected, checkpoint, strict)
            for name, tensor in found.items():
                if name in names:
                    cast = dtype is not None and tensor.is_floating_point()
                    state[name] = tensor.to(dtype) if cast else tensor
        except Exception as error:
            verdict[0] = f"Rank 0 could not read the checkpoint: {error}"
    # Without it the others would wait for weights that never come.
    broadcast_object_list(verdict, src=0)
    if verdict[0]:
        raise CheckpointError(verdict[0])
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=True, strict=False
    )
    set_model_state_dict(model, state, options=options)
    retie_parameters(model, tied)
