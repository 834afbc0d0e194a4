"""The order in which the ranks read. The cases are run by `test_shared_order.py`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from worker import SIZE, case, run_cases

from accelerate_core import Accelerator, DataLoaderConfiguration

accelerator = Accelerator(cpu=True)


def everyone(value: Any) -> list[Any]:
    return accelerator.communicator.gather_object(value)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


@case
def ranks_with_one_order_have_one_digest() -> None:
    for name, loader in {
        "in sequence": DataLoader(range(20), 2),
        "shuffled": DataLoader(range(20), 2, shuffle=True),
        "batch sampler": DataLoader(range(20), batch_sampler=[[3, 4], [5], [6, 7, 8]]),
        "items": DataLoader(range(20), batch_size=None),
    }.items():
        prepared = accelerator.prepare(loader)
        assert prepared.order_digest is None, name
        digests = []
        for _ in range(2):
            assert len(list(prepared)) > 0
            digests.append(prepared.order_digest)
            assert (digests[-1] is None) == (SIZE == 1), name
            assert len(set(everyone(digests[-1]))) == 1, name
        assert (digests[0] == digests[1]) == (name != "shuffled" or SIZE == 1), name
    for loader in (DataLoader(Stream(), 2), DataLoader(range(20), 2)):
        dispatched = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        prepared = dispatched.prepare(loader)
        assert len(list(prepared)) > 0
        if SIZE > 1:
            assert prepared.order_digest is None


if __name__ == "__main__":
    run_cases()
