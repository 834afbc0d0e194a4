"""Ranks and collectives of a backend."""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.distributed.collectives import broadcast
from accelerate_core.plugin import DistributedOperationException
from accelerate_testing.checks import check
from accelerate_testing.context import CheckContext, raised

Pair = namedtuple("Pair", "left right")
SAMPLES = 37  # not a multiple of a batch, so the last one is short on some rank


def _several(ctx: CheckContext) -> None:
    if ctx.size == 1:
        ctx.skip("there is only one process")


@check("backend", hooks="data_shard loss_shard device init_process_group")
def ranks(ctx: CheckContext) -> str:
    """Every rank exists once, all agree on the main process, and the shards of the data are complete."""
    accelerator = ctx.accelerator()
    comm = accelerator.communicator
    indices = comm.gather_object(accelerator.process_index)
    ctx.equal(indices, list(range(ctx.size)), "ranks in order")
    ctx.equal(sum(comm.gather_object(accelerator.is_main_process)), 1, "number of main processes")
    for what in ("data_shard", "loss_shard"):
        index, count = getattr(accelerator.hooks, what)()
        ctx.alike(accelerator, count, f"parts of {what}")
        ctx.equal(0 <= index < count, True, f"{what} ({index}, {count}) has 0 <= index < count")
        seen = set(comm.gather_object(index))
        ctx.equal(seen, set(range(count)), f"indices of {what}")
    mesh = accelerator.backend.supports.get("mesh") or ()
    if not {"tp", "cp", "sp", "pp"} & set(mesh):
        _, count = accelerator.hooks.data_shard()
        ctx.equal(
            count, ctx.size, "parts of the data, without a mesh dimension that shares samples"
        )
    return f"{ctx.size} on {accelerator.device.type}, {accelerator.distributed_type.value}"


@check("backend", hooks="gather reduce broadcast")
def collectives(ctx: CheckContext) -> str:
    """Gather, reduce, broadcast and padding work on nested structures of any dtype and shape."""
    _several(ctx)
    accelerator = ctx.accelerator()
    rank = accelerator.process_index
    size = ctx.size
    device = accelerator.device
    index, count = accelerator.hooks.data_shard()
    tree = {
        "whole": torch.full((2, 3), float(index), device=device),
        "list": [torch.tensor([index], device=device), (torch.tensor([index % 2 == 0], device=device),)],
        "pair": Pair(torch.tensor(index, dtype=torch.int16, device=device), torch.empty(0, 2, device=device)),
        "half": torch.full((1,), index + 0.5, dtype=torch.bfloat16, device=device),
    }  # fmt: skip
    got = accelerator.gather(tree)
    every = range(count)
    ctx.close(got["whole"][:, 0].tolist(), [float(r) for r in every for _ in (0, 1)], "gather")
    ctx.equal(got["list"][0].tolist(), list(every), "gather of int64")
    ctx.equal(got["list"][1][0].tolist(), [r % 2 == 0 for r in every], "gather of bool")
    ctx.equal(got["pair"].left.tolist(), list(every), "gather of numbers without dimensions")
    ctx.equal(tuple(got["pair"].right.shape), (0, 2), "shape of an empty tensor")
    ctx.equal(got["half"].tolist(), [r + 0.5 for r in every], "gather of bfloat16")
    total = accelerator.reduce({"x": torch.tensor([index + 1.0], device=device)}, "sum")
    ctx.close(total["x"].tolist(), [count * (count + 1) / 2], "reduce by sum")
    mean = accelerator.reduce(torch.tensor([index + 1.0], device=device), "mean")
    ctx.close(mean.tolist(), [(count + 1) / 2], "reduce by mean")
    large = 2**24 + 1  # float32 cannot represent it
    whole = accelerator.reduce(torch.tensor([large], device=device), "sum")
    ctx.equal(whole.tolist(), [large * count], "sum of large integers")
    comm = accelerator.communicator
    top = comm.reduce(torch.tensor([float(rank)], device=device), "max")
    low = comm.reduce(torch.tensor([float(rank)], device=device), "min")
    ctx.equal((top.item(), low.item()), (size - 1.0, 0.0), "reduce by max and min")
    most = comm.reduce(torch.tensor([rank - 5], device=device), "max")
    ctx.equal(most.item(), size - 6, "reduce of integers by max")
    for src in range(size):
        sent = broadcast({"x": torch.tensor([float(rank)], device=device)}, src, comm=comm)
        ctx.equal(sent["x"].item(), float(src), f"broadcast from rank {src}")
        # A little data is broadcast in a reduction, so the hook itself is called, too.
        answer = comm.broadcast(torch.tensor([float(rank)], device=device), src)
        ctx.equal(answer.item(), float(src), f"hook broadcast from rank {src}")
    many = torch.tensor([large + rank], device=device)
    ctx.equal(broadcast(many, 0, comm=comm).item(), large, "broadcast of a large integer")
    ctx.equal(accelerator.gather(torch.tensor([large + index], device=device)).tolist(),
              [large + r for r in every], "gather of large integers")  # fmt: skip
    hooks = accelerator.hooks  # called directly, because the core packs tensors together
    answer = hooks.gather(torch.tensor([large + rank], device=device), "world")
    ctx.equal(answer.tolist(), [large + r for r in range(size)], "hook gather, of large integers")
    answer = hooks.broadcast(torch.tensor([large + rank], device=device), 0, "world")
    ctx.equal(answer.tolist(), [large], "hook broadcast, of a large integer")
    padded = accelerator.pad_across_processes(torch.ones(index + 1, device=device))
    ctx.equal(padded.shape[0], count, "length after padding")
    ctx.equal(float(padded.sum()), index + 1.0, "sum after padding with zeros")
    if device.type == "cpu":  # on other devices, the error may come later
        uneven = partial(accelerator.gather, torch.ones(index + 1, device=device))
        refused = raised(DistributedOperationException, uneven) is not None
        ctx.equal(refused, count > 1, "whether gather refuses tensors of different lengths")
    return "gather, reduce, broadcast, pad"


