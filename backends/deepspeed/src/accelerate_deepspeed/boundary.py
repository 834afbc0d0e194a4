"""Gradients between the last backward of a cycle and the step: reduced, measured, clipped, scaled.

DeepSpeed finishes gradients inside of `engine.step()`. What users do between backward and step
(the norm, clipping, dividing by a number of items) needs them before; so they are finished when
they are first asked for, and `step()` is told not to do it once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.errors import ConfigurationError

__all__ = ["Boundary", "joint_norm"]


class Boundary:
    """The gradients of one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        #: A backward has run since the last step.
        self.dirty = False
        self._finished = False
        self._norm: torch.Tensor | None = None
        self._clip: float | None = None
        #: DeepSpeed's work at the end of a backward has been done.
        self.ended = False
        #: Finished gradients of a cycle that went on: group -> tensors.
        self._carried: dict[Any, list[torch.Tensor]] = {}
        # The core has divided the loss, or the user has, who calls loss.backward().
        engine.__dict__["_backward_prologue_per_tensor"] = _as_it_is
        epilogue = engine._backward_epilogue

        def noted() -> None:
            self.begun()
            self.ended = True
            epilogue()

        engine.__dict__["_backward_epilogue"] = noted

    def begun(self) -> None:
        """Note a backward: what was finished is so no more."""
        optimizer = self.engine.optimizer
        offload = getattr(optimizer, "cpu_offload", False)
        if self._finished and self.stage == 1 and offload:
            self.drop()
            raise ConfigurationError(
                "Gradients were measured or changed before the last micro-batch of a cycle, which "
                "stage 1 with offload_optimizer cannot: its next backward replaces them. Do it "
                "where accelerator.sync_gradients is true, or use stage 2."
            )
        if self._finished and self.stage in (1, 2) and not offload:
            # These stages begin anew after they have finished; the others add to what is there.
            self._carried = {
                key: list(group)
                for key, group in getattr(optimizer, "averaged_gradients", {}).items()
                if isinstance(group, list | tuple)
            }
        self.dirty, self._finished, self._norm = True, False, None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let another engine's backward, of a loss that is scaled already, run through this one."""
        # Stage 0 takes part in no other engine's backward by itself, and the others ask for a scale.
        name = "_manual_backward_expected" if self.stage else "_running_engine_backward"
        with _set(self.engine, name, True):
            yield

    def settle(self) -> None:
        """End a backward that went through this engine, also where DeepSpeed lost count.

        It counts forwards, not backwards: a discriminator that has judged two batches is left with
        a depth of one, and takes the next backward for a part of this one.
        """
        if not self.ended:
            self.engine._backward_epilogue()
        state = getattr(self.engine.optimizer, "_backward_hook_state", None)
        if state is not None:
            state.backward_active_depth = 0

    # --- what is done to gradients ----------------------------------------------------------------

    def finish(self) -> None:
        """Reduce what is not reduced yet, on all ranks together."""
        if self._finished:
            return
        engine = self.engine
        if self.stage >= 2:
            engine.optimizer.finalize_gradient_accumulation_boundary()
        elif engine.enable_backward_allreduce:
            with _set(engine, "_running_engine_step", True):
                engine.allreduce_gradients()
        for key, earlier in self._carried.items():
            for grad, more in zip(engine.optimizer.averaged_gradients[key], earlier, strict=True):
                grad.add_(more)
        self._carried = {}
        self._finished = True

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        self.finish()
        for grad in self._parts("num_items"):
            grad.mul_(factor.to(grad.device, torch.promote_types(grad.dtype, torch.float32)))
        norms = getattr(self.engine.optimizer, "norm_for_param_grads", None)
        if norms:  # with offload they were measured when gradients left the device
            for key in norms:
                norms[key] = norms[key] * factor.to(
                    "cpu" if not torch.is_tensor(norms[key]) else norms[key].device
                )
        self._norm = None

    def clamp(self, value: float) -> None:
        """Clip every element to [-value, value]."""
        self.finish()
        bound = value * self.loss_scale
        for grad in self._parts("clip_grad_value_"):
            if self.engine.fp16_enabled():  # what has overflowed must not be clipped to a number
                grad.masked_fill_(grad.isinf(), math.nan)
            grad.clamp_(-bound, bound)
        self._norm = None

    def norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients over all ranks, unscaled, as a 0-d tensor."""
        self.finish()
        if norm_type == math.inf:
            return self._largest()
        if self._norm is None:
            self._norm = self._measure()
        scaled = torch.as_tensor(self._norm, dtype=torch.float32)
        scaled = torch.where(torch.isfinite(scaled) & (scaled >= 0), scaled, math.inf)
        return scaled / self.loss_scale

    def clip(self, max_norm: float) -> None:
        """Clip to a norm in the coming step; stage 0 now."""
        if self.stage == 0:
            parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
            factor = torch.clamp(max_norm / (self.norm(2.0) + 1e-6), max=1.0)
            for parameter in parameters:
                parameter.grad.mul_(factor.to(parameter.grad.device))
            self._norm = None
        else:
            self._clip = max_norm

    @property
    def loss_scale(self) -> float:
        """By what gradients are multiplied against underflow."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale follows overflows."""
        return bool(self.engine.dynamic_loss_scale())

    # --- step -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Step the engine; tell whether the step was taken."""
        engine, optimizer = self.engine, self.engine.optimizer
        with ExitStack() as stack:
            if self._carried:
                self.finish()
            if self._finished:
                if self.stage >= 2:
                    stack.enter_context(
                        _set(optimizer, "finalize_gradient_accumulation_boundary", _nothing)
                    )
                else:
                    stack.enter_context(_set(engine, "enable_backward_allreduce", False))
            if self._clip is not None and self.stage > 0:
                stack.enter_context(_set(optimizer, "clip_grad", self._clip))
            if self._norm is not None and not getattr(optimizer, "use_muon", False):
                self._reuse(stack, self._norm)
            engine.step()
        self._forget_parts()
        self.dirty, self._finished, self._norm, self._clip = False, False, None, None
        return bool(engine.was_step_applied())

    def _forget_parts(self) -> None:
        """Clear the gradients of stage 3: a layer that is not used next would keep its last one."""
        if self.stage == 3:
            name = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
            parts = getattr(self.engine.optimizer, name, {})
            with torch.no_grad():
                for part in parts.values():
                    part.zero_()

    def _reuse(self, stack: ExitStack, norm: torch.Tensor) -> None:
        """Let the step take the norm that was measured for the user."""
        optimizer = self.engine.optimizer
        if self.stage in (1, 2) and hasattr(optimizer, "scaled_global_norm"):
            stack.enter_context(_set(optimizer, "scaled_global_norm", lambda norm_type=2: norm))
        elif self.stage == 3 and hasattr(optimizer, "_get_norm_groups"):
            stack.enter_context(_set(optimizer, "_get_norm_groups", lambda: [norm]))

    def drop(self) -> None:
        """Forget all gradients since the last step."""
        if not self.dirty:
            return
        engine, optimizer = self.engine, self.engine.optimizer
        if self.stage == 0:
            engine.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=True)
        if self.stage in (1, 2) and hasattr(optimizer, "averaged_gradients"):
            optimizer.micro_step_id = -1
            if getattr(optimizer, "cpu_offload", False):
                optimizer._wait_for_offload_copies()
                optimizer._offload_accumulated_param_ids = set()
                optimizer.reset_cpu_buffers()
            optimizer._release_preflattened_grad_buffers()
            for key in optimizer.averaged_gradients:
                optimizer.averaged_gradients[key] = None
            for key in optimizer.all_grad_tensors:
                optimizer.all_grad_tensors[key] = None
        self._forget_parts()
        self._carried = {}
        engine._unmanaged_backward_count = 0
        self.dirty, self._finished, self._norm, self._clip = False, False, None, None

    # --- where they are ---------------------------------------------------------------------------

    def _parts(self, what: str) -> list[torch.Tensor]:
        """Return this rank's parts of the finished gradients."""
        optimizer = self.engine.optimizer
        if self.stage == 0:
            return [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        if self.stage == 3 and getattr(optimizer, "swap_optimizer", False):
            raise ConfigurationError(
                f"{what} needs gradients at hand, and offload to nvme has written them to disk."
            )
        if getattr(optimizer, "offload_optimizer", False):
            return [
                flat.grad
                for flat in optimizer.fp32_partitioned_groups_flat
                if flat.grad is not None
            ]
        if getattr(optimizer, "cpu_offload", False):
            flats = optimizer.single_partition_of_fp32_groups
            return [flat.grad for flat in flats if flat.grad is not None]
        averaged = getattr(optimizer, "averaged_gradients", None)
        if averaged is None:
            raise ConfigurationError(
                f"{what} is not offered with DeepSpeed's {type(optimizer).__name__}: it keeps "
                "gradients to itself. Use the core's bf16 (mixed_precision='bf16' and no section "
                "bf16 in the config)."
            )
        found: list[torch.Tensor] = []
        for group in averaged.values():
            found += (
                group if isinstance(group, list | tuple) else [group] if group is not None else []
            )
        return [grad for grad in found if grad is not None]

    def _measure(self) -> torch.Tensor:
        optimizer = self.engine.optimizer
        if self.stage == 0:
            norms = [
                torch.linalg.vector_norm(p.grad, dtype=torch.float32)  # scaled ones overflow fp16
                for p in self.engine.module.parameters()
                if p.grad is not None
            ]
            return torch.nn.utils.get_total_norm(norms)
        if not getattr(optimizer, "compute_grad_norm", True):
            raise ConfigurationError(
                "clip_grad_norm_ needs the norm of the gradients, and the DeepSpeed config has "
                "zero_optimization.compute_grad_norm=false."
            )
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            return _tensor(combine_grad_norm_groups(optimizer._get_norm_groups()))
        if not hasattr(optimizer, "scaled_global_norm"):
            raise ConfigurationError(
                f"DeepSpeed's {type(optimizer).__name__} measures gradients in its step only: set "
                "gradient_clipping in the config instead of calling clip_grad_norm_."
            )
        return _tensor(optimizer.scaled_global_norm())

    def _largest(self) -> torch.Tensor:
        parts = [grad for grad in self._parts("The largest gradient") if grad.numel()]
        device = parts[0].device if parts else self.engine.device
        largest = torch.zeros((), device=device)
        for grad in parts:
            largest = torch.maximum(largest, grad.detach().abs().max().float())
        if self.stage > 0:
            largest = largest.to(self.engine.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest / self.loss_scale


def joint_norm(
    boundaries: Sequence[Boundary], norm_type: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the norm over several engines, and that of each."""
    each = [boundary.norm(norm_type) for boundary in boundaries]
    if len(each) == 1:
        return each[0], each
    device = each[0].device
    return torch.linalg.vector_norm(torch.stack([one.to(device) for one in each]), norm_type), each


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _as_it_is(grad: Any) -> Any:
    return grad


def _nothing() -> None:
    return None


@contextmanager
def _set(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute of one object inside of the block."""
    there = name in vars(obj)
    before: Callable[..., Any] | Any = vars(obj).get(name)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if there:
            setattr(obj, name, before)
        else:
            delattr(obj, name)
