"""Two ranks: accumulation, synchronisation, clipping, scaling and several models."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from digits import batches, loader, make_net
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks

from accelerate_core import Accelerator, LocalSGD
from accelerate_core.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)


def accelerate(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return flat([parameter.grad for parameter in model.parameters()])


def by_hand_model(seed: int = 0) -> DistributedDataParallel:
    return DistributedDataParallel(make_net(seed))


def batch(index: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that differs on each rank."""
    return batches(size * SIZE * (index + 1), size)[index * SIZE + RANK]


@case
def clipping_within_an_fp16_accumulation_cycle_uses_unscaled_gradients() -> None:
    norms = {}
    for precision in ("no", "fp16"):
        scaler = GradScalerKwargs(init_scale=256.0)
        with accelerate(
            gradient_accumulation_steps=2, mixed_precision=precision, kwargs_handlers=[scaler]
        ) as accelerator:
            net = make_net()
            model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            norms[precision] = []
            for index in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    norms[precision].append(float(norm))
    for plain, scaled in zip(norms["no"], norms["fp16"], strict=True):
        assert abs(plain - scaled) < 0.05 * plain, norms


@case
def fused_optimizer_reports_skipped_steps() -> None:
    for fused in (False, True):
        with accelerate(mixed_precision="fp16") as accelerator:
            net = make_net()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
            before = flat(model)
            accelerator.backward(cross_entropy(*_forward(model, batch(0))) * float("inf"))
            optimizer.step()
            schedule.step()
            assert torch.equal(flat(model), before)
            assert accelerator.optimizer_step_was_skipped
            assert schedule.get_last_lr() == [0.1]


@case
def gradients_are_unscaled_only_once() -> None:
    scaler = GradScalerKwargs(init_scale=256.0)
    with accelerate(mixed_precision="fp16", kwargs_handlers=[scaler]) as accelerator:
        nets = [torch.nn.Linear(2, 1) for _ in range(2)]
        sgd = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        one, two, first, second = accelerator.prepare(*nets, *sgd)
        before = one.module.bias.detach().clone()
        accelerator.backward(one(torch.ones(1, 2)).sum())
        accelerator.clip_grad_norm_(one.parameters(), 100.0)
        for _ in range(2):
            accelerator.backward(two(torch.ones(1, 2)).sum())
            second.step()
            second.zero_grad()
        first.step()
        moved = (one.module.bias.detach() - before).abs()
        assert (moved - 0.1).abs().max() < 1e-3, moved


class Duck:
    """An optimizer that does not derive from torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Wrapper(torch.optim.Optimizer):
    """A torch optimizer that does not call its base class's constructor."""

    __init__ = Duck.__init__
    step = Duck.step
    zero_grad = Duck.zero_grad


@case
def wrapped_optimizer_steps_in_fp16() -> None:
    with accelerate(mixed_precision="fp16") as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, Wrapper(torch.optim.SGD(net.parameters(), 0.1)))
        for factor, skipped in ((1.0, False), (float("inf"), True)):
            accelerator.backward(cross_entropy(*_forward(model, batch(0))) * factor)
            optimizer.step()
            assert accelerator.optimizer_step_was_skipped is skipped
            optimizer.zero_grad()


@case
def model_is_wrapped_in_ddp_only_once() -> None:
    with accelerate() as one, accelerate() as two:
        for accelerator, model in (
            (two, one.prepare(make_net())),
            (one, by_hand_model()),
        ):
            again = accelerator.prepare(model)
            assert not isinstance(again.module, DistributedDataParallel)
            assert list(accelerator.get_state_dict(again)) == list(make_net().state_dict())


# --- accumulation ---------------------------------------------------------------------------------


