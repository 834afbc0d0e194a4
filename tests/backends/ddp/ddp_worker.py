"""Cases for the settings of DDP on two ranks. The arguments select cases; the default is all."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError, PrepareError
from accelerate_ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate_ddp.hooks import wait_for_pending_hooks

STEPS, ACCUMULATION = 3, 2


class Net(nn.Module):
    """A model with a branch that a forward can skip, and a buffer that counts samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU())
        self.head = nn.Linear(32, 4)
        self.spare = nn.Linear(32, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        self.seen += len(x) * (RANK + 1)
        x = self.body(x)
        return self.head(x) + self.spare(x) if spare else self.head(x)


def data() -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(RANK)
    return [torch.randn(8, 16, generator=source) for _ in range(STEPS * ACCUMULATION)]


def by_library(spare: bool = True, **settings: Any) -> tuple[torch.Tensor, list[bool]]:
    """Train with the library.

    Returns:
        The weights, and for each micro-batch whether all ranks had the same gradients.
    """
    with Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[DistributedDataParallelKwargs(**settings)] if settings else None,
        process_group_timeout=PG_TIMEOUT,
    ) as accelerator:
        net = Net()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(net, sgd)
        assert isinstance(model, DistributedDataParallel)
        synced = []
        for x in data():
            with accelerator.accumulate(model):
                accelerator.backward(model(x, spare=spare).square().mean())
                synced.append(same_on_ranks(_gradients(model)))
                optimizer.step()
                optimizer.zero_grad()
        assert same_on_ranks(flat(model))
        return flat(model), synced


def by_hand(
    register: Callable[[DistributedDataParallel], None] = lambda model: None, spare: bool = True
) -> torch.Tensor:
    """Train with DDP in plain torch, with `no_sync` for all micro-batches but the last of a cycle."""
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT):  # only for its process group
        weights = _by_hand(register, spare)
        wait_for_pending_hooks()  # its docstring says why
        return weights


def _by_hand(register: Callable[[DistributedDataParallel], None], spare: bool) -> torch.Tensor:
    model = DistributedDataParallel(Net(), find_unused_parameters=not spare)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, x in enumerate(data()):
        last = (index + 1) % ACCUMULATION == 0
        with nullcontext() if last else model.no_sync():
            (model(x, spare=spare).square().mean() / ACCUMULATION).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def _gradients(model: nn.Module) -> torch.Tensor:
    return flat([p.grad for p in model.parameters() if p.grad is not None])


BOUNDARIES = [False, True] * STEPS


@case
def fp16_hook_matches_plain_torch() -> None:
    weights, synced = by_library(comm_hook="fp16")
    hook = default_hooks.fp16_compress_hook
    assert torch.equal(weights, by_hand(lambda model: model.register_comm_hook(None, hook)))
    assert synced == BOUNDARIES
    assert not torch.equal(weights, by_hand())


@case
def sharded_model_is_an_error_that_names_the_backend_to_use() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    accelerator = Accelerator(cpu=True)
    fully_shard(model[1], mesh=init_device_mesh("cpu", (SIZE,), mesh_dim_names=("shard",)))
    with pytest.raises(PrepareError, match=r"'1.weight' is a DTensor.*backend='fsdp2'"):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    accelerator.end_training()


@case
def model_with_a_hook_can_outlive_its_group() -> None:
    """The race is a few milliseconds long, from the last backward to freeing the model."""
    handlers = [DistributedDataParallelKwargs(comm_hook="fp16")]
    for _ in range(5):
        accelerator = Accelerator(
            cpu=True, kwargs_handlers=handlers, process_group_timeout=PG_TIMEOUT
        )
        model, x = accelerator.prepare(Net()), data()[0]
        accelerator.free_memory()  # `model` is now the only reference
        accelerator.backward(model(x).square().mean())
        accelerator.end_training()
        del model


@case
def bf16_hook_works_on_gloo() -> None:
    weights, synced = by_library(comm_hook="bf16")
    exact = by_hand()
    assert synced == BOUNDARIES
    assert not torch.equal(weights, exact)
    assert torch.allclose(weights, exact, atol=2e-3)


@case
def comm_wrapper_compresses_gradients() -> None:
    exact = by_hand()
    alone, _ = by_library(comm_hook="fp16")
    for wrapper in ("fp16", "bf16"):
        weights, _ = by_library(comm_wrapper=wrapper)
        assert not torch.equal(weights, exact), wrapper
        assert torch.allclose(weights, exact, atol=2e-3), wrapper
        if wrapper == "fp16":
            assert torch.allclose(weights, alone, atol=1e-4)


