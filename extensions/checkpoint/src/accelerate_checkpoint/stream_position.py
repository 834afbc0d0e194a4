"""Continue an iterable dataset at the position of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_core.plugin import ConfigurationError, is_count

#: What a state consists of: the number of batches, and the states of the dataset, of each worker.
_KEYS = ("counts", "before", "latest")


def resume_stream(
    base: DataLoader[Any], state: dict[str, Any]
) -> tuple[Iterator[Any], dict[str, Any], int]:
    """Open a loader whose dataset has a state, at the start of the round in which it was saved.

    Batches come from the workers in turn, so a round has one batch of each worker.

    Args:
        base: a prepared copy of the script's loader.
        state: `counts`, and the states of the workers' datasets `before` and after (`latest`) their latest
            batch.

    Returns:
        The loader's iterator, the state at which it begins, and how many of its batches were read
        before the state was saved.

    Raises:
        ConfigurationError: the state was saved with another number of workers, or is damaged.
    """
    counts = _checked_counts(state)
    number = max(base.num_workers, 1)
    if len(counts) != number:
        raise ConfigurationError(
            f"The position of an iterable dataset was saved with {len(counts)} reading "
            f"processes and cannot be loaded with {number}, because every worker has its "
            f"own position in the data. Set num_workers to its value when the position was saved."
        )
    # A worker without data keeps its count; the rounds continue without it.
    rounds = max(counts)
    seen = [count == rounds for count in counts]
    if all(seen):  # the round is complete
        seen = [False] * len(counts)
    # A worker whose batch of this round was read returns to its state before that batch.
    pairs = zip(state["before"], state["latest"], seen, strict=True)
    states = [before if is_seen else latest for before, latest, is_seen in pairs]
    resumed = {
        "counts": [count - is_seen for count, is_seen in zip(counts, seen, strict=True)],
        "latest": list(states),
        "before": states,
    }
    return _open(base, states), resumed, sum(seen)


def _checked_counts(state: Any) -> list[int]:
    """Return the counts of a state, after checking its form."""
    lists: list[Any] = [state.get(name) for name in _KEYS] if isinstance(state, dict) else []
    is_valid = (
        all(isinstance(values, list) for values in lists)
        and len({len(values) for values in lists}) == 1
        and all(is_count(count) for count in lists[0])
    )
    if not is_valid:
        raise ConfigurationError(
            f"The position of an iterable dataset is damaged: it must have the lists {', '.join(_KEYS)}, "
            "each with one value per reading process."
        )
    counts: list[int] = lists[0]
    return counts


def _open(base: Any, states: list[Any]) -> Iterator[Any]:
    if not base.num_workers:
        if states[0] is not None:
            base.dataset.load_state_dict(copy.deepcopy(states[0]))
        return iter(base)
    base.__dict__["_iterator"] = None  # persistent workers would not run worker_init_fn again
    init = base.worker_init_fn
    base.worker_init_fn = _Restoring(states, init)
    try:
        return iter(base)
    finally:
        base.worker_init_fn = init


@dataclass
class _Restoring:
    """Calls the user's `worker_init_fn`, then restores the state of the worker's dataset."""

    states: list[Any]
    init: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        info: Any = torch.utils.data.get_worker_info()
        state = self.states[worker_id]
        if info is not None and state is not None:
            info.dataset.load_state_dict(state)