@case
def gradients_are_synchronised_only_at_the_end_of_a_cycle() -> None:
    with accelerate(gradient_accumulation_steps=3) as accelerator:
        model = accelerator.prepare(make_net())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        start = flat(model)
        for index in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                boundary = index == 2
                assert accelerator.sync_gradients is boundary
                assert same_on_ranks(gradients(model)) is boundary, index
                kept = gradients(model)
                optimizer.step()
                assert torch.equal(flat(model), start) is not boundary
                optimizer.zero_grad()
                if not boundary:
                    assert torch.equal(gradients(model), kept), (
                        "zero_grad() should only clear at the end of a cycle"
                    )
        assert model.module.head.weight.grad is None
        assert same_on_ranks(flat(model))


def _forward(model: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data
    return model(x), y


@case
def loss_is_divided_once() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(make_net())
        for index in range(2):
            with accelerator.accumulate(model):
                loss = cross_entropy(*_forward(model, batch(index)))
                value = loss.item()
                accelerator.backward(loss)
                assert loss.item() == value, "the user's loss was changed"
        reference = by_hand_model()
        with reference.no_sync():
            (cross_entropy(*_forward(reference, batch(0))) / 2).backward()
        (cross_entropy(*_forward(reference, batch(1))) / 2).backward()
        assert torch.equal(gradients(model), gradients(reference))


def _boundaries(plugin: GradientAccumulationPlugin, count: int) -> list[bool]:
    """Return for each of `count` batches in two epochs whether gradients are synchronised."""
    with accelerate(gradient_accumulation_plugin=plugin) as accelerator:
        model, data = accelerator.prepare(make_net(), loader(count * SIZE * 4, 4))
        seen = []
        for _ in range(2):
            for x, y in data:
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(x), y))
                    seen.append(accelerator.sync_gradients)
                    both = same_on_ranks(gradients(model))
                    assert both is (seen[-1] or plugin.sync_each_batch)
                    if seen[-1]:
                        model.zero_grad()
        return seen


@case
def accumulation_cycle_ends_with_the_loader() -> None:
    epoch = [False, True, False, True, True]
    assert _boundaries(GradientAccumulationPlugin(num_steps=2), 5) == epoch * 2


@case
def accumulation_cycle_can_continue_in_the_next_epoch() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    assert _boundaries(plugin, 3) == [False, True] * 3


@case
def gradients_can_be_synchronised_in_each_batch() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    assert _boundaries(plugin, 2) == [False, True] * 2


@case
def scheduler_can_step_independently_of_the_optimizer() -> None:
    for with_optimizer, expected in ((True, SIZE * 2), (False, 4)):
        with accelerate(
            gradient_accumulation_steps=2, step_scheduler_with_optimizer=with_optimizer
        ) as accelerator:
            net = make_net()
            sgd = torch.optim.SGD(net.parameters(), lr=1.0)
            decay = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
            model, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
            for index in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            assert scheduler.get_last_lr() == [0.5**expected]


@case
def free_memory_resets_the_step_count() -> None:
    with accelerate(gradient_accumulation_steps=4) as accelerator:
        model, data = accelerator.prepare(make_net(), loader(64, 4))
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
            break
        assert accelerator.step == 1
        model, data = accelerator.free_memory(model, data)
        assert (model, data) == (None, None)
        assert accelerator.step == 0
        assert accelerator.sync_gradients
        assert not accelerator.gradient_state.in_dataloader
        # A separate training run starts a new cycle.
        model = accelerator.prepare(make_net())
        for index in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                assert accelerator.sync_gradients is (index == 3)


# --- loaders --------------------------------------------------------------------------------------


@case
def nested_loader_does_not_end_the_outer_one() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        train, test = accelerator.prepare(loader(5 * 4 * SIZE, 4), loader(11, 4, start=500))
        state, seen, counts = accelerator.gradient_state, [], []
        for _ in train:
            with accelerator.accumulate():
                seen.append((accelerator.sync_gradients, state.end_of_dataloader))
            assert state.active_dataloader is train
            if len(seen) == 3:
                for _, y in test:
                    assert state.active_dataloader is test
                    counts.append(len(accelerator.gather_for_metrics(y)))
                assert not state.end_of_dataloader
        assert [last for _, last in seen] == [False] * 4 + [True]
        assert [sync for sync, _ in seen] == [False, True, False, True, True]
        assert sum(counts) == 11
        assert not state.in_dataloader


