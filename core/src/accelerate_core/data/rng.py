"""Synchronise random number generators between ranks, and seed the workers of loaders."""

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
from accelerate_core.plugins.discovery import installed

#: Device type -> object with `is_available`, `get_rng_state` and `set_rng_state` (with CPU tensors), for
#: devices without a torch module. Backends can add entries.
GENERATORS: dict[str, Any] = {}
_NAMED = ("torch", "generator")


def _generator_of(device_type: str) -> Any:
    return GENERATORS.get(device_type) or getattr(torch, device_type, None)


def share_from_main(comm: Communicator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that broadcasts rank 0's 1-d CPU tensor to all ranks."""

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return comm.broadcast(tensor.clone().to(comm.device)).cpu()

    return share


def check_rng_types(rng_types: Iterable[Any] | None) -> list[str]:
    """Return the names of the generators to synchronise; `["generator"]` for None.

    Raises:
        ConfigurationError: a name is not "torch", "generator" or a device type.
    """
    if rng_types is None or isinstance(rng_types, str):
        rng_types = ["generator" if rng_types is None else rng_types]
    names = [str(getattr(kind, "value", kind)) for kind in rng_types]
    for name in names:
        if name not in _NAMED and not hasattr(_generator_of(name), "set_rng_state"):
            devices = [record.name for record in installed().of_kind("device")]
            known = [*_NAMED, *dict.fromkeys([*devices, *GENERATORS])]
            raise ConfigurationError(
                f"rng_types contains {name!r}, which is not a random number generator. Allowed values "
                f"are {listing(known)}.{did_you_mean(name, known)}"
            )
    return names


def find_generator(loader: Any) -> torch.Generator | None:
    """Return the generator that the user passed for the order of a loader, or None."""
    sampler = order_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return None
    dataset = getattr(loader, "dataset", None)
    of_order = [sampler, getattr(loader, "batch_sampler", None)]
    owners = [dataset] if isinstance(dataset, IterableDataset) else of_order
    found = (getattr(owner, "generator", None) for owner in owners)
    return next((each for each in found if isinstance(each, torch.Generator)), None)


def synchronize_rng_states(
    rng_types: Iterable[Any] | None, generator: torch.Generator | None, comm: Communicator
) -> None:
    """Copy the states of rank 0's generators to every rank; devices that are not available are skipped."""
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
    """Seeds a loader's workers differently on every rank, then calls the user's function.

    Ranks that share a generator would otherwise give their workers equal seeds, and so equal augmentations.

    Args:
        offset: added to the seeds that PyTorch chooses; 0 on rank 0.
        init: the user's `worker_init_fn`.
    """

    offset: int
    init: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        if info is not None:
            seed = info.seed + self.offset
            object.__setattr__(info, "seed", seed)  # torch forbids ordinary assignment
            torch.manual_seed(seed)
            random.seed(seed)
            numpy: Any = sys.modules.get("numpy")  # torch has seeded it if it is imported
            if numpy is not None:
                numpy.random.seed(numpy.random.SeedSequence(seed).generate_state(4))
        if self.init is not None:
            self.init(worker_id)
