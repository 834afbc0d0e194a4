"""Random number generators that ranks share, and what workers are seeded with."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate_core.data.order import SeedableRandomSampler, order_sampler
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError, did_you_mean, listing

#: Device type -> object with `is_available`, `get_rng_state` and `set_rng_state` (with CPU tensors), for
#: devices without a torch module. Backends can add entries.
GENERATORS: dict[str, Any] = {}
_NAMED = ("torch", "generator")


def _generator_of(device_type: str) -> Any:
    return GENERATORS.get(device_type) or getattr(torch, device_type, None)


def share_from_main(comm: Communicator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that takes a 1-d CPU tensor and returns rank 0's, on the CPU."""

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return comm.broadcast(tensor.clone().to(comm.device)).cpu()

    return share


def check_rng_types(rng_types: Iterable[Any] | None) -> list[str]:
    """Return the names of the generators to synchronise, `["generator"]` for None.

    Raises:
        ConfigurationError: a name is neither "torch", "generator" nor a device type.
    """
    if rng_types is None or isinstance(rng_types, str):
        rng_types = ["generator" if rng_types is None else rng_types]
    names = [str(getattr(kind, "value", kind)) for kind in rng_types]
    for name in names:
        if name not in _NAMED and not hasattr(_generator_of(name), "set_rng_state"):
            known = [*_NAMED, "cuda", "xpu", "mps", *GENERATORS]
            raise ConfigurationError(
                f"rng_types: {name!r} is no random number generator here. Allowed are "
                f"{listing(known)}.{did_you_mean(name, known)}"
            )
    return names


def find_generator(loader: Any) -> torch.Generator | None:
    """Return the generator that decides a loader's order, if the user gave one."""
    sampler = order_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return None
    dataset = getattr(loader, "dataset", None)
    owners: list[Any] = [sampler, getattr(loader, "batch_sampler", None)]
    if isinstance(dataset, IterableDataset):
        owners = [dataset]
    found = (getattr(owner, "generator", None) for owner in owners)
    return next((each for each in found if isinstance(each, torch.Generator)), None)


def synchronize_rng_states(
    rng_types: Iterable[Any] | None, generator: torch.Generator | None, comm: Communicator
) -> None:
    """Give every rank the states of rank 0's generators; a device that is absent is left out."""
    if comm.size == 1:
        return
    share = share_from_main(comm)
    for name in check_rng_types(rng_types):
        if name == "torch":
            torch.set_rng_state(share(torch.get_rng_state()))
        elif name == "generator":
            if generator is not None:
                generator.set_state(share(generator.get_state().cpu()))
        else:
            device = _generator_of(name)
            if device.is_available():
                device.set_rng_state(share(device.get_rng_state().cpu()))


@dataclass
class RankedWorkerInit:
    """Seed a loader's workers differently on every rank, then do what the user asked.

    `offset` is what is added to the seeds PyTorch gives. Ranks that share a generator would
    otherwise seed their workers alike and augment alike. Rank 0 keeps its seeds.
    """

    offset: int
    init: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        if info is not None:
            seed = info.seed + self.offset
            object.__setattr__(info, "seed", seed)  # torch forbids it the ordinary way
            torch.manual_seed(seed)
            random.seed(seed)
            numpy: Any = sys.modules.get("numpy")  # torch has seeded it where there is one
            if numpy is not None:
                numpy.random.seed(numpy.random.SeedSequence(seed).generate_state(4))
        if self.init is not None:
            self.init(worker_id)
