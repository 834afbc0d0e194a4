"""Names, ties and devices of the tensors in modules."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate_checkpoint import as_device, device_of
from accelerate_core.plugin import (
    ConfigurationError,
    clear_device_cache,
    did_you_mean,
    flatten,
    warn,
)

Device: TypeAlias = int | str | torch.device
#: The copies of each shared weight by device, under the address of its storage.
TiedMap: TypeAlias = MutableMapping[int, dict[torch.device, torch.Tensor]]


def default_device() -> torch.device:
    """Return the current accelerator with its index, or the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return torch.device("cpu")
    if device.type == "mps":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure, None if it has no tensor."""
    tensors = (leaf for leaf in flatten(data) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), None)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a name such as `"bfloat16"` or `"torch.bfloat16"`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = [n for n, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise ConfigurationError(f"{dtype!r} is not a torch dtype.{did_you_mean(dtype, names)}")
    return found


def joined(module: str, name: str) -> str:
    """Return the full name of `name` inside a module."""
    return f"{module}.{name}" if module else name


def within(name: str, module: str) -> bool:
    """Return whether a full name is that module or inside it; `""` is the whole model."""
    return module in ("", name) or name.startswith(f"{module}.")


def covered(name: str, modules: Container[str]) -> bool:
    """Return whether a full name is one of the modules or inside one of them."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name in modules


def non_persistent_buffers(module: nn.Module, recurse: bool = True) -> set[str]:
    """Return the full names of the buffers that are not in state dicts."""
    modules = module.named_modules() if recurse else [("", module)]
    return {joined(prefix, n) for prefix, sub in modules for n in sub._non_persistent_buffers_set}


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a module: parameters first, then buffers.

    Args:
        include_buffers: also yield buffers.
        recurse: also yield the tensors of submodules, under dotted names.
        remove_non_persistent: skip buffers that are not in state dicts.
        remove_duplicate: yield a tensor with several names only under the first one.
    """
    yield from module.named_parameters("", recurse, remove_duplicate)
    if include_buffers:
        hidden = non_persistent_buffers(module, recurse) if remove_non_persistent else ()
        for name, buffer in module.named_buffers("", recurse, remove_duplicate):
            if name not in hidden:
                yield name, buffer


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Return groups of names that refer to the same parameter.

    Example:
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
        model["head"].weight = model["embed"].weight
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return module.get_submodule(prefix), leaf


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie each group of names to one parameter again: the first one that has data.

    Args:
        tied_params: groups of full names.
    """
    for group in tied_params:
        found = [getattr(*_owner(model, name)) for name in group]
        chosen = next((p for p in found if p is not None and p.device.type != "meta"), found[0])
        if chosen is None:
            continue
        for name, parameter in zip(group, found):
            if parameter is not chosen:
                setattr(*_owner(model, name), chosen)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a model's configuration says that its word embeddings are tied."""
    config = getattr(model, "config", None)
    ask = getattr(config, "get_text_config", None)
    text = ask() if ask is not None else config
    return bool(getattr(text, "tie_word_embeddings", False)) and (
        getattr(model, "get_output_embeddings", lambda: None)() is not None
    )


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> bool:
    """Return whether each group of tied parameters is on one device, and warn if it is not.

    Args:
        tied_params: groups of full names.
        device_map: devices by full module name.
    """
    apart = [group for group in tied_params if not on_one_device(group, device_map)]
    for group in apart:
        warn(
            f"The tied parameters {', '.join(group)} are on different devices. Each device gets its"
            " own copy, so the copies would diverge in training.",
        )
    return not apart


def on_one_device(names: Sequence[str], device_map: Mapping[str, Any]) -> bool:
    """Return whether a device map assigns all of the names to the same device."""
    return len({str(device_of(name, device_map)) for name in names}) == 1


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor, and warn about names that the model doesn't have.

    Raises:
        ConfigurationError: tensors are not covered; the text lists them.
    """
    tensors = dict(named_module_tensors(model, recurse=True, remove_duplicate=False))
    known = {name for name, _ in model.named_modules()} | set(tensors)
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warn(
            f"These device_map keys do not match any submodules: {', '.join(map(repr, unknown))}."
            f"{did_you_mean(unknown[0], known)}"
        )
    missing = [name for name in tensors if not covered(name, device_map)]
    if missing:
        raise ConfigurationError(
            f"The device map has no device for {', '.join(missing[:10])}"
            f"{' and others' if len(missing) > 10 else ''}. Add them, or an entry '' for the rest."
        )


def rebuilt(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as a parameter or buffer with the class and attributes of `old`."""
    if not isinstance(old, nn.Parameter):
        return value
    floating = value.is_floating_point() or value.is_complex()
    kind: Any = type(old)
    new: nn.Parameter = kind(value, requires_grad=old.requires_grad and floating)
    new.__dict__.update(old.__dict__)
    return new


