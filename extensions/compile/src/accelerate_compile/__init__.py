"""Compile models in place: the class and the state dict's keys stay as they are.

torch's own `module.compile()` skips a module whose `forward` is defined in torch (a `Sequential`, a
`TransformerEncoderLayer`): it makes no graph and says nothing. `_compile_in_place` compiles those, too.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accelerate_core.plugin import (
    AcceleratorView,
    Claim,
    ConfigurationError,
    Request,
    Sources,
    TorchDynamoPlugin,
    did_you_mean,
    hookimpl,
    is_compiled_in_place,
    is_compiled_module,
    is_torch_layer,
    is_wrapped,
    listing,
    resolve_compiler,
    uncompiled,
    within_wrappers,
)

__all__ = ["TorchCompiler", "compile_model", "compile_regions"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CALLS: weakref.WeakKeyDictionary[type, types.CodeType] = weakref.WeakKeyDictionary()


class TorchCompiler:
    """The stage that compiles with `torch.compile`, active where settings name a compiler."""

    name = "torch_compile"
    api_version = (1, 0)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim a run whose settings name a compiler."""
        dynamo = resolve_compiler(request.arguments, Sources(request.environ, request.config))
        return Claim(0, f"the compiler {dynamo.backend!r} is asked for") if dynamo.enabled else None

    @hookimpl
    def compile(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Compile in place, as the settings say."""
        return compile_model(model, accelerator.dynamo_plugin)


def compile_model(model: nn.Module, dynamo: TorchDynamoPlugin) -> nn.Module:
    """Compile `model` in place as the settings say, and return it.

    A model that is compiled already is returned unchanged, and so is any model
    where the settings are off. A wrapper of torch's own around one module (what a data-parallel backend puts
    there) stays as it is; the module inside is compiled.

    Args:
        model: the model; its class, parameters and keys do not change.
        dynamo: a `TorchDynamoPlugin`.

    Raises:
        ConfigurationError: torch has no such backend, the backend does not know
            `mode` or `options`, or both were given.
    """
    if not dynamo.enabled or is_compiled_module(model):
        return model
    keywords = _compile_arguments(dynamo)
    if dynamo.use_regional_compilation:
        return compile_regions(model, **keywords)
    _compile_in_place(within_wrappers(model), keywords)
    return model


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the parts of a model one by one, in place, and return it.

    Blocks, that is modules of one class of which a `ModuleList`, `ModuleDict` or
    `Sequential` holds two or more, are compiled each; they share one graph, so
    the time to compile does not grow with depth. Of the rest the largest parts
    without such blocks are compiled (a head, a patch embedding). What holds the
    blocks stays eager, and so does a single layer of `torch.nn` such as an
    embedding or a norm: alone it is one kernel, there is nothing to fuse. A
    model without repeated blocks is compiled as a whole.

    Args:
        module: the model; its class, parameters and keys do not change.
        compile_kwargs: those of `torch.compile`.

    Example:
        model = compile_regions(model, backend="inductor", fullgraph=True)
    """
    root = within_wrappers(module)
    blocks = list(_repeated_blocks(root))
    if not blocks:
        _compile_in_place(root, compile_kwargs)
        return module
    regions = {id(block) for block in blocks}
    for part in _regions(root, regions):
        if not (is_wrapped(part) or is_compiled_in_place(part)):
            _compile_in_place(part, compile_kwargs)
    return module


# --- settings to arguments ----------------------------------------------------------------------


def _compile_arguments(dynamo: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the arguments for `torch.compile`."""
    assert dynamo.backend is not None, "only called if a compiler is enabled"
    backend = _registered(dynamo.backend)
    mode = None if dynamo.mode == "default" else dynamo.mode
    if mode and dynamo.options:
        raise ConfigurationError(
            f"TorchDynamoPlugin takes mode={mode!r} or options={dynamo.options!r}, not both: "
            f"a mode is a set of options."
        )
    for name, value in (("mode", mode), ("options", dynamo.options)):
        if value and not _takes(backend, name):
            raise ConfigurationError(
                f"The compiler {backend!r} takes no {name} (given: {value!r}). "
                f"Leave {name} out, or use backend='inductor'."
            )
    return {
        "backend": backend,
        "mode": mode,
        "options": dynamo.options,
        "fullgraph": bool(dynamo.fullgraph),
        "dynamic": dynamo.dynamic,
    }


def _registered(backend: str) -> str:
    known = {name.lower(): name for name in torch._dynamo.list_backends(exclude_tags=())}
    if backend not in known:
        # Those for debugging are accepted but not advertised.
        shown = torch._dynamo.list_backends()
        raise ConfigurationError(
            f"torch {torch.__version__} has no compiler {backend!r} for dynamo_backend; there is "
            f"'no', {listing(shown)}.{did_you_mean(backend, known)} A compiler from another "
            f"package is known after that package has been imported."
        )
    return known[backend]


def _takes(backend: str, argument: str) -> bool:
    from torch._dynamo.backends.registry import lookup_backend

    if backend == "inductor":
        return True
    parameters = inspect.signature(lookup_backend(backend)).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# --- one module ---------------------------------------------------------------------------------


def _compile_in_place(module: nn.Module, keywords: dict[str, Any]) -> None:
    if not is_torch_layer(module):
        # Not `module.compile`: a class may have a method of that name with another meaning.
        nn.Module.compile(module, **keywords)
        return
    # The compiler starts no graph in a file of torch, but follows calls into it:
    # a frame outside is needed to start from.
    # Not a frame that holds the module: torch 2.8 would make a graph for each.
    compiled = torch.compile(_outside_call(module), **keywords)
    module._compiled_call_impl = functools.partial(compiled, module)


def _outside_call(module: nn.Module) -> Callable[..., Any]:
    def compiled_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Graphs are kept per code object, up to a limit: one for each class, so that
    # classes do not crowd each other out and instances still share.
    kind = type(module)
    if kind not in _CALLS:
        _CALLS[kind] = compiled_call.__code__.replace(co_name=f"{kind.__name__}_call")
    compiled_call.__code__ = _CALLS[kind]
    return compiled_call


# --- regions ------------------------------------------------------------------------------------


def _has_work(module: nn.Module) -> bool:
    """Whether there is something to fuse: more than one layer of `torch.nn`."""
    return not is_torch_layer(module) or any(True for _ in module.children())


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks of which a container holds several of one class."""
    children = list(module.children())
    alike: Counter[type] = Counter()
    if isinstance(module, _CONTAINERS):
        alike.update(type(uncompiled(child)) for child in children if _has_work(child))
    for child in children:
        kind = type(uncompiled(child))
        # Plain containers are alike in class only; what they hold differs.
        if alike[kind] > 1 and _has_work(child) and kind not in _CONTAINERS:
            yield child
        else:
            yield from _repeated_blocks(child)


def _regions(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the blocks, and the largest parts beside them that are worth compiling."""
    if id(module) in blocks or is_wrapped(module):
        yield module
        return
    # A list or dict of modules is never called itself.
    is_bare = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not is_bare and not any(id(part) in blocks for part in module.modules()):
        if _has_work(module):
            yield module
    else:
        for child in module.children():
            yield from _regions(child, blocks)
