"""DeepSpeed's engines, and access to their gradients between backward and step.

DeepSpeed reduces gradients inside `engine.step()`. Computing the norm, clipping and dividing by a
number of items happen before that and need reduced gradients. They are therefore reduced when they
are first needed, and `step()` then skips the reduction.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import ConfigurationError
from accelerate_deepspeed.settings import DeepSpeedPlugin

#: Attribute in which stage 3 keeps this rank's part of each parameter's gradient.
STAGE_3_PARTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class TrainedEngine:
    """An engine that trains, with access to its gradients.

    Args:
        plugin: the settings of the engine.
    """

    def __init__(self, engine: Any, plugin: DeepSpeedPlugin) -> None:
        self.engine = engine
        self.plugin = plugin
        self.stage = int(engine.zero_optimization_stage())
        #: The module's parameters, cached because traversing a model takes many calls.
        self.parameters = list(engine.module.parameters())
        #: Whether the engine scales losses, cached because it is needed in every step.
        self.scales = bool(engine.fp16_enabled())
        config = plugin.hf_ds_config
        #: `gradient_clipping` of the config, or 0.0.
        self.configured_norm = float(config.get_value("gradient_clipping", 0.0) or 0.0)
        #: Whether a backward has run since the last step.
        self.dirty = False
        #: Whether gradients were reduced since the last backward.
        self.reduced = False
        self._norm: Any = None
        self._clip: float | None = None
        #: Whether DeepSpeed's epilogue of the current backward has run.
        self.backward_ended = False
        #: Whether the engine's hooks were removed.
        self.closed = False
        #: Gradients that were reduced before the last micro-batch of a cycle: group -> tensors.
        self._carried: dict[Any, list[torch.Tensor]] = {}
        # The core has already divided the loss. If the user calls loss.backward(), it's not divided.
        engine.__dict__["_backward_prologue_per_tensor"] = _unchanged
        epilogue = engine._backward_epilogue

        def record_and_run_epilogue() -> None:
            if not self.dirty or self.reduced:
                self.begin_backward()
            self.backward_ended = True
            epilogue()

        engine.__dict__["_backward_epilogue"] = record_and_run_epilogue

    @property
    def finished(self) -> bool:
        """Whether gradients were reduced before the step, because they were measured or changed."""
        return self.reduced or bool(self._carried)

    def begin_backward(self) -> None:
        """Record that a backward has begun. Gradients are then no longer fully reduced."""
        optimizer = self.engine.optimizer
        offload = getattr(optimizer, "cpu_offload", False)
        if self.reduced and self.stage == 1 and offload:
            self.drop()
            raise ConfigurationError(
                "Gradients were measured or changed before the last micro-batch of a cycle. This is "
                "not supported by stage 1 with offload_optimizer, whose next backward replaces them. "
                "Do it only when accelerator.sync_gradients is True, or use stage 2."
            )
        if self.reduced and self.stage in (1, 2) and not offload:
            # After a reduction, these stages start from zero. Other stages continue to accumulate.
            averaged = getattr(optimizer, "averaged_gradients", {})
            self._carried = {key: list(group) for key, group in averaged.items() if group}
        self.dirty = True
        self.reduced = False
        self._norm = None

    def joined(self) -> AbstractContextManager[None]:
        """Return a context for the backward of a loss that another engine has already scaled."""
        # Without this, stage 0 ignores the other engine's backward, and other stages scale again.
        name = "_manual_backward_expected" if self.stage else "_running_engine_backward"
        return _set((self.engine, name, True))

    def finish_backward(self) -> None:
        """End a backward that went through this engine, even if DeepSpeed miscounted.

        DeepSpeed counts forwards instead of backwards. For example, after a discriminator's two
        forwards and one backward, its depth is 1, and it would treat the next backward as a part of
        this one.
        """
        if not self.backward_ended:
            self.engine._backward_epilogue()
        state = getattr(self.engine.optimizer, "_backward_hook_state", None)
        if state is not None:
            state.backward_active_depth = 0

    # --- operations on gradients ------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce gradients, if they are not reduced yet. All ranks must call this."""
        if self.reduced:
            return
        engine = self.engine
        if self.stage >= 2:
            engine.optimizer.finalize_gradient_accumulation_boundary()
        elif engine.enable_backward_allreduce:
            with _set((engine, "_running_engine_step", True)):
                engine.allreduce_gradients()
        for key, earlier in self._carried.items():
            for grad, more in zip(engine.optimizer.averaged_gradients[key], earlier, strict=True):
                grad.add_(more)
        self._carried = {}
        self.reduced = True

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        self.finish()
        for grad in self._parts("num_items"):
            grad.mul_(factor.to(grad.device, torch.promote_types(grad.dtype, torch.float32)))
        norms = getattr(self.engine.optimizer, "norm_for_param_grads", None)
        if norms:  # with offload, norms were computed when gradients were moved to the host
            for key in norms:
                norms[key] = norms[key] * factor.to(getattr(norms[key], "device", "cpu"))
        self._norm = None

    def clamp(self, value: float) -> None:
        """Clip every element to [-value, value]."""
        self.finish()
        bound = value * self.loss_scale
        for grad in self._parts("clip_grad_value_"):
            if self.engine.fp16_enabled():  # clipping must not hide an overflow
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
        return scaled / self.loss_scale if self.scales else scaled

    def clip(self, max_norm: float) -> None:
        """Clip to a norm, in the next step or, with stage 0, immediately."""
        if self.stage == 0:
            self.scale(torch.clamp(max_norm / (self.norm(2.0) + 1e-6), max=1.0))
        else:
            self._clip = max_norm

    @property
    def loss_scale(self) -> float:
        """The factor by which gradients are multiplied to prevent underflow."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)

    # --- step -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Step the engine, and return whether the step was taken."""
        engine, optimizer = self.engine, self.engine.optimizer
        if not self.reduced and not self._carried and self._clip is None:
            # Gradients were neither measured nor changed, so nothing needs to be overridden.
            engine.step()
            self.dirty = False
            if self.stage == 3:
                self._zero_parts()
            return bool(engine._step_applied)  # the same as was_step_applied(), without a call
        if self._carried:
            self.finish()
        during: list[tuple[Any, str, Any]] = []
        if self.reduced:
            if self.stage >= 2:
                during.append((optimizer, "finalize_gradient_accumulation_boundary", _nothing))
            else:
                during.append((engine, "enable_backward_allreduce", False))
        if self._clip is not None and self.stage > 0:
            during.append((optimizer, "clip_grad", self._clip))
        if (norm := self._norm) is not None and not getattr(optimizer, "use_muon", False):
            # The step reuses the norm that was already computed.
            name, value = "scaled_global_norm", norm
            if self.stage == 3:
                name, value = "_get_norm_groups", [norm]
            if self.stage > 0 and hasattr(optimizer, name):
                during.append((optimizer, name, lambda *_: value))
        with _set(*during):
            engine.step()
        self._cleared()
        return bool(engine._step_applied)

    def drop(self) -> None:
        """Drop all gradients since the last step."""
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
        engine._unmanaged_backward_count = 0
        self._cleared()

    def _cleared(self) -> None:
        self.dirty = False
        self.reduced = False
        self._norm = None
        self._clip = None
        self._carried = {}
        if self.stage == 3:
            self._zero_parts()

    def _zero_parts(self) -> None:
        """Zero the gradients of stage 3, where a layer not used in the next cycle would keep its old one."""
        parts = getattr(self.engine.optimizer, STAGE_3_PARTS, {})
        for part in parts.values():  # `no_grad` is not needed, because these require no gradient
            part.zero_()

    # --- access to gradients ----------------------------------------------------------------------

    def _parts(self, what: str) -> list[torch.Tensor]:
        """Return this rank's parts of the reduced gradients.

        Args:
            what: the operation that needs them, for the error message.
        """
        optimizer = self.engine.optimizer
        if self.stage == 0:
            return [p.grad for p in self.parameters if p.grad is not None]
        if self.stage == 3 and getattr(optimizer, "swap_optimizer", False):
            raise ConfigurationError(
                f"{what} is not supported with offload to nvme, which writes gradients to disk."
            )
        if getattr(optimizer, "offload_optimizer", False):
            found = [flat.grad for flat in optimizer.fp32_partitioned_groups_flat]
        elif getattr(optimizer, "cpu_offload", False):
            found = [flat.grad for flat in optimizer.single_partition_of_fp32_groups]
        elif (averaged := getattr(optimizer, "averaged_gradients", None)) is not None:
            found = [grad for group in averaged.values() for grad in group or ()]
        else:
            raise ConfigurationError(
                f"{what} is not supported with DeepSpeed's {type(optimizer).__name__}, which does "
                "not give access to its gradients. Use the core's bf16: set mixed_precision='bf16' "
                "and remove the section bf16 from the config."
            )
        return [grad for grad in found if grad is not None]

    def _measure(self) -> Any:
        optimizer = self.engine.optimizer
        if self.stage == 0:
            # Norms of scaled gradients would overflow in fp16.
            grads = self._parts("clip_grad_norm_")
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
            return torch.nn.utils.get_total_norm(norms)
        if not getattr(optimizer, "compute_grad_norm", True):
            raise ConfigurationError(
                "clip_grad_norm_ needs the norm of the gradients, but the DeepSpeed config has "
                "zero_optimization.compute_grad_norm=false. Remove it."
            )
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            groups = optimizer._get_norm_groups()
            if len(groups) == 1 and isinstance(groups[0], torch.Tensor):
                return groups[0]  # `norm` replaces values that are not finite, as combining does
            return combine_grad_norm_groups(groups)
        if not hasattr(optimizer, "scaled_global_norm"):
            raise ConfigurationError(
                f"DeepSpeed's {type(optimizer).__name__} only computes the norm of gradients in its "
                "step. Instead of calling clip_grad_norm_, set gradient_clipping in the config."
            )
        return optimizer.scaled_global_norm()

    def _largest(self) -> torch.Tensor:
        parts = [grad for grad in self._parts("The largest gradient") if grad.numel()]
        largest = torch.nn.utils.get_total_norm(parts, math.inf).float().to(self.engine.device)
        if self.stage > 0:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest / self.loss_scale


