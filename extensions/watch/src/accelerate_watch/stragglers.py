"""Find ranks whose own work takes longer than that of the others.

All ranks of a synchronous run take equally long per step, because the fast ones wait for the slow
ones in collectives. The flight recorder knows when each rank entered each collective. From the moment
the last rank entered a collective until a rank enters the next one, that rank works; then it waits.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence

from accelerate_watch import flight_recorder

#: A rank is compared over at least this many collectives.
_LEAST = 4
#: A rank sends at most this many. With thousands of ranks, rank 0 reads them all.
_MOST = 64
#: Ranks for each second between two comparisons on rank 0.
_RANKS_PER_SECOND = 20
#: Ranks whose work per step differs by less than this many seconds are not reported.
_SMALLEST = 0.01


class Stragglers:
    """Collects when this rank entered its collectives, and compares the ranks on rank 0.

    Args:
        factor: report a rank whose work takes this many times the median.
        interval: seconds between two comparisons. Thousands of ranks are compared less often.
        ranks: the number of ranks.
    """

    def __init__(self, factor: float, interval: float, ranks: int) -> None:
        self._factor = factor
        self._interval = max(interval, ranks / _RANKS_PER_SECOND)
        self._last = 0.0
        self._last_step = 0
        self._places: Counter[str] = Counter()
        #: Ranks that were reported, which are not reported again while they stay slow.
        self._reported: set[int] = set()

    def sample(self, place: str) -> None:
        """Note where the main thread is while it does not wait for others."""
        if place:
            self._places[place] += 1

    def due(self, now: float, step: int) -> str | None:
        """Return this rank's times, as text for the store; None if an interval has not passed."""
        if not self._last:
            self._last, self._last_step = now, step
        if now - self._last < self._interval:
            return None
        steps = step - self._last_step
        seconds = now - self._last
        self._last, self._last_step = now, step
        default = [one for one in flight_recorder.collectives() if one.group == "0" and not one.p2p]
        entered = {one.number: one.entered for one in default[-_MOST:]}
        places = self._places.most_common(1)
        self._places = Counter()
        place = places[0][0] if places else ""
        return json.dumps({"entered": entered, "step": seconds / max(1, steps), "place": place})

    def describe(self, published: Sequence[bytes]) -> list[str]:
        """Return one line for each rank that has become slow.

        Args:
            published: what `due` returned on each rank.
        """
        ranks = [json.loads(one) for one in published]
        work = shares_of_work([{int(n): t for n, t in r["entered"].items()} for r in ranks])
        step = ranks[0]["step"]
        lines = []
        slow = set()
        for rank, share in enumerate(work):
            median = statistics.median(work[:rank] + work[rank + 1 :])
            if share <= self._factor * median or (share - median) * step < _SMALLEST:
                continue
            slow.add(rank)
            if rank not in self._reported:
                place = ranks[rank]["place"]
                lines.append(
                    f"accelerate-watch: rank {rank} is slow. Its own work takes {share * step:.3g} s of "
                    f"each step of {step:.3g} s, that of the other ranks {median * step:.3g} s (median), "
                    f"and they wait for it.{f' It is mostly at {place}.' if place else ''}\n"
                )
        self._reported = slow
        return lines


def shares_of_work(entered: Sequence[dict[int, float]]) -> list[float]:
    """Return the share of time in which each rank works and does not wait; [] if too little is known.

    Args:
        entered: for each rank, the number of a collective -> when the rank entered it.
    """
    common = sorted(set.intersection(*(set(one) for one in entered))) if entered else []
    if len(common) < _LEAST:
        return []
    ends = [max(one[number] for one in entered) for number in common]
    whole = ends[-1] - ends[0]
    if whole <= 0:
        return []
    return [
        sum(max(0.0, one[number] - end) for number, end in zip(common[1:], ends[:-1], strict=True))
        / whole
        for one in entered
    ]
