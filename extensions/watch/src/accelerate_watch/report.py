"""Compose the report: which collective is stuck, which ranks are missing there, and where they are."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_watch.flight_recorder import Collective

#: Why a rank requests a report before it is aborted.
ABORTS = "a C++ exception is about to abort the process"

#: Operations in which every rank passes tensors of the same shapes and types.
_SAME_INPUTS = (
    "all_reduce",
    "all_gather",
    "_all_gather_base",
    "allgather_base",
    "all_gather_into_tensor",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "broadcast",
)


@dataclass
class RankState:
    """What one rank answered, or what another process found out about it.

    Attributes:
        step: steps of its optimizers.
        why: why this rank requested the report; "" if it did not.
        silent: why it did not answer; "" if it did.
        seen: seconds since its last sign of life, if it did not answer.
        groups: the ranks of each of its process groups.
        collectives: its last collectives, oldest first.
        stack: lines of the stack of its main thread, the most recent call last.
    """

    rank: int
    host: str = ""
    pid: int = 0
    step: int = 0
    why: str = ""
    silent: str = ""
    seen: float = 0.0
    groups: dict[str, list[int]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankState:
        """Read what `dataclasses.asdict` wrote."""
        entered = [Collective(**one) for one in values.get("collectives", ())]
        return cls(**{**values, "collectives": entered})

    def at(self, group: str, number: int) -> Collective | None:
        """Return the collective of this number, None if it is not recorded."""
        found = (one for one in self.collectives if one.group == group and one.number == number)
        return next((one for one in found if not one.p2p), None)

    def last(self, group: str) -> Collective | None:
        """Return the collective of a group that the rank entered last."""
        found = [one for one in self.collectives if one.group == group and not one.p2p]
        return max(found, key=lambda one: one.number, default=None)


@dataclass
class Blocked:
    """The oldest collective of a group that has not completed."""

    group: str
    number: int
    #: The ranks that have entered it.
    arrived: dict[int, Collective | None]
    missing: list[int]
    entered: float

    #: Whether the ranks call different operations, or pass different tensors.
    differing: bool


def _spelled(one: Collective) -> str:
    tensors = [
        f"{dtype} {size}" for dtype, size in zip(one.dtypes[:3], one.sizes[:3], strict=False)
    ]
    more = f" and {len(one.sizes) - 3} more" if len(one.sizes) > 3 else ""
    return f"{one.operation}({', '.join(tensors)}{more})" if tensors else one.operation


def _differs(entries: Iterable[Collective | None], aborts: bool) -> bool:
    """Return whether ranks disagree about one collective.

    Args:
        entries: the collective on each rank.
        aborts: whether the library reported different sizes, which some operations allow.
    """
    known = [one for one in entries if one is not None]
    exact = aborts or all(one.operation in _SAME_INPUTS for one in known)
    return len({_spelled(one) if exact else one.operation for one in known}) > 1


def find_blocked(states: Mapping[int, RankState]) -> list[Blocked]:
    """Return the oldest incomplete collective of each group, the one that waits longest first."""
    pending: dict[str, Collective] = {}
    members: dict[str, set[int]] = {}
    for state in states.values():
        for group, ranks in state.groups.items():
            members.setdefault(group, set()).update(ranks)
        for one in state.collectives:
            if one.pending and not one.p2p:
                oldest = pending.setdefault(one.group, one)
                if one.number < oldest.number:
                    pending[one.group] = one
    aborts = any(state.why == ABORTS for state in states.values())
    found = []
    for group, oldest in pending.items():
        number = oldest.number
        lasts = {rank: state.last(group) for rank, state in states.items()}
        arrived = {
            rank: states[rank].at(group, number)
            for rank, last in lasts.items()
            if last is not None and last.number >= number
        }
        times = [one.entered for one in arrived.values() if one is not None]
        missing = sorted(members.get(group, set(states)) - arrived.keys())
        begun = min(times, default=oldest.entered)
        differs = _differs(arrived.values(), aborts)
        found.append(Blocked(group, number, arrived, missing, begun, differs))
    return sorted(found, key=lambda one: one.entered)


def compose(states: Mapping[int, RankState], ranks: int, timeout: float | None) -> str:
    """Return the report.

    Args:
        states: the state of each rank.
        ranks: the number of ranks.
        timeout: seconds after which the process group ends the run; None for torch's default.
    """
    blocked = find_blocked(states)
    absent = [rank for rank in range(ranks) if rank not in states]
    lines = [_headline(states, blocked, timeout)]
    for one in blocked:
        lines += _describe(one, states)
    if absent:
        lines.append(
            f"  No answer from {name_ranks(absent)}, and none about it from its machine: the machine or "
            "its network may be down."
        )
    first = {rank for one in blocked for rank in one.missing}
    first |= {rank for rank, state in states.items() if state.silent}
    if any(one.differing for one in blocked) or not first:
        first = set(states)
    lines += _places(states, sorted(first & states.keys()))
    lines += _places(states, sorted(states.keys() - first))
    return "\n".join([*lines, ""])


def _headline(
    states: Mapping[int, RankState], blocked: Sequence[Blocked], timeout: float | None
) -> str:
    reasons = {state.why: rank for rank, state in sorted(states.items(), reverse=True) if state.why}
    said = "; ".join(f"{why} (rank {rank})" for why, rank in reasons.items())
    limit = ""
    if timeout is not None and blocked:
        left = timeout - (time.time() - blocked[0].entered)
        limit = f" The process group's timeout ends the run in about {max(0.0, left):.0f} s."
    return f"accelerate-watch: {said or 'a report was requested'}.{limit}"


def _describe(one: Blocked, states: Mapping[int, RankState]) -> list[str]:
    known = [entry for entry in one.arrived.values() if entry is not None]
    purpose = next((f" ({entry.description})" for entry in known if entry.description), "")
    waited = time.time() - one.entered
    where = f"collective #{one.number} of group {one.group}{purpose}"
    lines = [f"  Stuck for {waited:.0f} s in {where}:"]
    if one.differing:
        lines[0] = f"  The ranks call different collectives, or pass different tensors, in {where}:"
    calls: dict[str, list[int]] = {}
    for rank, entry in sorted(one.arrived.items()):
        calls.setdefault(_spelled(entry) if entry else "it has completed there", []).append(rank)
    for call, ranks in calls.items():
        lines.append(f"    {call}: {name_ranks(ranks)}")
    if one.differing:
        lines.append(
            "    A rank leaves the common order if it takes another branch, or catches an exception in the "
            "middle of a step."
        )
    for rank in one.missing:
        lines.append(f"    not there: rank {rank}{_whereabouts(states.get(rank), one.group)}")
    return lines


def _whereabouts(state: RankState | None, group: str) -> str:
    if state is None:
        return ""
    if state.silent:
        return f", which {state.silent}"
    last = state.last(group)
    done = (
        f", whose last one is #{last.number}, {_spelled(last)}" if last else ", which entered none"
    )
    elsewhere = [one for one in state.collectives if one.pending and one.group != group]
    if elsewhere:
        done += f"; it waits in {_spelled(elsewhere[0])} of group {elsewhere[0].group}"
    return done


def _places(states: Mapping[int, RankState], chosen: Collection[int]) -> list[str]:
    """Return each distinct stack once, with the ranks that have it."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in chosen:
        state = states[rank]
        key = (str(state.step), state.silent, *state.stack)
        alike.setdefault(key, []).append(rank)
    lines = []
    for ranks in alike.values():
        state = states[ranks[0]]
        silent = f" It {state.silent}." if state.silent else ""
        step = f"step {state.step}"
        if state.silent:
            step = f"last seen {state.seen:.0f} s ago at step {state.step} or later"
        who = f"{name_ranks(ranks)}, {step}"
        where = f" (process {state.pid} on {state.host})" if len(ranks) == 1 else ""
        ends = ":" if state.stack else "."
        lines += [f"  {who}{where}{ends}{silent}".replace("rank", "Rank", 1), *state.stack]
    return [line if line.startswith("  R") else f"  {line}" for line in lines]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-3, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [
        str(p[0]) if len(p) == 1 else f"{p[0]}{'-' if len(p) > 2 else ', '}{p[-1]}" for p in parts
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