class Engines:
    """All engines of one Accelerator. Those that train are found by model, optimizer or loss."""

    def __init__(self) -> None:
        # Weak references, so that an engine is freed with its model.
        self._engines: list[weakref.ref[Any]] = []
        #: Engines that don't train. Stage 3 has them for frozen models.
        self._frozen: list[weakref.ref[Any]] = []
        #: Id of a parameter -> its engine. Only used if there are several engines.
        self._owners: dict[int, weakref.ref[Any]] = {}

    def add(self, engine: Any, plugin: DeepSpeedPlugin) -> None:
        """Add an engine. It trains if it has an optimizer."""
        reference = weakref.ref(engine)
        if engine.basic_optimizer is None:
            # Gradients may flow through a frozen model, but DeepSpeed refuses every backward through
            # an engine without an optimizer, and would divide the gradients by the accumulation.
            engine.__dict__["_backward_prologue"] = _nothing
            engine.__dict__["_backward_prologue_per_tensor"] = _unchanged
            self._frozen.append(reference)
            return
        engine.accelerate_trained = TrainedEngine(engine, plugin)
        self._engines.append(reference)
        self._owners.update({id(p): reference for p in engine.module.parameters()})

    @property
    def trained(self) -> list[TrainedEngine]:
        """The engines that still exist and train, in the order of their creation."""
        found = []
        for reference in self._engines:  # runs in every step that clips, so it's not a generator
            engine = reference()
            if engine is not None:
                found.append(engine.accelerate_trained)
        return found

    def destroy(self) -> None:
        """Free all engines and their resources."""
        self.end()
        for one in self.trained:
            del one.engine.accelerate_trained
        self._engines.clear()
        self._owners.clear()

    def end(self) -> None:
        """Remove the engines' hooks, which keep the models alive.

        Models can be unwrapped after that, but not trained. With stage 3, they can't be used either,
        because the hooks gather their parameters.
        """
        for one in self.trained:
            if not one.closed:
                one.closed = True
                _close(one.engine)
        for reference in self._frozen:
            engine = reference()
            if engine is not None:
                _close(engine)
        self._frozen.clear()

    def of(self, held: Any) -> TrainedEngine | None:
        """Return the engine of a prepared model, its module or its optimizer."""
        # Runs several times in every step, so it's not a generator.
        for reference in self._engines:
            engine = reference()
            if engine is None:
                continue
            trained: TrainedEngine = engine.accelerate_trained
            if held is engine.optimizer or held is engine.basic_optimizer:
                return trained
            if held is engine or held is engine.module:
                return trained
        return None

    def of_loss(self, loss: torch.Tensor) -> list[TrainedEngine]:
        """Return the engines whose parameters a loss depends on.

        With several engines, the autograd graph is searched. The order of calls would not be enough:
        a generator's forward may be older than its discriminator's last backward.
        """
        if loss.grad_fn is None:
            return []
        if len(self._engines) == 1:
            engine = self._engines[0]()
            return [] if engine is None else [engine.accelerate_trained]
        trained = self.trained
        if len(trained) <= 1:
            return trained
        found: set[int] = set()
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting and len(found) < len(trained):
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            reference = self._owners.get(id(getattr(node, "variable", None)))
            engine = None if reference is None else reference()
            if engine is not None:
                found.add(id(engine))
            waiting += [following for following, _ in node.next_functions if following is not None]
        return [one for one in trained if id(one.engine) in found]


