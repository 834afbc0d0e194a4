"""Gradients are averaged over the ranks when they should be, and only then."""

from copy import deepcopy

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.test_utils.testing import are_the_same_tensors
from accelerate.test_utils.training import RegressionDataset, RegressionModel


def backward(accelerator, model, x, y):
    accelerator.backward(mse_loss(model(x), y))


def grads(model):
    return torch.stack([parameter.grad for parameter in model.parameters()])


def points(accelerator):
    x = torch.arange(6, dtype=torch.float32, device=accelerator.device)
    return x + accelerator.process_index, 2 * x + 3


def check_no_sync(accelerator):
    """Inside `no_sync`, each rank accumulates its own gradients. The next backward averages them."""
    model = RegressionModel().to(accelerator.device)
    alone = deepcopy(model)
    prepared = accelerator.prepare(model)
    x, y = points(accelerator)
    with accelerator.no_sync(prepared):
        backward(accelerator, prepared, x, y)
    mse_loss(alone(x), y).backward()
    assert torch.allclose(grads(prepared), grads(alone))
    assert are_the_same_tensors(grads(prepared)) == (accelerator.num_processes == 1)
    backward(accelerator, prepared, x, y)
    assert are_the_same_tensors(grads(prepared))


def check_accumulation(accelerator):
    """The optimizer steps at the end of each cycle and of the data, with averaged gradients."""
    steps = accelerator.gradient_accumulation_steps
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(
        RegressionDataset(length=20 * accelerator.num_processes, seed=1), batch_size=4
    )
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    before = [p.detach().clone() for p in model.parameters()]
    for number, batch in enumerate(data, 1):
        ends = number % steps == 0 or number == len(data)
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients == ends
            backward(accelerator, model, batch["x"], batch["y"])
            if ends:
                assert are_the_same_tensors(grads(model))
            optimizer.step()
            optimizer.zero_grad()
        after = [p.detach().clone() for p in model.parameters()]
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert moved == ends, f"batch {number}"
        before = after
    assert are_the_same_tensors(torch.stack(before))


def main():
    check_no_sync(Accelerator())
    accelerator = Accelerator(gradient_accumulation_steps=2)
    check_accumulation(accelerator)
    accelerator.print("Gradients are averaged when they should be.")


if __name__ == "__main__":
    main()
