"""Compile models in place, without changing their class or the keys of their state dict.

torch's own `module.compile()` silently skips modules whose `forward` is defined in torch, such as
`Sequential` and `TransformerEncoderLayer`. `compile_in_place` of the core compiles these, too.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate_compile.recognise import is_compiled_module, within_wrappers
from accelerate_core.plugin import (
    AcceleratorView,
    Claim,
    ConfigurationError,
    Request,
    Sources,
    TorchDynamoPlugin,
    compile_in_place,
    did_you_mean,
    hookimpl,
    is_compiled_in_place,
    is_torch_layer,
    is_wrapped,
    listing,
    resolve_compiler,
    uncompiled,
)

__all__ = ["TorchCompiler", "compile_model", "compile_regions"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class TorchCompiler:
    """Compiles models with `torch.compile`. It is active if the settings name a compiler."""

    name = "torch_compile"
    api_version = (1, 0)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if its settings name a compiler."""
        dynamo = resolve_compiler(request.arguments, Sources(request.environ, request.config))
        return Claim(0, f"the compiler {dynamo.backend!r} is requested") if dynamo.enabled else None

    @hookimpl
    def compile(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Compile the model in place, according to the settings."""
        return compile_model(model, accelerator.dynamo_plugin)


def compile_model(model: nn.Module, dynamo: TorchDynamoPlugin) -> nn.Module:
    """Compile `model` in place according to the settings, and return it.

    A model that is already compiled is returned unchanged, and so is every model if the settings turn
    compilation off. If a wrapper from torch holds the model, such as `DistributedDataParallel`, only
    the module inside is compiled.

    Args:
        model: the model; its class, parameters and keys do not change.
        dynamo: a `TorchDynamoPlugin`.

    Raises:
        ConfigurationError: torch has no such backend, the backend does not support `mode` or
            `options`, or both were given.
    """
    if not dynamo.enabled or is_compiled_module(model):
        return model
    keywords = _compile_arguments(dynamo)
    if dynamo.use_regional_compilation:
        return compile_regions(model, **keywords)
    compile_in_place(within_wrappers(model), functools.partial(torch.compile, **keywords))
    return model


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks and the other large parts of a model in place, and return it.

    If a `ModuleList`, `ModuleDict` or `Sequential` holds two or more modules of one class, each of
    these blocks is compiled. Blocks of one class share a graph, so compilation does not take longer
    for deeper models. Outside the blocks, the largest modules that contain no blocks are compiled,
    such as a head or a patch embedding. Modules that contain blocks stay eager. So do single layers
    of `torch.nn` such as an embedding or a norm, because a single kernel has nothing to fuse. A model
    without repeated blocks is compiled as a whole.

    Args:
        module: the model; its class, parameters and keys do not change.
        compile_kwargs: the arguments of `torch.compile`.

    Example:
        model = compile_regions(model, backend="inductor", fullgraph=True)
    """
    root = within_wrappers(module)
    compiler = functools.partial(torch.compile, **compile_kwargs)
    blocks = list(_repeated_blocks(root))
    if not blocks:
        compile_in_place(root, compiler)
        return module
    regions = {id(block) for block in blocks}
    for part in _regions(root, regions):
        if not (is_wrapped(part) or is_compiled_in_place(part)):
            compile_in_place(part, compiler)
    return module


# --- settings to arguments ----------------------------------------------------------------------


def _compile_arguments(dynamo: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the arguments for `torch.compile`."""
    assert dynamo.backend is not None, "only called if a compiler is enabled"
    backend = _registered(dynamo.backend)
    mode = None if dynamo.mode == "default" else dynamo.mode
    if mode and dynamo.options:
        raise ConfigurationError(
            f"TorchDynamoPlugin was given mode={mode!r} and options={dynamo.options!r}. Leave one of "
            "them out, because a mode is a set of options."
        )
    for name, value in (("mode", mode), ("options", dynamo.options)):
        if value and not _takes(backend, name):
            raise ConfigurationError(
                f"The compiler {backend!r} does not support {name}={value!r}. Leave {name} out, or "
                "use backend='inductor'."
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
        # Compilers for debugging are accepted but not listed.
        shown = torch._dynamo.list_backends()
        raise ConfigurationError(
            f"dynamo_backend={backend!r} is not a compiler of torch {torch.__version__}. Use 'no', "
            f"{listing(shown)}.{did_you_mean(backend, known)} To use a compiler from another "
            "package, import that package first."
        )
    return known[backend]


def _takes(backend: str, argument: str) -> bool:
    from torch._dynamo.backends.registry import lookup_backend

    if backend == "inductor":
        return True
    parameters = inspect.signature(lookup_backend(backend)).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# --- regions ------------------------------------------------------------------------------------


def _has_work(module: nn.Module) -> bool:
    """Return whether a module has anything to fuse, so is more than a single layer of `torch.nn`."""
    return not is_torch_layer(module) or any(True for _ in module.children())


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks: modules of one class that occur several times in a container."""
    children = list(module.children())
    alike: Counter[type] = Counter()
    if isinstance(module, _CONTAINERS):
        alike.update(type(uncompiled(child)) for child in children if _has_work(child))
    for child in children:
        kind = type(uncompiled(child))
        # Containers have the same class even if their contents differ.
        if alike[kind] > 1 and _has_work(child) and kind not in _CONTAINERS:
            yield child
        else:
            yield from _repeated_blocks(child)


def _regions(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the blocks, and the largest other parts that are worth compiling."""
    if id(module) in blocks or is_wrapped(module) or is_compiled_in_place(module):
        yield module
        return
    # ModuleList and ModuleDict are never called themselves.
    is_bare = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not is_bare and not any(id(part) in blocks for part in module.modules()):
        if _has_work(module):
            yield module
    else:
        for child in module.children():
            yield from _regions(child, blocks)
