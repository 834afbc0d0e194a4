"""The collectives on tensors and objects, each compared with a result that every rank can compute."""

import torch

from accelerate import PartialState
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)


def main():
    state = PartialState()
    rank, size = state.process_index, state.num_processes
    mine = torch.arange(size, device=state.device, dtype=torch.float32) + size * rank
    every = torch.arange(size * size, dtype=torch.float32)
    assert torch.equal(gather(mine).cpu(), every)
    assert torch.equal(gather({"a": (mine,)})["a"][0].cpu(), every)
    assert gather_object([rank, {"of": rank}]) == [
        one for each in range(size) for one in (each, {"of": each})
    ]
    assert torch.equal(broadcast(mine.clone()).cpu(), every[:size])
    assert broadcast_object_list([rank, str(rank)]) == [0, "0"]
    padded = pad_across_processes(torch.ones(rank + 1, device=state.device))
    assert padded.tolist() == [1.0] * (rank + 1) + [0.0] * (size - rank - 1)
    first = pad_across_processes(torch.ones(rank + 1, device=state.device), pad_first=True)
    assert first.tolist() == padded.tolist()[::-1]
    whole = every.reshape(size, size)
    assert torch.equal(reduce(mine, "sum").cpu(), whole.sum(0))
    assert torch.allclose(reduce(mine, "mean").cpu(), whole.mean(0))
    assert torch.equal(concatenate([mine, mine]), torch.cat([mine, mine]))
    state.wait_for_everyone()
    state.print("The collectives return the right results.")


if __name__ == "__main__":
    main()
