"""Draw a custom sampler's order from rank 0's random number generators, on every rank."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accelerate_core.data.order import is_plain
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError

#: Bytes of the message with the states. It has one size, so that it is received whatever a sampler holds.
_MESSAGE = 2**17
_LENGTH = 8
_END: Any = object()
#: The attributes of batch samplers that hold another sampler.
_HOLDERS = ("sampler", "batch_sampler")


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def _get_state(generator: Any) -> Any:
    """Return the state of a generator as values that JSON knows."""
    if isinstance(generator, torch.Generator):
        return base64.b64encode(bytes(generator.get_state().tolist())).decode()
    if hasattr(generator, "getstate"):  # the module `random`, or one of its generators
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8))
    elif hasattr(generator, "setstate"):
        version, keys, following = state
        generator.setstate((version, tuple(keys), following))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _global_generators() -> list[Any]:
    generators: list[Any] = [torch.default_generator, random]
    numpy_random = _numpy_random()
    return generators if numpy_random is None else [*generators, numpy_random.mtrand._rand]


def _generators_of(sampler: Any) -> list[Any]:
    """Return the generators that a sampler, and the samplers inside it, hold in their attributes."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        kinds += (numpy_random.Generator, numpy_random.RandomState)
    held: dict[int, Any] = {}
    samplers = [sampler]
    while samplers:
        attributes = getattr(samplers.pop(), "__dict__", {})
        for name, value in attributes.items():
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                held[id(value)] = value
            elif name in _HOLDERS:
                samplers.append(value)
    shared = {id(generator) for generator in _global_generators()}
    return [generator for key, generator in held.items() if key not in shared]


def _as_json(array: Any) -> Any:
    return {"array": array.tolist(), "dtype": str(array.dtype)}


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() == {"array", "dtype"}:
        import numpy

        return numpy.array(value["array"], dtype=value["dtype"])
    return value


class GlobalStates:
    """States of the global generators, such as those that an order is drawn from."""

    def __init__(self, states: list[Any]) -> None:
        self._states = states

    @classmethod
    def capture(cls) -> GlobalStates:
        """Copy the current states."""
        numpy_random = _numpy_random()
        numpy_state = None if numpy_random is None else numpy_random.get_state()
        return cls([torch.get_rng_state(), random.getstate(), numpy_state])

    def _same(self, other: GlobalStates) -> list[bool]:
        mine, others = self._states[2], other._states[2]
        numpy_same = mine is None or (mine[2:] == others[2:] and bool((mine[1] == others[1]).all()))
        torch_same = torch.equal(self._states[0], other._states[0])
        return [torch_same, self._states[1] == other._states[1], numpy_same]

    def restore(self, skip: Sequence[bool] = (False, False, False)) -> None:
        """Set the global generators, except those to skip."""
        if not skip[0]:
            torch.set_rng_state(self._states[0])
        if not skip[1]:
            random.setstate(self._states[1])
        if not skip[2] and self._states[2] is not None:
            _numpy_random().set_state(self._states[2])

    def next_of(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, drawn from these states, which advance.

        If a global generator is in the same state, it advances too, as it would on one process.
        Otherwise it stays as it is.
        """
        own = GlobalStates.capture()
        same = self._same(own)
        self.restore(same)
        try:
            return next(batches, _END)
        finally:
            self._states = GlobalStates.capture()._states
            own.restore(same)


class SharedDraws:
    """Lets a sampler draw on every rank what it draws on rank 0.

    Args:
        sampler: a sampler or batch sampler whose order only its own code knows.
        comm: all ranks that read in its order; None if this rank reads alone.
    """

    def __init__(self, sampler: Any, comm: Communicator | None) -> None:
        self._sampler = sampler
        self.comm = comm

    def state(self) -> str:
        """Return the states of the generators that the order may be drawn from, except torch's global one."""
        generators = [*_global_generators()[1:], *_generators_of(self._sampler)]
        return json.dumps([_get_state(each) for each in generators], default=_as_json)

    def load_state(self, text: str) -> None:
        """Set the generators to the states that `state` returned."""
        generators = [*_global_generators()[1:], *_generators_of(self._sampler)]
        try:
            states = json.loads(text, object_hook=_from_json)
            for generator, state in zip(generators, states, strict=False):
                _set_state(generator, state)
        except Exception as error:  # generators raise any type for a state that they don't expect
            raise ConfigurationError(
                f"The states of the sampler's generators are damaged: {error}"
            ) from error

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over the sampler's batches; on several ranks, draw them from rank 0's states."""
        if self.comm is None:
            yield from batches
            return
        draws = self._share(self.comm)
        while True:
            batch = draws.next_of(batches)
            if batch is _END:
                return
            yield batch

    def _share(self, comm: Communicator) -> GlobalStates:
        """Copy rank 0's states: to the generators of the sampler, and to the result."""
        generators = [*_global_generators(), *_generators_of(self._sampler)]
        states = [_get_state(each) for each in generators]
        payload = json.dumps(states, default=_as_json).encode()
        if len(payload) + _LENGTH > _MESSAGE:  # many generators; a difference is noticed later
            payload = json.dumps(states[:3], default=_as_json).encode()
        text = len(payload).to_bytes(_LENGTH, "big") + payload
        message = torch.zeros(_MESSAGE, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = comm.broadcast(message.to(comm.device)).cpu().numpy().tobytes()
        if comm.rank == 0:
            return GlobalStates.capture()
        length = int.from_bytes(received[:_LENGTH], "big")
        shared = json.loads(received[_LENGTH : _LENGTH + length], object_hook=_from_json)
        own = GlobalStates.capture()
        for generator, state in zip(generators, shared, strict=False):
            _set_state(generator, state)
        draws = GlobalStates.capture()
        own.restore()
        return draws

    def check(self, order_digest: int | None) -> None:
        """Compare the order of the ranks.

        Raises:
            ConfigurationError: on every rank, if the orders differ.
        """
        if self.comm is None or self.comm.all_equal(order_digest):
            return
        sampler = self._sampler.sampler if is_plain(self._sampler) else self._sampler
        raise ConfigurationError(
            f"{type(sampler).__name__} returns another order on each rank, so some samples would be "
            "read twice and others never. The ranks share the global random generators of torch, "
            "NumPy and random, and the generators in the sampler's attributes; its order depends on "
            "something else, such as a generator that it creates itself, or an attribute that was "
            "shuffled before. Call set_seed(...) before you create the dataset and the sampler, pass the "
            "sampler a seeded generator, or use DataLoaderConfiguration(dispatch_batches=True), with "
            "which rank 0 reads for all. If the sampler already divides the data among the ranks, give "
            "prepare one that doesn't."
        )
