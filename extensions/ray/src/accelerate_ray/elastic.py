"""How many ranks of an elastic run a cluster has room for, and whether a node has joined."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from accelerate_ray.cluster import has_room
from accelerate_ray.options import RunOptions

#: Seconds in which Ray reserves resources that are free.
_AT_ONCE = 2.0


def sizes_of(options: RunOptions, full: int) -> list[int]:
    """Return the numbers of ranks with which a run may continue, from the smallest to the largest."""
    return [full] if options.least is None else list(range(options.least, full + 1, options.share))


def choose_size(options: RunOptions, bundle: Mapping[str, float], sizes: Sequence[int]) -> int:
    """Return the largest number of ranks that the cluster has room for.

    All of them have `join_wait` seconds to find room. If there is room for none of the sizes, this returns
    the smallest, for which the caller waits.
    """
    strategy = options.settings.strategy
    if len(sizes) == 1 or has_room(bundle, sizes[-1], strategy, options.settings.join_wait):
        return sizes[-1]
    fits, too_large = 0, len(sizes) - 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if has_room(bundle, sizes[middle], strategy, _AT_ONCE):
            fits = middle
        else:
            too_large = middle
    sys.stderr.write(f"Starting {sizes[fits]} of {sizes[-1]} ranks, because no more have room.\n")
    sys.stderr.flush()
    return sizes[fits]


class Joining:
    """Notices when a new node has room for more ranks.

    Resources that become free on old nodes don't count. Other jobs would take and return them all the
    time, and each change restarts the run.
    """

    def __init__(self, bundle: Mapping[str, float], more: int, strategy: str) -> None:
        self._asked = [dict(bundle)] * more
        self._strategy = strategy.upper()
        self._known = _living()
        self._group: PlacementGroup | None = None

    def has_joined(self) -> bool:
        """Return whether a node has joined, and resources for more ranks are free."""
        if self._group is None:
            if _living() <= self._known:
                return False
            self._group = placement_group(self._asked, strategy=self._strategy)
        return bool(self._group.wait(timeout_seconds=0))

    def close(self) -> None:
        """Release the resources."""
        if self._group is not None:
            remove_placement_group(self._group)


def _living() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
