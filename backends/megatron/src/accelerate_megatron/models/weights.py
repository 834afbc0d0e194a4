"""Which rows of Transformers' tensors make up a parameter of megatron, and how they are copied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_core.plugin import ConfigurationError
from accelerate_megatron.library import imported

#: Returns a tensor of Transformers by its name, or what safetensors' `get_slice` returns.
Read = Callable[[str], Any]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """Rows `start` to `start + size` of a tensor of Transformers that has `total` rows.

    Rows are counted along the dimension that tensor parallelism splits.
    """

    name: str
    start: int
    size: int
    total: int


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `end` of a tensor of Transformers, which start at row `at` of a rank's shard."""

    name: str
    total: int
    first: int
    end: int
    at: int


@dataclass(frozen=True)
class Weight:
    """How a parameter of megatron is made from tensors of Transformers.

    Along `dim`, the whole parameter consists of `blocks` blocks. Each block has an equal share of
    each source, in order: the queries, the key and the value of one group, or a rank's gate and up.
    The rest, up to `size`, is padding. Each tensor parallel rank has an equal share of the whole.

    Attributes:
        sources: the sources, in order; a single one with a size of 0 if it is not split.
        dim: the dimension that tensor parallelism splits; None: every rank has all of it.
        size: the length of this dimension, padding included.
        transposed: whether Transformers stores it with the inputs first.
    """

    sources: tuple[Source, ...]
    dim: int | None = None
    size: int = 0
    blocks: int = 1
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors of Transformers, without duplicates."""
        return tuple(dict.fromkeys(source.name for source in self.sources))

    def of_layer(self, number: int) -> Weight:
        """Return the weight of one layer, counted from 0."""
        named = (replace(one, name=one.name.format(number)) for one in self.sources)
        return replace(self, sources=tuple(named))

    def pieces(self, rank: int, ranks: int) -> Iterator[Piece]:
        """Yield the pieces of the shard of one of `ranks` tensor parallel ranks, in order."""
        share = self.size // ranks
        low, high = rank * share, (rank + 1) * share
        row = 0
        for block in range(self.blocks):
            for source in self.sources:
                length = source.size // self.blocks
                first = max(low, row)
                end = min(high, row + length)
                if first < end:
                    moved = source.start + block * length - row
                    yield Piece(source.name, source.total, first + moved, end + moved, first - low)
                row += length

    def side(self, tensor: torch.Tensor) -> int:
        """Return the split dimension of the tensor as Transformers stores it."""
        assert self.dim is not None
        return 1 - self.dim if self.transposed and tensor.dim() == 2 else self.dim


def parameters_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters with their global names, which count the layers of all stages."""
    for chunk in chunks:
        layers: Any = chunk.get_submodule("decoder.layers")
        for name, parameter in chunk.named_parameters():
            if found := _LAYER.match(name):
                number = layers[int(found[1])].layer_number - 1
                name = f"decoder.layers.{number}.{name[found.end() :]}"
            yield name, parameter


@torch.no_grad()
def fill(parameter: torch.Tensor, weight: Weight, read: Read, rank: int, ranks: int) -> None:
    """Fill one rank's shard of a parameter; padding rows become 0.

    Raises:
        ConfigurationError: a tensor is missing, is on the meta device or has a different shape.
    """
    if weight.dim is None:
        (source,) = weight.sources
        _put(parameter, _given(read, source.name)[:], source.name)
        return
    filled = 0
    for run in _runs(weight.pieces(rank, ranks)):
        # Read all rows of a source that this rank has at once, then take the blocks from them.
        given = _given(read, run[0].name)
        side = weight.side(parameter)
        _check_total(given, side, run[0])
        low, high = run[0].first, run[-1].end
        rows = given[low:high] if side == 0 else given[:, low:high]
        for piece in run:
            part = rows.narrow(side, piece.first - low, piece.end - piece.first)
            target = parameter.narrow(weight.dim, piece.at, piece.end - piece.first)
            _put(target, part.t() if side != weight.dim else part, piece.name)
            filled += piece.end - piece.first
    if filled < parameter.shape[weight.dim]:  # the padding is at the end
        parameter.narrow(weight.dim, filled, parameter.shape[weight.dim] - filled).zero_()


def mark(parameter: nn.Parameter, weight: Weight) -> None:
    """Mark how a parameter is split, which megatron does only when it initializes the parameter.

    Without the mark, norms of gradients count only the first tensor parallel rank's part.
    """
    if weight.dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        stride = 2 if len(weight.sources) == 2 else 1  # gate and up
        attributes = imported("tensor_parallel").set_tensor_model_parallel_attributes
        attributes(parameter, True, weight.dim, stride)


def leave_untrained(chunk: Any, token: int) -> None:
    """Stop the gradient from a token into the embedding; that of a tied head still flows.

    Args:
        chunk: the `GPTModel` that has the embedding.
    """

    def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not output.requires_grad:
            return
        padded = (args[0] == token).unsqueeze(-1)
        if module.reduce_scatter_embeddings:  # a part of the sequence, in the first dimension
            padded = padded.transpose(0, 1).chunk(module.tp_group.size())[module.tp_group.rank()]
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient.masked_fill(padded, 0)
        )

    chunk.embedding.word_embeddings.register_forward_hook(hook)


