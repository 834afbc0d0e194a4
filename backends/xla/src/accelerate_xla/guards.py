"""Errors for calls of `torch.distributed` that would silently do nothing under XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accelerate_core.plugin import ConfigurationError, DistributedOperationException
from accelerate_xla import library

_NAMESPACE = "c10d::"


@cache
def refuse_device_tensors() -> Any:
    """Make `torch.distributed` reject tensors on XLA devices, for the rest of the process.

    Its operations have no kernel for such tensors. XLA's fallback would run gloo's kernel on a copy
    and discard the result. This registers a kernel that raises an error, which adds no cost to
    other calls. torch_xla's own process group and functional collectives don't use these kernels.
    """
    made: Any = torch.library.Library("c10d", "IMPL", "XLA")  # type: ignore[no-untyped-call]
    # All operations that take tensors are registered for the CPU.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith(_NAMESPACE):
            made.impl(name.removeprefix(_NAMESPACE), _refusal(name.removeprefix(_NAMESPACE)))
    return made


def _refusal(operation: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise DistributedOperationException(
            "torch.distributed was called with a tensor on an XLA device "
            f"({operation.strip('_')}). Its process groups work in host memory here and would not "
            "change the tensor. Use accelerator.gather, reduce or broadcast, or pass tensor.cpu()."
        )

    return refuse


def refuse_unconnected_group() -> None:
    """Reject torch_xla's process group on the CPU, where each process would be alone in its group.

    From now on, creating such a group raises the same error.

    Raises:
        ConfigurationError: the process already has such a group.
    """
    if not library.device_kind().startswith("CPU"):
        return
    if dist.is_initialized() and dist.get_backend() == "xla":
        _refuse_group()
    # torch_xla looks up this name when a group is created.
    library.imported("distributed.xla_backend").ProcessGroupXla = _refuse_group


def _refuse_group(*_: Any) -> NoReturn:
    raise ConfigurationError(
        "init_process_group('xla') does not work on the CPU: XLA does not connect processes there, so "
        "each would be alone in its group. Remove the call, because the Accelerator creates the groups "
        "that it needs. For several devices, set CPU_NUM_DEVICES and pass a ParallelismConfig."
    )
