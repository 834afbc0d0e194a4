"""Samplers: seeded by epoch, and the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from typing import Any, ClassVar

import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["SeedableRandomSampler", "SharedOrderSampler", "Wrapper", "draws_from_torch"]


class Wrapper:
    """Stands in the place of another object, and asks it for what it does not know itself.

    `own_names`: the attribute that holds the other object, then those it is not asked for.
    """

    own_names: ClassVar[tuple[str, ...]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.own_names:
            raise AttributeError(name)
        return getattr(getattr(self, self.own_names[0]), name)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of seed and epoch only.

    Args:
        data_source, replacement, num_samples: as for `torch.utils.data.RandomSampler`.
        generator: the generator to use; it is seeded anew at the start of every iteration.
        data_seed: the seed, `torch.initial_seed()` by default. Epoch `e` uses `data_seed + e`.

        sampler.set_epoch(3)  # the order of epoch 3, whatever was iterated before
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.initial_seed = torch.initial_seed() if data_seed is None else int(data_seed)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.seed_epoch()
        yield from super().__iter__()

    def seed_epoch(self) -> None:
        """Seed the generator for the epoch that was chosen."""
        self.generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration gives."""
        self.epoch = epoch


def draws_from_torch(sampler: Any) -> bool:
    """Say whether a sampler of torch's own takes its order from the global generator."""
    kinds = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return (
        isinstance(sampler, kinds)
        and getattr(sampler, "generator", None) is None
        and any(type(sampler).__iter__ is kind.__iter__ for kind in kinds)
    )


class SharedOrderSampler(Wrapper, Sampler[int]):
    """A sampler of torch's own that gives rank 0's order on every rank.

    Rank 0 draws exactly as the sampler alone would; the other ranks draw as much from their own
    global generator, so that streams that were aligned stay so, and then use rank 0's draw.

    Args:
        base: a sampler without a generator, for which `draws_from_torch` is true.
        share: takes a 1-d tensor, returns rank 0's.
    """

    own_names = ("base",)

    def __init__(self, base: Any, share: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.base = base
        self.share = share

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn()

    def drawn(self) -> Any:
        """Return a copy of the sampler with a generator that is in the same state on all ranks."""
        generator = torch.Generator()
        if type(self.base).__iter__ is RandomSampler.__iter__:
            seed = torch.empty((), dtype=torch.int64).random_()
            generator.manual_seed(int(self.share(seed.reshape(1)).item()))
        else:
            # These use the global generator itself: share its state, then let it move on.
            state = torch.get_rng_state()
            next(iter(self.base), None)
            generator.set_state(self.share(state))
        sampler = copy.copy(self.base)
        sampler.generator = generator
        return sampler
