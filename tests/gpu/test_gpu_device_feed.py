"""Batches are copied to the device on a separate stream while it processes the previous ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from small import accelerate
from torch.utils.data import DataLoader, IterableDataset

SIDE = 8192  # of a square batch in half precision: 128 MiB


class Given(IterableDataset[torch.Tensor]):
    """Yields the given tensors without copying them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors)


def seconds(work: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - begun


def test_batches_arrive_complete_and_in_order(device: torch.device, on_cpu: bool) -> None:
    given = [torch.full((256, 256), float(number)) for number in range(30)]
    weight = torch.eye(256, device=device)
    with accelerate(on_cpu) as accelerator:
        loader = accelerator.prepare(DataLoader(Given(given), batch_size=None))
        sums = []
        for batch in loader:
            assert batch.device == device
            for _ in range(10):  # meanwhile the next batches are copied; this one must not change
                batch = batch @ weight
            sums.append(batch.sum())
            del batch
    assert [total.item() / 256**2 for total in sums] == list(range(30))


@pytest.mark.device
def test_copying_and_computing_overlap(device: torch.device, record_property: Callable) -> None:
    given = [torch.empty(SIDE, SIDE, dtype=torch.float16, pin_memory=True) for _ in range(8)]
    weight = torch.zeros(SIDE, SIDE, dtype=torch.float16, device=device)
    there = given[0].to(device)
    for _ in range(3):
        _ = there @ weight  # warm up
    copying = min(seconds(lambda: given[0].to(device, non_blocking=True)) for _ in range(5))
    product = min(seconds(lambda: there @ weight) for _ in range(5))
    products = max(1, round(copying / product))

    def one_after_the_other() -> None:
        for batch in given * 4:
            moved = batch.to(device, non_blocking=True)
            for _ in range(products):
                _ = moved @ weight

    with accelerate(False) as accelerator:
        loader = accelerator.prepare(DataLoader(Given(given * 4), batch_size=None))

        def fed() -> None:
            for batch in loader:
                for _ in range(products):
                    _ = batch @ weight

        fed()  # warm up the allocator
        ours, plain = min(seconds(fed) for _ in range(3)), seconds(one_after_the_other)
    record_property("copy", f"{copying * 1e3:.2f} ms")
    record_property("compute", f"{products * product * 1e3:.2f} ms")
    record_property("time, relative to no overlap", f"{ours / plain:.2f}")
    assert ours < 0.85 * plain, "copying takes as long as computing, so the optimum is 0.5"
