"""Prepare models that Transformers or the script has already sharded. Runs on two or four ranks."""

from __future__ import annotations

import functools
import gc
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations.accelerate
from common import fsdp, whole
from gpt import GPT, LENGTH, PLAN, loss_of, text
from support import collect_warnings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.distributed import DistributedConfig
from worker import RANK, SIZE, case, run_cases, scratch

from accelerate_core import Accelerator
from accelerate_core.plugin import PrepareError
from accelerate_core.utils import set_seed

# Transformers only checks that the distribution `accelerate` is installed.
transformers.integrations.accelerate.is_accelerate_available = lambda *args: True

STEPS, CYCLE, BATCH = 5, 2, 8
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
#: Its rows can't be divided evenly, and the models that have it tie the head to the embeddings.
ODD = 65
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=ODD, n_embd=32, n_layer=2, n_head=4, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied llama": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SMALL, "vocab_size": ODD}, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
}  # fmt: skip
#: Transformers has no plan for the layers of GPT-2.
PLANS = {"gpt2": {"fsdp_plan": {"transformer.h.*": "free_full_weight"}}}


@functools.cache
def pretrained(name: str) -> Path:
    """Return a folder with random weights of a small model."""
    folder = scratch(f"pretrained-{name}")
    if RANK == 0:
        torch.manual_seed(0)
        MODELS[name]().save_pretrained(folder)
    dist.barrier()
    return folder


def load(name: str, sizes: dict[str, int]) -> Any:
    """Return a model that Transformers shards while it loads it."""
    config = DistributedConfig(
        dp_replicate_size=sizes.get("dp_replicate", 1),
        fsdp_size=sizes.get("dp_shard", 1),
        tp_size=sizes.get("tp", 1),
        **PLANS.get(name, {}),
    )
    return AutoModelForCausalLM.from_pretrained(
        pretrained(name), distributed_config=config, attn_implementation="eager"
    )


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 64, (STEPS * CYCLE * BATCH, 12), generator=generator)


