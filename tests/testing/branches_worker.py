"""Two ranks, two branches, and a part nobody uses: what gradients a generated backend leaves.

`branches_worker.py SRC`, where SRC holds accelerate_fresh.
"""

from __future__ import annotations

import sys

import torch

from accelerate_core import Accelerator
from accelerate_testing import count_communication, write_result


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from accelerate_fresh import FreshBackend  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True, backend=FreshBackend, process_group_timeout=60)
    rank = accelerator.process_index
    parts = torch.nn.ModuleList(torch.nn.Linear(4, 1, bias=False) for _ in range(4))
    parts = accelerator.prepare(parts)
    found = []
    for _ in range(2):  # gradients add up
        # The first on rank 0, the second on rank 1, the third on both, the last on none.
        loss = (parts[rank](torch.ones(1, 4)) * (1 + rank) + parts[2](torch.ones(1, 4))).sum()
        with count_communication() as said:
            accelerator.backward(loss)
        grads = [None if p.grad is None else p.grad.flatten().tolist() for p in parts.parameters()]
        found.append((said.total, grads))
    write_result(found)
    accelerator.end_training()


main()
