"""The metric of `scheduler.step(metric)`, combined over the ranks so that their learning rates stay equal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import torch

from accelerate_core.config.provenance import SourcedValue
from accelerate_core.distributed import tree
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError
from accelerate_core.plugins.devices import widest_float

#: The parameters of a scheduler's `step` that count, instead of measuring, have one of these in their name.
_COUNTS = (
    "epoch",
    "step",
    "iter",
    "update",
    "increment",
    "batch",
    "sample",
    "token",
    "count",
    "num",
)


class SharedMetric:
    """Combines a metric over the ranks, in the way that `scheduler_metric` says.

    Args:
        rule: the setting, with its source.
        comm: the ranks that train the same model.
        meet: waits until every rank has called it with the same description, or raises an error.
    """

    def __init__(self, rule: SourcedValue, comm: Communicator, meet: Callable[[str], None]) -> None:
        self.rule = rule
        self.comm = comm
        self._meet = meet
        self._met: set[str] = set()
        self._uneven = False

    @contextmanager
    def uneven_inputs(self) -> Iterator[None]:
        """Refuse metrics in this block, where the ranks may take different numbers of steps."""
        before, self._uneven = self._uneven, True
        try:
            yield
        finally:
            self._uneven = before

    def combine(self, value: Any, scheduler: str) -> Any:
        """Return the combined value, of the same type. All ranks must call this.

        Numbers and tensors are combined, also inside of containers. Other values are returned unchanged.

        Args:
            value: the metric of this rank.
            scheduler: the name of the scheduler's class.

        Raises:
            ConfigurationError: the ranks may take different numbers of steps.
            RuntimeConflictError: some ranks have not called this within the time limit of the group.
        """
        if self.comm.size == 1 or self.rule.value == "local":
            return value
        if self._uneven:
            raise ConfigurationError(
                f"{scheduler}.step() combines the metrics of all ranks, which is not possible in "
                "join_uneven_inputs, because some ranks may have no batch left. Call it after the block, "
                "or pass Accelerator(scheduler_metric='local')."
            )
        if scheduler not in self._met:
            self._met.add(scheduler)
            self._meet(scheduler)
        return tree.map_leaves(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if _is_array(value):
            return self._tensor(torch.as_tensor(value)).numpy()
        if isinstance(value, bool) or not isinstance(value, Real | Decimal):
            return value
        mean = float(self._mean(torch.tensor([float(value)], dtype=torch.float64)).item())
        kind: Any = type(value)
        # The mean of whole numbers may be a fraction, or infinite.
        return mean if isinstance(value, Integral) and not mean.is_integer() else kind(mean)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        mean = self._mean(whole.detach().reshape(-1)).reshape(whole.shape).to(whole.device)
        return mean.to(whole.dtype) if whole.is_floating_point() else mean

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        device = self.comm.device
        values = values.to(device, widest_float(device.type))
        if self.rule.value == "mean":
            return self.comm.reduce(values, "mean")
        first = values if self.comm.rank == 0 else torch.zeros_like(values)
        return self.comm.reduce(first, "sum")


def _is_array(value: Any) -> bool:
    """Return whether this is an array of NumPy, which the core does not import."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


class StepArguments:
    """The arguments of one scheduler's `step`.

    A number or a tensor is a metric unless the name of its parameter counts something, such as `epoch`.

    Args:
        scheduler: the wrapped scheduler.
        metrics: combines its metrics.
    """

    def __init__(self, scheduler: Any, metrics: SharedMetric) -> None:
        self._name = type(scheduler).__name__
        self._metrics = metrics
        self._positional, self._keywords = _parameters(scheduler.step)

    def has_metric(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether one of the arguments is a metric."""
        names = [*self._named(args), *kwargs]
        return any(
            not _counts(name) and value is not None
            for name, value in zip(names, (*args, *kwargs.values()), strict=True)
        )

    def combined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the metrics of all ranks in place of this rank's."""
        names = self._named(args)
        return (
            tuple(self._shared(name, value) for name, value in zip(names, args, strict=True)),
            # In the order of the signature, because a script may pass them in any order.
            {name: self._shared(name, kwargs[name]) for name in sorted(kwargs, key=self._order)},
        )

    def _shared(self, name: str, value: Any) -> Any:
        if value is None or _counts(name):
            return value
        return self._metrics.combine(value, self._name)

    def _named(self, args: tuple[Any, ...]) -> list[str]:
        names = self._positional[: len(args)]
        return [*names, *["metric"] * (len(args) - len(names))]

    def _order(self, name: str) -> tuple[int, str]:
        known = name in self._keywords
        return (self._keywords.index(name) if known else len(self._keywords)), name


def _counts(name: str) -> bool:
    return any(part in name.lower() for part in _COUNTS)


def _parameters(step: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Return the names of the positional and of all parameters, as far as the signature has them."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C
        return [], []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in positional], [
        one.name for one in parameters
    ]
