"""Any number of ranks: ragged micro-batches have the same gradients as one big batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from digits import make_net
from torch.nn.functional import cross_entropy
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import GradientAccumulationPlugin
from accelerate_ddp import DDPBackend

STEPS = 3
IGNORED = -100


class Tagger(torch.nn.Module):
    """Predicts a class per token from its embedding and the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(17, 8)
        self.mix = torch.nn.GRU(8, 12, batch_first=True)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(tokens))[0])


def micro_batch(rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences whose length depends on rank and index, with some labels ignored."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    length = 3 + 4 * rank + 2 * index
    tokens = torch.randint(17, (2, length), generator=generator)
    labels = torch.randint(5, (2, length), generator=generator)
    labels[torch.rand(2, length, generator=generator) < 0.3] = IGNORED
    labels[0, 0] = 1
    return tokens, labels


def summed(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)


def reference(indices: list[int], scale: float = 1.0) -> list[torch.Tensor]:
    """Return the gradients of the mean over all items of these micro-batches on all ranks."""
    model, loss, count = Tagger(), torch.zeros(()), 0
    for rank in range(SIZE):
        for index in indices:
            tokens, labels = micro_batch(rank, index)
            loss = loss + summed(model, tokens, labels)
            count += int((labels != IGNORED).sum())
    (scale * loss / count).backward()
    return [parameter.grad for parameter in model.parameters()]


def check(model: torch.nn.Module, indices: list[int], scale: float = 1.0) -> None:
    wanted = reference(indices, scale)
    for parameter, expected in zip(model.parameters(), wanted, strict=True):
        assert (parameter.grad - expected).abs().max() <= 1e-6


def accelerate(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)


@case
def ragged_micro_batches_equal_one_big_batch() -> None:
    with accelerate(gradient_accumulation_steps=STEPS) as accelerator:
        model = accelerator.prepare(Tagger())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        for cycle in range(3):
            indices = [cycle * STEPS + i for i in range(STEPS)]
            for index in indices:
                tokens, labels = micro_batch(RANK, index)
                count: Any = (labels != IGNORED).sum()
                with accelerator.accumulate(model, num_items=count if cycle else int(count)):
                    accelerator.backward(summed(model, tokens, labels))
                    if accelerator.sync_gradients:
                        check(model, indices)  # already correct before clipping
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                        wanted = torch.cat([g.flatten() for g in reference(indices)]).norm()
                        assert abs(norm - wanted) < 1e-5
                    optimizer.step()
                    optimizer.zero_grad()


class SharedSamples(DDPBackend):
    """All ranks read the same samples, and each computes the loss for different tokens."""

    name = "shared_samples"

    def data_shard(self, runtime: Any) -> tuple[int, int]:
        return 0, 1

    def loss_shard(self, runtime: Any) -> tuple[int, int]:
        return runtime.process_index, runtime.num_processes


@case
def ranks_can_share_samples_but_count_different_tokens() -> None:
    with accelerate(gradient_accumulation_steps=STEPS, backend=SharedSamples) as accelerator:
        model = accelerator.prepare(Tagger())
        for index in range(STEPS):
            tokens, labels = micro_batch(0, index)
            mine = torch.full_like(labels, IGNORED)
            mine[:, RANK::SIZE] = labels[:, RANK::SIZE]
            with accelerator.accumulate(model, num_items=(mine != IGNORED).sum()):
                accelerator.backward(summed(model, tokens, mine))
        whole, loss, count = Tagger(), torch.zeros(()), 0
        for index in range(STEPS):
            tokens, labels = micro_batch(0, index)
            loss = loss + summed(whole, tokens, labels)
            count += int((labels != IGNORED).sum())
        (loss / count).backward()
        for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert (parameter.grad - expected.grad).abs().max() <= 1e-6


@case
def cycle_cut_short_by_the_end_of_the_data_is_averaged_correctly() -> None:
    data = [micro_batch(r, i) for i in range(STEPS + 2) for r in range(SIZE)]
    with accelerate(gradient_accumulation_steps=STEPS) as accelerator:
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        model, loader = accelerator.prepare(Tagger(), loader)
        boundaries = []
        for index, (tokens, labels) in enumerate(loader):
            with accelerator.accumulate(num_items=(labels != IGNORED).sum()):
                accelerator.backward(summed(model, tokens, labels))
                if accelerator.sync_gradients:
                    check(model, [0, 1, 2] if not boundaries else [3, 4])
                    boundaries.append(index)
                    model.zero_grad()
        assert boundaries == [2, 4]


@case
def two_losses_in_one_accumulate_block_are_summed() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(Tagger())
        for index in range(2):
            tokens, labels = micro_batch(RANK, index)
            with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                accelerator.backward(summed(model, tokens, labels))
                accelerator.backward(0.5 * summed(model, tokens, labels))
        check(model, [0, 1], scale=1.5)


@case
def items_are_counted_with_sync_each_batch_and_without_accumulation() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    with accelerate(gradient_accumulation_plugin=plugin) as accelerator:
        model = accelerator.prepare(Tagger())
        for index in range(2):
            tokens, labels = micro_batch(RANK, index)
            with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                accelerator.backward(summed(model, tokens, labels))
        check(model, [0, 1])
    with accelerate() as accelerator:
        model = accelerator.prepare(Tagger())
        for index in range(3):
            tokens, labels = micro_batch(RANK, index)
            with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                accelerator.backward(summed(model, tokens, labels))
                check(model, [index])
                model.zero_grad()


@case
def fp16_scale_stays_in_range() -> None:
    with accelerate(gradient_accumulation_steps=2, mixed_precision="fp16") as accelerator:
        model = accelerator.prepare(Tagger())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        taken = []
        for cycle in range(6):
            for index in range(2):
                tokens, labels = micro_batch(RANK, 2 * cycle + index)
                with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                    accelerator.backward(summed(model, tokens, labels))
                    optimizer.step()
                    if accelerator.sync_gradients:
                        taken.append(not accelerator.optimizer_step_was_skipped)
                    optimizer.zero_grad()
        assert taken[-1]
        tokens, labels = micro_batch(RANK, 0)
        for index in range(2):
            tokens, labels = micro_batch(RANK, index)
            with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                accelerator.backward(summed(model, tokens, labels))
                if accelerator.sync_gradients:
                    accelerator.unscale_gradients()
        for parameter, expected in zip(model.parameters(), reference([0, 1]), strict=True):
            assert (parameter.grad - expected).abs().max() < 5e-3


@case
def rank_without_items_contributes_nothing() -> None:
    with accelerate() as accelerator:
        model = accelerator.prepare(Tagger())
        tokens, labels = micro_batch(RANK, 0)
        if RANK == SIZE - 1:
            labels[:] = IGNORED
        with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
            accelerator.backward(summed(model, tokens, labels))
        alone, count, loss = Tagger(), 0, torch.zeros(())
        for rank in range(SIZE - 1):
            tokens, labels = micro_batch(rank, 0)
            loss = loss + summed(alone, tokens, labels)
            count += int((labels != IGNORED).sum())
        (loss / max(count, 1)).backward() if count else None
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            wanted = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
            assert (ours.grad - wanted).abs().max() <= 1e-6


@case
def cycles_with_and_without_item_counts_can_alternate() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(Tagger())
        for _ in range(2):
            for index in range(2):
                tokens, labels = micro_batch(RANK, index)
                with accelerator.accumulate(num_items=int((labels != IGNORED).sum())):
                    accelerator.backward(summed(model, tokens, labels))
            check(model, [0, 1])
            model.zero_grad()
            plain = make_plain([0, 1])
            for index in range(2):
                tokens, labels = micro_batch(RANK, index)
                with accelerator.accumulate():
                    accelerator.backward(summed(model, tokens, labels))
            for ours, theirs in zip(model.parameters(), plain, strict=True):
                assert (ours.grad - theirs).abs().max() <= 1e-5
            model.zero_grad()


def make_plain(indices: list[int]) -> list[torch.Tensor]:
    """Return gradients of the mean over ranks and steps of the summed losses, as without a count."""
    model, loss = Tagger(), torch.zeros(())
    for rank in range(SIZE):
        for index in indices:
            loss = loss + summed(model, *micro_batch(rank, index))
    (loss / (SIZE * len(indices))).backward()
    return [parameter.grad for parameter in model.parameters()]


@case
def item_counts_for_only_some_micro_batches_are_refused() -> None:
    with accelerate(gradient_accumulation_steps=2) as accelerator:
        accelerator.prepare(make_net())
        for first, second in ((4, None), (None, 4)):
            with accelerator.accumulate(num_items=first):
                pass
            with (
                pytest.raises(ConfigurationError, match="for every micro-batch"),
                accelerator.accumulate(num_items=second),
            ):
                pass
        for wrong in (-1, "3", True, float("nan"), torch.ones(2)):
            with (
                pytest.raises(ConfigurationError, match="num_items"),
                accelerator.accumulate(num_items=wrong),
            ):
                pass


if __name__ == "__main__":
    run_cases(sys.argv[1:])
