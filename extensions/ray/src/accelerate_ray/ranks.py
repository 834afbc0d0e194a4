"""Number the ranks by node, and let those of a node see each other's accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_ray.rank_actor import Ending, Place


@dataclass
class Rank:
    """One rank of an attempt."""

    number: int
    local_rank: int
    actor: Any
    place: Place
    ending: Ending | None = None
    #: For how many seconds its actor has not been reachable.
    unanswered: float = 0.0


def number_ranks(actors: Sequence[Any], places: Sequence[Place], here: str) -> list[Rank]:
    """Number the ranks so that those of one node follow each other, beginning with the node `here`."""
    nodes = list(dict.fromkeys(place.node for place in places))
    nodes.sort(key=lambda node: node != here)
    ranks: list[Rank] = []
    for node in nodes:
        on_node = [pair for pair in zip(actors, places, strict=True) if pair[1].node == node]
        for local_rank, (actor, place) in enumerate(on_node):
            ranks.append(Rank(len(ranks), local_rank, actor, place))
    return ranks


def shared_devices(ranks: Sequence[Rank]) -> dict[str, dict[str, str]]:
    """Return variables for each node that show the accelerators of all its ranks to each of them.

    Ray shows each actor only its own accelerator. A rank uses the accelerator with its local rank as
    index, and NCCL connects ranks of one node directly if they see each other's.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for rank in ranks:
        of_node = found.setdefault(rank.place.node, {})
        for name, text in rank.place.devices.items():
            of_node.setdefault(name, []).extend(text.split(","))
    return {
        node: {name: ",".join(dict.fromkeys(ids)) for name, ids in of_node.items()}
        for node, of_node in found.items()
    }
