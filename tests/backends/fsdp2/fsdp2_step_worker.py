"""Cases for steps, sequences and checkpoints with FSDP2, on two and on four ranks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import KEPT, fsdp, whole
from gpt import GPT, LENGTH, PLAN, SEQUENCE_PLAN, loss_of, text
from small_model import Tower, close, data, mine, steps
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases, scratch

from accelerate_checkpoint import read_manifest
from accelerate_checkpoint.files import checksum
from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.errors import (
    CheckpointError,
    ConfigurationError,
    PrepareError,
)
from accelerate_core.utils import (
    GradientAccumulationPlugin,
    TorchTensorParallelConfig,
    load_checkpoint_in_model,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
    set_seed,
)

# --- the step -------------------------------------------------------------------------------------


@case
def clipping_inside_a_cycle_has_no_effect() -> None:
    x, y = data()

    def run(always: bool) -> Any:
        accelerator = fsdp(gradient_accumulation_steps=2)
        model = Tower()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(10 * mse_loss(model(x), y))
                if always or accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    assert (float(norm) > 0.5) == accelerator.sync_gradients, norm
                    accelerator.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)

    close(run(always=True), run(always=False))


@case
def clipping_parameters_from_before_prepare_is_refused() -> None:
    """They have no gradients: the norm was 0 in every step, and nothing was clipped."""
    accelerator = fsdp()
    model = Tower()
    held = list(model.parameters())
    model, _ = accelerator.prepare(model, torch.optim.SGD(held, lr=0.1))
    x, y = data()
    accelerator.backward(mse_loss(model(x), y))
    with pytest.raises(
        ConfigurationError, match=r"parameter\(s\) from before prepare\(\), such as"
    ):
        accelerator.clip_grad_norm_(held, 1.0)


@case
def join_uneven_inputs_has_no_effect_and_gives_a_warning() -> None:
    accelerator = fsdp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([]):
            pass
    assert ["does not support it" in str(one.message) for one in caught] == [True] * (RANK == 0)


@case
def step_with_unreduced_gradients_is_rejected() -> None:
    accelerator = fsdp(gradient_accumulation_steps=2)
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data()
    before = whole(model)
    with accelerator.no_sync(model):
        accelerator.backward(mse_loss(model(x), y))
        for call in (
            optimizer.step,
            lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
            lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        ):
            with pytest.raises(ConfigurationError, match="under no_sync"):
                call()
    with pytest.raises(ConfigurationError, match="under no_sync"):
        optimizer.step()  # outside the block, but gradients are still not reduced
    other = Tower(seed=1)
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(mse_loss(other(x), y))
    with accelerator.no_sync(model):
        second.step()  # for another model
    optimizer.zero_grad()  # drops unreduced gradients
    accelerator.backward(mse_loss(model(x), y))
    once = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(100 * mse_loss(model(x), y))
    optimizer.zero_grad()
    accelerator.backward(mse_loss(model(x), y))
    close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, once)
    optimizer.zero_grad()
    place = scratch("dropped") / "state"
    accelerator.save_state(place)
    with accelerator.no_sync(model):
        accelerator.backward(100 * mse_loss(model(x), y))
    accelerator.load_state(place)
    accelerator.backward(mse_loss(model(x), y))
    close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, once)
    optimizer.zero_grad()
    with accelerator.accumulate(model):  # inside a cycle, a step has no effect
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
    close(whole(model), before, atol=0)
    accelerator.end_training()


@case
def gradients_are_only_reduced_in_the_last_micro_batch() -> None:
    """Counts collectives with the profiler."""
    sizes = {"dp_replicate": 2, "dp_shard": 2} if SIZE == 4 else None
    x, y = data()
    for each_batch, expected in ((False, (False, False)), (True, (True, False))):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch)
        accelerator = fsdp(sizes, auto_wrap_policy="no_wrap", gradient_accumulation_plugin=plugin)
        model = Tower()
        plain = copy.deepcopy(model)
        model = accelerator.prepare(model)
        for micro in range(2):
            with accelerator.accumulate(model), torch.profiler.profile() as seen:
                accelerator.backward(mse_loss(model(mine(x)), mine(y)))
            names = [event.key for event in seen.key_averages()]
            scattered = any("reduce_scatter" in name for name in names)
            reduced = any(name == "c10d::allreduce_" for name in names)
            if micro == 0:
                assert (scattered, reduced) == expected, names
            else:
                assert (scattered, reduced) == (True, SIZE == 4), names
        mse_loss(plain(x), y).backward()
        got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        close(got, {n: p.grad for n, p in plain.named_parameters()})
        accelerator.end_training()


@case
def overflow_on_one_rank_skips_the_step_on_all() -> None:
    accelerator = fsdp(mixed_precision="fp16")
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before, scale = whole(model), accelerator.scaler.get_scale()
    x, y = data()
    for clips in (False, True):
        loss = mse_loss(model(x), y)
        accelerator.backward(loss * (float("inf") if RANK == SIZE - 1 else 1.0))
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
    close(whole(model), before, atol=0)
    assert accelerator.scaler.get_scale() == scale / 4
    folder = scratch("scaler")
    accelerator.save_state(folder / "state")
    accelerator.scaler.update(8.0)
    accelerator.load_state(folder / "state")
    assert accelerator.scaler.get_scale() == scale / 4
    accelerator.end_training()


# --- sequences ------------------------------------------------------------------------------------


@case
def loss_parallel_matches_plain_torch() -> None:
    plan = {**PLAN, "head": "colwise_loss"}
    config = ParallelismConfig(
        dp_shard_size=SIZE // 2,
        tp_size=2,
        tp_handler=TorchTensorParallelConfig(plan=plan, loss_parallel=True),
    )
    set_seed(0)
    plain = GPT()
    rows = text(4)
    places = torch.arange(LENGTH).expand(4, -1)
    expected = loss_of(plain, rows[:, :-1], places, rows[:, 1:])
    expected.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    accelerator = Accelerator(cpu=True, parallelism_config=config, process_group_timeout=PG_TIMEOUT)
    model = accelerator.prepare(copy.deepcopy(plain).requires_grad_())
    index, count = accelerator.hooks.data_shard()
    part = rows.chunk(count)[index]
    loss = loss_of(model, part[:, :-1], places[: len(part)], part[:, 1:])
    assert isinstance(loss, DTensor)
    accelerator.backward(loss)
    mean = accelerator.reduce(loss.detach(), "mean")
    assert abs(float(mean) - float(expected.detach())) <= 1e-5
    assert accelerator.gather(loss.detach()).numel() == count
    got = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert abs(float(got) - float(norm)) <= 1e-4 * float(norm)
    accelerator.end_training()


def one_step(model: Any, accelerator: Any) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return the loss, norm and whole gradients of one step with four rows."""
    rows, places = text(4), torch.arange(LENGTH).expand(4, -1)
    if accelerator is None:
        loss = loss_of(model, rows[:, :-1], places, rows[:, 1:])
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        return float(loss.detach()), float(norm), grads
    index, count = accelerator.hooks.data_shard()
    part = rows.chunk(count)[index]
    loss = loss_of(model, part[:, :-1], places[: len(part)], part[:, 1:])
    accelerator.backward(loss)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    return float(accelerator.reduce(loss.detach(), "mean")), float(norm), grads


