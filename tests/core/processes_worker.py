"""Any number of ranks: ordering, decorators, splitting, collectives, generators and metrics."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from digits import digits, loader, make_net
from torch.utils.data import DataLoader, RandomSampler
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases, scratch

from accelerate_core import Accelerator, PartialState
from accelerate_core.utils import DataLoaderConfiguration, ProfileKwargs, set_seed

RANKS = list(range(SIZE))


def accelerate(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)


# --- ranks ----------------------------------------------------------------------------------------


@case
def ranks_have_the_right_indices() -> None:
    with accelerate() as accelerator:
        assert (accelerator.process_index, accelerator.num_processes) == (RANK, SIZE)
        assert accelerator.local_process_index == RANK
        assert accelerator.is_main_process is accelerator.is_local_main_process is (RANK == 0)
        assert accelerator.is_last_process is (RANK == SIZE - 1)
        assert accelerator.use_distributed
        assert accelerator.device == torch.device("cpu")
        assert accelerator.distributed_type.value == "MULTI_CPU"
        assert accelerator.state.num_processes == PartialState().num_processes == SIZE


@case
def decorated_functions_run_on_the_selected_process() -> None:
    with accelerate() as accelerator:
        last = SIZE - 1
        wrapped = {
            "main": (accelerator.on_main_process(lambda: RANK), 0),
            "main()": (accelerator.on_main_process()(lambda: RANK), 0),
            "local main": (accelerator.on_local_main_process(lambda: RANK), 0),
            "last": (accelerator.on_last_process(lambda: RANK), last),
            "one": (accelerator.on_process(lambda: RANK, process_index=1), 1),
            "one()": (accelerator.on_process(process_index=1)(lambda: RANK), 1),
            "local": (accelerator.on_local_process(lambda: RANK, local_process_index=1), 1),
            "state": (PartialState().on_main_process(lambda: RANK), 0),
        }
        for name, (function, rank) in wrapped.items():
            assert function() == (rank if rank == RANK else None), name


@case
def main_process_goes_first() -> None:
    with accelerate() as accelerator:
        for turn in (accelerator.main_process_first, accelerator.local_main_process_first):
            folder = scratch(turn.__name__)
            seen_before: list[str] = []
            with turn():
                if RANK == 0:
                    time.sleep(0.3)
                else:
                    seen_before = [path.name for path in folder.iterdir()]
                (folder / str(RANK)).touch()
            assert RANK == 0 or "0" in seen_before, "entered before the main process left"
            accelerator.wait_for_everyone()
            assert sorted(path.name for path in folder.iterdir()) == [str(r) for r in RANKS]


@case
def print_writes_on_one_process() -> None:
    with accelerate() as accelerator:
        out = io.StringIO()
        with redirect_stdout(out):
            accelerator.print("hello", "world", sep=", ")
        assert out.getvalue() == ("hello, world\n" if RANK == 0 else "")


# --- splitting ------------------------------------------------------------------------------------


@case
def lists_tensors_and_dicts_are_split_between_processes() -> None:
    total = 2 * SIZE + 1  # the first rank gets one extra item
    starts = [0, *(3 + 2 * rank for rank in RANKS)]
    mine = list(range(total))[starts[RANK] : starts[RANK + 1]]
    padded = mine if RANK == 0 else [*mine, total - 1]
    table = {"a": list(range(total)), "b": torch.arange(total)}
    with accelerate() as accelerator:
        for pad, expected in ((False, mine), (True, padded)):
            split = accelerator.split_between_processes

            def part(inputs: Any, split: Any = split, pad: bool = pad) -> Any:
                with split(inputs, apply_padding=pad) as got:
                    return got

            assert part(list(range(total))) == expected
            assert part(tuple(range(total))) == tuple(expected)
            tensor = part(torch.arange(2 * total).view(total, 2))
            assert tensor.tolist() == [[2 * i, 2 * i + 1] for i in expected]
            both = part(table)
            assert both["a"] == both["b"].tolist() == expected
        with PartialState().split_between_processes(["only"], apply_padding=False) as got:
            assert got == (["only"] if RANK == 0 else [])
        with pytest.raises(ValueError, match="equally long"):
            part({"a": [1], "b": [1, 2]})
        results = [{"rank": RANK, "rows": expected}]
        assert [r["rank"] for r in accelerator.gather_for_metrics(results, True)] == RANKS


# --- collectives ----------------------------------------------------------------------------------


@case
def gather_reduce_and_pad_combine_ranks() -> None:
    with accelerate() as accelerator:
        own = torch.tensor([float(RANK)])
        gathered = accelerator.gather({"x": own, "y": [torch.tensor(RANK)]})
        assert gathered["x"].tolist() == gathered["y"][0].tolist() == RANKS
        assert accelerator.reduce(own, "sum").item() == sum(RANKS)
        assert accelerator.reduce(own, "mean").item() == sum(RANKS) / SIZE
        assert accelerator.reduce(own).item() == sum(RANKS), "the default should be the sum"
        assert own.item() == RANK, "the input was changed"
        row = torch.full((1, RANK + 1), RANK)
        padded = accelerator.pad_across_processes(row, dim=1, pad_index=-1)
        assert padded.shape == (1, SIZE)
        table = accelerator.gather(padded)
        assert table.tolist() == [[r] * (r + 1) + [-1] * (SIZE - r - 1) for r in RANKS]
        first = accelerator.pad_across_processes(row, dim=1, pad_index=-1, pad_first=True)
        assert first[0].tolist() == [-1] * (SIZE - RANK - 1) + [RANK] * (RANK + 1)


@case
def metrics_are_exact_for_every_length() -> None:
    with accelerate() as accelerator:
        for config in ({}, {"split_batches": True}, {"dispatch_batches": True}):
            accelerator.dataloader_config = DataLoaderConfiguration(**config)
            for count in (2 * SIZE, 6 * SIZE + 1, 5):
                data = accelerator.prepare(loader(count, 2 * SIZE))
                got = [accelerator.gather_for_metrics(y) for _, y in data]
                assert torch.equal(torch.cat(got), digits(count).tensors[1]), (config, count)


@case
def metrics_are_exact_for_uneven_batches() -> None:
    with accelerate(dataloader_config=DataLoaderConfiguration(even_batches=False)) as accelerator:
        model = make_net()
        count = 4 * SIZE * 2 - 3
        data = accelerator.prepare(loader(count, 4))
        got = [accelerator.gather_for_metrics(model(x).argmax(1)) for x, _ in data]
        with torch.no_grad():
            expected = model(digits(count).tensors[0]).argmax(1)
        assert torch.equal(torch.cat(got), expected)


# --- generators -----------------------------------------------------------------------------------


def _draws(accelerator: Accelerator) -> list[float]:
    own = torch.rand(1)
    return [round(x, 6) for x in accelerator.gather(own).tolist()]


@case
def rng_types_select_which_generators_are_synchronised() -> None:
    for rng_types, alike in ((["torch"], True), (["generator"], False), (None, False)):
        with accelerate(rng_types=rng_types) as accelerator:
            data = accelerator.prepare(loader(8 * SIZE, 4))
            torch.manual_seed(RANK)
            for _ in data:
                break
            assert (len(set(_draws(accelerator))) == 1) is alike, rng_types


@case
def shuffled_ranks_read_disjoint_samples() -> None:
    with accelerate() as accelerator:
        torch.manual_seed(100 + RANK)  # generators differ between ranks, but the order must not
        dataset = list(range(8 * SIZE))
        generator = torch.Generator().manual_seed(RANK)
        plain = DataLoader(dataset, 4, shuffle=True)
        own = DataLoader(dataset, 4, sampler=RandomSampler(dataset, generator=generator))
        for data in accelerator.prepare(plain, own):
            orders = []
            for _ in range(2):
                rows = torch.cat([accelerator.gather(rows) for rows in data]).tolist()
                assert sorted(rows) == dataset
                orders.append(rows)
            assert orders[0] != orders[1]


@case
def seeds_can_differ_by_rank() -> None:
    with accelerate() as accelerator:
        set_seed(3)
        assert len(set(_draws(accelerator))) == 1
        set_seed(3, device_specific=True)
        assert len(set(_draws(accelerator))) == SIZE


# --- other ----------------------------------------------------------------------------------------


@case
def each_rank_writes_a_profiler_trace() -> None:
    with accelerate() as accelerator:
        folder = scratch("traces")
        with accelerator.profile(ProfileKwargs(output_trace_dir=str(folder))) as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        assert any("mm" in event.key for event in profiler.key_averages())
        accelerator.wait_for_everyone()
        names = sorted(path.name for path in folder.iterdir())
        assert names == [f"profile_{rank}.json" for rank in RANKS], names
        assert "traceEvents" in (folder / f"profile_{RANK}.json").read_text()


class Named(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": torch.tensor(index), "name": str(index)}


@case
def padding_is_removed_from_metrics_with_tensors_and_lists() -> None:
    with accelerate() as accelerator:
        names = []
        for batch in accelerator.prepare(DataLoader(Named(), 2)):
            for part in accelerator.gather_for_metrics(batch):
                assert len(part["index"]) == len(part["name"])
                names += part["name"]
        assert sorted(names) == list("01234")


@case
def metrics_gathered_from_several_batches_are_not_cut() -> None:
    with accelerate() as accelerator:
        loader = accelerator.prepare(DataLoader(range(9), 2))
        kept = []
        for index, batch in enumerate(loader):
            kept += batch.tolist()
            if index == len(loader) - 1:
                break
        assert set(accelerator.gather_for_metrics(torch.tensor(kept)).tolist()) == set(range(9))


if __name__ == "__main__":
    run_cases(sys.argv[1:])
