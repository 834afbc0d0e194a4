"""Time, messages and bytes of one rank, as the number of ranks grows to thousands.

    python benchmarks/scale.py [--worlds 8 64 512] [--out benchmarks/results] [--json]

One process plays one rank of a large run, in turn the first and another one. The process group is torch's
fake one, in which all ranks send what this rank sends. The store counts messages and bytes, and acts as if
all other ranks had done before what this rank does. So the figures show the work of our code and torch's on
one rank, and not the time that messages take on a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import machine
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

WORLDS = (8, 64, 512, 4096, 16384)
#: Ranks per machine, which is the size of the replicated dimension's neighbour.
LOCAL = 8
#: At most this many ranks hold the shards of one replica.
SHARDS = 64
LAYERS = 4
WIDTH = 64


class SimulatedStore(dist.Store):
    """A store on which all other ranks have done before what this rank does."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self.messages = 0
        self.bytes = 0
        #: Returns the value of a key that another rank has set.
        self.from_another_rank: Callable[[str], bytes] | None = None

    def _count(self, *parts: Any) -> None:
        self.messages += 1
        self.bytes += sum(len(part) for part in parts)

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        value = self._values[key] if key in self._values else str(self._counters[key]).encode()
        self._count(key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        self._counters[key] = self._counters.get(key, 0) + amount * self._world
        return self._counters[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count(key, desired)
        wanted = desired if isinstance(desired, bytes) else str(desired).encode()
        return self._values.setdefault(key, wanted)

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return all(key in self._values or key in self._counters for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count(*keys)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [
            self._values[key] if key in self._values else self.from_another_rank(key)
            for key in keys
        ]
        self._count(*keys, *values)
        return values

    def delete_key(self, key: str) -> bool:
        self._count(key)
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here waits."""


class Meter:
    """Times phases, and counts what this rank sends in each."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._collectives = {"calls": 0, "bytes": 0}
        self.phases: dict[str, dict[str, float]] = {}

    def watch_collectives(self) -> None:
        """Count the collectives on the process group and the bytes that this rank receives."""
        for name, result in (
            ("all_reduce", 0),
            ("broadcast", 0),
            ("all_gather_single", 0),
            ("all_gather_into_tensor", 0),
            ("all_gather", None),
            ("scatter", 0),
            ("barrier", None),
        ):
            actual = getattr(dist, name, None)
            if actual is not None:
                setattr(dist, name, self._counting(actual, result))
        world: Any = dist.group.WORLD
        direct = type(world).alltoall_base
        meter = self

        def alltoall_base(group: Any, out: torch.Tensor, *arguments: Any) -> Any:
            meter._add(out.nbytes)
            return direct(group, out, *arguments)

        type(world).alltoall_base = alltoall_base

    def watch_parts(self, rank: int) -> None:
        """Time some functions separately. Their time is also part of the phase in which they are called."""
        from torch.distributed.checkpoint import state_dict_loader

        from accelerate_checkpoint import sharded_save
        from accelerate_checkpoint.draft import InPlaceDraft
        from accelerate_core import ParallelismConfig
        from accelerate_core.accelerator import accelerator

        for owner, name, title in (
            (accelerator, "check_consistent", "construct: compare the settings"),
            (ParallelismConfig, "build_device_mesh", "construct: the mesh and its groups"),
            (sharded_save, "write_shards", "save: plan and write the own shards"),
            (sharded_save, "write_metadata", "save: join the plans of all ranks"),
            (InPlaceDraft, "publish", "save: the manifest"),
            (state_dict_loader, "_load_state_dict", "load: plan"),
        ):
            if rank == 0 or name not in ("publish", "write_metadata"):
                setattr(owner, name, self._timed(getattr(owner, name), title))

    def _timed(self, actual: Callable[..., Any], title: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(title):
                return actual(*arguments, **options)

        return timed

    def _counting(self, actual: Callable[..., Any], result: int | None) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            received = 0
            if result is not None and arguments and isinstance(arguments[result], torch.Tensor):
                received = arguments[result].nbytes
            elif arguments and isinstance(arguments[0], list):
                received = sum(one.nbytes for one in arguments[0])
            self._add(received)
            return actual(*arguments, **options)

        return counted

    def _add(self, received: int) -> None:
        self._collectives["calls"] += 1
        self._collectives["bytes"] += received

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        store, collectives = self._store, dict(self._collectives)
        before = store.messages, store.bytes
        begun, busy = time.perf_counter(), time.process_time()
        yield
        self.phases[name] = {
            "cpu_seconds": time.process_time() - busy,
            "seconds": time.perf_counter() - begun,
            "store_messages": store.messages - before[0],
            "store_bytes": store.bytes - before[1],
            "collectives": self._collectives["calls"] - collectives["calls"],
            "collective_bytes": self._collectives["bytes"] - collectives["bytes"],
        }


def play(world: int, rank: int, folder: Path) -> dict[str, dict[str, float]]:
    """Play one rank of a run, and return the figures of each phase."""
    import accelerate_fsdp2.backend  # noqa: F401 - importing is not what is timed
    from accelerate_core import Accelerator, ParallelismConfig

    torch.set_num_threads(1)
    shards = min(world // 2, SHARDS)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % LOCAL),
        LOCAL_WORLD_SIZE=str(min(LOCAL, world)), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    store = SimulatedStore(world)
    meter = Meter(store)
    with meter.phase("torch's process group"):
        dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    meter.watch_collectives()
    simulate_other_ranks(store, rank, world, shards)
    meter.watch_parts(rank)
    with meter.phase("construct the Accelerator"):
        mesh = ParallelismConfig(dp_replicate_size=world // shards, dp_shard_size=shards)
        accelerator = Accelerator(cpu=True, backend="fsdp2", parallelism_config=mesh)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.ones(world * 8, WIDTH))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with meter.phase("prepare a model and an optimizer"):
        model, optimizer = accelerator.prepare(model, optimizer)
    with meter.phase("prepare a loader"):
        loader = accelerator.prepare(loader)
    with meter.phase("one batch and one step"):
        (batch,) = next(iter(loader))
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    with meter.phase("save"):
        accelerator.save_state(str(folder / f"saved_by_{rank}"))
    if rank:  # the state that this rank would have saved
        states = folder / "saved_by_0" / "random_states_0.pkl"
        shutil.copy(states, states.with_name(f"random_states_{rank}.pkl"))
    with meter.phase("load"):
        accelerator.load_state(str(folder / "saved_by_0"))
    with meter.phase("clean up"):
        accelerator.end_training()
    return meter.phases


def simulate_other_ranks(store: SimulatedStore, rank: int, world: int, shards: int) -> None:
    """Let the store have what the other ranks send to rank 0, and do what rank 0 does for others."""
    import torch.distributed.checkpoint as dcp

    from accelerate_checkpoint import draft, manifest, sharded_save
    from accelerate_checkpoint import shards as reading
    from accelerate_checkpoint.collect import as_message
    from accelerate_checkpoint.draft import InPlaceDraft, Report
    from accelerate_checkpoint.files import FileEntry
    from accelerate_core.distributed.torch_collectives import TorchCollectives

    actual = sharded_save.write_shards
    prepared: dict[int, list[Any]] = {}

    def write_shards(tensors: Any, *arguments: Any) -> list[Any]:
        if rank == 0:
            prepared.update(shards_of_all_ranks(tensors, world, shards))
        own = actual(tensors, *arguments)
        return prepared.get(0, own)

    def from_another_rank(key: str) -> bytes:
        other = int(key.rsplit("/", 1)[1])
        if "/shards/" in key:
            return as_message(prepared.get(other, []))
        name = f"random_states_{other}.pkl"
        report = Report({name: FileEntry(4096, "0" * 32)}, other - other % LOCAL)
        return as_message(report.as_json())

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        done: Any = torch.futures.Future()  # the files of other ranks were not written
        done.set_result(None)
        return done

    store.from_another_rank = from_another_rank
    sharded_save.write_shards = write_shards
    reading.read_in_place = lambda directory, places, items, planner: list(items)
    dcp.FileSystemReader.read_data = read_data
    # The files of other ranks don't exist, so their sizes cannot be compared.
    draft.problems = manifest.problems = lambda *arguments, **options: []
    if rank:

        @functools.wraps(TorchCollectives.broadcast_object)
        def broadcast_object(self: Any, accelerator: Any, obj: Any, *ranks: Any) -> Any:
            return obj

        TorchCollectives.broadcast_object = broadcast_object
        InPlaceDraft.begin = lambda draft: draft.directory.mkdir(parents=True)


def shards_of_all_ranks(
    tensors: dict[str, torch.Tensor], world: int, shards: int
) -> dict[int, list[Any]]:
    """Return what each rank that writes sends to rank 0: the places of its shards in tensors and files."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.distributed.tensor import DTensor

    from accelerate_checkpoint.sharded_save import _WRITERS, shard_as_json

    items: dict[int, list[Any]] = {}
    for item in create_default_local_save_plan(tensors, True).items:
        name = item.index.fqn
        replica = zlib.crc32(name.encode()) % min(world // shards, _WRITERS)
        rows = item.tensor_data.chunk.sizes[0] if isinstance(tensors[name], DTensor) else 0
        if not rows:
            items.setdefault(0, []).append(item)
            continue
        for number in range(item.tensor_data.size[0] // rows):
            items.setdefault(replica * shards + number, []).append(shifted(item, number * rows))
    return {
        rank: [
            shard_as_json(
                item, WriteResult(item.index, 1, _StorageInfo(f"__{rank}_0.distcp", 0, 1))
            )
            for item in items_of_rank
        ]
        for rank, items_of_rank in items.items()
    }


def shifted(item: Any, row: int) -> Any:
    """Return the item of another rank, whose shard starts at this row."""
    offsets = torch.Size([row, *item.tensor_data.chunk.offsets[1:]])
    chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets)
    data = dataclasses.replace(item.tensor_data, chunk=chunk)
    return dataclasses.replace(
        item, index=dataclasses.replace(item.index, offset=offsets), tensor_data=data
    )


def measure(world: int, rank: int, folder: Path) -> dict[str, dict[str, float]]:
    """Play one rank in a process of its own, and return its figures."""
    command = [sys.executable, __file__, "--child", str(world), str(rank), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    if done.returncode:
        raise SystemExit(f"rank {rank} of {world}: {done.stderr}")
    figures: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def child(world: int, rank: int, folder: Path) -> None:
    """Print the figures of one rank as JSON."""
    warnings.simplefilter("ignore")
    print(json.dumps(play(world, rank, folder)))


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print one table of times, and one of messages and bytes, for each rank that was played."""
    for rank in dict.fromkeys(key.split("/")[1] for key in results):
        worlds = [key.split("/")[0] for key in results if key.endswith(f"/{rank}")]
        phases = list(results[f"{worlds[0]}/{rank}"])
        for title, cell in (
            ("seconds of CPU time", seconds),
            ("store messages, bytes; collectives, bytes", traffic),
        ):
            table = Table("", *worlds, title=f"{rank} rank by number of ranks: {title}")
            for phase in phases:
                table.add_row(phase, *(cell(results[f"{world}/{rank}"][phase]) for world in worlds))
            Console().print(table)


def seconds(figures: dict[str, float]) -> str:
    return f"{figures['cpu_seconds']:.3f}"


def traffic(figures: dict[str, float]) -> str:
    return (
        f"{figures['store_messages']:.0f}, {figures['store_bytes']:.0f}; "
        f"{figures['collectives']:.0f}, {figures['collective_bytes']:.0f}"
    )


def main() -> None:
    """Play the first and another rank of each world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--out", default="benchmarks/results", help="folder for the JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        world, rank, folder = options.child
        child(int(world), int(rank), Path(folder))
        return
    results = {}
    for world in options.worlds:
        with tempfile.TemporaryDirectory() as folder:
            for name, rank in (("first", 0), ("other", world // 2 + 1)):
                results[f"{world}/{name}"] = measure(world, rank, Path(folder))
    report = {"machine": machine(), "results": results}
    path = Path(options.out, "scale.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