def _runs(pieces: Iterator[Piece]) -> list[list[Piece]]:
    """Group the pieces that follow each other in a tensor of Transformers."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        for run in runs:
            if run[-1].name == piece.name and run[-1].end == piece.first:
                run.append(piece)
                break
        else:
            runs.append([piece])
    return runs


def _given(read: Read, name: str) -> Any:
    try:
        given = read(name)
    except KeyError:
        raise ConfigurationError(
            f"The weights have no tensor {name!r}. Only the modules that the model's class in "
            "Transformers creates are converted. Replace or wrap layers (adapters, quantization) "
            "after the conversion, or use a backend that does not convert models: fsdp2, deepspeed."
        ) from None
    if isinstance(given, torch.Tensor) and given.is_meta:
        raise ConfigurationError(
            f"{name!r} is on the meta device, so there are no values to convert. Load the weights "
            "first, or create the model on the CPU."
        )
    return given


def _check_total(given: Any, side: int, piece: Piece) -> None:
    shape = tuple(given.shape if isinstance(given, torch.Tensor) else given.get_shape())
    if len(shape) <= side or shape[side] != piece.total:
        raise ConfigurationError(
            f"{piece.name!r} has the shape {shape}, but according to the model's config its "
            f"dimension {side} has {piece.total} rows. Pass the config of these weights."
        )


def _put(target: torch.Tensor, given: torch.Tensor, name: str) -> None:
    if target.shape != given.shape:  # copy_ would broadcast
        raise ConfigurationError(
            f"{name!r} has the shape {tuple(given.shape)} where {tuple(target.shape)} is needed. "
            "Pass the config of these weights."
        )
    target.copy_(given)


def take(
    result: dict[str, torch.Tensor], shard: torch.Tensor, weight: Weight, rank: int, ranks: int
) -> None:
    """Copy one rank's shard of a parameter into the tensors of Transformers."""
    if weight.dim is None:
        result[weight.sources[0].name] = shard.cpu().clone()
        return
    side = weight.side(shard)
    for piece in weight.pieces(rank, ranks):
        length = piece.end - piece.first
        part = shard.narrow(weight.dim, piece.at, length)
        part = part.t() if side != weight.dim else part
        if piece.name not in result:
            shape = list(part.shape)
            shape[side] = piece.total
            result[piece.name] = torch.empty(shape, dtype=shard.dtype)
        result[piece.name].narrow(side, piece.first, length).copy_(part)


@torch.no_grad()
def collect(
    chunks: Sequence[nn.Module],
    weight_of: Callable[[str], Weight],
    skipped: str | None,
    master: Callable[[nn.Parameter], torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of Transformers on rank 0, nothing on the others.

    The tensors are sent one by one. The ranks of one whole model must all call it; the ranks of
    further copies return at once.

    Args:
        skipped: the name of a parameter that is a second copy.
        master: returns a parameter's values in float32; None: its own values in its precision.
    """
    group = imported("parallel_state").get_model_parallel_group()
    members = dist.get_process_group_ranks(group)
    if members[0] != 0:
        return {}
    first: Any = chunks[0]
    rank = first.tp_group.rank()
    ranks = first.tp_group.size()
    own = [(name, one) for name, one in parameters_of(chunks) if name != skipped]

    def value(parameter: nn.Parameter) -> torch.Tensor:
        tensor = parameter.detach() if master is None else master(parameter)
        return tensor.contiguous()

    told = [(name, tuple(one.shape), one.dtype) for name, one in own]
    if master is not None:
        told = [(name, shape, torch.float32) for name, shape, _ in told]
    every: list[Any] = [None] * len(members)
    dist.gather_object(told, every if dist.get_rank() == 0 else None, members[0], group=group)
    if dist.get_rank() != 0:
        for name, parameter in own:
            if rank == 0 or weight_of(name).dim is not None:
                dist.send(value(parameter), members[0], group=group)
        return {}
    result: dict[str, torch.Tensor] = {}
    mine = dict(own)
    device = own[0][1].device
    # Tensor parallel ranks are neighbours in this group: one of each stage speaks for all.
    for stage, listed in enumerate(every[::ranks]):
        for name, shape, dtype in listed:
            weight = weight_of(name)
            for sender in range(ranks if weight.dim is not None else 1):
                if stage == sender == 0:
                    shard = value(mine[name])
                else:
                    shard = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(shard, members[stage * ranks + sender], group=group)
                take(result, shard, weight, sender, ranks)
    return result


def reader(source: nn.Module | Mapping[str, Any] | str | Path, opened: ExitStack) -> Read:
    """Return a function that reads tensors from a model, a state dict or a folder of safetensors.

    For a model on the meta device, it reads from the folder in the model's `name_or_path`.

    Args:
        opened: the files stay open until it is closed; only the needed part of a tensor is read.

    Raises:
        ConfigurationError: the folder has no safetensors.
    """
    if isinstance(source, nn.Module):
        folder = Path(getattr(source, "name_or_path", "") or ".")
        on_meta = any(parameter.is_meta for parameter in source.parameters())
        if on_meta and not any(folder.glob("*.safetensors")):
            raise ConfigurationError(
                f"The {type(source).__name__} is on the meta device, and its name_or_path "
                f"{str(getattr(source, 'name_or_path', ''))!r} is not a folder with safetensors. Load "
                "the model, or create it from AutoConfig.from_pretrained(folder)."
            )
        source = folder if on_meta else source.state_dict()
    if isinstance(source, Mapping):
        return source.__getitem__
    from safetensors import safe_open

    files = {}
    for path in sorted(Path(source).glob("*.safetensors")):
        file = opened.enter_context(safe_open(path, "pt"))
        files.update(dict.fromkeys(file.keys(), file))
    if not files:
        raise ConfigurationError(
            f"{source} has no *.safetensors. Pass a folder written by save_pretrained(), or a model "
            "in memory."
        )

    def read(name: str) -> Any:
        # In the files of a model without a head, names have no prefix.
        short = name.partition(".")[2]
        found = name if name in files or short not in files else short
        return files[found].get_slice(found)

    return read
