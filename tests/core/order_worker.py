"""The order in which the ranks read. The cases are run by `test_shared_order.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)
from worker import RANK, SIZE, case, run_cases

from accelerate_core import Accelerator, DataLoaderConfiguration
from accelerate_core.data.order import SeedableRandomSampler
from accelerate_core.errors import ConfigurationError

accelerator = Accelerator(cpu=True)


def everyone(value: Any) -> list[Any]:
    return accelerator.communicator.gather_object(value)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


@case
def ranks_with_one_order_have_one_digest() -> None:
    for name, loader in {
        "in sequence": DataLoader(range(20), 2),
        "shuffled": DataLoader(range(20), 2, shuffle=True),
        "batch sampler": DataLoader(range(20), batch_sampler=[[3, 4], [5], [6, 7, 8]]),
        "items": DataLoader(range(20), batch_size=None),
    }.items():
        prepared = accelerator.prepare(loader)
        assert prepared.order_digest is None, name
        digests = []
        for _ in range(2):
            assert len(list(prepared)) > 0
            digests.append(prepared.order_digest)
            assert (digests[-1] is None) == (SIZE == 1), name
            assert len(set(everyone(digests[-1]))) == 1, name
        assert (digests[0] == digests[1]) == (name != "shuffled" or SIZE == 1), name
    for loader in (DataLoader(Stream(), 2), DataLoader(range(20), 2)):
        dispatched = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        prepared = dispatched.prepare(loader)
        assert len(list(prepared)) > 0
        if SIZE > 1:
            assert prepared.order_digest is None


class Drawing(Sampler):
    """Draws its order in one of several ways."""

    def __init__(self, how: str, size: int = 20) -> None:
        self.how = how
        self.size = size
        self.torch_own = torch.Generator()
        self.numpy_own = numpy.random.default_rng()
        self.numpy_old = numpy.random.RandomState()
        self.python_own = random.Random()
        self.shuffled = list(range(size))
        self.torch_own.manual_seed(RANK)
        random.Random(RANK).shuffle(self.shuffled)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        order = list(range(self.size))
        if self.how == "torch":
            order = torch.randperm(self.size).tolist()
        elif self.how == "numpy":
            numpy.random.shuffle(order)
        elif self.how == "python":
            random.shuffle(order)
        elif self.how == "own torch":
            order = torch.randperm(self.size, generator=self.torch_own).tolist()
        elif self.how == "own numpy":
            self.numpy_own.shuffle(order)
        elif self.how == "own old numpy":
            self.numpy_old.shuffle(order)
        elif self.how == "own python":
            self.python_own.shuffle(order)
        elif self.how == "new generator":
            numpy.random.default_rng(RANK + 100).shuffle(order)
        elif self.how == "attribute":
            order = self.shuffled
        elif self.how == "lazy":
            return self.lazily(order)
        return iter(order)

    def lazily(self, order: list[int]) -> Any:
        while order:
            choose = (random.randrange, numpy.random.randint)[len(order) % 2]
            yield order.pop(int(choose(len(order))))


class Buckets(Drawing):
    """A batch sampler that shuffles batches of different lengths."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        cuts = [0, 2, 5, 9, 12, 16, 20]
        for batch in torch.randperm(6).tolist():
            yield order[cuts[batch] : cuts[batch + 1]]


#: Ways to draw that all ranks can share.
SHARED = (
    "torch",
    "numpy",
    "python",
    "lazy",
    "own torch",
    "own numpy",
    "own old numpy",
    "own python",
)


def seed(value: int) -> None:
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(numpy.random.rand()), random.random()


def loaders(how: str) -> dict[str, DataLoader]:
    drawn = Drawing(how)
    return {
        "sampler": DataLoader(range(20), 2, sampler=drawn),
        "workers": DataLoader(range(20), 2, sampler=drawn, num_workers=2 * (how == "lazy")),
        "batch sampler": DataLoader(range(20), batch_sampler=BatchSampler(drawn, 3, False)),
        "buckets": DataLoader(range(20), batch_sampler=Buckets(how)),
        "items": DataLoader(range(20), batch_size=None, sampler=drawn),
    }


def read(prepared: Any) -> list[list[int]]:
    """Return the batches of all ranks, in the order of one process; the model draws in between."""
    own = []
    for batch in prepared:
        own.append(batch.tolist() if hasattr(batch, "tolist") else [batch])
        for _ in range(RANK + 1):
            draws()
    return [part for step in zip(*everyone(own), strict=True) for part in step]


@case
def all_ranks_read_the_order_of_rank_0() -> None:
    for how in SHARED:
        for name in loaders(how):
            seed(RANK)
            prepared = accelerator.prepare(loaders(how)[name])
            orders = []
            for _ in range(2):
                orders.append(read(prepared))
                seen = {index for batch in orders[-1] for index in flat_indices(batch)}
                assert seen == set(range(20)), (how, name, seen)
            assert orders[0] != orders[1], (how, name)


def flat_indices(batch: Any) -> list[int]:
    return [int(index) for each in batch for index in (each if isinstance(each, list) else [each])]


@case
def samplers_of_the_library_have_rank_0s_order() -> None:
    seed(RANK)
    own = torch.Generator().manual_seed(RANK)
    for sampler, options in (
        (SeedableRandomSampler(range(20)), {}),
        (RandomSampler(range(20), generator=own), {"rng_types": ["torch"]}),
        (RandomSampler(range(20), generator=own), {"rng_types": []}),
    ):
        prepared = Accelerator(**options).prepare(DataLoader(range(20), 2, sampler=sampler))
        for _ in range(2):
            assert {index for batch in read(prepared) for index in batch} == set(range(20))


