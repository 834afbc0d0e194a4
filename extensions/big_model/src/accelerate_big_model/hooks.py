"""Hooks that load, move or cast a module's weights before and after its forward.

A module has at most one hook, in its attribute `_hf_hook`; several are combined into a
`SequentialHook`. They run through torch's own forward hooks. So the module keeps its class and its
`forward`, and a deleted model is freed immediately.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate_big_model.prefetch import ReadAhead
from accelerate_big_model.tensors import (
    Device,
    TiedMap,
    default_device,
    find_device,
    hook_of,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accelerate_checkpoint import as_device
from accelerate_core.plugin import clear_device_cache, send_to_device

Call = tuple[tuple[Any, ...], dict[str, Any]]


class ModelHook:
    """Code that runs before and after a module's forward. Subclasses override what they need.

    `no_grad = True` runs the forward without gradients. After Ctrl-C in a forward, torch doesn't call
    `post_forward`, and gradients stay off.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is attached, and return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Call:
        """Run before forward, and return the arguments for it."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after forward, and return the output for the caller.

        If forward raised, `output` is None and the return value is ignored.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Combines several hooks, which run in the same order before and after forward."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Call:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        failed: BaseException | None = None
        for hook in self.hooks:
            # Every hook may have something to undo, even if an earlier one failed.
            try:
                output = hook.post_forward(module, output)
            except BaseException as error:
                failed, output = failed or error, None
        if failed is not None:
            raise failed
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _Bridge:
    """Runs a `ModelHook` through torch's forward hooks."""

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook
        self.grad_modes: list[bool] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self.hook.no_grad:
            self.grad_modes.append(torch.is_grad_enabled())
            torch.set_grad_enabled(False)
        return self.hook.pre_forward(module, *args, **kwargs)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self.grad_modes:
            torch.set_grad_enabled(self.grad_modes.pop())
        return self.hook.post_forward(module, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module. It replaces the present hook, or follows it with `append=True`.

    Returns:
        The module that the hook's `init_hook` returned.
    """
    present = hook_of(module)
    if present is not None:
        if append:
            _unregister(module)
        else:
            remove_hook_from_module(module)
    module = hook.init_hook(module)
    whole: Any = SequentialHook(present, hook) if append and present is not None else hook
    bridge = _Bridge(whole)
    # Runs first before forward and last after it, so that the weights are loaded for users' hooks.
    handles = (
        module.register_forward_pre_hook(bridge.before, prepend=True, with_kwargs=True),
        module.register_forward_hook(bridge.after, with_kwargs=True, always_call=True),
    )
    module._hf_hook = whole
    module._hf_hook_handles = handles  # type: ignore[assignment]
    return module


def _unregister(module: nn.Module) -> None:
    handles: Any = module._hf_hook_handles
    for handle in handles:
        handle.remove()
    del module._hf_hook_handles, module._hf_hook


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, and with `recurse` those of its submodules, too."""
    hook: Any = hook_of(module)
    if hook is not None:
        _unregister(module)
        module = hook.detach_hook(module)
    if recurse:
        remove_hook_from_submodules(module)
        retie_parameters(module, module.__dict__.pop("_tied_parameters", ()))
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of all submodules."""
    for child in module.children():
        remove_hook_from_module(child, recurse=True)


def _outside_of_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Exclude a method from Dynamo's graphs.

    Plain `torch.compiler.disable` would import Dynamo, which takes a second even if nothing is
    compiled.
    """
    outside: Callable[..., None] | None = None

    @functools.wraps(function)
    def called(*args: Any) -> None:
        nonlocal outside
        if outside is None and "torch._dynamo" in sys.modules:
            outside = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        if outside is None:
            function(*args)
        else:
            outside(*args)

    return called


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Brings weights and inputs to the same device during a forward.

    Args:
        execution_device: where forward runs; None leaves inputs where they are.
        offload: keep the weights elsewhere and load them for each call.
        io_same_device: move the output to the device of the input.
        weights_map: the offloaded weights by name; by default the module's own weights, moved to the
            CPU.
        offload_buffers: offload buffers, too.
        place_submodules: also handle the tensors of submodules.
        skip_keys: names of arguments that are not moved.
        tied_params_map: copies of shared weights, see `set_module_tensor_to_device`.
    """

    execution_device: Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, torch.Tensor] | None = field(default=None, repr=False)
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | Sequence[str] | None = None
    tied_params_map: TiedMap | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.execution_device is not None:
            self.execution_device = as_device(self.execution_device)
        self.original_devices: dict[str, torch.device] = {}
        self._moved: dict[str, torch.device] = {}
        self.input_device: torch.device | None = None
        self._loaded_copies: list[tuple[int, torch.device]] = []
        #: Reads the weights before they are needed; `place` is the index of this hook's layer in it.
        self.ahead: ReadAhead | None = None
        self.place = 0

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the tensors that are offloaded."""
        tensors = named_module_tensors(
            module,
            include_buffers=self.offload_buffers,
            recurse=self.place_submodules,
            # A non-persistent buffer isn't in any state dict, so it can't be loaded again.
            remove_non_persistent=True,
            remove_duplicate=False,
        )
        return [name for name, _ in tensors]

    def init_hook(self, module: nn.Module) -> nn.Module:
        tensors = dict(
            named_module_tensors(module, recurse=self.place_submodules, remove_duplicate=False)
        )
        offloaded = self.names(module) if self.offload else []
        if self.offload and self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        self.original_devices = {name: tensors[name].device for name in offloaded}
        for name, tensor in tensors.items():
            if name in self.original_devices:
                set_module_tensor_to_device(module, name, "meta")
            elif self.execution_device is not None:
                if self.offload:
                    self._moved[name] = tensor.device
                shared = None if self.offload else self.tied_params_map
                set_module_tensor_to_device(
                    module, name, self.execution_device, tied_params_map=shared
                )
        return module

    @_outside_of_graphs
    def load(self, module: nn.Module) -> None:
        """Bring the offloaded weights to the execution device."""
        assert self.weights_map is not None
        on = self.execution_device
        device = default_device() if on is None else as_device(on)
        ready = {} if self.ahead is None else self.ahead.enter(self.place)
        for name in self.names(module):
            value = ready.get(name)
            if value is not None:
                set_module_tensor_to_device(module, name, device, value=value)
                continue
            value = self.weights_map[name]
            key = value.data_ptr()
            copies = self.tied_params_map.get(key) if self.tied_params_map else None
            if copies is not None and device not in copies:
                self._loaded_copies.append((key, device))
            set_module_tensor_to_device(
                module, name, device, value=value, tied_params_map=self.tied_params_map
            )

    @_outside_of_graphs
    def unload(self, module: nn.Module) -> None:
        """Drop the loaded weights, which stay in `weights_map`."""
        for name in self.names(module):
            set_module_tensor_to_device(module, name, "meta", clear_cache=False)
        for key, device in self._loaded_copies:
            if self.tied_params_map is not None:
                self.tied_params_map[key].pop(device, None)
        self._loaded_copies.clear()

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Call:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self.load(module)
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self.unload(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload and self.weights_map is not None:
            for name, device in self.original_devices.items():
                # A weight that was on the meta device before is loaded to the CPU.
                home = torch.device("cpu") if device.type == "meta" else device
                set_module_tensor_to_device(module, name, home, value=self.weights_map[name])
        if self.execution_device != torch.device("meta"):
            for name, device in self._moved.items():
                set_module_tensor_to_device(module, name, device)
        return module


class CpuOffload(ModelHook):
    """Keeps a whole module on the CPU and moves it to a device when it is called.

    The module stays on the device until another module's hook, or the user, moves it back.

    Args:
        execution_device: where forward runs; by default the accelerator, if there is one.
        prev_module_hook: the hook of the module that is moved back first, to free memory.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        here = default_device() if execution_device is None else as_device(execution_device)
        self.execution_device = here
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Call:
        here = find_device(list(module.parameters()))
        if here is not None and here != self.execution_device:
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
            module.to(self.execution_device)
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device),
        )


@dataclass(eq=False, repr=False)
class UserCpuOffloadHook:
    """The handle from `cpu_offload_with_hook`, which moves the model back or removes the hook."""

    model: nn.Module
    hook: CpuOffload

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)
        clear_device_cache()

    def remove(self) -> None:
        """Remove the hook. The model stays where it is."""
        remove_hook_from_module(self.model)


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in a small dtype and casts them to a larger one for each forward.

    This is for inference, because the weights keep only the precision of the storage dtype.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Call:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
