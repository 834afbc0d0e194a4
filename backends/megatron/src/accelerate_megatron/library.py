"""Lazy import of megatron-core, and its process-wide state."""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError, process_global
from accelerate_megatron.settings import Sizes

_NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def imported(name: str) -> Any:
    """Import a module of megatron-core, without its warnings about optional libraries.

    If the import adds classes that `torch.load` may unpickle, they are removed again.
    """
    full = f"megatron.core.{name}"
    module = sys.modules.get(full)
    if module is not None:
        return module
    safe = torch.serialization.get_safe_globals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(full)
    if len(torch.serialization.get_safe_globals()) > len(safe):
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(safe)
    return module


def start(
    sizes: Sizes,
    seed: int,
    timeout: timedelta | None,
    attention: str | None = None,
    *,
    instead: Callable[[], str] = lambda: "use another backend",
) -> None:
    """Create megatron's groups and random generators, which all Accelerators of a process share.

    Args:
        instead: returns what to do without a CUDA device, for the error message.

    Raises:
        RuntimeConflictError: another Accelerator created them with other sizes.
        ConfigurationError: other code created them, or there is no CUDA device.
    """
    process_global(
        "megatron.parallel_state", sizes, lambda: _start(sizes, seed, timeout, instead), _end
    )
    if attention is not None:  # megatron sets environment variables for Transformer Engine
        process_global("megatron.attention_backend", attention, _variables, _restore)


def _start(sizes: Sizes, seed: int, timeout: timedelta | None, instead: Callable[[], str]) -> Any:
    state = imported("parallel_state")
    if state.model_parallel_is_initialized():
        raise ConfigurationError(
            "megatron's parallel_state was already initialised by other code. Remove your call to "
            "initialize_model_parallel(): the Accelerator makes it."
        )
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigurationError(
            f"megatron-core needs a CUDA device, but torch found none ({error}). Without one, "
            f"{instead()}."
        ) from None
    routing = imported("transformer.moe.moe_utils")
    if not hasattr(routing, "te_general_gemm"):
        # megatron-core 0.16 reads this name, but only defines it with Transformer Engine.
        routing.te_general_gemm = None
    logging.getLogger("megatron").setLevel(logging.WARNING)
    limit = {}
    if timeout is not None:
        limit["distributed_timeout_minutes"] = max(math.ceil(timeout.total_seconds() / 60), 1)
    state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
        **limit,
    )
    seed_generators(seed)
    return state


def _variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _NVTE}


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _end(state: Any) -> None:
    state.destroy_model_parallel()


def interleave(stages: int) -> None:
    """Set the number of virtual stages per pipeline rank, which megatron's schedules read.

    Raises:
        ConfigurationError: a model with another number was prepared before.
    """
    state = imported("parallel_state")
    before = state.get_virtual_pipeline_model_parallel_world_size()
    wanted = stages if stages > 1 else None
    if before is not None and before != wanted:
        raise ConfigurationError(
            f"This model has {stages} virtual stages, but a model with {before} was prepared before. "
            "megatron-core needs the same number for all models."
        )
    if wanted is not None:
        state.set_virtual_pipeline_model_parallel_world_size(wanted)
        state.set_virtual_pipeline_model_parallel_rank(0)


def seed_generators(seed: int) -> None:
    """Seed megatron's generators, and the device's default generator.

    One generator is the same on all data ranks, and another differs between tensor parallel ranks.
    The CPU's generator is not changed.
    """
    kept = torch.get_rng_state()
    imported("tensor_parallel.random").model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.set_rng_state(kept)


def generators() -> Any:
    """Return the tracker of megatron's generators."""
    return imported("tensor_parallel.random").get_cuda_rng_tracker()
