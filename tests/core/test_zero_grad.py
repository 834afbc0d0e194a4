"""When `zero_grad` clears gradients in an accumulation cycle. Each batch is a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_core import Accelerator
from accelerate_core.utils import GradientAccumulationPlugin, GradScalerKwargs

Loop = Callable[[Accelerator, Any, Any, Any], None]


class Weight(torch.nn.Module):
    """A number. The gradient of its output is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def train(
    loop: Loop,
    batches: Sequence[float],
    steps: int = 4,
    *,
    sgd: Any = torch.optim.SGD,
    **options: Any,
) -> float:
    """Return the sum of the gradients with which `loop` stepped, undivided."""
    plugin = GradientAccumulationPlugin(num_steps=steps, **options.pop("plugin", {}))
    with Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options) as accelerator:
        net = Weight()
        made = accelerator.prepare(net, sgd(net.parameters(), lr=1.0))
        loader = accelerator.prepare(DataLoader(torch.tensor(batches), batch_size=1))
        loop(accelerator, *made, loader)
        return -steps * net.weight.item()


def first(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()


def first_to_zeros(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad(set_to_none=False)
            accelerator.backward(model(x))
            optimizer.step()


def first_and_last(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()


def last(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()


def outside(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        optimizer.zero_grad()
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            optimizer.step()


def at_boundary_only(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            if accelerator.sync_gradients:
                optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()
            if accelerator.sync_gradients:
                optimizer.zero_grad()


def forward_before_it(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()


def counting(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        with accelerator.accumulate(model, num_items=1):
            optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()


def by_hand(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x in loader:
        optimizer.zero_grad()
        for _ in range(2):
            with accelerator.no_sync(model):
                accelerator.backward(model(x))
        optimizer.step()


LOOPS = (
    *(first, first_to_zeros, first_and_last, last, outside, at_boundary_only, forward_before_it),
    counting,
)


@pytest.mark.parametrize("loop", LOOPS)
def test_all_micro_batches_count_wherever_zero_grad_is_called(loop: Loop) -> None:
    assert train(loop, [1, 10, 100, 1000, 1e4, 2e4, 3e4, 4e4]) == 101111


@pytest.mark.parametrize("loop", LOOPS[:-1])
def test_cycles_that_end_with_the_loader_count(loop: Loop) -> None:
    def two_epochs(*parts: Any) -> None:
        for _ in range(2):
            loop(*parts)

    assert train(two_epochs, [1, 2, 4], 2) == 14


OPTIONS: dict[str, dict[str, Any]] = {
    "each batch": {"plugin": {"sync_each_batch": True}},
    "across epochs": {"plugin": {"sync_with_dataloader": False}},
    "fp16": {
        "mixed_precision": "fp16",
        "kwargs_handlers": [GradScalerKwargs(init_scale=2.0)],
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_zero_grad_first_under_other_settings(name: str) -> None:
    assert train(first, [1, 2, 4, 8, 16, 32, 64, 128], **OPTIONS[name]) == 255
    assert train(first_and_last, [1, 2, 4, 8, 16, 32, 64, 128], **OPTIONS[name]) == 255


def test_without_accumulate_zero_grad_always_clears() -> None:
    assert train(by_hand, [1, 2, 4], 2) == 14


def test_zero_grad_after_backward_discards_a_cycle() -> None:
    """The second cycle of two micro-batches has a bad gradient."""

    def loop(
        accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, early: bool
    ) -> None:
        for index, x in enumerate(loader):
            with accelerator.accumulate(model):
                if early:
                    optimizer.zero_grad()
                accelerator.backward(model(x))
                if index == 3:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                if not early:
                    optimizer.zero_grad()

    for early in (False, True):

        def discarding(*parts: Any, early: bool = early) -> None:
            loop(*parts, early)

        assert train(discarding, [1, 10, 100, 1000, 1e4, 2e4], 2) == 30011, early


def test_zero_grad_first_drops_a_cycle_that_was_not_stepped() -> None:
    """A script that skips a bad step relies on the next `zero_grad`, as without accumulation."""

    def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
        for index, x in enumerate(loader):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x))
                if index != 3:
                    optimizer.step()

    assert train(loop, [1, 10, 100, 1000, 1e4, 2e4], 2) == 30011


def test_skipped_micro_batch_leaves_the_others() -> None:
    """The first micro-batch of a cycle, one inside it, and the last of another are left out."""

    def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
        for index, x in enumerate(loader):
            try:
                with accelerator.accumulate(model):
                    if index in (3, 7):
                        raise ArithmeticError
                    optimizer.zero_grad()
                    accelerator.backward(model(x))
                    if index == 4:
                        raise ArithmeticError
                    optimizer.step()
            except ArithmeticError:
                pass

    expected = 1 + 2 + 4 + 16 + 32 + 64 + 256
    assert train(loop, [1, 2, 4, 8, 16, 32, 64, 128, 256], 3) == pytest.approx(expected)


def test_steps_that_overflow_are_dropped() -> None:
    def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
        for x in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x))
                optimizer.step()

    batches = [1, 2, float("inf"), 8, 16, 32]
    scaler = GradScalerKwargs(init_scale=4.0)
    got = train(loop, batches, 2, mixed_precision="fp16", kwargs_handlers=[scaler])
    assert got == 1 + 2 + 16 + 32


@pytest.mark.parametrize("order", ["first", "last", "both"])
def test_optimizers_of_several_losses_in_one_block(order: str) -> None:
    """As in a GAN, the backward of the first loss comes before `zero_grad` of the second optimizer."""
    with Accelerator(cpu=True, gradient_accumulation_steps=2) as accelerator:
        nets = [Weight() for _ in range(2)]
        sgd = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
        *prepared, loader = accelerator.prepare(
            *nets, *sgd, DataLoader(torch.tensor([1.0, 2, 4, 8, 16, 32]), batch_size=1)
        )
        models, optimizers = prepared[:2], prepared[2:]
        for x in loader:
            with accelerator.accumulate(*models):
                for factor, model, optimizer in zip((1, 100), models, optimizers, strict=True):
                    if order != "last":
                        optimizer.zero_grad()
                    accelerator.backward(model(x) * factor)
                    optimizer.step()
                    if order != "first":
                        optimizer.zero_grad()
        assert [-2 * net.weight.item() for net in nets] == [63, 6300]


def test_closure_may_clear() -> None:
    """LBFGS calls it several times in a step."""
    with Accelerator(cpu=True, gradient_accumulation_steps=2) as accelerator:
        net = Weight()
        model, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters(), max_iter=3))
        seen = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(1)) - 3) ** 2
            accelerator.backward(loss)
            seen.append(net.weight.grad.item() - (net.weight.item() - 3))
            return loss

        for _ in range(2):
            with accelerator.accumulate(model):
                optimizer.step(closure)
        assert len(seen) > 1
        assert not any(seen)


def test_resumed_cycle_keeps_its_gradients(tmp_path: Any) -> None:
    for stop in (1, 2, 3, 4):
        total = 0.0
        for part in range(2):
            with Accelerator(cpu=True, gradient_accumulation_steps=3) as accelerator:
                net = Weight()
                model, optimizer = accelerator.prepare(
                    net, torch.optim.SGD(net.parameters(), lr=1.0)
                )
                if part:
                    accelerator.load_state(tmp_path / str(stop))
                batches = [1.0, 2, 4, 8, 16, 32]
                for x in batches[stop:] if part else batches[:stop]:
                    first(accelerator, model, optimizer, [torch.tensor([x])])
                if not part:
                    accelerator.save_state(tmp_path / str(stop))
                total = -3 * net.weight.item()
        assert total == pytest.approx(63), stop


def test_plain_steps_after_a_cycle_always_clear() -> None:
    def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
        for index, x in enumerate(loader):
            if index < 2:
                with accelerator.accumulate(model):
                    if index == 0:
                        optimizer.zero_grad()
                        accelerator.backward(model(x))
                continue
            optimizer.zero_grad()
            accelerator.backward(model(x))
            optimizer.step()

    assert train(loop, [1, 2, 4, 8], 2) == 12
