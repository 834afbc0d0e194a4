"""The tensors of modules: naming, tying and placing them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate_checkpoint.weights import as_device, device_of
from accelerate_core.builtin.memory import clear_device_cache
from accelerate_core.distributed.tree import flatten
from accelerate_core.errors import ConfigurationError, did_you_mean, warn

Device: TypeAlias = int | str | torch.device
#: Storage address of a shared weight → its copies by device.
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
    """Return the device of the first tensor of a nested structure, None if it holds no tensor."""
    tensors = (leaf for leaf in flatten(data) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), None)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a name such as `"bfloat16"` or `"torch.bfloat16"`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = [n for n, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise ConfigurationError(f"{dtype!r} is no dtype of torch.{did_you_mean(dtype, names)}")
    return found


def joined(module: str, name: str) -> str:
    """Return the full name of what is called `name` inside of a module."""
    return f"{module}.{name}" if module else name


def within(name: str, module: str) -> bool:
    """Say whether a full name is a module's, or of something inside of it; `""` is the model."""
    return module in ("", name) or name.startswith(f"{module}.")


def covered(name: str, modules: Container[str]) -> bool:
    """Say whether a full name is one of the modules', or of something inside of one of them."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name in modules


def non_persistent_buffers(module: nn.Module, recurse: bool = True) -> set[str]:
    """Return the full names of the buffers that state dicts leave out."""
    modules = module.named_modules() if recurse else [("", module)]
    return {joined(prefix, n) for prefix, sub in modules for n in sub._non_persistent_buffers_set}


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors: parameters first, then buffers.

    Args:
        include_buffers: yield buffers too.
        recurse: also those of submodules, by dotted names.
        remove_non_persistent: without the buffers that state dicts leave out.
        remove_duplicate: a tensor of several names only under its first.
    """
    yield from module.named_parameters("", recurse, remove_duplicate)
    if include_buffers:
        hidden = non_persistent_buffers(module, recurse) if remove_non_persistent else ()
        for name, buffer in module.named_buffers("", recurse, remove_duplicate):
            if name not in hidden:
                yield name, buffer


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Return groups of names under which one parameter stands.

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
    """Make every group of names one parameter again, the first that has data.

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
    """Say whether a model's own configuration declares that its embeddings are tied."""
    config = getattr(model, "config", None)
    ask = getattr(config, "get_text_config", None)
    text = ask() if ask is not None else config
    return bool(getattr(text, "tie_word_embeddings", False)) and (
        getattr(model, "get_output_embeddings", lambda: None)() is not None
    )


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> bool:
    """Say whether every group of tied parameters has one device; warn where not.

    Args:
        device_map: full name of a module -> its device.
    """
    apart = [group for group in tied_params if not on_one_device(group, device_map)]
    for group in apart:
        warn(
            f"The tied parameters {', '.join(group)} are on different devices: each device gets"
            " its own copy, and training would let them drift apart.",
        )
    return not apart


def on_one_device(names: Sequence[str], device_map: Mapping[str, Any]) -> bool:
    """Say whether a device map gives all of the names the same device."""
    return len({str(device_of(name, device_map)) for name in names}) == 1


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map covers every tensor; warn of what it names beyond the model's modules.

    Raises:
        ConfigurationError: it does not; the text lists the names.
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
            f"The device map gives no device for {', '.join(missing[:10])}"
            f"{' and others' if len(missing) > 10 else ''}. Add them, or an entry '' for the rest."
        )


def rebuilt(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as what a parameter or buffer is, with its class and attributes."""
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
    """Put one parameter or buffer of a module on a device, with a new value if wanted.

    A weight of a layer of bitsandbytes is quantized when it leaves the meta device.

    Args:
        module: the module, or one that contains it.
        tensor_name: its name; dotted for a submodule's.
        device: where to; `"meta"` keeps the shape only.
        value: the new content, same shape; needed where the tensor is on meta now.
        dtype: cast to this; by default a new value is cast to the dtype of the old.
        fp16_statistics: scale of an 8 bit weight, kept as its attribute `SCB`.
        tied_params_map: copies of shared weights by address, to be reused and filled.
        non_blocking: do not wait for the copy.
        clear_cache: give freed accelerator memory back at once when leaving for meta.

    Raises:
        ConfigurationError: no such tensor, another shape, or no value for one on meta.
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
            f"{tensor_name!r} has the shape {tuple(old.shape)}; a value of shape"
            f" {tuple(value.shape)} was given."
        )
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name!r} is on the meta device, without data; moving it to {target} needs"
            " a value. Was it in the checkpoint?"
        )
    if value is None and old.device == target and dtype is None and not tied_params_map:
        return
    wanted = old.dtype if dtype is None else torch_dtype(dtype)
    given = old if value is None else value
    source = given.detach()
    if dtype is None or source.is_floating_point():
        source = source.to(wanted)
    if type(old).__module__.startswith("bitsandbytes.") and target.type != "meta":
        # Its own `to` quantizes what is not yet, from the CPU alone, and moves the scales along.
        source = source.to("cpu") if source.is_floating_point() else source
        kept = old if value is None and dtype is None else rebuilt(old, source)
        new: Any = kept.to(target)
    else:
        new = rebuilt(old, _move(source, target, tied_params_map, non_blocking))
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)
    # By attribute, not by dict: recurrent layers watch their attributes.
    setattr(owner, name, new)
    if clear_cache and target.type == "meta" and old.device.type not in ("cpu", "meta"):
        clear_device_cache()


def hook_of(module: nn.Module) -> Any:
    """Return a module's own hook, or None; wrappers may answer for the module inside of them."""
    return module.__dict__.get("_hf_hook")


def offload_hook(module: nn.Module) -> Any:
    """Return the hook that loads a module's weights for each call, or None."""
    hook = hook_of(module)
    return next((h for h in getattr(hook, "hooks", [hook]) if getattr(h, "offload", False)), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Say whether a module's own weights are kept elsewhere and loaded for each call."""
    return offload_hook(module) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: Device | None = None
) -> Iterator[None]:
    """Have a module's own tensors on one device for the length of the block.

    Offloaded weights are loaded, others moved; afterwards they are where they were.

    Args:
        module: its direct parameters and buffers are meant, not those of submodules.
        execution_device: where to; by default an offloaded module's own, else nothing moves.
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
            # What was changed meanwhile is kept.
            home.copy_(now)
    setattr(module, name, home)
