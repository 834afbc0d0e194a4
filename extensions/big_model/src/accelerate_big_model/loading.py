"""Load a checkpoint into a model, with each weight going directly to its device."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_big_model.hooks import remove_hook_from_module
from accelerate_big_model.mapped import read_in
from accelerate_big_model.offload import (
    MAPPED,
    Index,
    mapped_key,
    offload_weight,
    save_offload_index,
)
from accelerate_big_model.tensors import (
    check_device_map,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    has_offloaded_params,
    named_module_tensors,
    non_persistent_buffers,
    on_one_device,
    retie_parameters,
    set_module_tensor_to_device,
    torch_dtype,
)
from accelerate_checkpoint import (
    as_device,
    byte_bar,
    checkpoint_files,
    device_of,
    first_scales,
    iter_state_dict,
    load_shards,
)
from accelerate_core.plugin import (
    CheckpointError,
    ConfigurationError,
    did_you_mean,
    key_matcher,
    match_keys,
)

logger = logging.getLogger(__name__)


@dataclass
class _Loader:
    """Loads tensors into a model according to a device map, and records which names it has seen."""

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
        self.match = key_matcher(self.tensors, self.model)

    def read(self, path: Path) -> Iterator[int]:
        """Load all tensors of a file into the model, and yield the bytes of each one when it is done."""
        kind = mapped_key(path)
        name = ""
        try:
            self.file = MAPPED[kind](path)
            self.entry = {kind: str(path.resolve())}
            for name in self.file.names():
                about = self.file.about(name)
                self._put(name, about)
                yield about.nbytes
        except CheckpointError:
            raise
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            what = f"{name!r}" if name else "the weights"
            raise CheckpointError(f"Cannot read {what} from {path}: {error}") from error

    def _put(self, name: str, about: torch.Tensor) -> None:
        """Load a weight under its own name and under every name that is tied to it.

        Args:
            name: its name in the file.
            about: a tensor with the weight's shape and dtype.
        """
        own = self.match(name)
        if own not in self.tensors:
            self.unexpected.append(name)
            return
        old = self.tensors[own]
        dtype = self._dtype(name, about, old)
        stored = ""
        group = next((group for group in self.tied if own in group), [])
        for twin in dict.fromkeys([own, *group]):
            if twin in self.loaded:
                continue
            device = device_of(twin, self.device_map)
            if _is_sharded(old):
                self._put_part(twin, self.file.peek(name), dtype, old)
            elif str(device) == "disk" and (isinstance(old, nn.Parameter) or self.offload_buffers):
                if stored:
                    self.index[twin] = {"file": f"{stored}.dat", **self.index[stored]}
                else:
                    self._keep_on_disk(name, twin, about, dtype)
                    stored = twin
                nothing = torch.empty(about.shape, dtype=dtype, device="meta")
                set_module_tensor_to_device(self.model, twin, "meta", nothing, dtype)
            else:
                on = "cpu" if str(device) == "disk" else device
                value = self.file.read(name)
                if (value.dtype, str(on)) != (dtype, "cpu"):
                    # Read the pages now: a failing disk is an error here, but a crash when the pages
                    # are used.
                    read_in(value)
                value = value.to(dtype)
                set_module_tensor_to_device(self.model, twin, on, value, dtype)
            self.loaded.add(twin)

    def _keep_on_disk(self, name: str, twin: str, about: torch.Tensor, dtype: torch.dtype) -> None:
        """Record where a weight is on disk, after writing it if the file's copy can't be used."""
        entry = {"dtype": str(dtype).removeprefix("torch."), "shape": list(about.shape)}
        if about.dtype == dtype and self.file.can_map(name):
            self.index[twin] = {**self.entry, "weight_name": name, **entry}
            return
        if self.offload_folder is None:
            why = f"has dtype {about.dtype} in the checkpoint but {dtype} in the model"
            if about.dtype == dtype:
                why = "cannot be mapped into memory from the checkpoint"
            raise ConfigurationError(
                f"The device map puts {twin!r} on 'disk', but it {why}. It must be written to another"
                " file, so pass a folder as offload_folder."
            )
        value = self.file.peek(name)
        read_in(value)
        offload_weight(value.to(dtype), twin, self.offload_folder, self.index)

    def _put_part(self, name: str, value: torch.Tensor, dtype: torch.dtype, old: Any) -> None:
        """Load this rank's part of a weight into a sharded parameter, without reading other parts."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = old.device_mesh, old.placements
        sizes, starts = compute_local_shape_and_global_offset(old.shape, mesh, placements)
        for dim, (size, start) in enumerate(zip(sizes, starts)):
            value = value.narrow(dim, min(start, value.shape[dim]), size)
        if old.device.type != "meta":
            with torch.no_grad():
                old.to_local().copy_(value)
            return
        local = torch.empty(value.shape, dtype=dtype, device=mesh.device_type).copy_(value)
        new: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=old.shape, stride=old.stride()
        )
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(owner), leaf, new)

    def _dtype(self, name: str, value: torch.Tensor, old: torch.Tensor) -> torch.dtype:
        if value.shape != old.shape:
            raise CheckpointError(
                f"{name!r} has the shape {tuple(value.shape)} in the checkpoint, but"
                f" {tuple(old.shape)} in the model."
            )
        if not value.is_floating_point():
            return old.dtype
        if any(f".{part}." in f".{name}." for part in self.keep_in_fp32):
            return torch.float32
        return self.dtype or old.dtype