@case
def power_sgd_matches_plain_torch() -> None:
    option = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    for wrapper in ("no", "bf16"):
        weights, synced = by_library(
            comm_hook=DDPCommunicationHookType.POWER_SGD,
            comm_state_option=option,
            comm_wrapper=wrapper,
        )
        assert synced == BOUNDARIES
        if wrapper == "no":

            def register(model: DistributedDataParallel) -> None:
                state = powerSGD_hook.PowerSGDState(None, **option)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

            assert torch.equal(weights, by_hand(register))


@case
def static_graph_supports_accumulation() -> None:
    """torch aborts unless the first backward is reduced. The weights must be correct anyway."""
    weights, synced = by_library(static_graph=True)
    assert synced[1:] == BOUNDARIES[1:]
    assert torch.allclose(weights, by_hand(), atol=1e-6)


@case
def gradient_as_bucket_view_matches_plain_torch() -> None:
    weights, synced = by_library(gradient_as_bucket_view=True, bucket_cap_mb=1)
    assert synced == BOUNDARIES
    assert torch.equal(weights, by_hand())


@case
def find_unused_parameters_allows_a_skipped_branch() -> None:
    weights, synced = by_library(spare=False, find_unused_parameters=True)
    assert synced == BOUNDARIES
    assert torch.equal(weights, by_hand(spare=False))


@case
def buffers_follow_rank_0_unless_broadcast_is_disabled() -> None:
    for broadcast in (True, False):
        handler = DistributedDataParallelKwargs(broadcast_buffers=broadcast)
        with Accelerator(
            cpu=True, kwargs_handlers=[handler], process_group_timeout=PG_TIMEOUT
        ) as accelerator:
            model = accelerator.prepare(Net())
            for x in data()[:2]:
                model(x)
            before_last = 8 if broadcast else 8 * (RANK + 1)
            assert model.module.seen.item() == before_last + 8 * (RANK + 1)


@case
def models_without_training_are_not_wrapped() -> None:
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT) as accelerator:
        frozen = accelerator.prepare(Net().requires_grad_(False))
        assert type(frozen) is Net
        judged = accelerator.prepare_model(Net(), evaluation_mode=True)
        assert type(judged) is Net
        torch.manual_seed(RANK)
        own = nn.Linear(4, 4)
        assert not same_on_ranks(flat(own))
        assert same_on_ranks(flat(accelerator.prepare(own))), "all ranks get rank 0's weights"


@case
def settings_are_visible_on_the_accelerator() -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=7)
    with Accelerator(
        cpu=True, kwargs_handlers=[handler], process_group_timeout=PG_TIMEOUT
    ) as accelerator:
        assert accelerator.distributed_type.value == "MULTI_CPU"
        assert accelerator.ddp_handler.bucket_cap_mb == 7
        model = accelerator.prepare(Net())
        assert model.bucket_bytes_cap == 7 * 2**20


@case
def settings_that_differ_between_ranks_are_rejected() -> None:
    handler = DistributedDataParallelKwargs(static_graph=RANK == 1)
    message = "ddp.static_graph is False on rank 0, True on rank 1"
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, kwargs_handlers=[handler], process_group_timeout=PG_TIMEOUT)


# --- parameters that are frozen, unfrozen or added after prepare ---------------------------------

#: What happens to a model before one of its micro-batches, by the number of the micro-batch.
Schedule = dict[int, Callable[[nn.Module, Any], None]]


def unfreeze(*names: str) -> Callable[[nn.Module, Any], None]:
    return lambda net, _: [net.get_submodule(name).requires_grad_(True) for name in names] and None


def freeze(*names: str) -> Callable[[nn.Module, Any], None]:
    return lambda net, _: [net.get_submodule(name).requires_grad_(False) for name in names] and None


def swap(net: nn.Module, _: Any) -> None:
    for name in ("body", "spare"):
        trains = next(net.get_submodule(name).parameters()).requires_grad
        net.get_submodule(name).requires_grad_(not trains)


def unfreeze_into_group(net: nn.Module, optimizer: Any) -> None:
    unfreeze("body")(net, optimizer)
    optimizer.add_param_group({"params": list(net.body.parameters()), "lr": 0.05})


