"""Data that is not divisible by the number of ranks: even batches, uneven ones, and uneven ranks."""

import warnings

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration


def sizes(accelerator, length, batch_size):
    """Return the sizes of this rank's batches."""
    made = accelerator.prepare(DataLoader(torch.arange(length), batch_size=batch_size))
    return [len(batch) for batch in made]


def main():
    accelerator = Accelerator()
    count, rank = accelerator.num_processes, accelerator.process_index
    assert sizes(accelerator, 3 * count + 1, 3) == ([3, 3] if count > 1 else [3, 1])
    accelerator.even_batches = False
    assert sizes(accelerator, count + 1, 1) == [1] * (1 + (rank == 0))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    made = accelerator.prepare(DataLoader(torch.ones(count + 1, 1), batch_size=1))
    with warnings.catch_warnings(record=True), accelerator.join_uneven_inputs([model]):
        for batch in made:
            accelerator.backward(model(batch).sum())
    with accelerator.join_uneven_inputs([model], even_batches=True):
        lengths = accelerator.gather(torch.tensor([len(list(made))], device=accelerator.device))
    assert len(set(lengths.tolist())) == 1
    stateful = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    data = DataLoader(torch.arange(8 * count), batch_size=2, shuffle=True)
    whole = stateful.gather(torch.cat(list(stateful.prepare(data))))
    assert sorted(whole.tolist()) == list(range(8 * count))
    accelerator.wait_for_everyone()
    accelerator.print("Uneven data is divided as configured.")


if __name__ == "__main__":
    main()
