"""Stop reading a dispatched loader in the middle, in the way that `LEAVE` selects."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, IterableDataset
from worker import PG_TIMEOUT, write_result

from accelerate_core import Accelerator


class Numbers(IterableDataset):
    def __iter__(self):
        for number in range(1000):
            yield torch.tensor([float(number)])


how = os.environ["LEAVE"]
accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)
loader = accelerator.prepare(DataLoader(Numbers(), 4))
iterator = iter(loader)
for _ in range(4):
    batch = next(iterator)
    time.sleep(0.001)  # long enough for the reading thread to start
write_result(batch.flatten().tolist())
if how == "again":
    accelerator.end_training()
    assert next(iterator, None) is None
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT) as second:
        assert len(list(zip(range(3), second.prepare(DataLoader(Numbers(), 4)), strict=False))) == 3
elif how == "exit":
    sys.exit(0)
