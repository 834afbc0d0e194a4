"""Functions and methods of Accelerate that clients replace, and what becomes of the replacement.

A replacement is called wherever our function has the same job. For any other function that Accelerate's own
code calls, a warning names the function and the line of the client.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import proxy

from torch import nn

from accelerate_core import DistributedType, PartialState
from accelerate_core.plugin import of_the_user, warn
from accelerate_drop_in.continuation import continuing

#: Module functions that the Accelerator calls like Accelerate's does.
CALLED = {"fsdp2_prepare_model", "prepare_data_loader"}
#: Functions that some of our code calls, but not where Accelerate's code does.
NOT_CALLED = {"recursively_apply", "find_device", "find_batch_size", "is_wandb_available"}

#: Steps of Accelerate's `prepare` that are called here too, by the type of the run.
STEPS = {
    DistributedType.FSDP: "_prepare_fsdp2",
    DistributedType.DEEPSPEED: "_prepare_deepspeed",
    DistributedType.MEGATRON_LM: "_prepare_megatron_lm",
}
#: Other private steps.
UNUSED_STEPS = (
    *("_prepare_cp", "_prepare_tp", "_prepare_ao", "_prepare_te", "_prepare_msamp"),
    *("_prepare_one", "_prepare_device_mesh"),
)
#: Methods and steps whose replacement has no effect on the Accelerator's own methods, with the reason.
WITHOUT_EFFECT = {
    **dict.fromkeys(UNUSED_STEPS, "prepare has other steps here"),
    "no_sync": "accumulate does not call it, and only direct calls use the replacement",
    "_clip_grad_norm_dtensor_aware": "clip_grad_norm_ asks the backend",
    "_get_named_parameters": "prepare finds parameters in another way",
}

#: The client's current replacement of each function in `CALLED`.
_replacements: dict[str, Callable[..., Any]] = {}
#: The original methods that clients have replaced, by class and name.
_class_originals: dict[str, Any] = {}
_warned: set[str] = set()


def _client_line() -> str:
    """Return the file and line outside our packages and `unittest.mock` that led here."""
    frame: Any = sys._getframe(1)
    while frame is not None and not of_the_user(frame):
        frame = frame.f_back
    return "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"


def _warn_once(name: str, reason: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warn(f"Replacing {name} has no effect here{_client_line()}: {reason}.")


def _mentions(code: CodeType, name: str) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return name in code.co_names or any(_mentions(each, name) for each in inner)


def _functions(module: ModuleType) -> list[FunctionType]:
    found: list[Any] = []
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        found += [getattr(one, "__func__", getattr(one, "fget", one)) for one in members]
    return [one for one in found if getattr(one, "__module__", None) == module.__name__]


def is_used(module: ModuleType, name: str) -> bool:
    """Return whether a function in a module looks up a global name."""
    codes = (getattr(one, "__code__", None) for one in _functions(module))
    return any(_mentions(code, name) for code in codes if code is not None)


def note_function(
    module: str, name: str, original: Any, value: Any, users: list[ModuleType], calls: bool
) -> None:
    """Record that a client has assigned to a name of an `accelerate` module.

    Args:
        users: the modules of our packages in which the name was replaced.
        calls: whether Accelerate's own functions in this module use the name.
    """
    if name in CALLED:
        if value is original:
            _replacements.pop(name, None)
        else:
            _replacements[name] = value
    elif value is original or not calls or not callable(value):
        return
    elif name in NOT_CALLED or not any(is_used(one, name) for one in users):
        _warn_once(f"{module}.{name}", "the Accelerator and our other functions do not call it")


# --- the Accelerator ---------------------------------------------------------------------------


class WatchedClass(type):
    """A class that warns if a client replaces a method without effect."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in WITHOUT_EFFECT:
            original = _class_originals.setdefault(
                f"{cls.__name__}.{name}", getattr(cls, name, None)
            )
            if value is not original:
                _warn_once(f"{cls.__name__}.{name}", WITHOUT_EFFECT[name])
        super().__setattr__(name, value)


def connect(accelerator: Any) -> None:
    """Let the core call methods of the Accelerator that clients replace, and replaced functions."""
    prepared, me = accelerator._prepared, proxy(accelerator)
    core_loader, here = type(prepared)._core_loader, proxy(prepared)
    prepared.verify_device_map = lambda model: me.verify_device_map(model)
    prepared.get_state_dict = lambda model, unwrap=True: me.get_state_dict(model, unwrap)
    prepared._core_loader = lambda *given: _loader(me, partial(core_loader, here), *given)
    if accelerator.distributed_type == DistributedType.FSDP:
        shard = accelerator.hooks.prepare_model
        accelerator.hooks.prepare_model = lambda *given: _shard(me, shard, *given)

    _check_others(accelerator)


def _check_others(accelerator: Any) -> None:
    """Warn if a client's replacement of a method of another class would lead to another run."""
    from accelerate_drop_in import private, settings

    if "to_kwargs" in vars(settings.TorchDynamoPlugin) and accelerator.dynamo_plugin.enabled:
        _warn_once("TorchDynamoPlugin.to_kwargs", "the compiler gets the fields of the plugin")
    step: Any = vars(PartialState)["_prepare_backend"]
    if step is not private._prepare_backend:
        _, kind = step(accelerator.state)
        if kind != accelerator.distributed_type:
            _warn_once(
                "PartialState._prepare_backend", f"this run is {accelerator.distributed_type}"
            )


def _loader(accelerator: Any, usual: Callable[..., Any], loader: Any, moves: bool, cut: Any) -> Any:
    """Prepare a loader with the client's `prepare_data_loader`, if there is one."""
    replacement = _replacements.get("prepare_data_loader")
    if replacement is None:
        return usual(loader, moves, cut)
    config, (index, count) = accelerator.dataloader_config, accelerator.hooks.data_shard()

    def original(dataloader: Any, *_: Any, **given: Any) -> Any:
        share = given.get("process_index", index), given.get("num_processes", count)
        if share == (index, count):
            return usual(dataloader, moves, cut)
        from accelerate_drop_in.data_loader import prepare_data_loader

        with continuing(None):
            state = accelerator.gradient_state
            return prepare_data_loader(dataloader, gradient_state=state, **given)

    with continuing(original):
        return replacement(
            loader,
            accelerator.device,
            num_processes=count,
            process_index=index,
            split_batches=config.split_batches,
            put_on_device=moves,
            rng_types=accelerator.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=cut,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=accelerator.torch_device_mesh,
        )


def _shard(
    accelerator: Any, usual: Callable[..., Any], model: nn.Module, evaluation_mode: bool
) -> nn.Module:
    """Shard a model with the client's `fsdp2_prepare_model`, if there is one."""
    replacement = _replacements.get("fsdp2_prepare_model")
    if replacement is None:
        only: nn.Module = usual(model, evaluation_mode)
        return only
    sharded: list[nn.Module] = []

    def original(_: Any, model: nn.Module, *__: Any, **___: Any) -> nn.Module:
        sharded.append(usual(model, evaluation_mode))
        return sharded[-1]

    with continuing(original):
        made: nn.Module = replacement(accelerator, model)
    if not sharded:  # it called fully_shard itself
        from accelerate_fsdp2 import adopted

        layout = adopted.layout_of(made)
        if layout is not None:
            accelerator.backend._adopted[made] = layout
        made = usual(made, evaluation_mode)
    return made