@case
def sequence_parallel_plan_matches_plain_torch() -> None:
    set_seed(0)
    plain = GPT()
    sharded = copy.deepcopy(plain)
    loss, norm, grads = one_step(plain, None)
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    accelerator = fsdp(sizes, plan=SEQUENCE_PLAN)
    got = one_step(accelerator.prepare(sharded), accelerator)
    assert abs(got[0] - loss) <= 1e-5
    assert abs(got[1] - norm) <= 1e-4 * norm
    close(got[2], grads, atol=1e-5)
    accelerator.end_training()


@case
def gradients_from_parts_of_the_heads_are_summed() -> None:
    class Normed(nn.Module):
        """A model with a norm over each head's query, like some models in Transformers."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o(self.norm(self.q(x).unflatten(-1, (-1, 4))).flatten(-2))

    x, y = data()
    plain = Normed()
    sharded = copy.deepcopy(plain)
    for _ in range(2):  # two backwards accumulate gradients
        mse_loss(plain(x), y).backward()
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    plan = {"q": "colwise", "o": "rowwise", "norm": "replicated_with_grad_allreduce"}
    accelerator = fsdp(sizes, plan=plan)
    model = accelerator.prepare(sharded)
    index, count = accelerator.hooks.data_shard()
    for _ in range(2):
        accelerator.backward(mse_loss(model(x.chunk(count)[index]), y.chunk(count)[index]))
    got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    close(got, {n: p.grad for n, p in plain.named_parameters()}, atol=1e-5)
    accelerator.end_training()


@case
def models_that_differ_between_ranks_are_rejected() -> None:
    accelerator = fsdp()
    with pytest.raises(PrepareError, match=r"different models: 'layers.0.weight' is .*rank 0 and"):
        accelerator.prepare(Tower(width=8 if RANK == 0 else 16))
    with pytest.raises(PrepareError, match=r"'layers.3.weight' is missing on rank 0"):
        accelerator.prepare(Tower(layers=3 if RANK == 0 else 4))
    accelerator.end_training()


@case
def checkpoint_stores_rank_0s_buffers() -> None:
    place = scratch("buffers") / "state"
    accelerator = fsdp()
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model(mine(data()[0]) * (RANK + 1))
    own = model[1].running_mean.clone()
    first = accelerator.communicator.broadcast_object(own)
    accelerator.save_state(place)
    accelerator.load_state(place)
    assert torch.equal(model[1].running_mean, first)
    assert RANK == 0 or not torch.equal(own, first)
    accelerator.end_training()


@case
def context_parallel_splits_buffers_and_restores_them() -> None:
    for kind, parts in (("cp", 2 * SIZE), ("sp", SIZE)):
        accelerator = fsdp({kind: SIZE})
        rows = torch.arange(2 * 16).view(2, 16)
        one, other = rows.clone(), rows.clone()
        with accelerator.maybe_context_parallel([one, other], [1, 1], {other}):
            assert one.shape == other.shape == (2, 16 // SIZE)
            seen = accelerator.communicator.gather_object(one[0].tolist())
            assert sorted(chain(*seen)) == list(range(16)), "each position once"
        assert torch.equal(one, rows)
        assert other.shape == (2, 16 // SIZE)
        odd = torch.zeros(2, parts + 1)
        with pytest.raises(ConfigurationError, match=f"multiple of {parts}. Pad it to {2 * parts}"):
            accelerator.maybe_context_parallel([odd], [1]).__enter__()
        with pytest.raises(ConfigurationError, match="requires a gradient"):
            accelerator.maybe_context_parallel([odd.requires_grad_()], [1]).__enter__()
        with pytest.raises(ConfigurationError, match="1 buffers but 2"):
            accelerator.maybe_context_parallel([rows], [1, 1]).__enter__()
        accelerator.end_training()
        # Tokens and labels are usually views of the same tensor.
        accelerator = fsdp({kind: SIZE})
        rows = torch.arange(2 * 17).view(2, 17)
        before = rows.clone()
        tokens, labels = rows[:, :-1], rows[:, 1:]
        with accelerator.maybe_context_parallel([tokens, labels], [1, 1]):
            assert torch.equal(labels, tokens + 1)
            assert tokens.shape == (2, 16 // SIZE)
        assert torch.equal(rows, before)
        assert torch.equal(labels, before[:, 1:])
        accelerator.end_training()
    accelerator = fsdp()
    kept = torch.arange(7)
    with accelerator.maybe_context_parallel([kept], [0]):
        assert len(kept) == 7
    accelerator.end_training()


@case
def ulysses_works_inside_torchs_own_layers() -> None:
    """Attention is inside MultiheadAttention, and is recomputed in backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 16)
    expected = layer(x).detach()
    (layer(x).square().sum()).backward()
    grads = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    for again in (False, True):
        accelerator = fsdp({"sp": SIZE}, activation_checkpointing=again)
        model = accelerator.prepare(copy.deepcopy(layer))
        part = x.clone()
        with accelerator.maybe_context_parallel([part], [1]):
            out = model(part)
            accelerator.backward(out.square().sum() * SIZE)  # gradients are averaged
            torch.testing.assert_close(out, expected.chunk(SIZE, 1)[RANK], rtol=0, atol=1e-5)
        close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, grads, atol=1e-4)
        accelerator.end_training()
    accelerator = fsdp({"sp": SIZE})
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    with (
        accelerator.maybe_context_parallel(),
        pytest.raises(ConfigurationError, match="need_weights=False"),
    ):
        attention(x, x, x)
    with (
        pytest.warns(UserWarning, match=r"scaled_dot_product_attention was not called"),
        accelerator.maybe_context_parallel([x.clone()], [1]),
    ):
        pass
    accelerator.end_training()


