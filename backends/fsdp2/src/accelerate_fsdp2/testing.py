"""For tests only: ring attention on the CPU, which torch only supports on accelerators."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

_enabled = False


def ring_runs_on_cpu() -> bool:
    """Whether `enable_cpu_ring_attention` was called in this process."""
    return _enabled


def enable_cpu_ring_attention() -> None:
    """Make torch's ring attention use the attention kernel of the CPU.

    With this, code around ring attention can be tested without an accelerator. It changes private
    parts of torch (2.13), so don't use it for training.
    """
    global _enabled
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten: Any = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, key, value, *rest = args
        dropout, causal = rest[:2] if len(rest) > 1 else (0.0, False)
        made = ring._templated_ring_attention(
            query.device_mesh.get_group(),
            2,
            forward_op,
            query=query.to_local(),
            key=key.to_local(),
            value=value.to_local(),
            is_causal=kwargs.get("is_causal", causal),
            dropout_p=kwargs.get("dropout_p", dropout),
            scale=kwargs.get("scale"),
        )
        return tuple(_wrapped(one, query) for one in made[:2])

    def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, query, key, value, out, lse, dropout, causal = args[:8]
        made = ring._templated_ring_attention_backward(
            query.device_mesh.get_group(),
            2,
            backward_op.default,
            grad_out=grad.to_local(),
            grad_out_name="grad_out",
            query=query.to_local(),
            key=key.to_local(),
            value=value.to_local(),
            out=out.to_local(),
            logsumexp=lse.to_local(),
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return tuple(_wrapped(one, query) for one in made[:3])

    handlers: Any = ring.custom_ops
    handlers[forward_op.default] = forward
    handlers[backward_op.default] = backward
    _enabled = True


def _wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, [Shard(2)], run_check=False)
