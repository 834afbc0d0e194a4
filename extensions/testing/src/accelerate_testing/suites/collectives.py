"""Ranks and collectives of a backend."""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.distributed.collectives import broadcast
from accelerate_testing.checks import check
from accelerate_testing.lab import Lab

Pair = namedtuple("Pair", "left right")
SAMPLES = 37  # no multiple of a batch: the last one is short on some rank


@check("backend")
def ranks(lab: Lab) -> str | None:
    """Every rank is there once, all name the same main process, and shards of the data add up."""
    accelerator = lab.accelerator()
    comm = accelerator.communicator
    lab.equal(
        comm.gather_object(accelerator.process_index), list(range(lab.size)), "ranks in order"
    )
    lab.equal(sum(comm.gather_object(accelerator.is_main_process)), 1, "number of main processes")
    for what in ("data_shard", "loss_shard"):
        index, count = getattr(accelerator.hooks, what)(accelerator)
        lab.alike(accelerator, count, f"parts of {what}")
        lab.equal(0 <= index < count, True, f"{what} ({index}, {count}) is inside")
        seen = set(comm.gather_object(index))
        lab.equal(seen, set(range(count)), f"indices of {what}")
    mesh = accelerator.backend.supports.get("mesh") or ()
    if not {"tp", "cp", "sp", "pp"} & set(mesh):
        _, count = accelerator.hooks.data_shard(accelerator)
        lab.equal(count, lab.size, "parts of the data, where no mesh dimension shares samples")
    return f"{lab.size} on {accelerator.device.type}, {accelerator.distributed_type}"


@check("backend")
def collectives(lab: Lab) -> str | None:
    """Gather, reduce, broadcast and padding are right on nested structures of any dtype and shape."""
    accelerator = lab.accelerator()
    rank, size, device = accelerator.process_index, lab.size, accelerator.device
    index, count = accelerator.hooks.data_shard(accelerator)
    tree = {
        "whole": torch.full((2, 3), float(index), device=device),
        "list": [torch.tensor([index], device=device), (torch.tensor([index % 2 == 0], device=device),)],
        "pair": Pair(torch.tensor(index, dtype=torch.int16, device=device), torch.empty(0, 2, device=device)),
        "half": torch.full((1,), index + 0.5, dtype=torch.bfloat16, device=device),
    }  # fmt: skip
    got = accelerator.gather(tree)
    every = range(count)
    lab.close(got["whole"][:, 0].tolist(), [float(r) for r in every for _ in (0, 1)], "gather")
    lab.equal(got["list"][0].tolist(), list(every), "gather of int64")
    lab.equal(got["list"][1][0].tolist(), [r % 2 == 0 for r in every], "gather of bool")
    lab.equal(got["pair"].left.tolist(), list(every), "gather of numbers without dimensions")
    lab.equal(tuple(got["pair"].right.shape), (0, 2), "shape of what is empty")
    lab.equal(got["half"].tolist(), [r + 0.5 for r in every], "gather of bfloat16")
    total = accelerator.reduce({"x": torch.tensor([index + 1.0], device=device)}, "sum")
    lab.close(total["x"].tolist(), [count * (count + 1) / 2], "reduce by sum")
    mean = accelerator.reduce(torch.tensor([index + 1.0], device=device), "mean")
    lab.close(mean.tolist(), [(count + 1) / 2], "reduce by mean")
    large = 2**24 + 1  # no float32
    whole = accelerator.reduce(torch.tensor([large], device=device), "sum")
    lab.equal(whole.tolist(), [large * count], "sum of large integers")
    comm = accelerator.communicator
    top = comm.reduce(torch.tensor([float(rank)], device=device), "max")
    low = comm.reduce(torch.tensor([float(rank)], device=device), "min")
    lab.equal((top.item(), low.item()), (size - 1.0, 0.0), "reduce by max and min")
    most = comm.reduce(torch.tensor([rank - 5], device=device), "max")
    lab.equal(most.item(), size - 6, "reduce of integers by max")
    for src in range(size):
        sent = broadcast({"x": torch.tensor([float(rank)], device=device)}, src, comm=comm)
        lab.equal(sent["x"].item(), float(src), f"broadcast from rank {src}")
    many = torch.tensor([large + rank], device=device)
    lab.equal(broadcast(many, 0, comm=comm).item(), large, "broadcast of a large integer")
    lab.equal(accelerator.gather(torch.tensor([large + index], device=device)).tolist(),
              [large + r for r in every], "gather of large integers")  # fmt: skip
    hooks = accelerator.hooks  # as they are, without what the core packs together
    told = hooks.gather(accelerator, torch.tensor([large + rank], device=device), "world")
    lab.equal(told.tolist(), [large + r for r in range(size)], "hook gather, of large integers")
    told = hooks.broadcast(accelerator, torch.tensor([large + rank], device=device), 0, "world")
    lab.equal(told.tolist(), [large], "hook broadcast, of a large integer")
    padded = accelerator.pad_across_processes(torch.ones(index + 1, device=device))
    lab.equal(padded.shape[0], count, "length after padding")
    lab.equal(float(padded.sum()), index + 1.0, "sum after padding with zeros")
    return "gather, reduce, broadcast, pad"