@case
def indivisible_number_of_heads_is_rejected() -> None:
    accelerator = fsdp({"sp": SIZE})
    q = torch.randn(1, 3, 4, 8)
    with (
        accelerator.maybe_context_parallel(),
        pytest.raises(ConfigurationError, match="number of heads divisible by"),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    accelerator.end_training()


@case
def ranks_of_the_same_group_read_the_same_batches() -> None:
    if SIZE == 2:
        meshes = [({"tp": 2}, 1)]
    else:
        meshes = [({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 2, "sp": 2}, 2)]
    for sizes, count in meshes:
        torch.manual_seed(RANK)  # the ranks' own generators differ
        accelerator = fsdp(sizes)
        loader = DataLoader(TensorDataset(torch.arange(16)), 2, shuffle=True)
        loader = accelerator.prepare(loader)
        read = accelerator.communicator.gather_object([b.tolist() for (b,) in loader])
        distinct = {str(one) for one in read}
        assert len(distinct) == count, read
        every = [v for one in distinct for batch in eval(one) for v in batch]
        assert sorted(every) == list(range(16)), read
        gathered = accelerator.gather(torch.tensor([RANK]))
        assert len(gathered) == count
        accelerator.end_training()


@case
def transformers_model_is_parallelised_by_its_own_plan() -> None:
    """Train a small Llama with its own layers as units, its own `tp_plan`, and Ulysses."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig

    def make() -> Any:
        set_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=4, **sizes)
        )

    def loss_and_norm(model: Any, accelerator: Any) -> tuple[float, float]:
        rows = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(3))
        if accelerator is not None:
            index, count = accelerator.hooks.data_shard()
            rows = rows.chunk(count)[index]
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        places = torch.arange(16).expand_as(tokens).clone()
        if accelerator is None:
            loss = loss_of(lambda t, p: model(t, position_ids=p).logits, tokens, places, labels)
            loss.backward()
            return float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        with accelerator.maybe_context_parallel([tokens, labels, places], [1, 1, 1]):
            loss = loss_of(lambda t, p: model(t, position_ids=p).logits, tokens, places, labels)
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        return float(accelerator.reduce(loss.detach(), "mean")), float(norm)

    expected = loss_and_norm(make(), None)
    meshes = [{"dp_shard": 2}, {"tp": 2}, {"sp": 2}]
    if SIZE == 4:
        meshes = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "sp": 2}, {"sp": 4}]
    for sizes in meshes:
        config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
        accelerator = Accelerator(
            cpu=True, parallelism_config=config, process_group_timeout=PG_TIMEOUT
        )
        model = accelerator.prepare(make())
        assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
        assert model.model.layers[0].self_attn.q_proj.weight.to_local().numel() == 1024 // SIZE
        loss, norm = loss_and_norm(model, accelerator)
        assert abs(loss - expected[0]) <= 1e-5, (sizes, loss, expected)
        assert abs(norm - expected[1]) <= 1e-4 * norm, (sizes, norm, expected)
        if "sp" in sizes:
            recurrent = Tower()
            recurrent.config = Qwen3NextConfig(num_hidden_layers=4)
            with pytest.raises(
                ConfigurationError, match="has linear_attention layers, which carry a"
            ):
                accelerator.prepare(recurrent)
        accelerator.end_training()


# --- checkpoints ----------------------------------------------------------------------------------


@case
def rank_0_gets_whole_weights() -> None:
    folder = scratch("whole")
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    torch.manual_seed(0)
    original = GPT()
    expected = {n: t.clone() for n, t in original.state_dict().items()}
    accelerator = fsdp(sizes)
    model = accelerator.prepare(original)
    assert accelerator.unwrap_model(model) is model
    state = accelerator.get_state_dict(model)
    if RANK == 0:
        close(state, expected, atol=0)
    else:
        assert state == {}
    accelerator.save_model(model, folder, max_shard_size="10KB")
    accelerator.wait_for_everyone()
    other = GPT()
    load_checkpoint_in_model(other, str(folder))
    close(dict(other.state_dict()), expected, atol=0)
    cleared = accelerator.free_memory(model)
    assert cleared == [None]
    accelerator.end_training()


@case
def full_state_dict_checkpoint_can_be_loaded_with_ddp() -> None:
    folder = scratch("full")
    accelerator = fsdp(state_dict_type="FULL_STATE_DICT")
    model = Tower()
    plain = copy.deepcopy(model)
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    steps(model, adam, accelerator)
    accelerator.save_state(folder / "state")
    expected = whole(model)
    steps(model, adam, accelerator)
    accelerator.load_state(folder / "state")
    close(whole(model), expected, atol=0)
    steps(model, adam, accelerator)
    ended = whole(model)
    accelerator.end_training()
    ddp = Accelerator(cpu=True, backend="ddp", process_group_timeout=PG_TIMEOUT)
    plain, adam = ddp.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    ddp.load_state(folder / "state")
    other, sharded = Tower(), fsdp()
    sharded.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
    with pytest.raises(CheckpointError, match=r"not a sharded checkpoint.*FULL_STATE_DICT"):
        sharded.load_state(folder / "state")
    steps(plain, adam, ddp)
    close(dict(ddp.unwrap_model(plain).state_dict()), ended)
    ddp.end_training()


@case
def state_dict_type_can_be_changed_after_construction() -> None:
    folder = scratch("changed_kind")
    accelerator = fsdp()
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.prepare(Tower())
    accelerator.save_state(folder / "state")
    assert (folder / "state" / "model.safetensors").is_file()
    accelerator.load_state(folder / "state")
    accelerator.end_training()


@case
def sharded_checkpoint_resumes_and_mismatches_are_rejected() -> None:
    folder = scratch("sharded")
    for blocking in (True, False):
        accelerator = fsdp()
        model = Tower()
        rate = torch.tensor(0.01)
        model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate))
        steps(model, adam, accelerator)
        place = folder / f"state_{blocking}"
        accelerator.save_state(place, blocking=blocking)
        expected = whole(model)
        steps(model, adam, accelerator)  # while the checkpoint is written
        ended = whole(model)
        accelerator.wait_for_checkpoint()
        rate.fill_(0.5)
        assert (place / "backend_fsdp2" / ".metadata").exists()
        assert not (place / "model.safetensors").exists()
        accelerator.load_state(place)
        close(whole(model), expected, atol=0)
        assert adam.param_groups[0]["lr"] is rate
        steps(model, adam, accelerator)
        close(whole(model), ended, atol=0)
        adam.optimizer.state[model.layers[0].weight]["history"] = [torch.zeros(1)]
        with pytest.raises(CheckpointError, match=r"has 'history' of 0.layers.0.weight"):
            accelerator.save_state(folder / "refused")
        other = Tower(width=4)
        mismatched = fsdp()
        mismatched.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.01))
        shapes = r"has shape \[8, 8\] in the checkpoint and \[4, 4\] in this run"
        with pytest.raises(CheckpointError, match=shapes):
            mismatched.load_state(place)
        half = Tower().to(torch.bfloat16)
        mismatched = fsdp()
        mismatched.prepare(half, torch.optim.AdamW(half.parameters(), lr=0.01))
        dtypes = r"is torch\.float32 in the checkpoint and torch\.bfloat16 in this run"
        with pytest.raises(CheckpointError, match=dtypes):
            mismatched.load_state(place)
        accelerator.end_training()


@case
def shards_can_be_merged_and_hooks_are_called() -> None:
    import subprocess
    import sys

    from safetensors.torch import load_file

    folder = scratch("merged")
    sizes = {"tp": 2} if SIZE == 2 else {"dp_shard": 2, "tp": 2}
    torch.manual_seed(0)
    original = GPT(tied=True)
    expected = {n: t.clone() for n, t in original.state_dict().items()}
    accelerator = fsdp(sizes)
    accelerator.prepare(original, torch.optim.AdamW(original.parameters()))
    calls: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], directory: str) -> None:
        calls.append((len(models), len(weights)))
        if RANK == 0:
            with open(f"{directory}/mine.txt", "w") as file:
                file.write("mine")

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(lambda models, directory: calls.append(len(models)))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    assert calls == [(1, 0), 1]
    assert (folder / "state" / "mine.txt").read_text() == "mine"
    if RANK == 0:
        command = [sys.executable, "-m", "accelerate_core", "merge-weights"]
        for flags, name in (
            ([], "model.safetensors"),
            (["--unsafe_serialization"], "pytorch_model.bin"),
        ):
            subprocess.run(
                [*command, str(folder / "state"), str(folder / "out"), *flags], check=True
            )
            path = folder / "out" / name
            merged = load_file(path) if not flags else torch.load(path)
            close(merged, expected, atol=0)
    accelerator.wait_for_everyone()
    accelerator.end_training()


@case
def malicious_pickle_in_the_metadata_is_not_executed() -> None:
    folder = scratch("planted")
    accelerator = fsdp()
    accelerator.prepare(Tower())
    place = folder / "state"
    accelerator.save_state(place)

    class Planted:
        def __reduce__(self) -> Any:
            return (open, (str(folder / "ran"), "w"))

    accelerator.wait_for_everyone()
    if RANK == 0:
        (place / "backend_fsdp2" / ".metadata").write_bytes(pickle.dumps(Planted()))
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="metadata"):
        accelerator.load_state(place, verify=False)
    assert not (folder / "ran").exists()
    accelerator.end_training()


@case
def tensor_that_the_metadata_declares_as_bytes_is_not_unpickled() -> None:
    folder = scratch("planted_bytes")
    accelerator = fsdp()
    model = Tower()
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    plugin: Any = accelerator.state.fsdp_plugin
    place = folder / "state"
    steps(model, adam, accelerator)
    accelerator.save_state(place)
    save_fsdp_model(plugin, accelerator, model, folder / "names")
    save_fsdp_optimizer(plugin, accelerator, adam, model, folder / "names")
    accelerator.wait_for_everyone()
    ran = folder / "ran"
    if RANK == 0:
        for directory in (
            place / "backend_fsdp2",
            folder / "names" / "pytorch_model_fsdp_0",
            folder / "names" / "optimizer_0",
        ):
            plant_bytes(directory, ran)
        manifest = read_manifest(place)
        manifest.files = {name: checksum(place / name) for name in manifest.files}
        (place / "manifest.json").write_text(manifest.render())
    accelerator.wait_for_everyone()
    loads = [
        lambda: accelerator.load_state(place, strict=False),
        lambda: accelerator.load_state(place),
        lambda: load_fsdp_model(plugin, accelerator, model, folder / "names"),
        lambda: load_fsdp_optimizer(plugin, accelerator, adam, model, folder / "names"),
    ]
    for load in loads:
        with pytest.raises(CheckpointError, match="tensor"):
            load()
        assert not ran.exists()
    accelerator.end_training()


def plant_bytes(directory: Path, path: Path) -> None:
    """Declare each tensor of a directory as bytes, which hold a pickle that creates a file."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    class Planted:
        def __reduce__(self) -> Any:
            return (open, (str(path), "w"))

    torch.save(Planted(), directory / "__0_0.distcp")
    size = (directory / "__0_0.distcp").stat().st_size
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    info = next(iter(metadata.storage_data.values()))
    place = dataclasses.replace(info, relative_path="__0_0.distcp", offset=0, length=size)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = place
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@case
def damaged_shard_of_the_right_size_is_the_same_error_on_all_ranks() -> None:
    folder = scratch("damaged_shard")
    accelerator = fsdp()
    accelerator.prepare(Tower())
    place = folder / "state"
    accelerator.save_state(place)
    shard = place / "backend_fsdp2" / "__1_0.distcp"
    for content in (b"x" * shard.stat().st_size, None):
        accelerator.wait_for_everyone()
        if RANK == 0:
            shard.write_bytes(content) if content else shard.unlink()
        accelerator.wait_for_everyone()
        start = time.monotonic()
        with pytest.raises(CheckpointError) as failure:
            accelerator.load_state(place, verify=False)
        assert time.monotonic() - start < 20
        texts: list[Any] = [None] * SIZE
        dist.all_gather_object(texts, str(failure.value))
        assert len(set(texts)) == 1
        assert str(place) in texts[0]
    accelerator.end_training()


if __name__ == "__main__":
    run_cases(sys.argv[1:])
    dist.barrier()
    KEPT.end_training()
