"""Decide, on all ranks together, whether an optimizer may take a step."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from accelerate_core.plugin import (
    AccelerateError,
    AcceleratorView,
    Claim,
    ConfigurationError,
    KwargsHandler,
    Request,
    hookimpl,
    option,
    settings,
)
from accelerate_watch.settings import claim_if_configured

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Spikes are only looked for after this many good steps.
_LEAST = 16
#: Makes the median absolute deviation an estimate of the standard deviation of normal values.
_TO_DEVIATION = 1.4826
#: The smallest deviation, relative to the median. Without it, any change of a constant value is a spike.
_SMALLEST = 0.01
#: A run that rolls back this often is stopped.
_ROLLBACKS = 3


class GuardError(AccelerateError, RuntimeError):
    """A guard stopped the run.

    Cause: losses or gradient norms were not finite, or spiked; the message lists the steps.
    Fix: look at the batches that it names, or load an earlier checkpoint with a lower learning rate.
    """


@settings(env_prefix="ACCELERATE_GUARD_", section="guard_config")
class GuardKwargs(KwargsHandler):
    """What `accelerator.guard` does about losses and gradient norms that aren't finite, or that spike.

    Example:
        accelerator = Accelerator(kwargs_handlers=[GuardKwargs(spikes="skip", then="rollback")])
    """

    non_finite: Literal["skip", "stop"] = option(
        default="skip", help="what to do with a step whose loss or gradient norm is NaN or infinite"
    )
    spikes: Literal["off", "warn", "skip", "stop"] = option(
        default="warn",
        help="what to do with a step whose loss or gradient norm is far above the others",
    )
    threshold: float = option(
        default=8.0, help="how many robust standard deviations above the median a spike is", gt=0
    )
    window: int = option(default=100, help="good steps that the median is computed of", ge=_LEAST)
    patience: int = option(
        default=3, help="skipped steps in a row after which `then` happens", ge=1
    )
    then: Literal["stop", "rollback"] = option(
        default="stop", help="what to do after too many skipped steps in a row"
    )
    checkpoint: str | None = option(
        default=None, help="the checkpoint to roll back to; default: the newest one"
    )


class Guard:
    """Provides `accelerator.guard` if `kwargs_handlers` contains a `GuardKwargs`.

    Args:
        settings: the limits of the guard, and what happens when a step exceeds them.
    """

    name = "guard"
    api_version = (1, 0)
    Settings = GuardKwargs

    def __init__(self, settings: GuardKwargs) -> None:
        self._settings = settings
        self._guard: StepGuard | None = None

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs that pass a `GuardKwargs`, or have a section `guard_config`."""
        return claim_if_configured(request, GuardKwargs, "guard_config")

    @hookimpl
    def on_start(self, accelerator: AcceleratorView) -> None:
        """Create the guard.

        Raises:
            ConfigurationError: spikes cannot be skipped, because losses are scaled.
        """
        if accelerator.scaler is not None and self._settings.spikes == "skip":
            raise ConfigurationError(
                "GuardKwargs(spikes='skip') can't be used with the gradient scaler of "
                f"mixed_precision={accelerator.mixed_precision!r}, which must see every step. Use "
                "spikes='warn' or 'stop', or mixed_precision='bf16'."
            )
        self._guard = StepGuard(self._settings)

    @hookimpl
    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `accelerator.guard`."""
        if self._guard is not None:
            self._guard.accelerator = accelerator
        return {"guard": self._guard}


class StepGuard:
    """Says whether an optimizer may take a step: `if guard(loss, norm): optimizer.step()`.

    All ranks get the same answer. The norm that `clip_grad_norm_` returns is the same on every rank, so it
    needs no collective; a NaN on one rank makes it NaN on all of them. A loss is averaged over the ranks,
    with one collective per step. Both values are read from the device at once.

    Args:
        settings: the limits of the guard, and what happens when a step exceeds them.
    """

    accelerator: AcceleratorView

    def __init__(self, settings: GuardKwargs) -> None:
        self.settings = settings
        #: A line about each bad step so far.
        self.events: list[str] = []
        self._seen: dict[str, deque[float]] = {}
        #: Losses of the accumulation cycle, on the device.
        self._losses: list[torch.Tensor] = []
        self._calls = 0
        self._in_a_row = 0
        self._rollbacks = 0

    def __call__(
        self, loss: torch.Tensor | None = None, norm: torch.Tensor | float | None = None
    ) -> bool:
        """Return whether to take this step. All ranks must call this in the same steps.

        Inside an accumulation cycle, this returns True and only keeps the loss. The last micro-batch decides
        about the mean of the losses of its cycle.

        Args:
            loss: the loss of this rank, with one element; None to look only at the norm.
            norm: what `clip_grad_norm_` returned; None to look only at the loss.

        Raises:
            GuardError: the step is bad, and the settings stop the run; on all ranks.
        """
        if loss is None and norm is None:
            raise ConfigurationError("accelerator.guard() needs a loss, a norm, or both.")
        if loss is not None:
            self._losses.append(loss.detach().float().reshape(()))
        if not self.accelerator.sync_gradients:
            return True
        self._calls += 1
        losses, self._losses = self._losses, []
        values = self._read(losses, norm)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            if self.accelerator.scaler is not None:
                return True  # the scaler skips the step, and lowers its scale
            said = ", ".join(f"{name} is {values[name]}" for name in bad)
            return self._on_bad(said, self.settings.non_finite)
        if self.settings.spikes != "off":
            spikes = [self._spike(name, value) for name, value in values.items()]
            if any(spikes):
                said = ", ".join(filter(None, spikes))
                if not self._on_bad(said, self.settings.spikes):
                    return False
        for name, value in values.items():
            seen = self._seen.setdefault(name, deque(maxlen=self.settings.window))
            seen.append(value)
        self._in_a_row = 0
        return True

    def _read(
        self, losses: list[torch.Tensor], norm: torch.Tensor | float | None
    ) -> dict[str, float]:
        import torch

        given: dict[str, torch.Tensor] = {}
        device = self.accelerator.device
        if norm is not None:
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            given["the gradient norm"] = torch.as_tensor(whole, device=device).detach().float()
        if losses:
            own = torch.stack(losses).mean()
            several = self.accelerator.num_processes > 1
            given["the loss"] = self.accelerator.reduce(own, "mean") if several else own
        read = torch.stack([one.reshape(()) for one in given.values()]).tolist()
        return dict(zip(given, read, strict=True))

    def _spike(self, name: str, value: float) -> str:
        seen = self._seen.get(name, ())
        if len(seen) < _LEAST:
            return ""
        median = statistics.median(seen)
        deviation = _TO_DEVIATION * statistics.median(abs(one - median) for one in seen)
        limit = median + self.settings.threshold * max(deviation, _SMALLEST * abs(median))
        return f"{name} is {value:.4g}, with a median of {median:.4g}" if value > limit else ""

    def _on_bad(self, said: str, action: str) -> bool:
        text = f"{said} in step {self._calls}{_batches(self.accelerator)}"
        self.events.append(text)
        if action == "warn":
            self._warn(f"{text}.")
            return True
        if action == "stop":
            raise GuardError(f"The guard stopped the run: {text}.")
        self._in_a_row += 1
        if self._in_a_row < self.settings.patience:
            self._warn(f"{text}. The step is skipped.")
            return False
        row = f"{text}. That is bad step {self._in_a_row} in a row"
        self._in_a_row = 0
        if self.settings.then == "stop":
            raise GuardError(f"The guard stopped the run: {row}.")
        if self._rollbacks == _ROLLBACKS:
            raise GuardError(f"The guard stopped the run: {row}, after {_ROLLBACKS} rollbacks.")
        self._rollbacks += 1
        with _loaders_continue(self.accelerator.loaders):
            accelerator: Any = self.accelerator
            path = accelerator.load_state(self.settings.checkpoint)
        self._warn(f"{row}. The run was rolled back to {path}, and continues with the next batch.")
        return False

    def _warn(self, text: str) -> None:
        if self.accelerator.is_main_process:
            logger.warning(text[0].upper() + text[1:])


def _batches(accelerator: AcceleratorView) -> str:
    """Return which batches of the loop that runs now are in this step, if its loader knows."""
    for loader in accelerator.loaders:
        position = loader.state_dict() if hasattr(loader, "state_dict") else {}
        seen = position.get("batches_seen")
        if not seen:
            continue
        # The last cycle of an epoch may be shorter.
        count = (seen - 1) % accelerator.gradient_accumulation_steps + 1
        batches = f"batch {seen - 1}" if count == 1 else f"batches {seen - count} to {seen - 1}"
        text = f" (epoch {position['epoch']}, {batches}"
        last, size = position.get("samples_seen"), getattr(loader, "total_batch_size", None)
        if last and size:
            text += f", samples {last - count * size} to {last - 1} of the epoch's order"
        return f"{text})"
    return ""


@contextmanager
def _loaders_continue(loaders: Sequence[Any]) -> Iterator[None]:
    """Keep the positions of the loaders while a checkpoint is loaded.

    Otherwise the batches since the checkpoint, among them the bad ones, would come again.
    """
    for loader in loaders:
        vars(loader)["load_state_dict"] = lambda state: None
    try:
        yield
    finally:
        for loader in loaders:
            del vars(loader)["load_state_dict"]