@case
def ranks_with_the_same_seed_draw_as_without_the_library() -> None:
    for how in ("torch", "numpy", "python"):
        seed(3)
        plain = loaders(how)["sampler"]
        expected = [batch.tolist() for batch in plain]
        after = draws()
        seed(3)
        prepared = accelerator.prepare(loaders(how)["sampler"])
        own = [batch.tolist() for batch in prepared]
        assert own[:2] == expected[RANK::SIZE][:2], how
        assert draws() == after, how


@case
def training_of_a_rank_keeps_its_own_generators() -> None:
    seed(RANK)
    prepared = accelerator.prepare(DataLoader(range(20), 2, sampler=Drawing("numpy")))
    own = numpy.random.get_state()[1].copy()
    for _ in prepared:
        pass
    assert (RANK == 0) == bool((numpy.random.get_state()[1] != own).any()) or SIZE == 1


@case
def a_custom_order_is_resumed_in_the_middle() -> None:
    for how in SHARED:
        for name in ("sampler", "buckets"):
            if how == "lazy" and SIZE == 1:
                continue  # nothing separates its draws from those of the loop
            seed(RANK)
            prepared = accelerator.prepare(loaders(how)[name])
            for _ in prepared:
                pass
            own, state = [], None
            for batch in prepared:
                own.append(batch.tolist())
                draws()
                if len(own) == 1:
                    state = everyone(prepared.state_dict())[0]
            seed(50 + RANK)
            resumed = accelerator.prepare(loaders(how)[name])
            resumed.load_state_dict(state)
            rest = [batch.tolist() for batch in resumed]
            assert rest == own[1:], (how, name, rest, own)
            skipped = accelerator.skip_first_batches(accelerator.prepare(loaders(how)[name]), 1)
            read(skipped)


@case
def an_order_that_cannot_be_shared_is_an_error_on_every_rank() -> None:
    for how in ("new generator", "attribute"):
        for name, loader in loaders(how).items():
            prepared = accelerator.prepare(loader)
            if SIZE == 1:
                list(prepared)
                continue
            with pytest.raises(ConfigurationError, match=r"another order.*set_seed.*dispatch"):
                list(prepared)
            assert name
    if SIZE > 1:
        parts = SubsetRandomSampler(random.Random(RANK).sample(range(20), 10))
        with pytest.raises(ConfigurationError, match="SubsetRandomSampler"):
            list(accelerator.prepare(DataLoader(range(20), 2, sampler=parts)))


@case
def samplers_that_divide_the_data_are_used_as_they_are() -> None:
    divided = DistributedSampler(range(20), SIZE, RANK, shuffle=True)
    own = [
        index
        for batch in accelerator.prepare(DataLoader(range(20), 2, sampler=divided))
        for index in batch.tolist()
    ]
    assert {index for part in everyone(own) for index in part} == set(range(20))


class Shuffled(Dataset):
    """Its samples were shuffled when it was created."""

    def __init__(self, samples: Any, **others: Any) -> None:
        self._samples = samples
        self.__dict__.update(others)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def mixed(size: int = 20) -> list[int]:
    return random.Random(RANK).sample(range(size), size)


@case
def ranks_with_the_data_in_different_orders_are_an_error() -> None:
    by_rank = torch.Generator().manual_seed(RANK)
    names = [f"{index}.png" for index in mixed()]
    for name, dataset in {
        "list": Shuffled(names),
        "list itself": names,
        "tensor": Shuffled(torch.tensor(mixed())),
        "rows": TensorDataset(torch.arange(80.0).reshape(20, 4)[mixed()]),
        "array": Shuffled(numpy.array(mixed())),
        "split": random_split(range(20), [15, 5], generator=by_rank)[0],
        "own split": Shuffled(mixed()[:15]),
        "joined": ConcatDataset([Shuffled(range(20)), Shuffled(mixed())]),
        "wrapped": Shuffled(Shuffled(mixed())),
        "columns": Shuffled(range(20), columns={"x": mixed(), "y": mixed()}),
        "files": Shuffled(range(60), files=names),
        "length": Shuffled(range(20 + RANK)),
    }.items():
        if SIZE == 1:
            list(accelerator.prepare(DataLoader(dataset, 2)))
            continue
        for options in ({}, {"shuffle": True}):
            with pytest.raises(ConfigurationError, match=r"rank 0.*set_seed.*dispatch"):
                accelerator.prepare(DataLoader(dataset, 2, **options))
            assert name


@case
def attributes_that_may_differ_between_ranks_are_allowed() -> None:
    here = torch.Generator().manual_seed(RANK)
    for name, dataset in {
        "cache": Shuffled(range(20), cache={RANK: 1}, seen=[RANK] * (RANK + 1)),
        "filled": Shuffled(range(20), cache=[i if i < RANK else None for i in range(20)]),
        "path": Shuffled(range(20), folder=f"/tmp/{RANK}", logs=[f"/tmp/{RANK}/log"]),
        "servers": Shuffled(range(20), servers=[f"s{(i + RANK) % 4}" for i in range(4)]),
        "noise": Shuffled(range(20), noise=torch.randn(20, generator=here)),
        "synthetic": TensorDataset(torch.randn(20, 3, generator=here)),
        "tokens": TensorDataset(torch.randint(50000, (20, 8), generator=here)),
        "objects": Shuffled(range(20), things=[object() for _ in range(20)]),
        "generator": Shuffled(range(20), rng=random.Random(RANK), function=lambda: RANK),
    }.items():
        prepared = accelerator.prepare(DataLoader(dataset, 2, shuffle=True))
        assert len(list(prepared)) == -(-10 // SIZE), name


if __name__ == "__main__":
    run_cases()
