"""Run megatron-core without a GPU: give the names of torch.cuda that it uses a meaning on the CPU.

No algorithm is replaced: process groups, sharded layers, schedules, optimizers and checkpoints run
unchanged, over gloo. Streams and their overlap, NCCL and fused kernels do not run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils import _device


class _Stream:
    """A stream, or an event on it, whose work is always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _done(self, *args: Any) -> _Stream:
        return self

    wait = wait_stream = wait_event = record = record_event = synchronize = _done


def install() -> None:
    """Give the names a meaning on the CPU. Call it before megatron is imported."""
    cuda: Any = torch.cuda
    if cuda.is_available() or cuda.Stream is _Stream:
        return
    stream = _Stream()
    # Megatron fuses parts of experts and norms with torch.compile, which takes longer here than
    # everything else together and keeps each model it has seen.
    torch._dynamo.config.disable = True
    # A device for factories, and a key for the generators.
    cuda.current_device = lambda: "cpu"
    cuda.default_generators = {"cpu": torch.default_generator}
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.synchronize = lambda device=None: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = nullcontext
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]
    # Optimizers distinguish parameters by names such as 'torch.cuda.FloatTensor'.
    torch.Tensor.type = _named_cuda(torch.Tensor.type)  # type: ignore[assignment, method-assign]
    _device._device_constructors()  # `with torch.device(...)` records the original functions
    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    # The numbers of tokens sent to experts, which the host needs as lists.
    dist.all_to_all_single = _splits_as_lists(dist.all_to_all_single)
    # The fork of megatron's tracker draws from the CPU's generator here, and warns each time.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _named_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return named


def _splits_as_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return exchange(*args, **kwargs)

    return exchanged


def _made_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made