def from_hub(checkpoint: str | Path) -> str | Path:
    """Download a checkpoint from the Hugging Face Hub, unless it is cached, and return its folder.

    Returns the argument itself if it is a path.
    """
    name = str(checkpoint)
    known = Path(name).suffix in (".safetensors", ".bin", ".pt", ".pth", ".json")
    if (
        known
        or Path(checkpoint).exists()
        or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    ):
        return checkpoint
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(
            f"There is no file or folder {name!r}. To look it up on the Hugging Face Hub:"
            " pip install huggingface_hub"
        )
    from huggingface_hub import snapshot_download

    try:
        for kind in ("safetensors", "bin"):
            patterns = [f"*.{kind}", f"*.{kind}.index.json"]
            folder = Path(snapshot_download(name, allow_patterns=patterns))
            if any(folder.glob(patterns[0])):
                return folder
    except Exception as error:  # the library raises many types of errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"There is no file or folder {name!r}, and it could not be downloaded from the Hugging "
            f"Face Hub: {reason}"
        ) from None
    raise CheckpointError(f"{name} on the Hugging Face Hub has neither *.safetensors nor *.bin.")


def _check_device(name: str, device: Any) -> None:
    try:
        as_device(device)
    except RuntimeError:
        raise ConfigurationError(
            f"The device map puts {name!r} on {device!r}, which is not a device. Use the index of an"
            " accelerator, a device, 'cpu' or 'disk'."
            f"{did_you_mean(str(device), ['cpu', 'disk', 'meta', 'cuda'])}"
        ) from None


def _is_sharded(tensor: torch.Tensor) -> bool:
    # Importing the module takes half a second. If nothing has imported it, nothing is sharded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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
    """Load a checkpoint into a model, tensor by tensor, without running any code from it.

    Args:
        model: usually created under `init_empty_weights`. If it is already sharded (prepared with FSDP2,
            `fully_shard`, `parallelize_module`), each rank reads only the parts that it holds.
        checkpoint: a `.safetensors` or `torch.save` file, an index of shards, a folder that contains
            one of these, or a name on the Hugging Face Hub (offline, its cached copy).
        device_map: devices by module name. Weights on `"disk"` stay in the files of the checkpoint,
            which must not be moved. By default, everything goes to the CPU.
        offload_folder: a folder for weights on disk that can't be used in the checkpoint's files,
            because they have another dtype or can't be mapped into memory.
        dtype: cast floating-point weights to this dtype; by default to the model's own.
        offload_state_dict: accepted for compatibility, and ignored; there is never a second copy of
            all weights.
        offload_buffers: also keep the buffers of modules on disk there.
        keep_in_fp32_modules: parts of names whose weights are kept in float32.
        offload_8bit_bnb: not supported.
        strict: raise an error for missing or unexpected names instead of logging a warning.
        full_state_dict: the checkpoint contains whole tensors, even for a sharded model. This is only
            used with `broadcast_from_rank0`.
        broadcast_from_rank0: only rank 0 reads the checkpoint and sends the weights to the others.
            This needs an initialized process group and `device_map=None`.

    Raises:
        CheckpointError: there is no checkpoint, or it doesn't match the model.
        ConfigurationError: the arguments contradict each other.
    """
    if offload_8bit_bnb:
        raise ConfigurationError("offload_8bit_bnb=True is not supported. Leave it out.")
    wanted = None if dtype is None else torch_dtype(dtype)
    if broadcast_from_rank0 and torch.distributed.is_initialized():
        if device_map is not None:
            raise ConfigurationError(
                f"broadcast_from_rank0=True cannot be used with device_map={device_map!r}. Leave one "
                "of them out."
            )
        _load_from_rank0(model, checkpoint, wanted, strict, full_state_dict)
        return
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        if device_map is not None or wanted is not None:
            raise ConfigurationError(
                f"The model is already sharded over several ranks, so device_map={device_map!r} and "
                f"dtype={dtype!r} cannot change its devices or dtypes. Leave them out."
            )
        _load_into_shards(model, checkpoint, strict)
        return
    if device_map is None:
        device_map = {"": "cpu"}
    else:
        for name, device in device_map.items():
            if str(device) != "disk":
                _check_device(name, device)
        check_device_map(model, device_map)
        check_tied_parameters_on_same_device(find_tied_parameters(model), device_map)
    folder = None if offload_folder is None else Path(offload_folder).resolve()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"offload_folder={str(folder)!r} cannot be used as a folder: {error}"
            ) from None
    for module in model.modules():  # hooks of an earlier load would load its weights
        if has_offloaded_params(module):
            remove_hook_from_module(module)
    keep = keep_in_fp32_modules or ()
    loader = _Loader(model, device_map, folder, wanted, keep, offload_buffers)
    files = checkpoint_files(from_hub(checkpoint))
    with byte_bar("Loading weights", sum(file.stat().st_size for file in files)) as advance:
        for file in files:
            for read in loader.read(file):
                advance(read)
    if scales := first_scales(model, loader.unexpected):
        raise CheckpointError(
            f"{checkpoint} was saved from a model that bitsandbytes quantized, and "
            f"load_checkpoint_in_model can't load its scales, such as {scales!r}. Load it with "
            "from_pretrained of Transformers, or load a checkpoint of save_state with load_state."
        )
    missing = loader.tensors.keys() - loader.loaded - non_persistent_buffers(model)
    _report_names(sorted(missing), loader.unexpected, checkpoint, strict)
    if folder is not None:
        save_offload_index(loader.index, folder)
    # For `dispatch_model`, which may be called without a folder.
    model._offload_index = loader.index  # type: ignore[assignment]
    retie_parameters(model, [group for group in loader.tied if on_one_device(group, device_map)])


