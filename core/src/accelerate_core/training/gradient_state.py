"""Where an Accelerator's loops are: which loaders are open, and which served the last batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.distributed import process


@dataclass(slots=True)
class BatchInfo:
    """What a loader knows about the batch it handed out last.

    `last`: no batch follows. `real`: how many samples of the global batch (all ranks' batches in
    rank order) are real where the rest was added to fill it up, else None. `whole`: how many
    samples a global batch has, None if it is not known.
    """

    last: bool = False
    real: int | None = None
    whole: int | None = None


class _Current(type):
    """Lets a class called without arguments return the latest Accelerator's instance, if there is one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        user = None if args or kwargs else process.current_user()
        return super().__call__(*args, **kwargs) if user is None else user.gradient_state


@dataclass(eq=False, repr=False)
class GradientState(metaclass=_Current):
    """Gradient accumulation settings, and the open loaders, of one Accelerator.

    Without arguments it is that of the latest Accelerator, or one of its own where there is none.

    Args:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: step the schedulers only when the optimizer steps.
        sync_with_dataloader: a loader's last batch ends an accumulation early.
        sync_each_batch: synchronise gradients on every micro-batch.

    A loader hands its batches out through `serve`. Accumulation asks the *open* loader that served
    last whether its data ends; metrics ask about the batch handed out *last*, even if its loader
    was abandoned. Loaders are held by weak references.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    sync_gradients: bool = field(default=True, init=False)
    #: How often gradients have been computed.
    backwards: int = field(default=0, init=False)
    #: How often a prepared optimizer was stepped.
    steps: int = field(default=0, init=False)
    #: Called by a loader when the body of its loop has run; None costs nothing.
    loop_body_end: Callable[[], None] | None = field(default=None, init=False)
    #: Whether it is running, or has raised: what it raises is not the loader's.
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
        """Iterate over a loader's batches, and track where the loop is.

        Nothing happens before the first batch is asked for: progress bars make an iterator that
        they never advance.

        Args:
            loader: the prepared loader.
            start: opens its data and returns the batches. It is given the record of the iteration,
                in which `last` and `real` have to be set when a batch comes out.
            whole: samples of a full global batch, None if that is not known.
        """
        served = BatchInfo(whole=whole)
        batches = start(served)
        exhausted = False
        self._open.append((weakref.ref(loader), served))
        try:
            for batch in batches:
                self._touched = served
                yield batch
                if self.loop_body_end is not None:
                    self.in_listener = True
                    self.loop_body_end()
                    self.in_listener = False
            exhausted = True
        finally:
            self._open = [one for one in self._open if one[1] is not served]
            # What is computed from the last batch of an abandoned iteration (`next(iter(loader))`,
            # `break`, an exception) may still have to be cut to the real samples.
            if exhausted and self._touched is served:
                innermost = self._innermost()
                self._touched = innermost[1] if innermost else None

    def hold(self, inner: Any, outer: Any) -> bool:
        """Show scripts the loader they hold, `outer`, where `inner` is open; False: it is not."""
        found = [i for i, (reference, _) in enumerate(self._open) if reference() is inner]
        for index in found:
            self._open[index] = (weakref.ref(outer), self._open[index][1])
        return bool(found)

    def forget(self) -> None:
        """Forget every loader, open or touched."""
        self._open.clear()
        self._touched = None
        self.sync_gradients = True

    def metrics_cut(self) -> tuple[int, int | None]:
        """Return how many samples of the global batch served last are real, 0 if all are, and how
        many a global batch has, None if that is not known.
        """
        touched = self._touched
        return (0, None) if touched is None else (touched.real or 0, touched.whole)

    def _active(self) -> tuple[Any, BatchInfo] | None:
        """Return the open loader that served last, else the one opened last.

        An iterator that is kept for later stays open and says nothing about the loop around it.
        """
        touched = self._touched
        for reference, served in self._open:
            if served is touched and (loader := reference()) is not None:
                return loader, served
        return self._innermost()

    def _innermost(self) -> tuple[Any, BatchInfo] | None:
        while self._open:
            reference, served = self._open[-1]
            if (loader := reference()) is not None:
                return loader, served
            self._open.pop()
        return None

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings by name."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}

    @property
    def dataloader_references(self) -> list[Any]:
        """The open loaders that are alive, outermost first."""
        alive = (reference() for reference, _ in self._open)
        return [loader for loader in alive if loader is not None]

    @property
    def active_dataloader(self) -> Any | None:
        """The open loader that served last, or None outside of every loop."""
        innermost = self._active()
        return innermost[0] if innermost else None

    @property
    def in_dataloader(self) -> bool:
        """Whether an iteration is open."""
        return self._active() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the open loader that served last has served its last batch."""
        if self._open and self._open[-1][1] is self._touched and self._open[-1][0]() is not None:
            return self._open[-1][1].last  # in every micro-batch, so without another call
        innermost = self._active()
        return innermost is not None and innermost[1].last

    @property
    def remainder(self) -> int:
        """The `remainder` of the open loader that served last; -1 if there is none or it does not know."""
        innermost = self._active()
        return int(getattr(innermost[0], "remainder", -1)) if innermost else -1