@case
def abandoned_loader_loses_its_padding_and_becomes_inactive() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        short, train = accelerator.prepare(loader(7, 4), loader(3 * 4 * SIZE, 4))
        _, y = next(iter(short))
        expected = digits_labels(7)
        assert torch.equal(accelerator.gather_for_metrics(y), expected), (
            "one of the 8 gathered samples is padding"
        )
        assert not accelerator.gradient_state.in_dataloader
        for index, _ in enumerate(train):
            with accelerator.accumulate():
                assert accelerator.sync_gradients is (index in (1, 2))
        for _ in short:
            break
        assert not accelerator.gradient_state.end_of_dataloader


def digits_labels(count: int) -> torch.Tensor:
    return loader(count, 1).dataset.tensors[1]


class Stream(IterableDataset):
    """A stream that counts its reads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0

    def __iter__(self) -> Any:
        for index in range(self.count):
            self.reads += 1
            yield torch.tensor([index])


@case
def iterable_data_is_dispatched_by_default() -> None:
    for asked, reads in ((None, [11, 0]), (True, [11, 0]), (False, [11, 11])):
        with accelerate(
            dataloader_config=DataLoaderConfiguration(dispatch_batches=asked)
        ) as accelerator:
            stream = Stream(11)
            data = accelerator.prepare(DataLoader(stream, batch_size=2))
            rows = torch.cat([accelerator.gather_for_metrics(rows) for rows in data])
            assert sorted(rows.flatten().tolist()) == list(range(11))
            assert accelerator.communicator.gather_object(stream.reads) == reads
    with accelerate() as accelerator:
        name = type(accelerator.prepare(loader(8, 2))).__name__
        assert name == "DataLoaderShard", "each rank should read map-style data itself"


# --- synchronisation ------------------------------------------------------------------------------


@case
def no_sync_without_arguments_applies_to_all_models() -> None:
    with accelerate() as accelerator:
        one, two = accelerator.prepare(make_net(0), make_net(1))
        models = [one, two]
        with accelerator.no_sync():
            for model in models:
                accelerator.backward(cross_entropy(*_forward(model, batch(0))))
        assert [same_on_ranks(gradients(model)) for model in models] == [False, False]
        for model in models:
            model.zero_grad()
        with accelerator.no_sync(one):
            for model in models:
                accelerator.backward(cross_entropy(*_forward(model, batch(0))))
        assert [same_on_ranks(gradients(model)) for model in models] == [False, True]


@case
def accumulate_accepts_several_models() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        one, two = accelerator.prepare(make_net(0), make_net(1))
        for index in range(2):
            with accelerator.accumulate(one, two):
                for model in (one, two):
                    accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                    assert same_on_ranks(gradients(model)) is (index == 1)


@case
def trigger_sync_in_backward_synchronises_accumulated_gradients() -> None:
    with accelerate() as accelerator:
        model = accelerator.prepare(make_net())
        with accelerator.no_sync():
            first = cross_entropy(*_forward(model, batch(0)))
            second = cross_entropy(*_forward(model, batch(1)))
            accelerator.backward(first)
            assert not same_on_ranks(gradients(model))
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
        assert same_on_ranks(gradients(model))
        reference = by_hand_model()
        with reference.no_sync():
            cross_entropy(*_forward(reference, batch(0))).backward()
        cross_entropy(*_forward(reference, batch(1))).backward()
        assert torch.equal(gradients(model), gradients(reference))
        # Afterwards, everything works as before.
        model.zero_grad()
        accelerator.backward(cross_entropy(*_forward(model, batch(2))))
        assert same_on_ranks(gradients(model))
        model.zero_grad()
        with accelerator.no_sync():
            accelerator.backward(cross_entropy(*_forward(model, batch(2))))
        assert not same_on_ranks(gradients(model))


@case
def join_uneven_inputs_handles_ranks_with_fewer_batches() -> None:
    mine = [batch(index) for index in range(3 if RANK else 6)]
    with accelerate() as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with accelerator.join_uneven_inputs([model]):
            for data in mine:
                accelerator.backward(cross_entropy(*_forward(model, data)))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        # join sends the weights of the rank with the most batches to the others.
        assert same_on_ranks(flat(model))
        reference = by_hand_model()
        sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
        with reference.join():
            for data in mine:
                cross_entropy(*_forward(reference, data)).backward()
                sgd.step()
                sgd.zero_grad()
        assert torch.equal(flat(model), flat(reference))


@case
def join_uneven_inputs_overrides_even_batches_temporarily() -> None:
    with accelerate() as accelerator:
        model, data = accelerator.prepare(make_net(), loader(5 * 4, 4))
        assert accelerator.even_batches
        counts = []
        for even in (False, None, True):
            with accelerator.join_uneven_inputs([model], even_batches=even):
                sizes = [len(x) for x, y in data if model(x).sum().backward() is None]
            counts.append(accelerator.communicator.gather_object(len(sizes)))
        assert counts == [[3, 2], [3, 3], [3, 3]]
        assert data.even_batches


@case
def trigger_of_one_rank_reaches_all_and_is_reset() -> None:
    with accelerate() as accelerator:
        assert not accelerator.check_trigger()
        if RANK == SIZE - 1:
            accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()


# --- several models, scaling ----------------------------------------------------------------------


def make_gan() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(3)
    make = torch.nn.Sequential
    generator = make(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    critic = make(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return generator, critic


def adversarial(generator: Any, critic: Any, real: torch.Tensor, noise: torch.Tensor) -> Any:
    """Yield the critic's loss and then the generator's, each when the loop asks for it."""
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = generator(noise)
    loss = binary_cross_entropy_with_logits
    yield loss(critic(real).float(), ones) + loss(critic(fake.detach()).float(), zeros)
    yield loss(critic(generator(noise)).float(), ones)


def gan_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(RANK)
    return [(batch(i)[0].flatten(1), torch.randn(8, 4, generator=source)) for i in range(6)]


def gan_by_hand(precision: str, init_scale: float) -> tuple[torch.Tensor, float]:
    nets = [DistributedDataParallel(net) for net in make_gan()]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=precision == "fp16")

    def mixed(net: torch.nn.Module) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                return net(x)

        return forward

    for real, noise in gan_data():
        losses = adversarial(*map(mixed, nets), real, noise)
        for turn in (1, 0):
            optimizers[turn].zero_grad()
            scaler.scale(next(losses)).backward()
            scaler.unscale_(optimizers[turn])
            torch.nn.utils.clip_grad_norm_(nets[turn].parameters(), 0.1)
            scaler.step(optimizers[turn])
            scaler.update()
    return torch.cat([flat(net) for net in nets]), scaler.get_scale()


def check_gan(precision: str, init_scale: float) -> float:
    """Train one GAN with accelerate-core and one in plain PyTorch. Return the last loss scale."""
    handlers = [GradScalerKwargs(init_scale=init_scale)]
    with accelerate(mixed_precision=precision, kwargs_handlers=handlers) as accelerator:
        plain = make_gan()
        start = torch.cat([flat(net) for net in plain])
        adams = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in plain]
        *nets, first, second = accelerator.prepare(*plain, *adams)
        optimizers = (first, second)
        for real, noise in gan_data():
            losses = adversarial(*nets, real, noise)
            for turn in (1, 0):
                optimizers[turn].zero_grad()
                accelerator.backward(next(losses))
                accelerator.clip_grad_norm_(nets[turn].parameters(), 0.1)
                optimizers[turn].step()
        trained = torch.cat([flat(net) for net in nets])
        assert (trained != start).float().mean() > 0.5, "the networks were not trained"
        assert same_on_ranks(trained)
        expected, scale = gan_by_hand(precision, init_scale)
        assert torch.equal(trained, expected)
        # The scale of the last step may be updated only when the next backward begins.
        return scale


@case
def gan_equals_plain_pytorch() -> None:
    check_gan("no", 1.0)


@case
def gan_in_fp16_equals_plain_pytorch() -> None:
    assert check_gan("fp16", 1024.0) == 1024.0


@case
def gan_in_fp16_survives_overflows() -> None:
    assert check_gan("fp16", 2.0**20) < 2.0**20


@case
def two_optimizers_for_one_loss_use_the_same_scale() -> None:
    """Both optimizers step after one backward, and the scale must not change between the steps."""
    for init_scale in (1024.0, 2.0**28):
        handlers = [GradScalerKwargs(init_scale=init_scale)]
        with accelerate(mixed_precision="fp16", kwargs_handlers=handlers) as accelerator:
            nets = [make_net(0), make_net(1)]
            sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
            one, two, *optimizers = accelerator.prepare(*nets, *sgds)
            pair = [by_hand_model(0), by_hand_model(1)]
            references = [torch.optim.SGD(net.parameters(), lr=0.1) for net in pair]
            scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
            for index in range(4):
                x, y = batch(index)
                accelerator.backward(cross_entropy(one(x) + two(x), y))
                for model, optimizer in zip((one, two), optimizers, strict=True):
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    outputs = pair[0](x), pair[1](x)
                loss = cross_entropy(outputs[0].float() + outputs[1].float(), y)
                scaler.scale(loss).backward()
                for net, optimizer in zip(pair, references, strict=True):
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            assert accelerator.scaler.get_scale() == scaler.get_scale()
            for model, net in zip((one, two), pair, strict=True):
                assert torch.equal(flat(model), flat(net)), init_scale


@case
def overflow_on_one_rank_skips_the_step_on_all() -> None:
    with accelerate(mixed_precision="fp16") as accelerator:
        net = make_net()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
        model, optimizer, scheduler = accelerator.prepare(net, sgd, decay)
        scale, start = accelerator.scaler.get_scale(), flat(model)

        def step(factor: float) -> None:
            loss = cross_entropy(*_forward(model, batch(0))) * factor
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        step(float("inf") if RANK == 1 else 1.0)
        assert accelerator.optimizer_step_was_skipped
        assert optimizer.step_was_skipped
        assert scheduler.get_last_lr() == [0.1]
        assert accelerator.scaler.get_scale() == scale / 2
        assert torch.equal(flat(model), start)
        step(1.0)
        assert not accelerator.optimizer_step_was_skipped
        assert scheduler.get_last_lr() == [0.1 * 0.5**SIZE]
        assert accelerator.scaler.get_scale() == scale / 2
        assert not torch.equal(flat(model), start)
        assert same_on_ranks(flat(model))


@case
def clipping_by_value_uses_unscaled_gradients() -> None:
    with accelerate(mixed_precision="fp16") as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(cross_entropy(*_forward(model, batch(0))))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        assert gradients(model).abs().max() <= 0.01
        assert (gradients(model).abs() < 0.01).float().mean() > 0.3, (
            "most gradients were clipped, so they were still scaled"
        )
        kept = gradients(model)
        accelerator.unscale_gradients(optimizer)
        assert torch.equal(gradients(model), kept), "once per step"


# --- averaging parameters -------------------------------------------------------------------------


@case
def local_sgd_averages_every_few_steps() -> None:
    # Local SGD counts calls, not optimizer steps: ranks are equal after every second call.
    for accumulated, expected in ((1, [False, True, False, True, False]), (2, [True] * 5)):
        with accelerate(gradient_accumulation_steps=accumulated) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            equal = []
            with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
                for index in range(5):
                    with accelerator.accumulate(model):
                        accelerator.backward(cross_entropy(*_forward(model, batch(index))))
                        optimizer.step()
                        optimizer.zero_grad()
                        before = flat(model)
                        local_sgd.step()
                    equal.append(same_on_ranks(flat(model)))
                    if equal[-1]:
                        dist.all_reduce(before)
                        assert torch.allclose(flat(model), before / SIZE, atol=1e-7)
            assert equal == expected, equal
            assert same_on_ranks(flat(model)), (
                "parameters should be averaged at the end of the block"
            )


if __name__ == "__main__":
    run_cases(sys.argv[1:])
