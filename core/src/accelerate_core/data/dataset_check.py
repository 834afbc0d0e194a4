"""Notice that ranks which read by index hold their samples in different orders.

Attributes that differ between ranks are common (caches, paths, noise, synthetic data), so a difference
alone proves nothing. It is an error if the same entries are in another order, if the ranks chose different
samples of a larger set, or if the numbers of samples differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from accelerate_core.data.fingerprint import digest_of
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError

#: Limits on what is looked at: objects, entries of a container without a difference, and with one.
_OBJECTS = 64
_ENTRIES = 64
_ALL_ENTRIES = 2**20
#: A container of so few entries may hold other objects; an order of fewer may be that of a few servers.
_FEW = 16
#: How many of the smallest hashes are exchanged, and which part of them shows a common origin.
_SKETCH = 512
_OVERLAP = 0.05


@dataclass
class _Summary:
    """The entries of a container, for comparing two ranks.

    Attributes:
        ordered: a digest of the entries in their order.
        unordered: a digest that doesn't depend on the order.
        distinct: whether no two entries are equal.
        smallest: the smallest hashes of entries.
    """

    length: int
    ordered: int
    unordered: int
    distinct: bool
    smallest: set[int]

    @classmethod
    def of_values(cls, values: Any) -> _Summary:
        length, ordered, unordered, distinct, smallest = values
        return cls(length, ordered, unordered, distinct, set(smallest))

    def values(self) -> tuple[Any, ...]:
        return self.length, self.ordered, self.unordered, self.distinct, sorted(self.smallest)


def check_same_data(dataset: Any, comm: Communicator) -> None:
    """Compare the data of ranks that read by index. All ranks must call this.

    Raises:
        ConfigurationError: on every rank, if the ranks hold other samples, or in another order.
    """
    containers = dict(_containers(dataset))
    length = None if isinstance(dataset, IterableDataset) else _length(dataset)
    shown = [(path, len(each), _some_entries(each)) for path, each in containers.items()]
    if comm.all_equal((length, shown)):
        return
    own = {
        path: _summary(each).values()
        for path, each in containers.items()
        if len(each) <= _ALL_ENTRIES
    }
    ranks = comm.gather_object((length, own))
    for rank, (other_length, others) in enumerate(ranks):
        first_length, first = ranks[0]
        evidence = _evidence(first_length, first, other_length, others)
        if evidence:
            raise ConfigurationError(
                f"Rank {rank} holds other data than rank 0: {evidence}. Each rank reads its part of "
                f"{type(dataset).__name__} by index, so some samples would be read twice and others "
                "never. Call set_seed(...) before you create, shuffle or split the dataset, pass a "
                "seeded generator to random_split, or use "
                "DataLoaderConfiguration(dispatch_batches=True), with which rank 0 reads for all."
            )


def _evidence(length: Any, first: dict[str, Any], other_length: Any, others: dict[str, Any]) -> str:
    if length != other_length:
        return f"its dataset has {other_length} samples instead of {length}"
    for path in first.keys() & others.keys():
        one = _Summary.of_values(first[path])
        other = _Summary.of_values(others[path])
        if one.ordered == other.ordered:
            continue
        chosen = path.endswith(_CHOSEN)
        samples = one.length == other.length == length
        if one.unordered == other.unordered and (samples or chosen or one.length >= _FEW):
            return f"{path} has the same entries in another order"
        common = len(one.smallest & other.smallest) / max(len(one.smallest | other.smallest), 1)
        split = samples and one.distinct and other.distinct and common >= _OVERLAP
        if chosen or split:
            return f"{path} has other entries of the same data"
    return ""


#: The end of the path of indices into another dataset.
_CHOSEN = " (of a Subset)"


def _containers(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the ordinary containers in a dataset and in the objects that it holds, with their paths."""
    waiting = [("dataset", dataset)]
    seen: set[int] = set()
    while waiting and len(seen) < _OBJECTS:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_container(value):
            yield path, value
            if isinstance(value, (list, tuple)) and len(value) <= _FEW:
                waiting += [(f"{path}[{i}]", each) for i, each in enumerate(value) if _holds(each)]
        elif isinstance(value, dict):
            if len(value) <= _FEW:
                waiting += [(f"{path}[{key!r}]", value[key]) for key in sorted(value, key=repr)]
        elif isinstance(value, Subset):
            yield f"{path}.indices{_CHOSEN}", list(value.indices)
            waiting.append((f"{path}.dataset", value.dataset))
        elif _holds(value):
            attributes = getattr(value, "__dict__", {})
            waiting += [(f"{path}.{name}", each) for name, each in sorted(attributes.items())]


def _is_container(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.device.type == "cpu" and value.ndim > 0
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    return _is_frame(value) or _is_array(value)


def _is_array(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "numpy" and len(getattr(value, "shape", ())) > 0


def _is_frame(value: Any) -> bool:
    """Return whether a value is a table of pandas."""
    return type(value).__module__.startswith("pandas.") and hasattr(value, "iloc")


def _holds(value: Any) -> bool:
    """Return whether a value may hold samples."""
    if isinstance(value, (str, bytes, type)):
        return False
    return isinstance(value, (Dataset, dict)) or _is_container(value) or _reads_by_index(value)


def _reads_by_index(value: Any) -> bool:
    return all(hasattr(type(value), name) for name in ("__getitem__", "__len__"))


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _entry(container: Any, index: int) -> Any:
    entry = container.iloc[index] if _is_frame(container) else container[index]
    return _as_plain(entry)


def _as_plain(value: Any, depth: int = 0) -> Any:
    """Return values whose `repr` is the same on every rank; of other objects, only the class."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, Path)):
        return value
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.device.type != "cpu":
            return type(value).__name__
        return list(value.shape), value.detach().reshape(-1)[:_ENTRIES].tolist()
    if hasattr(value, "tolist"):
        flat = value.reshape(-1)[:_ENTRIES] if hasattr(value, "reshape") else value
        return flat.tolist()
    if isinstance(value, (list, tuple)) and depth < 3:
        return [_as_plain(each, depth + 1) for each in value[:_ENTRIES]]
    if isinstance(value, dict) and depth < 3:
        return [(repr(key), _as_plain(value[key], depth + 1)) for key in list(value)[:_ENTRIES]]
    return type(value).__name__


def _some_entries(container: Any) -> list[Any]:
    size = len(container)
    spread = range(0, size, max(size // _ENTRIES, 1))
    indices = dict.fromkeys([*range(min(size, _ENTRIES)), *spread])
    return [_entry(container, index) for index in indices]


def _summary(container: Any) -> _Summary:
    hashes = [digest_of(_entry(container, index)) for index in range(len(container))]
    different = set(hashes)
    return _Summary(
        len(hashes),
        digest_of(hashes),
        sum(hashes) % 2**61,
        len(different) == len(hashes),
        set(sorted(different)[:_SKETCH]),
    )