def _load_into_shards(model: nn.Module, checkpoint: str | Path, strict: bool) -> None:
    """Load into a sharded model: each rank reads only its parts of the files."""
    _allocate_shards(model)
    named = model.state_dict(keep_vars=True).items()
    state = {name: one for name, one in named if isinstance(one, torch.Tensor)}
    files = checkpoint_files(from_hub(checkpoint))
    with byte_bar("Loading weights", sum(file.stat().st_size for file in files)) as advance:
        tensors = {name: one.detach() for name, one in state.items()}
        loaded = load_shards(tensors, files, advance, model)
    present = {id(state[name]) for name in loaded.names}  # the files have one name of tied weights
    missing = [name for name, one in state.items() if id(one) not in present]
    _report_names(sorted(missing), loaded.unexpected, checkpoint, strict)


def _allocate_shards(model: nn.Module) -> None:
    """Give the weights of a sharded model that are on the meta device memory on their mesh's device.

    Buffers that no checkpoint contains stay on meta, because nothing would fill them.
    """
    saved = {id(one) for one in model.state_dict(keep_vars=True).values()}
    meshes = (getattr(one, "device_mesh", None) for one in model.parameters())
    device = next(mesh.device_type for mesh in meshes if mesh is not None)

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        fills = tensor.is_meta and id(tensor) in saved
        return torch.empty_like(tensor, device=device) if fills else tensor

    model._apply(allocate)  # type: ignore[no-untyped-call]


def _report_names(missing: list[str], unexpected: list[str], checkpoint: Any, strict: bool) -> None:
    """Raise or log which weights are missing from the checkpoint, and which were not used."""

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
                k: v
                for file in checkpoint_files(from_hub(checkpoint))
                for k, v in iter_state_dict(file)
            }
            names = model.state_dict().keys()
            found = match_keys(found, names, model)
            for group in tied:
                known = [name for name in group if name in found]
                found |= {name: found[known[0]] for name in group if known and name not in found}
            missing, unexpected = sorted(names - found.keys()), sorted(found.keys() - names)
            _report_names(missing, unexpected, checkpoint, strict)
            for name, tensor in found.items():
                if name in names:
                    cast = dtype is not None and tensor.is_floating_point()
                    state[name] = tensor.to(dtype) if cast else tensor
        except Exception as error:
            verdict[0] = f"Rank 0 could not read the checkpoint: {error}"
    # Without this, the other ranks would wait forever for weights.
    broadcast_object_list(verdict, src=0)
    if verdict[0]:
        raise CheckpointError(verdict[0])
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=True, strict=False
    )
    set_model_state_dict(model, state, options=options)
    retie_parameters(model, tied)
