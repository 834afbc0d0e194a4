"""What torch_xla has compiled, moved and handed to the CPU, by its own counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate_core.plugin import flatten
from accelerate_xla.library import imported

#: So often it is told by itself.
_TOLD = 3


class Compilations:
    """Tells of graphs that were compiled after a loop should have had all of them.

    Args:
        tell: says a text once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._count = imported("debug.metrics").counter_value
        self._told = 0
        self.begin(1)

    def begin(self, cycle: int) -> None:
        """Expect new graphs again: a model was prepared, which is trained in cycles of so many batches."""
        # In two cycles all have been there: gradients and an optimizer's state are new in the first.
        self._expected = {True: 2 * cycle, False: 2}
        self._shapes: dict[bool, set[Any]] = {True: set(), False: set()}

    @property
    def total(self) -> int:
        """Graphs that this process has compiled."""
        return int(self._count("UncachedCompile") or 0)

    def watch(self, batch: Any, before: int) -> None:
        """Look at the step that `batch` has gone through; `before` is what `total` was when it came."""
        trains = torch.is_grad_enabled()
        shapes = self._shapes[trains]
        own = _shapes(batch)
        new = own not in shapes
        known = sorted(shapes)[:2]
        shapes.add(own)
        if self._expected[trains] > 0:
            self._expected[trains] -= 1
            return
        many = self.total - before
        if not many or self._told >= _TOLD:
            return
        if not (new or trains):
            return  # the last batch of an evaluation: what fills it is left out of metrics
        self._told += 1
        if new:
            seen = " and ".join(_text(one) for one in known)
            cause = f"a batch of the shape {_text(own)} was new (before: {seen})"
        else:
            cause = (
                f"the batch's shape {_text(own)} was not new: a number of Python's that changes, a shape "
                "that follows from values, or an operation that this step had for the first time"
            )
        self._tell(
            f"XLA compiled {many} new graph(s) in a step that should have had none: {cause}. "
            "XLAPlugin(metrics=True) shows all in accelerator.explain()."
        )


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in flatten(batch) if isinstance(leaf, torch.Tensor))


def _text(shapes: tuple[Any, ...]) -> str:
    return ", ".join(str(list(one)) for one in shapes) or "no tensor"


def report() -> list[str]:
    """Return what a user of XLA looks for first, one line each."""
    metrics = imported("debug.metrics")
    lines = []
    for name, what in (
        ("CompileTime", "graphs compiled"),
        ("ExecuteTime", "graphs run"),
        ("ExecuteReplicatedTime", "graphs run on all devices"),
        ("TransferToDeviceTime", "transfers to the device"),
        ("TransferFromDeviceTime", "transfers from the device"),
    ):
        data = metrics.metric_data(name)
        if data is not None:
            lines.append(f"{what}: {data[0]} in {data[1] / 1e9:.3f} s")
    for name in metrics.executed_fallback_ops():
        lines.append(
            f"on the CPU, since XLA has it not: {name}, {metrics.counter_value(name)} times"
        )
    return lines