def _move(
    value: torch.Tensor, device: torch.device, tied: TiedMap | None, non_blocking: bool
) -> torch.Tensor:
    copies = tied.get(value.data_ptr()) if tied and value.device.type != "meta" else None
    if copies is None:
        return value.to(device, non_blocking=non_blocking)
    if device not in copies:
        copies[device] = value.detach().to(device, non_blocking=non_blocking)
    return copies[device]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one parameter or buffer of a module to a device, optionally with a new value.

    A weight of a bitsandbytes layer is quantized when it leaves the meta device.

    Args:
        module: the module, or one that contains it.
        tensor_name: the name of the tensor; dotted for a submodule.
        device: the target device; `"meta"` drops the data.
        value: the new value, with the same shape; required if the tensor is on the meta device.
        dtype: the new dtype; by default the tensor keeps its own.
        fp16_statistics: the scale of an 8-bit weight, kept as its attribute `SCB`.
        tied_params_map: copies of shared weights by address, which are reused and added to.
        non_blocking: don't wait for the copy.
        clear_cache: release freed accelerator memory immediately after moving to the meta device.

    Raises:
        ConfigurationError: there is no such tensor, the shapes differ, or a tensor on the meta device
            was moved without a value.
    """
    owner, name = _owner(module, tensor_name)
    store = owner._parameters if name in owner._parameters else owner._buffers
    if name not in store:
        names = [n for n, _ in named_module_tensors(module, recurse=True)]
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter or buffer {tensor_name!r}."
            f"{did_you_mean(tensor_name, names)}"
        )
    old = store[name]
    target = as_device(device)
    if old is None:
        return
    if value is not None and value.shape != old.shape:
        raise ConfigurationError(
            f"{tensor_name!r} has the shape {tuple(old.shape)}, but the new value has the shape"
            f" {tuple(value.shape)}."
        )
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name!r} is on the meta device without data, so moving it to {target} needs a"
            " value. It may be missing from the checkpoint."
        )
    if value is None and old.device == target and dtype is None and not tied_params_map:
        return
    wanted = old.dtype if dtype is None else torch_dtype(dtype)
    given = old if value is None else value
    source = given.detach()
    if dtype is None or source.is_floating_point():
        source = source.to(wanted)
    if type(old).__module__.startswith("bitsandbytes.") and target.type != "meta":
        # The parameter's own `to` quantizes it, which only works from the CPU, and moves the scales.
        source = source.to("cpu") if source.is_floating_point() else source
        kept = old if value is None and dtype is None else rebuilt(old, source)
        new: Any = kept.to(target)
    else:
        new = rebuilt(old, _move(source, target, tied_params_map, non_blocking))
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)
    # Not through the dict, because recurrent layers override `__setattr__`.
    setattr(owner, name, new)
    if clear_cache and target.type == "meta" and old.device.type not in ("cpu", "meta"):
        clear_device_cache()


def hook_of(module: nn.Module) -> Any:
    """Return a module's own hook or None. `getattr` on a wrapper may return the inner module's hook."""
    return module.__dict__.get("_hf_hook")


def offload_hook(module: nn.Module) -> Any:
    """Return the hook that loads a module's weights for each call, or None."""
    hook = hook_of(module)
    return next((h for h in getattr(hook, "hooks", [hook]) if getattr(h, "offload", False)), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's own weights are kept elsewhere and loaded for each call."""
    return offload_hook(module) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: Device | None = None
) -> Iterator[None]:
    """Bring a module's own tensors to one device inside the block.

    Offloaded weights are loaded and others are moved. After the block, they are where they were.

    Args:
        module: the module; the tensors of its submodules are not moved.
        execution_device: the device; by default the execution device of an offloaded module, and
            nothing moves for other modules.
    """
    hook = offload_hook(module)
    if hook is not None:
        usual = hook.execution_device
        hook.execution_device = usual if execution_device is None else as_device(execution_device)
        try:
            hook.load(module)
            yield
        finally:
            hook.unload(module)
            hook.execution_device = usual
    elif execution_device is not None:
        before = dict(named_module_tensors(module))
        try:
            for name in before:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, home in before.items():
                _put_back(module, name, home)
    else:
        yield


def _put_back(module: nn.Module, name: str, home: torch.Tensor) -> None:
    now = getattr(module, name)
    if now is home:
        return
    if now.device.type != "meta" and home.device.type != "meta":
        with torch.no_grad():
            # Keep changes that were made inside the block.
            home.copy_(now)
    setattr(module, name, home)