@check("backend")
def objects(lab: Lab) -> str | None:
    """Objects are gathered, broadcast and scattered in rank order, on every rank."""
    accelerator = lab.accelerator()
    comm, rank = accelerator.communicator, accelerator.process_index
    mine = {"rank": rank, "text": "ä" * (rank + 1)}
    expected = [{"rank": r, "text": "ä" * (r + 1)} for r in range(lab.size)]
    lab.equal(comm.gather_object(mine), expected, "gather_object")
    for src in range(lab.size):
        lab.equal(comm.broadcast_object(mine, src), expected[src], f"broadcast_object from {src}")
    for src in range(lab.size):
        parts = [["part", src, r] for r in range(lab.size)] if rank == src else None
        scattered = accelerator.hooks.scatter_object(accelerator, parts, src, "world")
        lab.equal(scattered, ["part", src, rank], f"scatter_object from {src}")
    return None


@check("backend")
def pieces(lab: Lab) -> str | None:
    """Scatter and all_to_all give each rank the piece that is its own."""
    accelerator = lab.accelerator()
    rank, size, hooks = accelerator.process_index, lab.size, accelerator.hooks
    like = torch.zeros(2, device=accelerator.device)
    for src in range(size):
        parts = [like + 10 * src + r for r in range(size)] if rank == src else None
        part = hooks.scatter(accelerator, parts, like, src, "world")
        lab.equal(part.tolist(), [10.0 * src + rank] * 2, f"scatter from {src}")
    for length in (1, 3):
        sent = torch.cat([torch.arange(length) + 100.0 * rank + 10 * r for r in range(size)])
        got = hooks.all_to_all(accelerator, sent.to(accelerator.device), "world")
        mine = torch.cat([torch.arange(length) + 100.0 * r + 10 * rank for r in range(size)])
        lab.equal(got.tolist(), mine.tolist(), f"all_to_all, {length} to each")
    return None


@check("backend")
def barrier(lab: Lab) -> str | None:
    """Nobody passes `wait_for_everyone` before all have come."""
    accelerator = lab.accelerator()
    marks = [lab.scratch(f"came_{rank}") for rank in range(lab.size)]
    for late in range(lab.size):
        for mark in marks:
            mark.unlink(missing_ok=True)
        accelerator.communicator.gather_object(late)  # from here on all know they are gone
        if accelerator.process_index == late:
            time.sleep(0.3)
        marks[accelerator.process_index].touch()
        accelerator.wait_for_everyone()
        lab.equal([mark.exists() for mark in marks], [True] * lab.size, "who had come")
        accelerator.communicator.gather_object(late)
    return None


@check("backend")
def loader(lab: Lab) -> str | None:
    """Every sample is seen once in an epoch, in order where it is not shuffled."""
    accelerator = lab.accelerator()
    dataset = TensorDataset(torch.arange(SAMPLES))
    for shuffle in (False, True):
        prepared = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=shuffle))
        for _ in range(2):
            steps = [accelerator.gather_for_metrics(batch[0]) for batch in prepared]
            seen = torch.cat(steps).tolist()
            lab.alike(accelerator, len(steps), "steps of an epoch")
            lab.equal(sorted(seen), list(range(SAMPLES)), "samples of an epoch")
            if not shuffle:
                lab.equal(seen, list(range(SAMPLES)), "order of the samples")
    _raises(lab, accelerator)
    _streams(lab, accelerator)
    # Where batches are born on their device the core does not ask for this hook.
    given = [{"x": torch.full((2,), float(step))} for step in range(4)]
    fed = list(accelerator.hooks.feed_device(accelerator, iter(given), False))
    lab.equal([float(one["x"][0]) for one in fed], [0.0, 1.0, 2.0, 3.0], "batches of feed_device")
    places = {one["x"].device.type for one in fed}
    lab.equal(places, {accelerator.device.type}, "where feed_device puts them")
    return f"{SAMPLES} samples, 4 epochs"


class _Broken(Dataset[torch.Tensor]):
    """Cannot read its last samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= SAMPLES // 2:
            raise OSError("this sample cannot be read")
        return torch.tensor(index)


def _streams(lab: Lab, accelerator: Accelerator) -> None:
    """The first batches are there before the last ones are read."""
    read = 0

    def source() -> Iterator[torch.Tensor]:
        nonlocal read
        while read < 64:
            read += 1
            yield torch.zeros(1)

    fed = iter(accelerator.hooks.feed_device(accelerator, source(), False))
    next(fed)
    if read > 16:
        raise AssertionError(f"feed_device reads {read} batches before it gives the first")
    lab.equal(1 + sum(1 for _ in fed), 64, "batches of a stream")


def _raises(lab: Lab, accelerator: Accelerator) -> None:
    """An exception of the dataset reaches the script; an epoch does not just end."""
    told: BaseException | None = None
    try:
        for _ in accelerator.prepare(DataLoader(_Broken(), batch_size=4)):
            pass
    except OSError as error:
        told = error
    lab.equal(str(told).partition("\n")[0], "this sample cannot be read", "what a dataset raised")
    given = iter([torch.zeros(1)])

    def source() -> Iterator[torch.Tensor]:
        yield from given
        raise OSError("this batch cannot be read")

    told = None
    try:
        list(accelerator.hooks.feed_device(accelerator, source(), False))
    except OSError as error:
        told = error
    lab.equal(str(told), "this batch cannot be read", "what feed_device does with an exception")
