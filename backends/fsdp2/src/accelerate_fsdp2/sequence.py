"""Split a sequence over several ranks, with torch's ring attention or with Ulysses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from accelerate_core.plugin import ConfigurationError, warn


def refuse_recurrent(model: Any) -> None:
    """Reject models with recurrent layers, whose state would start over on each rank.

    Raises:
        ConfigurationError: the model's config lists such layers.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    kinds = sorted({one for one in getattr(config, "layer_types", None) or () if "linear" in one})
    if kinds:
        raise ConfigurationError(
            f"{type(model).__name__} has {', '.join(kinds)} layers, which carry a state along the "
            "sequence. If ranks shared a sequence, the state would start over on each rank, and "
            "gradients would be wrong. Train this model with cp_size=1 and sp_size=1."
        )


def _check_buffers(
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
    parts: int,
    ranks: int,
) -> None:
    """Check the buffers, because torch would abort the process instead of raising an error.

    Args:
        parts: number of parts into which a sequence is split.

    Raises:
        ConfigurationError: a length is not divisible, or a buffer requires a gradient.
    """
    if len(buffers) != len(dims):
        raise ConfigurationError(
            f"maybe_context_parallel received {len(buffers)} buffers but {len(dims)} "
            "buffer_seq_dims. Pass one dimension per buffer."
        )
    lengths = set()
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.requires_grad:
            raise ConfigurationError(
                f"Buffer {number} of maybe_context_parallel requires a gradient, but buffers are "
                "split in place. Only pass inputs, labels and positions."
            )
        if not -buffer.dim() <= dim < buffer.dim():
            raise ConfigurationError(
                f"buffer_seq_dims[{number}]={dim}, but the buffer only has {buffer.dim()} dimensions."
            )
        length = buffer.shape[dim]
        lengths.add(length)
        if length % parts:
            raise ConfigurationError(
                f"Buffer {number} has length {length} in dimension {dim}. To split it over {ranks} "
                f"ranks, its length must be a multiple of {parts}. Pad it to "
                f"{-(-length // parts) * parts}."
            )
    if len(lengths) > 1:
        raise ConfigurationError(
            f"The buffers must have sequences of the same length, but have {sorted(lengths)}."
        )
    if any(not any(one is buffer for buffer in buffers) for one in no_restore):
        raise ConfigurationError("no_restore_buffers has a tensor that is not in buffers.")


@contextmanager
def ring(
    mesh: DeviceMesh,
    strategy: str,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
) -> Iterator[None]:
    """Split the buffers, and compute attention with torch's ring attention."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import (
        set_rotate_method,
    )

    _check_buffers(buffers, dims, no_restore, 2 * mesh.size(), mesh.size())
    set_rotate_method(strategy)
    with (
        _own_memory(buffers, no_restore),
        context_parallel(
            mesh,
            buffers=list(buffers),
            buffer_seq_dims=list(dims),
            no_restore_buffers=set(buffers),
        ),
    ):
        yield


@contextmanager
def _own_memory(buffers: Sequence[torch.Tensor], no_restore: set[torch.Tensor]) -> Iterator[None]:
    """Give buffers their own memory, so that views of one tensor can be split, and restore it."""
    before = [buffer.data for buffer in buffers]
    for buffer in buffers:
        buffer.data = buffer.data.clone()
    try:
        yield
    finally:
        for buffer, whole in zip(buffers, before, strict=True):
            if not any(buffer is one for one in no_restore):
                buffer.data = whole


@contextmanager
def ulysses(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    no_restore: set[torch.Tensor],
) -> Iterator[None]:
    """Split the buffers, and compute attention with Ulysses."""
    _check_buffers(buffers, dims, no_restore, mesh.size(), mesh.size())
    rank = mesh.get_local_rank()
    with _own_memory(buffers, no_restore):
        for buffer, dim in zip(buffers, dims, strict=True):
            buffer.data = buffer.data.chunk(mesh.size(), dim)[rank].clone()
        mode = UlyssesAttention(mesh.get_group())
        whole = F.scaled_dot_product_attention
        # MultiheadAttention and recomputation in backward look the function up in its module. Code
        # that imported the function is intercepted by the mode.
        F.scaled_dot_product_attention = mode.attend
        try:
            with mode:
                yield
        finally:
            F.scaled_dot_product_attention = whole
    if buffers and not mode.calls:
        warn(
            "scaled_dot_product_attention was not called inside maybe_context_parallel. Any other "
            "kind of attention only used this rank's part of the sequence.",
        )


class UlyssesAttention(TorchFunctionMode):
    """Make `scaled_dot_product_attention` attend to whole sequences with some of the heads.

    Each rank has a part of the sequence and all heads. An exchange before attention gives it the
    whole sequence and a part of the heads, and one after attention reverses this (DeepSpeed-Ulysses,
    arXiv:2309.14509).

    Args:
        group: the ranks that share a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._inside = False
        self._whole = F.scaled_dot_product_attention
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is self._whole and not self._inside:
            return self.attend(*args, **kwargs)
        wants_weights = func is F.multi_head_attention_forward and kwargs.get("need_weights", True)
        if func in _FUSED or wants_weights:
            raise ConfigurationError(
                f"With Ulysses, {getattr(func, '__name__', func)} would only attend to this rank's "
                "part of the sequence. Call MultiheadAttention with need_weights=False, and call "
                "encoder layers in training mode or with gradients enabled."
            )
        return func(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend to the whole sequence, with the arguments of `scaled_dot_product_attention`."""
        if self._inside:
            return self._whole(*args, **kwargs)
        self.calls += 1
        self._inside = True
        try:
            return self._attend(*args, **kwargs)
        finally:
            self._inside = False

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
                    f"Ulysses over {ranks} ranks needs tensors of shape (batch, heads, length, "
                    f"width) with a number of heads divisible by {ranks}, but the {name} has shape "
                    f"{tuple(tensor.shape)}."
                )
        if attn_mask is not None and attn_mask.shape[-1] != length:
            raise ConfigurationError(
                f"With Ulysses, attn_mask must cover the whole sequence of length {length}, but its "
                f"last dimension is {attn_mask.shape[-1]}. For a causal mask, pass is_causal=True."
            )
        exchange: Any = _Exchange.apply
        q, k, v = (exchange(one, self._group, True) for one in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.chunk(ranks, 1)[self._group.rank()]
        out = self._whole(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
        result: torch.Tensor = exchange(out, self._group, False)
        return result


#: Fused kernels of torch's own layers, which contain attention.
_FUSED = tuple(
    getattr(torch, name)
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    if hasattr(torch, name)
)


class _Exchange(torch.autograd.Function):
    """Turn (batch, heads, part, width) into (batch, part of heads, whole, width), or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> Any:
        ctx.group = group
        ctx.to_heads = to_heads
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
