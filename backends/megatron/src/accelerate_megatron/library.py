"""megatron-core, imported when it is used, and its global state, which a process has once."""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError, process_global
from accelerate_megatron.settings import Sizes

_NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def imported(name: str) -> Any:
    """Import a module of megatron-core, without its warnings about libraries it can do without.

    What it lets every later `torch.load` unpickle is taken back.
    """
    full = f"megatron.core.{name}"
    if (there := sys.modules.get(full)) is not None:
        return there
    safe = torch.serialization.get_safe_globals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(full)
    if len(torch.serialization.get_safe_globals()) > len(safe):
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(safe)
    return module


def start(sizes: Sizes, seed: int, timeout: timedelta | None, attention: str | None = None) -> None:
    """Make megatron's groups and random generators, which all Accelerators of a process share.

    Raises:
        RuntimeConflictError: another Accelerator has made them otherwise.
        ConfigurationError: somebody else has made them, or there is no CUDA device.
    """
    process_global("megatron.parallel_state", sizes, lambda: _start(sizes, seed, timeout), _end)
    if attention is not None:  # megatron says it to Transformer Engine by variables
        process_global("megatron.attention_backend", attention, _variables, _restore)


def _start(sizes: Sizes, seed: int, timeout: timedelta | None) -> Any:
    state = imported("parallel_state")
    if state.model_parallel_is_initialized():
        raise ConfigurationError(
            "megatron's parallel_state is initialised already, not by accelerate-core: leave "
            "initialize_model_parallel() to the Accelerator."
        )
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigurationError(
            f"megatron-core needs a CUDA device, and torch finds none ({error}). Without one train by "
            "backend='fsdp2', which has tensor parallelism, too."
        ) from None
    routing = imported("transformer.moe.moe_utils")
    if not hasattr(routing, "te_general_gemm"):
        routing.te_general_gemm = None  # 0.16 asks whether it is None, and has it with TE alone
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
    """Tell megatron how many virtual stages each pipeline rank has; its schedules ask for it.

    Raises:
        ConfigurationError: a model with another number was prepared before.
    """
    state = imported("parallel_state")
    said = state.get_virtual_pipeline_model_parallel_world_size()
    wanted = stages if stages > 1 else None
    if said is not None and said != wanted:
        raise ConfigurationError(
            f"A model with {said} virtual stages was prepared before, and this one has {stages}: "
            "megatron-core has one number for all."
        )
    if wanted is not None:
        state.set_virtual_pipeline_model_parallel_world_size(wanted)
        state.set_virtual_pipeline_model_parallel_rank(0)


def seed_generators(seed: int) -> None:
    """Seed megatron's generators: one all data ranks share, one for each tensor parallel rank.

    The CPU's generator goes on as it was; the device's default one is seeded, too.
    """
    kept = torch.get_rng_state()
    imported("tensor_parallel.random").model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.set_rng_state(kept)


def generators() -> Any:
    """Return the tracker of megatron's generators."""
    return imported("tensor_parallel.random").get_cuda_rng_tracker()
