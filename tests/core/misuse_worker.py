"""Train by calling the unwrapped model, and then by calling the prepared one."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings

import torch
from worker import PG_TIMEOUT, write_result

from accelerate_core import Accelerator

how = sys.argv[1]
accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)
inner = torch.nn.Linear(2, 1)
model = accelerator.prepare(inner)
assert model is not inner
if how == "copied":
    pickle.loads(pickle.dumps(copy.deepcopy(model)))
called = inner if how == "inner" else model
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        accelerator.backward(called(torch.ones(1, 2)).sum())
if how != "inner":
    assert not model._forward_pre_hooks
write_result([str(one.message) for one in caught])
accelerator.end_training()
