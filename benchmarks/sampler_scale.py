"""Time to find a rank's batch of indices for growing numbers of processes, and to skip batches.

No processes are started. The script only creates the sampler of one rank. Every rank has 100 batches of 8,
so the dataset grows with the number of processes. The first batch of an epoch, which includes drawing the
permutation of the whole dataset, is timed separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from harness import OURS, PEER, RAW, Limit, Result, arguments, measure, save, show
from rich.console import Console
from rich.table import Table
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

WORLDS = (8, 64, 512, 1024, 8192)
OWN = 100
BATCH = 8
SKIPPED = 190_000
Shard = Callable[[range, int, bool], Any]


def ours(data: range, world: int, shuffle: bool) -> Any:
    from accelerate_core.data.shard import BatchSamplerShard

    return BatchSamplerShard(plain(data, shuffle), world, world // 2)


def peer(data: range, world: int, shuffle: bool) -> Any:
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(plain(data, shuffle), world, world // 2)


def raw(data: range, world: int, shuffle: bool) -> Any:
    return BatchSampler(DistributedSampler(data, world, world // 2, shuffle), BATCH, False)


def plain(data: range, shuffle: bool) -> BatchSampler:
    return BatchSampler(RandomSampler(data) if shuffle else SequentialSampler(data), BATCH, False)


def first_and_rest(shard: Shard, world: int, shuffle: bool) -> tuple[float, float]:
    """Return the seconds for the first batch of the rank, and for each of the others."""
    batches = iter(shard(range(world * OWN * BATCH), world, shuffle))
    start = time.perf_counter()
    next(batches)
    middle = time.perf_counter()
    for _ in range(OWN - 2):  # stops before the end, where the permutation is freed
        next(batches)
    return middle - start, (time.perf_counter() - middle) / (OWN - 2)


class Numbers(Dataset):
    def __len__(self) -> int:
        return SKIPPED + 10_000

    def __getitem__(self, index: int) -> int:
        return index


def skipping(skip: Callable[..., Any]) -> Callable[[], int]:
    loader = DataLoader(Numbers(), batch_size=1)

    def work() -> int:
        assert int(next(iter(skip(loader, SKIPPED)))) == SKIPPED
        return 1

    return work


def by_hand(loader: DataLoader, count: int) -> DataLoader:
    indices = list(loader.batch_sampler)[count:]
    return DataLoader(loader.dataset, batch_sampler=indices)


def main() -> None:
    options = arguments(__doc__, rounds=5)
    shards: dict[str, Shard] = {RAW: raw, OURS: ours}
    skips: dict[str, Any] = {RAW: skipping(by_hand)}
    from accelerate_core.data.prepare_loader import skip_first_batches

    skips[OURS] = skipping(skip_first_batches)
    try:
        from accelerate import skip_first_batches as peer_skips

        shards[PEER] = peer
        skips[PEER] = skipping(peer_skips)
    except ImportError:
        pass
    results = []
    for shuffle in (False, True):
        kind = "shuffled" if shuffle else "in order"
        for world in WORLDS:
            result = Result(f"own batch {kind}, {world} processes", "batch", OURS)
            first = Result(f"first batch {kind}, {world} processes", "epoch", OURS)
            for number in range(options.rounds + 1):
                for name, shard in shards.items():
                    begin, each = first_and_rest(shard, world, shuffle)
                    if number:
                        first.rounds.setdefault(name, []).append(begin * 1e6)
                        result.rounds.setdefault(name, []).append(each * 1e6)
            results += [result, first]
    table = Table(title=f"One rank's batch of {BATCH} indices, µs (first batch listed separately)")
    table.add_column("processes", justify="right")
    for name in shards:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.title,
            *(f"{result.median(name):.1f}" for name in shards if name in result.rounds),
        )
    Console().print(table)
    for kind in ("in order", "shuffled"):
        own = [r for r in results if r.title.startswith(f"own batch {kind}")]
        ratio = own[-1].median(OURS) / own[0].median(OURS)
        Console().print(
            f"  ours, {kind}: {WORLDS[0]} -> {WORLDS[-1]} processes x {ratio:.2f} (limit 3)"
        )
    skip = Result(f"first batch after skipping {SKIPPED:,}", "call", RAW)
    skip.rounds = measure(skips, options.rounds)
    skip.limits = [Limit(PEER, 1.0)]
    show(skip)
    Console().print(f"  ours: {skip.median(OURS) / 1e3:.2f} ms (limit 50 ms)")
    save("sampler_scale", [*results, skip], options.out)


if __name__ == "__main__":
    main()
