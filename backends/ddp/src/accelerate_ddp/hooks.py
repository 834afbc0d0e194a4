"""Communication hooks, which change how gradients are sent between ranks."""

# No `from __future__ import annotations`: torch checks a hook's annotations and expects classes.
import atexit
import enum
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelerate_core.plugin import GradientReducer


class DDPCommunicationHookType(enum.StrEnum):
    """A communication hook of torch."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


Hook = DDPCommunicationHookType


def wait_for_pending_hooks() -> None:
    """Give gloo's threads time to free the last reduction before the group is destroyed.

    A moment after backward, a gloo thread frees the objects of a Python hook, which needs the
    GIL. If the group is destroyed before that, one of two things can happen: the thread frees the
    group itself, which aborts the process; or a model that is still alive frees the group while it
    holds the GIL, and waits for the thread forever.
    """
    time.sleep(0.1)


def register(
    model: DistributedDataParallel, comm_hook: Hook, wrapper: Hook, state_options: dict[str, Any]
) -> None:
    """Register a hook with a model, optionally inside a wrapper that compresses gradients.

    Args:
        comm_hook: the hook.
        wrapper: `Hook.FP16` or `Hook.BF16` to compress, `Hook.NO` for none.
        state_options: arguments of `PowerSGDState`.
    """
    state: Any = None
    if comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(None, **state_options)
    hook: Any = {
        Hook.NO: default_hooks.allreduce_hook,
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: bf16_compress,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }[comm_hook]
    if wrapper is Hook.FP16:
        hook = default_hooks.fp16_compress_wrapper(hook)
    elif wrapper is Hook.BF16:
        hook = _bf16_wrapper(hook)
    model.register_comm_hook(state, hook)
    _wait_at_exit()


def register_reducer(model: DistributedDataParallel, reducer: GradientReducer) -> None:
    """Let a plugin's reducer average each bucket of gradients."""
    group = model.process_group

    def average(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        mean = reducer.all_reduce(gradients, bucket.index(), group)
        if not isinstance(mean, torch.Tensor):  # the futures of collectives have another class
            return mean
        devices: Any = None if gradients.device.type == "cpu" else [gradients.device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(mean)
        return done

    model.register_comm_hook(None, average)
    _wait_at_exit()


def _wait_at_exit() -> None:
    # For scripts that never call `end_training`. This runs before the runtime destroys the group.
    atexit.unregister(wait_for_pending_hooks)
    atexit.register(wait_for_pending_hooks)


def bf16_compress(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16.

    torch refuses to register its own hook for a group without CUDA, although the reduction works.
    """
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return torch.Tensor.copy_(buffer, done.value()[0])

    return future.then(decompress)


def _bf16_wrapper(hook: Any) -> Any:
    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(torch.bfloat16))
        future = hook(state, bucket)

        def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
            value = done.value()
            return torch.Tensor.copy_(whole, value[0] if isinstance(value, list) else value)

        result: torch.futures.Future[torch.Tensor] = future.then(decompress)
        return result

    return wrapped
