"""Reports on compilations, transfers and CPU fallbacks, from torch_xla's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate_core.plugin import flatten
from accelerate_xla.library import imported

#: Maximum number of warnings.
_MAX_WARNINGS = 3


class Compilations:
    """Warns about graphs that are compiled later than expected in a training loop.

    Args:
        warn_once: logs a warning, unless the same text was logged before.
    """

    def __init__(self, warn_once: Callable[[str], None]) -> None:
        self._warn_once = warn_once
        self._count = imported("debug.metrics").counter_value
        self._warnings = 0
        self.begin(1)

    def begin(self, cycle: int) -> None:
        """Expect new graphs for a newly prepared model.

        Args:
            cycle: number of batches in an accumulation cycle.
        """
        # Two cycles, because the first one creates gradients and the optimizer's state.
        self._expected = {True: 2 * cycle, False: 2}
        self._shapes: dict[bool, set[Any]] = {True: set(), False: set()}

    @property
    def total(self) -> int:
        """Number of graphs that this process has compiled."""
        return int(self._count("UncachedCompile") or 0)

    def watch(self, batch: Any, before: int) -> None:
        """Warn if the step of `batch` compiled graphs unexpectedly.

        Args:
            before: the value of `total` before the step.
        """
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
        if not many or self._warnings >= _MAX_WARNINGS:
            return
        if not (new or trains):
            return  # the last batch of an evaluation, where padding is removed from metrics
        self._warnings += 1
        if new:
            seen = " and ".join(_text(one) for one in known)
            cause = f"The batch has a new shape, {_text(own)} (before: {seen})."
        else:
            cause = (
                f"The batch's shape, {_text(own)}, is not new. Look for a Python number that changes, "
                "a shape that depends on values, or an operation that first ran in this step."
            )
        self._warn_once(
            f"XLA unexpectedly compiled {many} new graph(s) in this step. {cause} For details, set "
            "XLAPlugin(metrics=True) and print accelerator.explain()."
        )


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in flatten(batch) if isinstance(leaf, torch.Tensor))


def _text(shapes: tuple[Any, ...]) -> str:
    return ", ".join(str(list(one)) for one in shapes) or "no tensor"


def report() -> list[str]:
    """Return one line for each metric that is useful to a user of XLA."""
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
            f"on the CPU, because XLA does not support it: {name}, {metrics.counter_value(name)} times"
        )
    return lines
