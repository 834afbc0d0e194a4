"""Compile models in place, remove the compilation from them, and give their weights plain names."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from torch import nn

T = TypeVar("T")
#: Compiles a function, like `torch.compile` with all other arguments filled in.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

_PREFIX = "_orig_mod."
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_CALLS: weakref.WeakKeyDictionary[type, types.CodeType] = weakref.WeakKeyDictionary()


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wrapped, or `model` itself."""
    while is_wrapped(model):
        model = cast(nn.Module, model._orig_mod)
    return model


def strip_compiled(model: nn.Module) -> nn.Module:
    """Return the model without compilation, with the same parameters and buffers.

    If nothing is compiled, this is `model` itself. Otherwise it is a new module of the same class that
    shares all tensors, so training one trains the other. `train()`, `eval()` and new submodules affect
    only one of them. `model` stays compiled.
    """
    return _strip(model, {})


def take_compilers(model: nn.Module) -> tuple[nn.Module, dict[str, Compiler]]:
    """Replace modules that `torch.compile` returned by the modules that they compile, in place.

    Returns the model, and the compiler of each replaced module by the name that the module has now. The
    model itself has the name "". What has hooks of its own stays, because the hooks would be lost.
    """
    inner = uncompiled(model)
    compilers: dict[int, Compiler] = {}
    if inner is not model:
        compilers[id(inner)] = cast(Any, model).dynamo_ctx
    for module in list(inner.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and not is_wrapped(module) and _is_replaceable(child):
                module._modules[name] = uncompiled(child)
                compilers[id(module._modules[name])] = cast(Any, child).dynamo_ctx
    named = ((name, compilers.get(id(module))) for name, module in inner.named_modules())
    return inner, {name: compiler for name, compiler in named if compiler is not None}


def compile_in_place(module: nn.Module, compiler: Compiler) -> None:
    """Compile a module without changing its class or the names of its weights.

    torch's own `module.compile()` silently skips modules whose `forward` is defined in torch.
    """
    if not is_torch_layer(module):
        # Not `module.compile`, because the class may define a different method of that name.
        module._compiled_call_impl = compiler(module._call_impl)
        return
    # The compiler starts no graph in a file of torch, but it follows calls into one. So the call
    # starts in a function outside of torch. The module is an argument of that function rather than
    # a closure variable, because torch 2.8 would compile a graph for each closure.
    compiled = compiler(_outside_call(module))
    module._compiled_call_impl = functools.partial(compiled, module)


def is_torch_layer(module: nn.Module) -> bool:
    """Return whether a module uses the `forward` of a layer in `torch.nn`."""
    return str(getattr(module.forward, "__module__", "") or "").startswith("torch.nn.modules.")


def plain_keys(model: nn.Module, state: Mapping[str, T]) -> dict[str, T]:
    """Return `state`, with the names that the model would have without `torch.compile`.

    Modules that the script itself calls `_orig_mod` keep their names.

    Args:
        state: values by the names that the weights have in the model.
    """
    wrapped = [
        f"{name}.{_PREFIX}" if name else _PREFIX
        for name, module in model.named_modules(remove_duplicate=False)
        if is_wrapped(module)
    ]
    wrapped.sort(key=len, reverse=True)  # the name of an outer prefix is part of the inner ones

    def plain(name: str) -> str:
        for prefix in wrapped:
            if name.startswith(prefix):
                name = prefix.removesuffix(_PREFIX) + name.removeprefix(prefix)
        return name

    return {plain(name): value for name, value in state.items()}


def match_keys(
    saved: Mapping[str, T], names: Collection[str], model: nn.Module | None = None
) -> dict[str, T]:
    """Return saved values with the names that they have in a model, compiled or not.

    Models that were compiled before `prepare` used to be saved with `_orig_mod.` in the names.

    Args:
        saved: values by the names in a file.
        names: the names in the model. Exact matches win.
        model: the model, if parts of it may be compiled.
    """
    match = key_matcher(names, model)
    return {name if match(name) in saved else match(name): value for name, value in saved.items()}


def key_matcher(names: Collection[str], model: nn.Module | None = None) -> Callable[[str], str]:
    """Return a function from a saved name to the name in a model, or to itself if there is none.

    See `match_keys` for the arguments.
    """
    exact = {name: name for name in names}
    by_plain = (exact if model is None else plain_keys(model, exact)) | exact
    by_canonical = {canonical_key(name): name for name in names}

    def match(name: str) -> str:
        if name in by_plain:
            return by_plain[name]
        canonical = canonical_key(name)
        # A name without the prefix does not belong to a module that is really called `_orig_mod`.
        return name if canonical == name else by_canonical.get(canonical, name)

    return match


def canonical_key(name: str) -> str:
    """Remove the prefix `_orig_mod.` that `torch.compile` adds to parameter names.

    A script may use this name for a module of its own. Use `plain_keys` if there is a model to look at.
    """
    if _PREFIX not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _PREFIX[:-1])


def is_wrapped(module: object) -> bool:
    """Return whether an object was returned by `torch.compile(module)`."""
    # Reading `torch._dynamo` would import the compiler, even if nothing is ever compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module was compiled with `Module.compile`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_replaceable(module: nn.Module) -> bool:
    """Return whether a module only adds compilation to another one."""
    if not is_wrapped(module):
        return False
    # `fully_shard` changes the class and adds hooks.
    plain = type(module).__name__ == "OptimizedModule"
    return plain and not any(vars(module).get(name) for name in _HOOKS)


def _outside_call(module: nn.Module) -> Callable[..., Any]:
    def compiled_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # torch keeps a limited number of graphs per code object. With one code object per class,
    # instances share graphs, and classes don't use up each other's limit.
    kind = type(module)
    if kind not in _CALLS:
        _CALLS[kind] = compiled_call.__code__.replace(co_name=f"{kind.__name__}_call")
    compiled_call.__code__ = _CALLS[kind]
    return compiled_call


def _strip(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    inner = uncompiled(module)
    if not any(is_wrapped(part) or is_compiled_in_place(part) for part in inner.modules()):
        done[id(module)] = inner
        return inner
    # Some backends give the class a `__new__` that returns another class.
    view = object.__new__(inner.__class__)
    done[id(module)] = view
    done[id(inner)] = view
    state = {name: value for name, value in vars(inner).items() if name != "_compiled_call_impl"}
    # Both share the dictionaries of parameters and buffers, so rebinding a parameter affects both.
    state["_modules"] = {
        name: None if child is None else _strip(child, done)
        for name, child in inner._modules.items()
    }
    view.__dict__.update({name: _rebound(value, inner, view) for name, value in state.items()})
    return view


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """Point a method that was set on the instance (a patched `forward`) at the view."""
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return value
