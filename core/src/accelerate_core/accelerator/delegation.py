"""How the Accelerator shows what its parts do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from accelerate_core.plugins.selection import plugin_arguments

P = ParamSpec("P")
R = TypeVar("R")


def method(
    part: str, function: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return the method of an object that calls `function`, a method of one of its parts.

    Args:
        part: the attribute that holds the part.
        function: a method of the part's class; signature and docstring are taken over.
    """
    find = attrgetter(part)

    @functools.wraps(function)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(find(self), *args, **kwargs)

    return call


def attribute(path: str, doc: str, *, settable: bool = False) -> Any:
    """Return the property that reads, and if `settable` writes, `path` of an object."""
    holder, _, name = path.rpartition(".")

    def write(self: Any, value: Any) -> None:
        setattr(attrgetter(holder)(self), name, value)

    return property(attrgetter(path), write if settable else None, doc=doc)


def mesh_rank(dimension: str) -> Any:
    """Return the property of a rank in one dimension of the device mesh."""

    def rank(self: Any) -> int:
        mesh = self.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return int(mesh.get_local_rank(dimension)) if dimension in names else 0

    return property(rank, doc=f"Rank in the mesh dimension `{dimension}`, 0 without one.")


class ShowsPluginArguments(type):
    """`inspect.signature(Accelerator)` lists what the installed plugins take, too."""

    @property
    def __signature__(cls) -> inspect.Signature:
        _, *parameters = inspect.signature(cast(Any, cls).__init__).parameters.values()
        extra = sorted(plugin_arguments() - {one.name for one in parameters})
        kind = inspect.Parameter.KEYWORD_ONLY
        lent = [inspect.Parameter(name, kind, default=None) for name in extra]
        return inspect.Signature([*parameters[:-1], *lent])