def add_adapter(net: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(1)
    net.adapter = nn.Linear(32, 4)
    net.head.register_forward_hook(lambda head, inputs, output: output + net.adapter(*inputs))
    optimizer.add_param_group({"params": list(net.adapter.parameters())})


def replace_head(net: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(2)
    net.head = nn.Linear(32, 4)
    optimizer.add_param_group({"params": list(net.head.parameters())})


def train_with_changes(
    schedule: Schedule, model: Any, optimizer: Any, cycle: int, step: Callable[..., None]
) -> torch.Tensor:
    """Train, and change the model before some of the micro-batches."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    for index, x in enumerate(data()):
        schedule.get(index, lambda *_: None)(net, optimizer)
        step(x, (index + 1) % cycle == 0)
    return flat(net)


def changes_by_hand(schedule: Schedule, frozen: tuple[str, ...], cycle: int) -> torch.Tensor:
    """Average the gradients of all parameters that have one, before each step."""
    net = Net()
    freeze(*frozen)(net, None)
    optimizer = torch.optim.SGD(_in_optimizer(net, schedule), lr=0.1)

    def step(x: torch.Tensor, last: bool) -> None:
        (net(x).square().mean() / cycle).backward()
        if last:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= SIZE
            optimizer.step()
            optimizer.zero_grad()

    return train_with_changes(schedule, net, optimizer, cycle, step)


def changes_by_library(
    schedule: Schedule,
    frozen: tuple[str, ...],
    cycle: int,
    *,
    mixed_precision: str = "no",
    dynamo_backend: str = "no",
    compare: bool = True,
    **options: Any,
) -> torch.Tensor:
    with Accelerator(
        cpu=True,
        gradient_accumulation_steps=cycle,
        mixed_precision=mixed_precision,
        dynamo_backend=dynamo_backend,
        kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        process_group_timeout=PG_TIMEOUT,
    ) as accelerator:
        net = Net()
        freeze(*frozen)(net, None)
        sgd = torch.optim.SGD(_in_optimizer(net, schedule), lr=0.1)
        model, optimizer = accelerator.prepare(net, sgd)

        def step(x: torch.Tensor, last: bool) -> None:
            with accelerator.accumulate(model):
                output = model(x)
                if output.requires_grad:
                    accelerator.backward(output.square().mean())
                optimizer.step()
                optimizer.zero_grad()

        weights = train_with_changes(schedule, model, optimizer, cycle, step)
        assert not compare or same_on_ranks(weights)
        return weights


def _in_optimizer(net: nn.Module, schedule: Schedule) -> list[nn.Parameter]:
    late = unfreeze_into_group in schedule.values()
    return [p for p in net.parameters() if p.requires_grad or not late]


#: Name -> the schedule, and what is frozen when `prepare` is called.
CHANGES: dict[str, tuple[Schedule, tuple[str, ...]]] = {
    "unfrozen": ({2: unfreeze("body")}, ("body",)),
    "one after the other": ({1: unfreeze("spare"), 3: unfreeze("body")}, ("body", "spare")),
    "frozen": ({2: freeze("spare")}, ()),
    "frozen inside a cycle": ({3: freeze("spare"), 5: unfreeze("spare")}, ()),
    "exchanged in every step": (dict.fromkeys(range(STEPS * ACCUMULATION), swap), ("spare",)),
    "added group": ({2: unfreeze_into_group}, ("body",)),
    "added module": ({2: add_adapter}, ()),
    "replaced module": ({4: replace_head}, ("spare",)),
}


@case
def parameters_that_change_after_prepare_are_averaged() -> None:
    for name, (schedule, frozen) in CHANGES.items():
        for cycle in (1, ACCUMULATION):
            with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT):
                expected = changes_by_hand(schedule, frozen, cycle)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                weights = changes_by_library(schedule, frozen, cycle)
            assert torch.allclose(weights, expected, atol=1e-6), (name, cycle)


#: Options under which a change is followed, and how far the weights may be from the exact ones.
FOLLOWING: list[tuple[dict[str, Any], float]] = [
    ({"find_unused_parameters": True}, 1e-6),
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 1}, 1e-6),
    ({"comm_hook": "fp16"}, 2e-3),
    ({"comm_hook": "bf16"}, 1e-2),
    ({"comm_wrapper": "bf16"}, 1e-2),
    ({"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}}, 1.0),
    ({"mixed_precision": "bf16"}, 5e-2),
    ({"mixed_precision": "fp16"}, 5e-2),
]


@case
def options_stay_when_the_trained_parameters_change() -> None:
    schedule, frozen = CHANGES["one after the other"]
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT):
        expected = changes_by_hand(schedule, frozen, 1)
    for options, tolerance in FOLLOWING:
        weights = changes_by_library(schedule, frozen, 1, **options)
        assert torch.allclose(weights, expected, atol=tolerance), options


@case
def model_that_is_frozen_in_every_second_step_keeps_its_reducer() -> None:
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT) as accelerator:
        generator, judge = accelerator.prepare(nn.Linear(16, 16), nn.Linear(16, 1))
        reducers = generator.reducer, judge.reducer
        optimizers = accelerator.prepare(
            torch.optim.SGD(generator.parameters(), lr=0.1),
            torch.optim.SGD(judge.parameters(), lr=0.1),
        )
        for x in data():
            judge.requires_grad_(True)
            accelerator.backward(judge(generator(x).detach()).mean())
            assert same_on_ranks(_gradients(judge))
            optimizers[1].step()
            judge.requires_grad_(False)
            accelerator.backward(-judge(generator(x)).mean())
            assert same_on_ranks(_gradients(generator))
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert (generator.reducer, judge.reducer) == reducers
        assert same_on_ranks(torch.cat([flat(generator), flat(judge)]))


@case
def change_that_ranks_make_differently_is_an_error() -> None:
    def differently(net: nn.Module, optimizer: Any) -> None:
        unfreeze("body" if RANK == 1 else "spare")(net, optimizer)

    def other_values(net: nn.Module, optimizer: Any) -> None:
        add_adapter(net, optimizer)
        with torch.no_grad():
            net.adapter.weight += RANK

    for change, text in (
        (differently, r"unfrozen: '(body|spare).*rank \d: unfrozen: '(body|spare)"),
        (other_values, r"other values.*'adapter.weight'.*set_seed"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            changes_by_library({2: change}, ("body", "spare"), 1)


@case
def change_that_cannot_be_followed_is_an_error() -> None:
    schedule = {2: unfreeze("body")}
    for options, frozen, text in (
        ({"static_graph": True}, ("body",), r"static_graph=True.*'body.0.weight'"),
        ({}, ("body", "head", "spare"), r"Net required gradients.*'body.0.weight'.*Call prepare"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            changes_by_library(schedule, frozen, 1, **options)


@case
def parameter_of_no_prepared_model_is_a_warning() -> None:
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT) as accelerator:
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scale = nn.Parameter(torch.ones(()))
        for step, x in enumerate(data()[:3]):
            if step == 1:
                optimizer.add_param_group({"params": [scale]})
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                accelerator.backward((model(x) * scale).square().mean())
            texts = [str(one.message) for one in caught]
            assert len(texts) == (step == 1), texts
            assert not texts or "1 parameter(s) of SGD" in texts[0]
            optimizer.step()
            optimizer.zero_grad()


@case
def compiled_model_follows_changes() -> None:
    schedule, frozen = CHANGES["unfrozen"]
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT):
        expected = changes_by_hand(schedule, frozen, 1)
    weights = changes_by_library(schedule, frozen, 1, dynamo_backend="eager")
    assert torch.allclose(weights, expected, atol=1e-5)


@case
def change_on_one_rank_is_an_error_and_not_a_hang() -> None:
    """This is the last case, because the other ranks don't notice, and their run cannot continue."""

    def on_rank_1(net: nn.Module, optimizer: Any) -> None:
        if RANK == 1:
            unfreeze("body")(net, optimizer)

    last = {STEPS * ACCUMULATION - 1: on_rank_1}
    if RANK == 1:
        with pytest.raises(
            ConfigurationError, match=r"unfrozen: 'body.0.weight'.*rank 0: no change"
        ):
            changes_by_library(last, ("body",), 1, compare=False)
    else:
        changes_by_library(last, ("body",), 1, compare=False)


def settings_come_from_outside_the_script() -> None:
    """The environment or the config file sets them."""
    with Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT) as accelerator:
        model = accelerator.prepare(Net())
        for x in data()[:3]:
            accelerator.backward(model(x, spare=False).square().mean())
        assert model.find_unused_parameters
        assert accelerator.ddp_handler.find_unused_parameters is True
        (line,) = [s for s in accelerator.explain().splitlines() if "find_unused" in s]
        assert os.environ["EXPECTED_ORIGIN"] in line, line


if __name__ == "__main__":
    if "EXPECTED_ORIGIN" in os.environ:
        case(settings_come_from_outside_the_script)
    run_cases(sys.argv[1:])
