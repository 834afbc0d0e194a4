"""Names of Hugging Face Accelerate's Megatron module. Unsupported ones say what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accelerate_core.plugin import AcceleratedOptimizer, AcceleratedScheduler, ConfigurationError
from accelerate_megatron.library import imported
from accelerate_megatron.module import MegatronModel

#: Classes that `prepare` returns, under Accelerate's names for isinstance checks.
MegatronEngine = MegatronModel
MegatronLMOptimizerWrapper = AcceleratedOptimizer
MegatronLMSchedulerWrapper = AcceleratedScheduler


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `losses`, each averaged over the data parallel ranks, as a 1-d tensor."""
    group = imported("parallel_state").get_data_parallel_group()
    averaged = torch.stack([loss.detach().reshape(()) for loss in losses])
    dist.all_reduce(averaged, group=group)
    means: torch.Tensor = averaged / group.size()
    return means


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return the tensors of all data parallel ranks, concatenated along the first dimension."""
    if isinstance(tensor, dict):
        return {name: gather_across_data_parallel_groups(one) for name, one in tensor.items()}
    if isinstance(tensor, list | tuple):
        return type(tensor)(gather_across_data_parallel_groups(one) for one in tensor)
    group = imported("parallel_state").get_data_parallel_group()
    tensor = tensor.reshape(1).contiguous() if tensor.dim() == 0 else tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts)


def _refuse(name: str) -> NoReturn:
    raise ConfigurationError(
        f"{name}() is not supported. Use Accelerator(megatron_lm_plugin=MegatronLMPlugin(...)) and "
        "accelerator.prepare(model, optimizer, loader, scheduler) instead."
    )


def megatron_lm_initialize(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. The Accelerator starts megatron-core."""
    _refuse("megatron_lm_initialize")


def megatron_lm_prepare_data_loader(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. Use `prepare` instead."""
    _refuse("megatron_lm_prepare_data_loader")


def megatron_lm_prepare_model_optimizer_scheduler(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. Use `prepare` instead."""
    _refuse("megatron_lm_prepare_model_optimizer_scheduler")


def megatron_lm_prepare_optimizer(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. Use `prepare` instead."""
    _refuse("megatron_lm_prepare_optimizer")


def megatron_lm_prepare_scheduler(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. Use `prepare` instead."""
    _refuse("megatron_lm_prepare_scheduler")


def add_model_config_to_megatron_parser(model_type: str) -> NoReturn:
    """Raise an error. Create models of other families in a provider function.

    Args:
        model_type: name of the family.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"add_model_config_to_megatron_parser({model_type!r}) is not supported, because megatron's "
        "arguments are not parsed here. Create models of other families in a provider function and "
        "pass it to prepare()."
    )
