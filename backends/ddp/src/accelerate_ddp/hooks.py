"""Communication hooks: what gradients go through between ranks."""

# No postponed annotations here: torch reads those of a hook and wants the class, not its name.
import atexit
import enum
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class DDPCommunicationHookType(enum.StrEnum):
    """A communication hook torch ships: what gradients go through on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


Hook = DDPCommunicationHookType


def let_go() -> None:
    """Let the group's threads drop the last reduction before the group may be freed.

    A thread of gloo frees what a hook in Python left behind some moments after the backward that
    waited for it, and needs the interpreter's lock to do so. A group that ends within that time
    is freed by its own thread, which aborts the process, or by a model that outlived it, which
    waits for the thread while it holds the lock, for ever.
    """
    time.sleep(0.1)


def register(
    model: DistributedDataParallel, comm_hook: Hook, wrapper: Hook, state_options: dict[str, Any]
) -> None:
    """Register a hook, with a compression around it and the arguments of PowerSGD's state."""
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
    # For scripts that do not end their training: run before the runtime ends the group.
    atexit.unregister(let_go)
    atexit.register(let_go)


def bf16_compress(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce gradients in bfloat16 and average them.

    torch's own hook is refused by name on groups without CUDA, although the
    reduction itself works there.
    """
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()

    def back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return torch.Tensor.copy_(buffer, done.value()[0])

    return future.then(back)


def _bf16_wrapper(hook: Any) -> Any:
    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(torch.bfloat16))
        future = hook(state, bucket)

        def back(done: torch.futures.Future[Any]) -> torch.Tensor:
            value = done.value()
            return torch.Tensor.copy_(whole, value[0] if isinstance(value, list) else value)

        result: torch.futures.Future[torch.Tensor] = future.then(back)
        return result

    return wrapped
