"""One model under megatron: its chunks, their gradients, and the optimizer that updates them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_core.plugin import (
    CheckpointError,
    ConfigurationError,
    GradScalerKwargs,
    PrepareError,
    warn,
)
from accelerate_megatron.library import imported
from accelerate_megatron.settings import Sizes
from accelerate_megatron.shards import Part, parts_of, parts_of_plain

#: Megatron stores norms under the names of the layers that contain them in Transformer Engine.
_STORED_AS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(eq=False)
class Engine:
    """A model's chunks wrapped in megatron's data parallelism, and its optimizer once prepared.

    Every backward accumulates gradients in megatron's buffers. Clipping or the optimizer step
    reduces them, once per step, and `zero_grad` clears them.

    Attributes:
        modules: this rank's parts of the model, one for each virtual stage.
        chunks: the same parts, wrapped in megatron's data parallelism.
        config: megatron's `TransformerConfig` of the model.
        plain: whether the module is not a megatron model; then every rank holds all of it.
    """

    modules: list[Any]
    chunks: list[Any]
    config: Any
    sizes: Sizes
    plain: bool
    #: Size of the vocabulary, without padding; 0 if unknown.
    vocab_size: int = 0
    optimizer: Any = None
    inner: torch.optim.Optimizer | None = None
    #: Global names of each group's parameters.
    group_names: list[list[str]] = field(default_factory=list)
    #: The parameters of this rank that the optimizer holds.
    stepped: set[nn.Parameter] = field(default_factory=set)
    #: The norm to which gradients are clipped if the script does not clip them.
    clip: float | None = None
    #: The model has been called, with gradients enabled, since the last backward.
    called: bool = False
    #: A backward has run since the gradients were cleared.
    begun: bool = False
    #: The gradients are reduced over all ranks, unscaled, and where the optimizer reads them.
    ready: bool = False
    #: The gradients overflowed (fp16).
    overflowed: bool = False
    clipped: bool = False
    _parts: dict[torch.Tensor, list[Part]] | None = None

    @property
    def parts(self) -> dict[torch.Tensor, list[Part]]:
        """Which part of which whole tensor each parameter and buffer of this rank is."""
        if self._parts is None:
            if self.plain:
                rank = dist.get_rank(imported("parallel_state").get_data_parallel_group())
                self._parts = parts_of_plain(self.modules[0], rank)
            else:
                self._parts = parts_of(self.modules)
        return self._parts

    def name(self, parameter: nn.Parameter) -> str:
        """Return the global name of one of this rank's parameters."""
        part = self.parts[parameter][0]
        name = part.key
        if len(part.size) > parameter.dim():  # an expert: all experts are stored as one tensor
            name = name.replace(".experts.", f".experts.{part.offset[0]}.")
        for stored, called in _STORED_AS.items():
            name = name.replace(stored, called)
        return name

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over this rank's parameters."""
        for module in self.modules:
            yield from module.parameters()

    @cached_property
    def listed(self) -> list[nn.Parameter]:
        """This rank's parameters, cached for the step: walking a model takes many calls."""
        return list(self.parameters())

    # --- the step -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Record that a backward is about to add to the gradients.

        Raises:
            ConfigurationError: the gradients have already been reduced.
        """
        called = self.called
        self.called = False
        if self.ready and not called:
            return  # it is the backward of another model
        if self.ready:
            raise ConfigurationError(
                "backward() was called after the gradients were reduced by optimizer.step() or by "
                "clipping: megatron would add the gradients of tied embeddings and norms twice. "
                "Call optimizer.zero_grad() after each step, and clip only once, before the step."
            )
        self.begun = True

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss on which to call backward: in fp16 it is scaled."""
        if self.optimizer is not None and self.config.fp16:
            loss = self.optimizer.scale_loss(loss)
        return loss.reshape(())

    @cached_property
    def _finalize(self) -> Any:
        return imported("distributed.finalize_model_grads").finalize_model_grads

    @cached_property
    def _clip_grads(self) -> Any:
        return imported("optimizer.clip_grads")

    @cached_property
    def balances(self) -> bool:
        """Whether the routers of experts add losses of their own."""
        config = self.config
        even = config.moe_aux_loss_coeff
        even = any(even) if isinstance(even, list) else even
        return config.num_moe_experts is not None and bool(even or config.moe_z_loss_coeff)

    def scale_balance(self, factor: torch.Tensor) -> None:
        """Set the factor of the routers' losses in the next backward."""
        scaler = imported("transformer.moe.moe_utils").MoEAuxLossAutoScaler
        scaler.set_loss_scale(self.scaled(factor))

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the accumulated gradients."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def flush(self) -> None:
        """Reduce the gradients over the ranks and pass them to the optimizer, once per step."""
        if self.ready:
            return
        self._finalize(self.chunks)
        self.overflowed = bool(self.optimizer.prepare_grads())
        self.ready = True

    def norm(self, norm_type: float) -> float:
        """Return the norm of the whole model's gradients."""
        norm_of = self._clip_grads.get_grad_norm_fp32
        norms = []
        for group, found in self._gradients():
            # There may be none, for example on a data rank that updates nothing.
            grads = found or [torch.zeros(1, device=self.listed[0].device)]
            norms.append(float(norm_of(grads, norm_type, grad_stats_parallel_group=group)))
        if len(norms) == 1 or norm_type == math.inf:
            return max(norms)
        return float(sum(norm**norm_type for norm in norms) ** (1 / norm_type))

    def _gradients(self) -> Sequence[tuple[Any, list[torch.Tensor]]]:
        """Return groups of ranks, with gradients such that each is on one rank of its group only."""
        optimizer = self.optimizer
        if self.sizes.ep == 1:
            group = optimizer.get_grad_stats_parallel_group()
            return ((group, optimizer.get_main_grads_for_grad_norm()),)
        found = []
        # Experts are split across different ranks than the rest.
        state, single = imported("parallel_state"), imported("tensor_parallel")
        whole = (state.get_model_parallel_group, state.get_tensor_model_parallel_group)
        expert = (
            state.get_expert_tensor_model_pipeline_parallel_group,
            state.get_expert_tensor_parallel_group,
        )
        for kind, (all_ranks, tensor_ranks) in ((False, whole), (True, expert)):
            grads = [
                held.grad
                for parameter, held, _, _ in self.held()
                if held.grad is not None
                and is_expert(parameter) == kind
                and not getattr(parameter, "shared", False)
                and single.param_is_not_tensor_parallel_duplicate(parameter, tensor_ranks())
            ]
            found.append((None if self.distributed else all_ranks(), grads))
        return found

    def clip_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients by their norm; return the norm before clipping."""
        self.flush()
        self.clipped = True
        norm = self.norm(norm_type)
        if not self.overflowed:
            clip = self._clip_grads.clip_grad_by_total_norm_fp32
            clip(self.optimizer.get_parameters(), max_norm, norm)
        return torch.tensor(norm, device=self.listed[0].device)

    def clip_value(self, value: float) -> None:
        """Clip each element of the gradients."""
        self.flush()
        self.clipped = True
        held = [p for p in self.optimizer.get_parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_value_(held, value)

    def step(self) -> bool:
        """Step; return False if the gradients overflowed."""
        if not self.ready:
            self.flush()
        if self.overflowed:
            return False
        if self.clip is not None and not self.clipped:
            self.clip_norm(self.clip, 2.0)
        return bool(self.optimizer.step_with_ready_grads())

    def clear(self) -> None:
        """Clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.begun = False
        self.ready = False
        self.overflowed = False
        self.clipped = False
        self.called = False

    def pending_gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's gradient buffers of megatron, if a backward has run since the step."""
        if not self.begun:
            return {}
        found = {}
        for number, chunk in enumerate(self.chunks):
            for index, buffer in enumerate([*chunk.buffers, *chunk.expert_parallel_buffers]):
                found[f"{number}.{index}"] = buffer.grad_data
        return found

    @torch.no_grad()
    def load_pending_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restore what `pending_gradients` returned.

        Raises:
            CheckpointError: it was saved by a different layout.
        """
        self.begun = True
        here = self.pending_gradients()
        sizes = {name: buffer.numel() for name, buffer in here.items()}
        saved = {name: gradient.numel() for name, gradient in gradients.items()}
        if sizes != saved:
            self.begun = False
            raise CheckpointError(
                "The checkpoint was saved in the middle of an accumulation cycle, with a different "
                "layout of tensor, pipeline or expert ranks. Load it with that layout, or load a "
                "checkpoint that was saved after an optimizer step."
            )
        for name, buffer in here.items():
            buffer.copy_(gradients[name])

    # --- what the optimizer holds ---------------------------------------------------------------

    @property
    def distributed(self) -> bool:
        """Whether the optimizer's state is split across the data ranks."""
        return hasattr(self.optimizer, "model_param_group_index_map")

    def held(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int, int]]:
        """Yield what the optimizer updates: a parameter, the optimizer's tensor for it, its range.

        The tensor is the parameter itself, its fp32 copy, or, with the distributed optimizer, this
        data rank's elements `first` to `end` of the flattened parameter.
        """
        optimizer = self.optimizer
        if self.distributed:
            for parameter, (group, at) in optimizer.model_param_group_index_map.items():
                run = optimizer._get_model_param_range_map(parameter)["param"]
                held = optimizer.optimizer.param_groups[group]["params"][at]
                yield parameter, held, run.start, run.end
            return
        for parameter in self.parameters():
            if parameter in self.stepped:
                held = getattr(parameter, "main_param", None)
                yield parameter, parameter if held is None else held, 0, parameter.numel()


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether the parameter belongs to an expert that only some ranks have."""
    return not getattr(parameter, "allreduce", True)


def cuts(sizes: Sizes) -> bool:
    """Return whether a rank holds only a part of the model."""
    return sizes.tp * sizes.pp * sizes.ep > 1


def build_optimizer(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    options: Mapping[str, Any],
    scaling: GradScalerKwargs,
) -> None:
    """Wrap the user's optimizer, which gets this rank's parameters, in megatron's optimizer.

    Args:
        names: global names of the parameters of each group; names of other ranks are ignored.
        options: keyword arguments of `OptimizerConfig`.
        scaling: how losses are scaled in fp16.

    Raises:
        ConfigurationError: megatron does not support such an optimizer.
        PrepareError: a trainable parameter is in no group, with the distributed optimizer.
    """
    distributed = bool(options.get("use_distributed_optimizer"))
    _check_class(optimizer, engine.sizes, distributed)
    own = {engine.name(parameter): parameter for parameter in engine.parameters()}
    names = _everywhere(names, own, engine.sizes)
    for group, wanted in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [own[name] for name in wanted if name in own]
    held = {p for group in optimizer.param_groups for p in group["params"]}
    lost = [n for n, p in own.items() if p.requires_grad and p not in held]
    if lost:
        text = (
            f"{len(lost)} trainable parameter(s), such as {lost[0]!r}, are in no group of the "
            f"{type(optimizer).__name__}: freeze them with requires_grad_(False)"
        )
        if distributed:
            raise PrepareError(
                f"{text}, or leave out use_distributed_optimizer, which updates all parameters."
            )
        warn(f"{text}.")
    optimizer.state.clear()
    engine.stepped = held
    engine.inner = optimizer
    engine.group_names = [list(wanted) for wanted in names]
    engine.optimizer = _wrapped(engine, optimizer, options, scaling)


def _everywhere(
    names: Sequence[Sequence[str]], own: Collection[str], sizes: Sizes
) -> list[list[str]]:
    """Merge the names in the groups of all ranks.

    Raises:
        PrepareError: the ranks have different groups, or no rank has a parameter with that name.
    """
    state = imported("parallel_state")
    group = state.get_pipeline_model_parallel_group()
    if sizes.ep > 1:
        group = state.get_expert_tensor_model_pipeline_parallel_group()
    mine = ([list(one) for one in names], sorted(own))
    found: list[Any] = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(found, mine, group)
    there = {name for _, stage in found for name in stage}
    merged: list[dict[str, None]] = [{} for _ in names]
    for stage, _ in found:
        if len(stage) != len(merged):
            raise PrepareError(
                f"The optimizer has {len(merged)} groups on one rank and {len(stage)} on "
                "another. Create the same groups on every rank, even if some are empty there."
            )
        for into, one in zip(merged, stage, strict=True):
            into.update(dict.fromkeys(one))
            if strange := [name for name in one if name not in there]:
                raise PrepareError(
                    f"The optimizer holds {strange[0]!r}, which is in no rank's part of the model."
                )
    return [list(one) for one in merged]


def _check_class(optimizer: torch.optim.Optimizer, sizes: Sizes, distributed: bool) -> None:
    kind = type(optimizer).__name__
    adam = torch.optim.Adam
    adamw = torch.optim.AdamW
    sgd = torch.optim.SGD
    if distributed and not isinstance(optimizer, adamw):
        raise ConfigurationError(
            f"megatron's distributed optimizer supports only AdamW, not {kind}: use "
            "torch.optim.AdamW (with weight_decay=0 it is Adam), or leave "
            "use_distributed_optimizer out."
        )
    if cuts(sizes) and type(optimizer) not in (adam, adamw, sgd):
        raise ConfigurationError(
            f"{kind} may need whole parameters, but here each rank has only parts of them: use "
            "Adam, AdamW or SGD from torch.optim."
        )


def _wrapped(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    scaling: GradScalerKwargs,
) -> Any:
    module = imported("optimizer.optimizer")
    state = imported("parallel_state")
    config = imported("optimizer").OptimizerConfig(
        **options, bf16=engine.config.bf16, fp16=engine.config.fp16
    )
    engine.clip = config.clip_grad or None
    scaler = None
    if config.fp16:
        scaler = imported("optimizer.grad_scaler").DynamicGradScaler(
            initial_scale=scaling.init_scale,
            min_scale=1.0,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
            hysteresis=1,
        )
    if config.use_distributed_optimizer:
        kinds = [chunk.buffers for chunk in engine.chunks]
        kinds += [chunk.expert_parallel_buffers for chunk in engine.chunks]
        made = imported("optimizer.distrib_optimizer").DistributedOptimizer(
            optimizer,
            config,
            scaler,
            None,
            model_chunks=engine.chunks,
            per_model_buffers=dict(enumerate(kinds)),  # each buffer knows its own data ranks
            data_parallel_group=state.get_data_parallel_group(with_context_parallel=True),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=dist.get_rank(state.get_model_parallel_group()),
            distributed_optimizer_instance_id=0,
        )
    elif config.bf16 or config.fp16:
        made = module.Float16OptimizerWithFloat16Params(optimizer, config, scaler, None)
    else:
        made = module.FP32Optimizer(optimizer, config, None)
    # None is the world: each rank updates its own part, or any rank's experts may overflow.
    everyone = config.use_distributed_optimizer or engine.sizes.ep > 1
    made.grad_stats_parallel_group = None if everyone else state.get_model_parallel_group()
    made.tp_group = state.get_tensor_model_parallel_group()
    return made
