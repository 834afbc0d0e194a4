"""Cases for `idea_plugins`, on two ranks. The arguments select cases; the default is all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_model import Tower, data, mine
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from worker import PG_TIMEOUT, case, flat, run_cases, same_on_ranks, scratch

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import (
    ConfigurationError,
    PluginConflictError,
    PluginError,
    PrepareError,
)
from accelerate_ddp import DDPCommunicationHookType, DistributedDataParallelKwargs

torch.set_num_threads(1)
STEPS = 12


@contextmanager
def plugins(*names: str) -> Iterator[None]:
    """Activate extensions."""
    os.environ["ACCELERATE_PLUGINS"] = ",".join(names)
    try:
        yield
    finally:
        del os.environ["ACCELERATE_PLUGINS"]


def accelerate(*names: str, backend: str = "ddp", **arguments: Any) -> Accelerator:
    with plugins(*names):
        return Accelerator(cpu=True, backend=backend, process_group_timeout=PG_TIMEOUT, **arguments)


def whole(model: nn.Module) -> torch.Tensor:
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def train(
    accelerator: Accelerator, make: Any = None, steps: int = STEPS, **options: Any
) -> tuple[Any, Any, list[float]]:
    """Train a small model.

    Returns:
        The prepared model and optimizer, and the learning rate of each step.
    """
    net = Tower()
    model, optimizer = accelerator.prepare(
        net, (make or torch.optim.SGD)(net.parameters(), **{"lr": 0.1, **options})
    )
    return model, optimizer, go_on(accelerator, model, optimizer, steps)


def go_on(accelerator: Accelerator, model: Any, optimizer: Any, steps: int) -> list[float]:
    x, y = data()
    rates = []
    for _ in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(mine(x)), mine(y)))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
    return rates


# --- gradients ------------------------------------------------------------------------------------


@case
def reducer_of_a_plugin_averages_the_gradients() -> None:
    for backend in ("ddp", "fsdp2"):
        for accumulation in (1, 3):
            options = {"backend": backend, "gradient_accumulation_steps": accumulation}
            with accelerate(**options) as accelerator:
                expected = whole(train(accelerator)[0])
            with accelerate("mean", **options) as accelerator:
                assert torch.equal(whole(train(accelerator)[0]), expected), options
            if backend == "ddp":
                with accelerate("later", **options) as accelerator:
                    assert torch.equal(whole(train(accelerator)[0]), expected), options


@case
def reducer_works_in_half_precision() -> None:
    for backend in ("ddp", "fsdp2"):
        for precision in ("bf16", "fp16"):
            options = {"backend": backend, "mixed_precision": precision}
            with accelerate(**options) as accelerator:
                expected = whole(train(accelerator)[0])
            with accelerate("mean", **options) as accelerator:
                close = whole(train(accelerator)[0])
            torch.testing.assert_close(close, expected, rtol=0, atol=1e-3, msg=str(options))


@case
def documented_reducer_sends_half_precision() -> None:
    for backend in ("ddp", "fsdp2"):
        with accelerate(backend=backend) as accelerator:
            expected = whole(train(accelerator)[0])
        with accelerate("half_gradients", backend=backend) as accelerator:
            got = whole(train(accelerator)[0])
        assert 0 < (got - expected).abs().max() < 1e-3


@case
def gradients_are_sent_in_8_bits() -> None:
    parameters = sum(p.numel() for p in Tower().parameters())
    for backend in ("ddp", "fsdp2"):
        with accelerate(backend=backend) as accelerator:
            expected = whole(train(accelerator)[0])
        with accelerate("int8_gradients", backend=backend) as accelerator:
            got = whole(train(accelerator)[0])
            assert parameters * STEPS <= accelerator.sent_bytes <= parameters * STEPS * 1.2
            assert same_on_ranks(got)
        assert 0 < (got - expected).abs().max() < 1e-3


def refused(error: type[Exception], text: str, *names: str, **arguments: Any) -> Exception:
    """Return the error with which training with these plugins fails."""
    with accelerate(*names, **arguments) as accelerator, pytest.raises(error, match=text) as caught:
        train(accelerator, steps=1)
    return caught.value


@case
def failing_reducer_is_named() -> None:
    error = refused(ValueError, "no way to send this", "failing", backend="fsdp2")
    assert "hook 'reduce_scatter' of plugin failing" in error.__notes__[0]
    error = refused(ValueError, "no way to send this", "failing")
    assert "hook 'all_reduce' of plugin failing" in error.__notes__[0]
    refused(PluginError, r"The reducer of incomplete .* has no 'all_reduce'", "incomplete")


@case
def what_cannot_be_combined_is_refused() -> None:
    both = ("mean", "int8_gradients")
    refused(PluginConflictError, r"int8_gradients .*mean .* each returned a reducer", *both)
    text = "'own_average' does not let another plugin"
    refused(ConfigurationError, text, "mean", backend="own_average")
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    text = r"comm_hook=fp16 .* conflict"
    refused(ConfigurationError, text, "mean", kwargs_handlers=[hook])
    sizes = ParallelismConfig(dp_replicate_size=2)
    text = "dp_replicate_size=2 also averages"
    refused(ConfigurationError, text, "mean", backend="fsdp2", parallelism_config=sizes)


# --- optimizers and schedulers --------------------------------------------------------------------


@case
def extension_adds_a_scheduler() -> None:
    expected = [0.1 * min(1.0, (step + 1) / 100) for step in range(STEPS)]
    for backend in ("ddp", "fsdp2"):
        folder = scratch(f"warmup_{backend}")
        options = {"backend": backend}
        with accelerate("warmup", **options) as accelerator:
            model, optimizer, rates = train(accelerator, steps=5)
            assert rates == pytest.approx(expected[:5])
            assert len(accelerator.schedulers) == 1
            accelerator.save_state(folder)
            rest = go_on(accelerator, model, optimizer, STEPS - 5)
            assert rest == pytest.approx(expected[5:])
        with accelerate("warmup", **options) as accelerator:
            model, optimizer, _ = train(accelerator, steps=0)
            accelerator.load_state(folder)
            assert go_on(accelerator, model, optimizer, STEPS - 5) == rest


@case
def average_of_weights_is_sharded_and_saved() -> None:
    for backend in ("ddp", "fsdp2"):
        folder = scratch(f"ema_{backend}")
        with accelerate("ema", backend=backend) as accelerator:
            model, _, _ = train(accelerator, steps=4)
            accelerator.save_state(folder)
            saved = [one.clone() for one in accelerator.average]
            weights = list(model.parameters())
            assert [one.shape for one in saved] == [one.shape for one in weights]
            assert all(isinstance(one, DTensor) for one in saved) == (backend == "fsdp2")
        with accelerate("ema", backend=backend) as accelerator:
            train(accelerator, steps=0)
            start = accelerator.average[0].clone()
            accelerator.load_state(folder)
            for one, other in zip(accelerator.average, saved, strict=True):
                assert torch.equal(flat([one]), flat([other]))
            assert not torch.equal(flat([start]), flat([saved[0]]))


@case
def extension_replaces_the_optimizer() -> None:
    options = {"make": torch.optim.AdamW, "lr": 0.01}
    with accelerate() as accelerator:
        expected = whole(train(accelerator, **options)[0])
    folder = scratch("zero")
    with accelerate("zero") as accelerator:
        model, optimizer, _ = train(accelerator, steps=5, **options)
        assert type(optimizer.optimizer).__name__ == "DividedOptimizer"
        held = len(optimizer.optimizer.optim.state)
        assert 0 < held < len(list(model.parameters()))
        accelerator.save_state(folder)
        go_on(accelerator, model, optimizer, STEPS - 5)
        assert torch.equal(whole(model), expected)
    with accelerate("zero") as accelerator:
        model, optimizer, _ = train(accelerator, steps=0, **options)
        accelerator.load_state(folder)
        go_on(accelerator, model, optimizer, STEPS - 5)
        assert torch.equal(whole(model), expected)


@case
def extension_runs_code_before_each_step() -> None:
    for backend in ("ddp", "fsdp2"):
        with accelerate("decay", backend=backend) as accelerator:
            got = whole(train(accelerator, lr=0.0)[0])
        torch.testing.assert_close(got, flat(Tower()) * 0.99**STEPS)


@case
def replaced_optimizer_must_hold_the_parameters() -> None:
    for backend in ("ddp", "fsdp2"):
        refused(PrepareError, r"5 trainable .* are in no optimizer", "forgetful", backend=backend)


if __name__ == "__main__":
    run_cases(sys.argv[1:])
