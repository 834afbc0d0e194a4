"""The position of the training loop: accumulation, open loaders, and the loader of the last batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.distributed import process


@dataclass(slots=True)
class BatchInfo:
    """Facts about the batch that a loader yielded last.

    Attributes:
        last: whether it is the last one.
        real: the number of real samples in the global batch (all ranks' batches in rank order) if it
            was padded, else None.
        whole: the number of samples in a full global batch; None if unknown.
    """

    last: bool = False
    real: int | None = None
    whole: int | None = None


class _Current(type):
    """Calling the class without arguments returns the instance of the latest Accelerator, if one exists."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        user = None if args or kwargs else process.current_user()
        return super().__call__(*args, **kwargs) if user is None else user.gradient_state


@dataclass(eq=False, repr=False)
class GradientState(metaclass=_Current):
    """The gradient accumulation settings and the open loaders of one Accelerator.

    Without arguments, the class returns the state of the latest Accelerator, or a new one if none
    exists.

    Loaders yield their batches through `serve`. Accumulation depends on whether the *open* loader
    that yielded last is at its end. Metrics depend on the batch yielded *last*, even if its loop was
    left early. Loaders are held by weak references.

    Args:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: step the schedulers only when the optimizer steps.
        sync_with_dataloader: end an accumulation cycle early at the last batch of a loader.
        sync_each_batch: synchronise gradients in every micro-batch.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    sync_gradients: bool = field(default=True, init=False)
    #: The number of backward passes.
    backwards: int = field(default=0, init=False)
    #: The number of steps of prepared optimizers.
    steps: int = field(default=0, init=False)
    #: The number of micro-batches that have begun.
    micro_batches: int = field(default=0, init=False)
    #: The number of backward passes before the current cycle, and before the current micro-batch (None
    #: outside of `accumulate`).
    cycle_start: int = field(default=0, init=False)
    micro_batch_start: int | None = field(default=None, init=False)
    #: Called when `zero_grad` keeps the gradients of earlier micro-batches; None for nothing.
    gradients_kept: Callable[[GradientState], None] | None = field(default=None, init=False)
    #: Called with the loader before it reads a batch, and before its end; None for nothing.
    before_batch: Callable[[Any], None] | None = field(default=None, init=False)
    #: Called after each iteration of a loop over a loader; None for nothing.
    loop_body_end: Callable[[], None] | None = field(default=None, init=False)
    #: Whether `join_uneven_inputs` was entered, so ranks may have taken different numbers of steps.
    uneven_inputs: bool = field(default=False, init=False)
    #: Whether `loop_body_end` is running or has raised. Such an exception doesn't come from the loader.
    in_listener: bool = field(default=False, init=False)
    _open: list[tuple[weakref.ref[Any], BatchInfo]] = field(default_factory=list, init=False)
    _touched: BatchInfo | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_steps = self.num_steps or 1

    def __repr__(self) -> str:
        return (
            f"GradientState(num_steps={self.num_steps}, sync_gradients={self.sync_gradients}, "
            f"in_dataloader={self.in_dataloader}, end_of_dataloader={self.end_of_dataloader}, "
            f"remainder={self.remainder})"
        )

    def serve(
        self, loader: Any, start: Callable[[BatchInfo], Iterator[Any]], whole: int | None = None
    ) -> Iterator[Any]:
        """Iterate over a loader's batches, and track the position of the loop.

        Nothing happens before the first batch is requested, because progress bars create iterators
        that they never advance.

        Args:
            loader: the prepared loader.
            start: opens the data and returns the batches. Its argument is the record of the
                iteration; set `last` and `real` in it before yielding a batch.
            whole: samples in a full global batch; None if unknown.
        """
        if self.before_batch is not None:
            self.before_batch(loader)
        info = BatchInfo(whole=whole)
        batches = start(info)
        exhausted = False
        self._open.append((weakref.ref(loader), info))
        try:
            for batch in batches:
                self._touched = info
                yield batch
                if self.loop_body_end is not None:
                    self.in_listener = True
                    self.loop_body_end()
                    self.in_listener = False
                if self.before_batch is not None:
                    self.before_batch(loader)
            exhausted = True
        finally:
            self._open = [one for one in self._open if one[1] is not info]
            # If the loop was left early (`next(iter(loader))`, `break`, an exception), metrics of its
            # last batch may still have to be cut to the real samples.
            if exhausted and self._touched is info:
                innermost = self._innermost()
                self._touched = innermost[1] if innermost else None

    def hold(self, inner: Any, outer: Any) -> bool:
        """Report `outer` as the open loader in place of `inner`; return False if `inner` is not open."""
        found = [i for i, (reference, _) in enumerate(self._open) if reference() is inner]
        for index in found:
            self._open[index] = (weakref.ref(outer), self._open[index][1])
        return bool(found)

    def forget(self) -> None:
        """Forget all loaders."""
        self._open.clear()
        self._touched = None
        self.sync_gradients = True

    def metrics_cut(self) -> tuple[int, int | None]:
        """Return the number of real samples in the global batch yielded last (0 if all are real), and
        the size of a full global batch (None if unknown).
        """
        touched = self._touched
        return (0, None) if touched is None else (touched.real or 0, touched.whole)

    def _active(self) -> tuple[Any, BatchInfo] | None:
        """Return the open loader that yielded last, else the one opened last.

        An iterator that is kept for later stays open, but does not describe the loop around it.
        """
        touched = self._touched
        for reference, info in self._open:
            if info is touched and (loader := reference()) is not None:
                return loader, info
        return self._innermost()

    def _innermost(self) -> tuple[Any, BatchInfo] | None:
        while self._open:
            reference, info = self._open[-1]
            if (loader := reference()) is not None:
                return loader, info
            self._open.pop()
        return None

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings by name."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}

    @property
    def dataloader_references(self) -> list[Any]:
        """The open loaders that still exist, outermost first."""
        alive = (reference() for reference, _ in self._open)
        return [loader for loader in alive if loader is not None]

    @property
    def active_dataloader(self) -> Any | None:
        """The open loader that yielded last; None outside of loops."""
        innermost = self._active()
        return innermost[0] if innermost else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a loader is running."""
        return self._active() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the open loader has yielded its last batch."""
        if self._open and self._open[-1][1] is self._touched and self._open[-1][0]() is not None:
            return self._open[-1][1].last  # runs in every micro-batch, so it avoids another call
        innermost = self._active()
        return innermost is not None and innermost[1].last

    @property
    def remainder(self) -> int:
        """The `remainder` of the open loader; -1 if there is none or it is unknown."""
        innermost = self._active()
        return int(getattr(innermost[0], "remainder", -1)) if innermost else -1