@check("backend", hooks="gather_object broadcast_object scatter_object")
def objects(ctx: CheckContext) -> None:
    """Objects are gathered, broadcast and scattered in rank order, on every rank."""
    _several(ctx)
    accelerator = ctx.accelerator()
    comm, rank = accelerator.communicator, accelerator.process_index
    mine = {"rank": rank, "text": "ä" * (rank + 1)}
    expected = [{"rank": r, "text": "ä" * (r + 1)} for r in range(ctx.size)]
    ctx.equal(comm.gather_object(mine), expected, "gather_object")
    for src in range(ctx.size):
        ctx.equal(comm.broadcast_object(mine, src), expected[src], f"broadcast_object from {src}")
    for src in range(ctx.size):
        parts = [["part", src, r] for r in range(ctx.size)] if rank == src else None
        scattered = accelerator.hooks.scatter_object(parts, src, "world")
        ctx.equal(scattered, ["part", src, rank], f"scatter_object from {src}")


@check("backend", hooks="scatter all_to_all")
def pieces(ctx: CheckContext) -> None:
    """Scatter and all_to_all give each rank its own piece."""
    _several(ctx)
    accelerator = ctx.accelerator()
    rank = accelerator.process_index
    size = ctx.size
    hooks = accelerator.hooks
    like = torch.zeros(2, device=accelerator.device)
    for src in range(size):
        parts = [like + 10 * src + r for r in range(size)] if rank == src else None
        part = hooks.scatter(parts, like, src, "world")
        ctx.equal(part.tolist(), [10.0 * src + rank] * 2, f"scatter from {src}")
    for length in (1, 3):
        sent = torch.cat([torch.arange(length) + 100.0 * rank + 10 * r for r in range(size)])
        got = hooks.all_to_all(sent.to(accelerator.device), "world")
        mine = torch.cat([torch.arange(length) + 100.0 * r + 10 * rank for r in range(size)])
        ctx.equal(got.tolist(), mine.tolist(), f"all_to_all, {length} to each")


@check("backend", hooks="barrier")
def barrier(ctx: CheckContext) -> None:
    """No rank leaves `wait_for_everyone` before all ranks have entered it."""
    accelerator = ctx.accelerator()
    marks = [ctx.scratch(f"entered_{rank}") for rank in range(ctx.size)]
    for late in range(ctx.size):
        for mark in marks:
            mark.unlink(missing_ok=True)
        accelerator.communicator.gather_object(late)  # now all files are deleted
        if accelerator.process_index == late:
            time.sleep(0.3)
        marks[accelerator.process_index].touch()
        accelerator.wait_for_everyone()
        ctx.equal([mark.exists() for mark in marks], [True] * ctx.size, "ranks that had entered")
        accelerator.communicator.gather_object(late)


@check("backend", hooks="data_shard feed_device")
def loader(ctx: CheckContext) -> str:
    """An epoch has every sample once, and in order without shuffling."""
    accelerator = ctx.accelerator()
    dataset = TensorDataset(torch.arange(SAMPLES))
    for shuffle in (False, True):
        prepared = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=shuffle))
        for _ in range(2):
            steps = [accelerator.gather_for_metrics(batch[0]) for batch in prepared]
            seen = torch.cat(steps).tolist()
            ctx.alike(accelerator, len(steps), "steps of an epoch")
            ctx.equal(sorted(seen), list(range(SAMPLES)), "samples of an epoch")
            if not shuffle:
                ctx.equal(seen, list(range(SAMPLES)), "order of the samples")
    _raises(ctx, accelerator)
    _streams(ctx, accelerator)
    # The core does not call this hook if batches are already on the device.
    given = [{"x": torch.full((2,), float(step))} for step in range(4)]
    fed = list(accelerator.hooks.feed_device(iter(given), False))
    ctx.equal([float(one["x"][0]) for one in fed], [0.0, 1.0, 2.0, 3.0], "batches of feed_device")
    places = {one["x"].device.type for one in fed}
    ctx.equal(places, {accelerator.device.type}, "devices of the batches of feed_device")
    return f"{SAMPLES} samples, 4 epochs"


class _Broken(Dataset[torch.Tensor]):
    """A dataset that cannot read its last samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= SAMPLES // 2:
            raise OSError("this sample cannot be read")
        return torch.tensor(index)


def _streams(ctx: CheckContext, accelerator: Accelerator) -> None:
    """The first batches are available before the last ones are read."""
    read = 0

    def source() -> Iterator[torch.Tensor]:
        nonlocal read
        while read < 64:
            read += 1
            yield torch.zeros(1)

    fed = iter(accelerator.hooks.feed_device(source(), False))
    next(fed)
    assert read <= 16, f"feed_device reads {read} batches before it yields the first"
    ctx.equal(1 + sum(1 for _ in fed), 64, "batches of a stream")


def _raises(ctx: CheckContext, accelerator: Accelerator) -> None:
    """An exception of the dataset reaches the script instead of ending the epoch."""

    def source() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise OSError("this batch cannot be read")

    prepared = accelerator.prepare(DataLoader(_Broken(), batch_size=4))
    fed = accelerator.hooks.feed_device(source(), False)
    for batches, said, what in (
        (prepared, "this sample cannot be read", "what a dataset raised"),
        (fed, "this batch cannot be read", "what feed_device does with an exception"),
    ):
        told = raised(OSError, partial(list, batches))
        ctx.equal(str(told).partition("\n")[0], said, what)
