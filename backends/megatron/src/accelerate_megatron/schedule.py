"""Run a batch through megatron's schedules: the forward, and in training the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import ConfigurationError, ScheduleResult, ScheduleStep
from accelerate_megatron.library import imported
from accelerate_megatron.module import MegatronModel
from accelerate_megatron.settings import Sizes
from accelerate_megatron.split_checks import check_batch


def run(
    model: MegatronModel,
    batch: Any,
    step: ScheduleStep,
    count: int,
    *,
    keep_logits: bool = False,
    own_step: Callable[..., Any] | None = None,
) -> ScheduleResult:
    """Run one batch of this data rank, split into micro-batches.

    Args:
        count: number of micro-batches.
        keep_logits: whether to return the logits of the batch, on every rank.
        own_step: the script's `forward_step(iterator, chunk)`, which returns `(output, loss_func)`.

    Raises:
        ConfigurationError: the batch size is not divisible by the number of micro-batches.
    """
    engine = model.engine
    if own_step is None:  # check on every rank, before any rank waits for another
        model.check(batch, step.training)
    pieces = cut(batch, count, engine.sizes)
    if own_step is not None and (step.counted or keep_logits):
        raise ConfigurationError(
            "A custom step returns a mean loss and no logits, so it cannot be combined with num_items "
            "or return_logits. Leave these or the custom step out."
        )
    if step.training:
        engine.called = True
        engine.begin()
    size, length = _shape(pieces[0])
    losses: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []

    def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
        if own_step is None:
            output, loss_of = model.run_chunk(chunk, next(batches), keep_logits)
        else:
            output, loss_func = own_step(batches, chunk)

            def loss_of(output: Any, total: bool) -> tuple[torch.Tensor, None]:
                return loss_func(output)[0], None

        def reduced(output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            loss, found = loss_of(output, step.counted)
            losses.append(loss.detach().clone())  # the schedule divides in place
            if found is not None:
                logits.append(found)
            # The schedule divides by the number of micro-batches, but a sum must not be divided.
            return loss * count if step.counted else loss, {}

        return output, reduced

    def scaled(loss: torch.Tensor) -> torch.Tensor:
        return engine.scaled(step.divide(loss))

    schedule = imported("pipeline_parallel.schedules").get_forward_backward_func()
    iterators = [iter(pieces) for _ in engine.chunks]
    engine.config.grad_scale_func = scaled  # scales the loss, and the losses of routers
    with nullcontext() if step.training else torch.no_grad():
        schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=engine.chunks if len(iterators) > 1 else engine.chunks[0],
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=size,
            forward_only=not step.training,
        )
    engine.config.grad_scale_func = None
    loss = _loss(losses, step.counted, next(model.parameters()).device)
    return ScheduleResult(loss, _outputs(model, logits, pieces) if keep_logits else None)


def cut(batch: Any, count: int, sizes: Sizes) -> list[Any]:
    """Split a batch into micro-batches along its first dimension.

    Raises:
        ConfigurationError: the batch size is not divisible by `count`.
    """
    if count == 1 and sizes.vp == 1:
        return [batch]
    size = _shape(batch)[0]
    check_batch(size, count, sizes)

    def part(value: Any, index: int) -> Any:
        if isinstance(value, Mapping):
            return {name: part(one, index) for name, one in value.items()}
        if isinstance(value, list | tuple):
            parts = [part(one, index) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or (len(value) == 1 < size):
            return value  # shared by all samples
        return value.chunk(count)[index]

    return [part(batch, index) for index in range(count)]


def _shape(piece: Any) -> tuple[int, int]:
    """Return the batch size and sequence length of a micro-batch, which stages need to send tensors."""
    values = piece.values() if isinstance(piece, Mapping) else piece
    if isinstance(piece, Mapping):
        named = [piece[name] for name in ("input_ids", "tokens") if piece.get(name) is not None]
        values = [*named, *values]
    for value in [piece] if isinstance(piece, torch.Tensor) else values:
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.size(0), value.size(1)
    return 1, 1


def _loss(losses: list[torch.Tensor], total: bool, device: torch.device) -> torch.Tensor:
    """Return the loss of the batch on every rank of the pipeline."""
    state = imported("parallel_state")
    group = state.get_pipeline_model_parallel_group()
    loss = torch.zeros((), dtype=torch.float32, device=device)
    if losses:
        stacked = torch.stack([one.float() for one in losses])
        loss = stacked.sum() if total else stacked.mean()
    if group.size() > 1:
        dist.broadcast(loss, dist.get_process_group_ranks(group)[-1], group)
    return loss


def _outputs(model: Any, logits: list[torch.Tensor], pieces: list[Any]) -> Any:
    """Return the logits of the batch on every rank of the pipeline and of the tensor group."""
    state = imported("parallel_state")
    gather = imported("tensor_parallel").gather_from_tensor_model_parallel_region
    group = state.get_pipeline_model_parallel_group()
    whole = torch.cat([gather(one)[..., : model.vocab_size] for one in logits]) if logits else None
    if group.size() == 1:
        return whole
    size, length = _shape(pieces[0])
    if whole is None:
        device = next(model.parameters()).device
        shape = (size * len(pieces), length, model.vocab_size)
        whole = torch.empty(shape, dtype=torch.float32, device=device)
    whole = whole.float().contiguous()
    dist.broadcast(whole, dist.get_process_group_ranks(group)[-1], group)
    return whole
