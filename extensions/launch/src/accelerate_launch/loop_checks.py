"""Warn about loops that look right but train something else.

Each check runs once: when `prepare` returns, in the first `accumulate` block, or in the first two calls
of `backward`. Later steps cost nothing. `ACCELERATE_DISABLED_PLUGINS=loop_checks`
turns the warnings off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from accelerate_core.plugin import AcceleratorView, Claim, Request, hookimpl, warn

if TYPE_CHECKING:
    import torch


class LoopChecks:
    """Checks how a script uses its Accelerator. Active in every run."""

    name = "loop_checks"
    api_version = (1, 0)

    @classmethod
    def detect(cls, request: Request) -> Claim:
        """Claim every run."""
        return Claim(0, "on by default")

    @hookimpl
    def on_prepared(
        self, accelerator: AcceleratorView, given: Sequence[object], prepared: Sequence[object]
    ) -> None:
        """Check that the script uses the results of `prepare`, and watch wrappers and optimizers."""
        import torch

        from accelerate_core.plugin import AcceleratedOptimizer
        from accelerate_launch import misuse
        from accelerate_launch.skipped_steps import SkippedSteps

        replaced = [(old, new) for old, new in zip(given, prepared, strict=True) if old is not new]
        for _, new in replaced:
            if isinstance(new, torch.nn.Module) and misuse.is_wrapper(accelerator, new):
                misuse.NotCalled(new)
        # With a loss scale, skipping steps is normal.
        if accelerator.scaler is None and "precision" not in accelerator.backend.owns:
            for _, new in replaced:
                if isinstance(new, AcceleratedOptimizer):
                    new.skip_watch = SkippedSteps(accelerator.backend.name)
        if replaced and misuse.result_is_dropped():
            names = ", ".join(type(old).__name__ for old, _ in replaced)
            warn(
                f"The results of prepare() are ignored, so the script keeps using the unprepared "
                f"{names}. Assign them: `model, optimizer, loader = accelerator.prepare(model, "
                "optimizer, loader)`."
            )

    @hookimpl
    def on_early_backward(self, accelerator: AcceleratorView, loss: torch.Tensor) -> None:
        """Check the gradients of the first loss, and that `accumulate` was entered before the second."""
        state = accelerator.gradient_state
        if not state.backwards:
            from accelerate_launch.misuse import check_loss

            check_loss(loss, accelerator.models)
            return
        divides = state.num_steps > 1 and "accumulation" not in accelerator.backend.owns
        # `accumulate` counts micro-batches, but starts again at the end of a loader.
        entered = accelerator.step or state.end_of_dataloader
        if divides and state.steps and not entered:
            warn(
                f"gradient_accumulation_steps={state.num_steps} divides every loss by {state.num_steps}, "
                "but the optimizer steps after each backward, because the loop never enters "
                "accelerator.accumulate(). Put its body into `with accelerator.accumulate(model):`, or "
                "set gradient_accumulation_steps to 1."
            )

    @hookimpl
    def on_first_micro_batch(self, accelerator: AcceleratorView) -> Callable[[], None]:
        """Watch the steps inside this micro-batch. The returned function stops watching."""
        from accelerate_launch.misuse import StepWatch

        return StepWatch(accelerator.optimizers).end
