"""Keeps gradients averaged when parameters are frozen, unfrozen or added after `prepare`."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accelerate_core.plugin import ConfigurationError, TrainableChange, shorten

#: The keys that this process published for the last change.
_published: list[str] = []


def refuse_change(model: torch.nn.Module, change: TrainableChange) -> None:
    """Refuse a change that DDP cannot follow. This does not communicate.

    Raises:
        ConfigurationError: says why, and what to do.
    """
    kind = type(getattr(model, "module", model)).__name__
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"Nothing in {kind} required gradients when prepare() was called, so it was not wrapped and "
            f"its gradients are not averaged over the ranks. Now parameters require gradients ({change}). "
            "Call prepare() while they require gradients; you can freeze and unfreeze them afterwards."
        )
    if model.static_graph:
        raise ConfigurationError(
            f"static_graph=True promises that every step trains the same parameters, but in {kind} this "
            f"changed ({change}). Remove static_graph from DistributedDataParallelKwargs."
        )
    if model._join_config.enable:
        raise ConfigurationError(
            f"The trainable parameters of {kind} changed inside join_uneven_inputs ({change}), where ranks "
            "without batches cannot follow. Freeze, unfreeze or add parameters outside of this block."
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigurationError(
            f"The trainable parameters of {kind} changed ({change}), which torch's Python reducer cannot "
            "follow. Set torch._dynamo.config.optimize_ddp to another value."
        )


def check_agreement(model: DistributedDataParallel, change: TrainableChange, key: str) -> None:
    """Check that every rank makes the same change in the same backward.

    Other ranks may not know of a change. They cannot be asked, because they wait in the first reduction
    of their backward. So each rank that knows publishes its change and takes part in this reduction. Once
    it has completed, all ranks have begun their backward, and a change that is not published isn't made.

    Args:
        key: names the backward; the same on all ranks.

    Raises:
        ConfigurationError: names the ranks that make no change or another one.
    """
    world: dist.Store = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore("accelerate_ddp/trainable", world)
    group = model.process_group
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size(group))]
    own_key, own = keys[dist.get_rank(group)], _describe(change)
    store.set(own_key, own)
    _join_first_reduction(model)
    for earlier in _published:  # all ranks have read these
        store.delete_key(earlier)
    _published[:] = [own_key]
    published = [store.get(name).decode() if store.check([name]) else "" for name in keys]
    different = {other: text for other, text in enumerate(published) if text != own}
    if different:
        _raise_disagreement(model, change, own, different)


def _join_first_reduction(model: DistributedDataParallel) -> None:
    """Reduce zeros as the first bucket of a backward, and return once all ranks have done it."""
    bucket = model.reducer._get_zeros_like_grad_buckets()[0]
    model.reducer._run_comm_hook(bucket).wait()
    if bucket.buffer().device.type != "cpu":
        torch.accelerator.synchronize()


def _describe(change: TrainableChange) -> str:
    """Return what must be equal on all ranks, with a readable summary."""
    exact = {
        "unfrozen": {name: [str(p.dtype), *p.shape] for name, p in change.unfrozen.items()},
        "leftovers": [name for name, p in change.frozen.items() if p.grad is not None],
        "frozen": list(change.frozen),
        "removed": change.removed,
    }
    digest = hashlib.blake2b(json.dumps(exact).encode(), digest_size=16).hexdigest()
    values = hashlib.blake2b(digest_size=16)
    for parameter in change.added.values():
        data = parameter.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8)
        values.update(data.numpy().data)
    return json.dumps({"change": str(change), "digest": digest, "values": values.hexdigest()})


def _raise_disagreement(
    model: DistributedDataParallel, change: TrainableChange, own: str, published: dict[int, str]
) -> None:
    kind = type(model.module).__name__
    reports = {rank: json.loads(text) if text else None for rank, text in published.items()}
    digest = json.loads(own)["digest"]
    if all(report and report["digest"] == digest for report in reports.values()):
        raise ConfigurationError(
            f"Parameters that were added to {kind} after prepare() have other values on this rank than on "
            f"rank {', '.join(map(str, reports))}: {shorten(change.added)}. Seed all ranks alike before "
            "you create them (set_seed(42)), or copy rank 0's values with "
            "torch.distributed.broadcast(parameter.data, 0)."
        )
    others = "; ".join(
        f"rank {rank}: {report['change'] if report else 'no change'}"
        for rank, report in reports.items()
    )
    raise ConfigurationError(
        f"The ranks train different parameters of {kind}. Changed on this rank: {change}. On other ranks: "
        f"{others}. Freeze, unfreeze and add the same parameters in the same step on every rank."
    )


def average_leftovers(model: DistributedDataParallel, change: TrainableChange) -> None:
    """Average the gradients of parameters that were frozen inside an accumulation cycle."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in change.frozen.values():
        if parameter.grad is not None:
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            parameter.grad = dense
            groups[dense.device, dense.dtype].append(dense)
    for gradients in groups.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= dist.get_world_size(model.process_group)
        dist.all_reduce(flat, group=model.process_group)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def rebuild_reducer(model: Any, loss: torch.Tensor | None) -> None:
    """Replace the reducer between a forward and its backward, as torch does when a model is unpickled.

    Communication hooks stay. PowerSGD starts again with the errors of earlier steps, because they are kept
    per bucket.

    Args:
        model: a `DistributedDataParallel` model. torch has no types for these methods.
        loss: the loss of the backward.
    """
    model.reducer._remove_autograd_hooks()
    model.logger = None
    del model.reducer  # frees its buckets
    model._module_parameters = [
        p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore
    ]
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for hook, state in model._comm_hooks:
        if isinstance(state, PowerSGDState):
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
        dist._register_comm_hook(model.reducer, state, hook)
    # The forward has done this for the old reducer.
    model.reducer.prepare_for_forward()
    unused_outputs = [loss] if model.find_unused_parameters and loss is not None else []
    model.reducer.prepare_for_backward(unused_outputs)
