"""What a script may hand to `torch.distributed` under XLA: nothing of a device, and nothing fails there."""

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
    """Have `torch.distributed` refuse tensors of XLA devices, for the rest of the process.

    Its operations have no kernel for them: XLA's fallback runs gloo's on a copy, which is thrown away.
    torch_xla's own process group and functional collectives do not come by these kernels. An
    operation costs nothing more than before, for this is the one it is dispatched to.
    """
    made: Any = torch.library.Library("c10d", "IMPL", "XLA")  # type: ignore[no-untyped-call]
    # What the dispatcher lists where a kernel for the CPU is: the operations that take tensors.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith(_NAMESPACE):
            made.impl(name.removeprefix(_NAMESPACE), _refusal(name.removeprefix(_NAMESPACE)))
    return made


def _refusal(operation: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise DistributedOperationException(
            f"torch.distributed was handed a tensor of an XLA device ({operation.strip('_')}). Its groups "
            "are in host memory here, and would leave the tensor as it is. Use accelerator.gather, reduce "
            "or broadcast, or hand it tensor.cpu()."
        )

    return refuse


def refuse_lonely_group() -> None:
    """Refuse torch_xla's process group on the CPU: it would have one process, however many there are.

    Raises:
        ConfigurationError: the process has such a group; from now on also where one is started.
    """
    if not library.device_kind().startswith("CPU"):
        return
    if dist.is_initialized() and dist.get_backend() == "xla":
        _refuse_group()
    # A module's name that torch_xla looks up when a group is started.
    library.imported("distributed.xla_backend").ProcessGroupXla = _refuse_group


def _refuse_group(*_: Any) -> NoReturn:
    raise ConfigurationError(
        "init_process_group('xla') on the CPU: processes of XLA do not see each other there, and each "
        "would be a group of its own. Leave it out, the Accelerator starts what it needs; for several "
        "devices set CPU_NUM_DEVICES and pass a ParallelismConfig."
    )
