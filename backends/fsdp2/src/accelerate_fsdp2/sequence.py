"""One sequence shared by several ranks: ring attention (torch's), and Ulysses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from accelerate_core.errors import ConfigurationError

__all__ = ["Ulysses", "check_buffers", "ring", "ulysses"]


def check_buffers(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
    parts: int,
    ranks: int,
) -> None:
    """Refuse what would end a rank instead of raising.

    Args:
        parts: into how many pieces a sequence is cut.

    Raises:
        ConfigurationError: a length cannot be divided, or a buffer needs a gradient.
    """
    if len(buffers) != len(dims):
        raise ConfigurationError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims."
        )
    lengths = set()
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.requires_grad:
            raise ConfigurationError(
                f"Buffer {number} of maybe_context_parallel needs a gradient; give inputs, labels "
                "and positions, which are cut in place."
            )
        if not -buffer.dim() <= dim < buffer.dim():
            raise ConfigurationError(
                f"buffer_seq_dims[{number}]={dim}, and the buffer has {buffer.dim()} dimensions."
            )
        length = buffer.shape[dim]
        lengths.add(length)
        if length % parts:
            raise ConfigurationError(
                f"Buffer {number} has the length {length} in dimension {dim}, which {ranks} ranks "
                f"cannot share: it must be a multiple of {parts}. Pad it to "
                f"{-(-length // parts) * parts}."
            )
    if len(lengths) > 1:
        raise ConfigurationError(
            f"The buffers have sequences of several lengths: {sorted(lengths)}."
        )
    if any(not any(one is buffer for buffer in buffers) for one in no_restore):
        raise ConfigurationError("no_restore_buffers has a tensor that is not among the buffers.")


@contextmanager
def ring(
    mesh: DeviceMesh,
    strategy: str,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
) -> Iterator[None]:
    """Cut the buffers, and let attention pass keys and values around."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        set_rotate_method,
    )

    check_buffers(buffers, dims, no_restore, 2 * mesh.size(), mesh.size())
    set_rotate_method(strategy)
    with context_parallel(
        mesh,
        buffers=list(buffers),
        buffer_seq_dims=list(dims),
        no_restore_buffers=no_restore,
    ):
        yield


@contextmanager
def ulysses(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
) -> Iterator[None]:
    """Cut the buffers, and let attention exchange sequences for heads."""
    check_buffers(buffers, dims, no_restore, mesh.size(), mesh.size())
    rank = mesh.get_local_rank()
    kept = [None if any(b is n for n in no_restore) else b.clone() for b in buffers]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            part = buffer.chunk(mesh.size(), dim)[rank].clone()
            buffer.resize_(part.shape).copy_(part)
    try:
        with Ulysses(mesh.get_group()):
            yield
    finally:
        with torch.no_grad():
            for buffer, whole in zip(buffers, kept, strict=True):
                if whole is not None:
                    buffer.resize_(whole.shape).copy_(whole)


class Ulysses(TorchFunctionMode):
    """Give `scaled_dot_product_attention` whole sequences of some heads each.

    Every rank has a part of the sequence and all heads; two exchanges around the attention turn
    that into all of the sequence and a part of the heads, and back (DeepSpeed-Ulysses,
    arXiv:2309.14509).

    Args:
        group: the ranks that share a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        ranks = self._group.size()
        length = query.shape[-2] * ranks
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4 or tensor.shape[1] % ranks:
                raise ConfigurationError(
                    f"Ulysses over {ranks} ranks needs attention of the shape (batch, heads, "
                    f"length, width) with heads divisible by {ranks}; the {name} has "
                    f"{tuple(tensor.shape)}."
                )
        if attn_mask is not None and attn_mask.shape[-1] != length:
            raise ConfigurationError(
                f"Under Ulysses attn_mask must be over the whole sequence of {length}, not "
                f"{attn_mask.shape[-1]}; or use is_causal."
            )
        exchange: Any = _Exchange.apply
        q, k, v = (exchange(one, self._group, True) for one in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.chunk(ranks, 1)[self._group.rank()]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
        result: torch.Tensor = exchange(out, self._group, False)
        return result


class _Exchange(torch.autograd.Function):
    """(batch, heads, part, width) to (batch, part of heads, whole, width), or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> Any:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    ranks = group.size()
    batch, heads, length, width = x.shape
    if to_heads:
        cut = x.view(batch, ranks, heads // ranks, length, width).movedim(1, 0).contiguous()
    else:
        cut = x.view(batch, heads, ranks, length // ranks, width).movedim(2, 0).contiguous()
    got = torch.empty_like(cut)
    dist.all_to_all_single(got, cut, group=group)
    if to_heads:  # got: (rank = part of the sequence, batch, heads, part, width)
        return got.movedim(0, 2).reshape(batch, heads // ranks, ranks * length, width)
    return got.movedim(0, 1).reshape(batch, ranks * heads, length // ranks, width)
