"""Exact metrics: count every test sample once, on any number of processes, with any batch size.

accelerate-core launch --num_processes 2 examples/by_feature/multi_process_metrics.py
"""

from __future__ import annotations

import torch
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator


@torch.no_grad()
def main(batch_size: int = 7) -> dict[str, object]:
    accelerator = Accelerator()
    test = digits()[1]
    # 360 is not a multiple of 7, so the last batches are padded to the same size on all ranks.
    model, loader = accelerator.prepare(network(), DataLoader(test, batch_size))
    guesses, labels = [], []
    for images, targets in loader:
        # Removes the padding again.
        found = accelerator.gather_for_metrics((model(images).argmax(1), targets))
        guesses.append(found[0])
        labels.append(found[1])
    all_labels = torch.cat(labels)
    right = int((torch.cat(guesses) == all_labels).sum())
    accelerator.print(f"{right} of {len(all_labels)} right, before any training")
    accelerator.end_training()
    in_order = torch.equal(all_labels.cpu(), test.tensors[1])
    return {"counted": len(all_labels), "right": right, "in_order": in_order}


if __name__ == "__main__":
    main()