class DeepSpeedEngineWrapper:
    """Type of `accelerator.deepspeed_engine_wrapped`, with the newest engine as `engine`.

    Accelerate's class calls `step()` in its `backward`. Here the training loop does, so this class
    only provides access.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before clipping in the last step, or None with stage 0."""
        if self.engine.zero_optimization_stage() == 0:
            return None  # with fp16, DeepSpeed would return the norm of scaled gradients
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


def use_smallest_scale(engines: Sequence[TrainedEngine]) -> None:
    """Give all engines of one loss the same loss scale: a static one, or else the smallest.

    Existing gradients are rescaled.
    """
    if len({one.loss_scale for one in engines}) == 1:
        return
    static = {one.loss_scale for one in engines if not one.engine.dynamic_loss_scale()}
    if len(static) > 1:
        raise ConfigurationError(
            f"The loss depends on engines with different static scales {sorted(static)}. Set the "
            "same fp16.loss_scale in their DeepSpeed configs, or 0 for a dynamic scale."
        )
    scale = min(static or {one.loss_scale for one in engines})
    for one in engines:
        if one.dirty:
            one.scale(torch.tensor(scale / one.loss_scale))
        one.engine.optimizer.loss_scale = scale


def _close(engine: Any) -> None:
    """Destroy an engine, and remove what stage 3 keeps of its model in global variables."""
    engine.destroy()
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    # DeepSpeed never removes the first module from this list of running ones.
    stack: list[Any] = getattr(offload, "FWD_MODULE_STACK", [])
    stack[:] = [module for module in stack if module is not engine.module]
    _forget_released(getattr(offload, "PartitionedParameterCoordinator", None))


def _forget_released(coordinator: Any) -> None:
    """Clear the cache in which a method of stage 3 keeps every model that has run a backward.

    The cache is inside a wrapper without attributes, so it's found among the variables that the
    wrapper uses. Engines that still train compute its values again.
    """
    method = getattr(coordinator, "_PartitionedParameterCoordinator__params_to_release", None)
    cells = getattr(method, "__closure__", None) or ()
    for function in (method, *(cell.cell_contents for cell in cells)):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _unchanged(grad: Any) -> Any:
    return grad


def _nothing() -> None:
    """Replace a method that has nothing to do, or whose work has already been done."""


class _set:
    """A context that sets attributes, given as `(object, name, value)`.

    A step that clips sets three attributes, and an `ExitStack` would need eight calls for each.
    """

    __slots__ = ("_before", "_changes")

    def __init__(self, *changes: tuple[Any, str, Any]) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = []
        for obj, name, value in self._changes:
            held = vars(obj)
            self._before.append((held, name, name in held, held.get(name)))
            held[name] = value

    def __exit__(self, *error: Any) -> None:
        for held, name, was_there, value in reversed(self._before):
            if was_there:
                held[name] = value
            else:
                del held[name]
