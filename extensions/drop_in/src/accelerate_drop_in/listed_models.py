"""Show prepared models as Accelerate lists them: in `accelerator._models` and to hooks of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, overload

from torch import nn

from accelerate_core import DistributedType

#: Backends whose engine is the model that Accelerate lists.
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
#: Accelerate saves and loads the models of these itself, before it calls a hook.
_SHARDED = (*_ENGINES, DistributedType.FSDP)


def listed(accelerator: Any, model: nn.Module) -> nn.Module:
    """Return the model that Accelerate lists for a prepared one: the engine, or the script's own module."""
    if accelerator.distributed_type in _ENGINES:
        return model
    inner: nn.Module = accelerator._prepared.inner_model(model)
    return inner


class ListedModels(MutableSequence[nn.Module]):
    """`accelerator._models`: the prepared models as Accelerate lists them. Changes have an effect."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepared: list[nn.Module] = accelerator._prepared.objects.models

    def _listed(self) -> list[nn.Module]:
        return [listed(self._accelerator, model) for model in self._prepared]

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._listed()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        prepared = dict(zip(map(id, self._listed()), self._prepared, strict=True))
        models: Iterable[nn.Module] = value if isinstance(index, slice) else [value]
        found = [prepared.get(id(model), model) for model in models]
        self._prepared[index] = found if isinstance(index, slice) else found[0]

    def __delitem__(self, index: Any) -> None:
        del self._prepared[index]

    def __len__(self) -> int:
        return len(self._prepared)

    def insert(self, index: int, value: nn.Module) -> None:
        """Insert a model."""
        self._prepared.insert(index, value)

    def __eq__(self, other: object) -> bool:
        return self._listed() == (list(other) if isinstance(other, ListedModels) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._listed())


@contextmanager
def _as_listed(accelerator: Any, models: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Replace the core's models by those that Accelerate lists. Removing one removes it from both lists."""
    inner = accelerator._prepared.inner_model
    shown = {id(inner(model)): listed(accelerator, model) for model in accelerator.models}
    before = [(model, shown.get(id(model), model)) for model in models]
    seen = [other for _, other in before]
    yield seen
    models[:] = [model for model, other in before if any(other is kept for kept in seen)]


def save_hook(accelerator: Any, hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook of the core that calls a hook which was written for Accelerate.

    The list of weights is empty if Accelerate saves the models of this backend before it calls hooks.
    """

    @wraps(hook)
    def call(models: list[Any], weights: list[Any], output_dir: str) -> None:
        with _as_listed(accelerator, models) as shown:
            if accelerator.distributed_type in _SHARDED:
                hook(list(shown), [], output_dir)
            else:
                hook(shown, weights, output_dir)

    return call


def load_hook(accelerator: Any, hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook of the core that calls a hook which was written for Accelerate.

    The list of models is empty if Accelerate loads the models of this backend before it calls hooks.
    """

    @wraps(hook)
    def call(models: list[Any], input_dir: str) -> None:
        with _as_listed(accelerator, models) as shown:
            hook([] if accelerator.distributed_type in _SHARDED else shown, input_dir)

    return call