@functools.cache
def trained_by_one_process(name: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train a whole model with plain PyTorch. Return losses, norms and weights."""
    model = AutoModelForCausalLM.from_pretrained(pretrained(name), attn_implementation="eager")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for number, batch in enumerate(rows().split(BATCH)):
        loss = model(input_ids=batch, labels=batch).loss
        (loss / CYCLE).backward()
        losses.append(float(loss.detach()))
        if number % CYCLE:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            adam.step()
            adam.zero_grad()
    return losses, norms, dict(model.state_dict())


class Run:
    """A model that Transformers sharded, with its Accelerator and optimizer."""

    def __init__(self, name: str, sizes: dict[str, int], **options: Any) -> None:
        model = load(name, sizes)
        self.accelerator = fsdp(sizes, plan={}, gradient_accumulation_steps=CYCLE, **options)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
        loader = DataLoader(TensorDataset(rows()), BATCH // parts)
        self.before = [id(parameter) for parameter in model.parameters()]
        self.model, self.adam, self.loader = self.accelerator.prepare(model, adam, loader)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, until: int = STEPS * CYCLE) -> None:
        accelerator = self.accelerator
        for (batch,) in self.loader:
            with accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.norms.append(float(norm))
                self.adam.step()
                self.adam.zero_grad()
            self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if len(self.losses) == until:
                return


def layouts() -> list[tuple[str, dict[str, int]]]:
    if SIZE == 2:
        return [
            ("gpt2", {"dp_shard": 2}),
            ("llama", {"dp_shard": 2}),
            ("tied llama", {"dp_shard": 2}),
            ("llama", {"tp": 2}),
            ("qwen3", {"tp": 2}),
        ]
    return [
        ("llama", {"dp_shard": 2, "tp": 2}),
        ("llama", {"dp_replicate": 2, "dp_shard": 2}),
        ("gpt2", {"dp_shard": 4}),
    ]


@case
def training_equals_one_process_and_resumes_bit_for_bit() -> None:
    for name, sizes in layouts():
        losses, norms, weights = trained_by_one_process(name)
        run = Run(name, sizes)
        assert [id(parameter) for parameter in run.model.parameters()] == run.before
        run.train()
        found = whole(run.model)
        what = f"{name} {sizes}"
        assert torch.allclose(torch.tensor(run.losses), torch.tensor(losses), atol=1e-5), what
        assert torch.allclose(torch.tensor(run.norms), torch.tensor(norms), atol=1e-5), what
        for key, value in found.items():
            assert torch.allclose(value, weights[key], atol=1e-5), (what, key)

        # In the middle of an accumulation cycle.
        folder = scratch(f"{name}-{'-'.join(map(str, sizes))}")
        first = Run(name, sizes)
        first.train(until=7)
        first.accelerator.save_state(folder / "state")
        resumed = Run(name, sizes)
        with torch.no_grad():
            for parameter in resumed.model.parameters():
                parameter.zero_()
        resumed.accelerator.load_state(folder / "state")
        resumed.train(until=STEPS * CYCLE - 7)
        assert resumed.losses == run.losses[7:], (what, resumed.losses, run.losses[7:])
        for key, value in whole(resumed.model).items():
            assert torch.equal(value, found[key]), (what, key)


@case
def exported_weights_load_in_plain_transformers() -> None:
    batch = rows()[:2]
    for name, sizes in layouts():
        run = Run(name, sizes)
        run.train(until=2)
        folder = scratch(f"export-{name}-{'-'.join(map(str, sizes))}")
        run.accelerator.save_model(run.model, folder, max_shard_size="20KB")
        weights = whole(run.model)
        if RANK == 0:
            shutil.copy(pretrained(name) / "config.json", folder)
            expected = MODELS[name]()
            expected.load_state_dict(weights)
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                logits = loaded(batch).logits
                assert torch.equal(logits, expected.eval()(batch).logits), (name, sizes)
        dist.barrier()


@case
def whole_checkpoints_are_loaded_into_adopted_models() -> None:
    for name, sizes in layouts():
        folder = scratch(f"whole-{name}-{'-'.join(map(str, sizes))}")
        run = Run(name, sizes, state_dict_type="FULL_STATE_DICT")
        run.train(until=8)
        run.accelerator.save_state(folder)
        weights, norm = whole(run.model), run.norms[-1]
        run.train(until=10)
        run.accelerator.load_state(folder)
        for key, value in whole(run.model).items():
            assert torch.equal(value, weights[key]), (name, sizes, key)
        assert norm == run.norms[3]


@case
def model_sharded_by_the_script_trains_like_one_that_prepare_shards() -> None:
    own_mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("data", "layers"))
    for who in ("fully_shard", "parallelize_module", "both"):
        if who == "both" and SIZE == 2:
            continue
        results = []
        for adopted in (False, True):
            set_seed(0)
            model = GPT()
            sizes = {"dp_shard": SIZE}
            if who != "fully_shard":
                sizes = {"dp_shard": SIZE // 2, "tp": 2}
                styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
                if adopted:
                    plan = {name: styles[style]() for name, style in PLAN.items()}
                    parallelize_module(model, own_mesh["layers"], plan)
            if adopted and who != "parallelize_module":
                mesh = own_mesh["data"] if who == "both" else init_device_mesh("cpu", (SIZE,))
                for block in model.layers:
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
            accelerator = fsdp(sizes, gradient_accumulation_steps=2)
            adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model, adam = accelerator.prepare(model, adam)
            norms = []
            for number, batch in enumerate(text(4 * BATCH).split(BATCH)):
                places = torch.arange(LENGTH).expand(BATCH, LENGTH)
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch[:, :-1], places, batch[:, 1:])
                    accelerator.backward(loss)
                    if number % 2:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                    adam.step()
                    adam.zero_grad()
            results.append((torch.stack(norms), whole(model)))
        (norms, weights), (other_norms, other) = results
        assert torch.allclose(norms, other_norms, atol=1e-6), who
        for key, value in weights.items():
            assert torch.allclose(value, other[key], atol=1e-6), (who, key)


@case
def layout_that_contradicts_the_mesh_is_an_error_that_shows_both() -> None:
    model = load("llama", {"tp": SIZE} if SIZE == 2 else {"dp_shard": 2, "tp": 2})
    with pytest.raises(PrepareError) as caught:
        fsdp({"dp_shard": SIZE}).prepare(model)
    found = "tp 2" if SIZE == 2 else "dp_shard 2 x tp 2"
    assert f"already sharded as {found}, but parallelism_config" in str(caught.value)
    assert f"is dp_shard {SIZE} = {SIZE}" in str(caught.value)
    assert "parallelism_config=ParallelismConfig(" in str(caught.value)
    assert "tp_size=2)" in str(caught.value)
    if SIZE == 4:  # the same sizes, but other ranks
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp"])
        parallel = torch.nn.Sequential(torch.nn.Linear(4, 4))
        parallelize_module(parallel, mesh["tp"], {"0": ColwiseParallel()})
        with pytest.raises(PrepareError, match="over other ranks: this rank shares tp"):
            fsdp({"dp_shard": 2, "tp": 2}).prepare(parallel)


@case
def parts_without_the_model_itself_are_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[0])
    with pytest.raises(PrepareError, match=r"Call fully_shard\(model\) after its parts"):
        fsdp().prepare(model)


@case
def parameters_added_after_sharding_are_averaged() -> None:
    torch.manual_seed(RANK)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    model.scale = torch.nn.Parameter(torch.full((4,), float(RANK)))
    accelerator = fsdp()
    model = accelerator.prepare(model)
    assert torch.equal(model.scale, torch.zeros(4))
    accelerator.backward((model(torch.ones(2, 4)) * (model.scale + RANK)).sum())
    expected = model.scale.grad.clone()
    dist.broadcast(expected, 0)
    assert torch.equal(model.scale.grad, expected)
    assert not isinstance(model.scale, DTensor)


@case
def wrapper_around_a_sharded_model_keeps_its_record() -> None:
    """PEFT wraps models like this."""
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for module in (*inner, inner):
        fully_shard(module)
    accelerator = fsdp()
    model = accelerator.prepare(torch.nn.Sequential(inner))
    gc.collect()
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.full((2, 4), RANK + 1.0)).sum())
    assert inner[0].weight.grad is None
    accelerator.backward(model(torch.full((2, 4), RANK + 1.0)).sum())
    assert isinstance(inner[0].weight.grad, DTensor)


@case
def copies_of_sharded_weights_in_a_wrapper_are_an_error() -> None:
    """PEFT makes such copies for modules_to_save. PiSSA assigns them to `data` of another parameter."""
    for assigned in (False, True):
        inner: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(inner)
        copy = inner[0].weight.detach().clone()
        inner.copy = torch.nn.Parameter(torch.zeros(4, 4) if assigned else copy)
        if assigned:
            inner.copy.data = copy
        with pytest.raises(
            PrepareError, match=r"'0\.copy' of Sequential was created from a weight"
        ):
            fsdp().prepare(torch.nn.Sequential(inner))


@case
def options_without_effect_are_named_in_a_warning() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    accelerator: Accelerator = fsdp(auto_wrap_policy="no_wrap")
    with collect_warnings() as texts:
        accelerator.prepare(model)
    if RANK == 0:
        assert any("no effect: 'auto_wrap_policy'. Set them" in text for text in texts), texts


if __name__ == "__main__":
    run_cases(sys.argv[1:])
