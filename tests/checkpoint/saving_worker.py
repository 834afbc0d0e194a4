"""Saving, resuming, unwrapping and copying, on one or more ranks."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from digits import digits, loader, make_net
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks, scratch

from accelerate_core import Accelerator
from accelerate_core.utils import (
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    load_checkpoint_in_model,
    set_seed,
)

KEYS = set(make_net().state_dict())
WHOLE = TorchDynamoPlugin(backend="eager")
REGIONAL = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)


def accelerate(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, **arguments)


# --- resuming ---------------------------------------------------------------------------------


class Counter:
    """A user's own object with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def train(
    folder: Path,
    precision: str,
    save_at: tuple[int, int],
    resume: bool,
    seedable: bool = False,
) -> tuple[list[Any], torch.Tensor]:
    """Train two epochs of six batches and save once, or resume. Return what followed the save."""
    set_seed(99 if resume else 5, device_specific=True)
    with accelerate(
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10, growth_interval=2)],
    ) as accelerator:
        accelerator.dataloader_config.use_seedable_sampler = seedable
        # Resuming starts from other values, so that anything not restored is noticed.
        net = make_net(7 if resume else 0, dropout=0.2)
        set_seed(98 if resume else 6, device_specific=True)
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)
        data = loader(6 * 4 * SIZE, 4, shuffle=True)
        model, optimizer, scheduler, data = accelerator.prepare(net, adam, decay, data)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        if resume:
            accelerator.load_state(str(folder))
            assert counter.value == save_at[0] * 6 + save_at[1], counter.value
        seen: list[Any] = []
        for epoch in range(save_at[0] if resume else 0, 2):
            for index, (x, y) in enumerate(data, start=save_at[1] * (resume and not seen)):
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                counter.value += 1
                seen.append((epoch, index, y.tolist(), loss.item(), scheduler.get_last_lr()))
                if not resume and (epoch, index + 1) == save_at:
                    accelerator.save_state(str(folder))
                    seen.clear()
        scaler = accelerator.scaler
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()) if scaler else ())
        seen.append(torch.rand(2).tolist())
        assert same_on_ranks(flat(model))
        return seen, flat(model)


def check_resumes(precision: str, save_at: tuple[int, int], **more: Any) -> None:
    folder = scratch(f"resume_{precision}_{save_at[0]}_{save_at[1]}_{len(more)}")
    straight, weights = train(folder, precision, save_at, resume=False, **more)
    resumed, again = train(folder, precision, save_at, resume=True, **more)
    assert len(straight) == 12 - save_at[0] * 6 - save_at[1] + 2
    for one, other in zip(straight, resumed, strict=True):
        assert one == other, (one, other)
    assert torch.equal(weights, again)


@case
def resuming_in_the_first_epoch_is_bitwise_equal() -> None:
    check_resumes("no", (0, 2))


@case
def resuming_in_a_later_epoch_is_bitwise_equal() -> None:
    check_resumes("bf16", (1, 4))


@case
def resuming_restores_the_scaler() -> None:
    check_resumes("fp16", (0, 4))


@case
def resuming_a_seedable_shuffle_is_bitwise_equal() -> None:
    check_resumes("no", (1, 2), seedable=True)


@case
def pending_scale_update_is_applied_before_saving() -> None:
    """With two optimizers, the update waits for the second one. A save in between must apply it."""
    folder = scratch("scale")
    with accelerate(mixed_precision="fp16") as accelerator:
        nets = [make_net(0), make_net(1)]
        sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        *nets, first, second = accelerator.prepare(*nets, *sgds)
        x, y = digits(4).tensors
        scale = accelerator.scaler.get_scale()
        accelerator.backward(cross_entropy(nets[0](x), y) * float("inf"))
        first.step()
        first.zero_grad()
        assert accelerator.optimizer_step_was_skipped
        accelerator.save_state(str(folder))
        saved = torch.load(folder / "scaler.pt", weights_only=True)
        assert saved["scale"] == scale / 2
        accelerator.backward(cross_entropy(nets[1](x), y))
        second.step()
        assert not second.step_was_skipped


@case
def total_limit_deletes_old_numbered_checkpoints() -> None:
    folder = scratch("numbered")
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    with accelerate(project_config=config) as accelerator:
        model = accelerator.prepare(make_net())
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        for value in range(4):
            counter.value = value
            made = accelerator.save_state()
            assert Path(made) == folder / "checkpoints" / f"checkpoint_{value}"
        accelerator.wait_for_everyone()
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["checkpoint_2", "checkpoint_3"]
        counter.value = -1
        accelerator.load_state()
        assert counter.value == 3, "the newest"
        accelerator.load_state(str(folder / "checkpoints" / "checkpoint_2"))
        assert counter.value == 2
        assert accelerator.save_iteration == 3
        assert same_on_ranks(flat(model))


@case
def hooks_may_save_and_load_models_themselves() -> None:
    folder = scratch("hooks")
    calls: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], directory: str) -> None:
        calls.append(("save", len(models), sorted(weights[0]) == sorted(KEYS), directory))
        if RANK == 0:
            torch.save(weights[0], Path(directory, "mine.pt"))
        models.pop()
        weights.pop()

    def on_load(models: list[Any], directory: str) -> None:
        calls.append(("load", len(models), True, directory))
        model = models.pop()
        accelerator.unwrap_model(model).load_state_dict(torch.load(Path(directory, "mine.pt")))

    with accelerate() as accelerator:
        model = accelerator.prepare(make_net())
        start = flat(model)
        handles = [
            accelerator.register_save_state_pre_hook(on_save),
            accelerator.register_load_state_pre_hook(on_load),
        ]
        accelerator.save_state(str(folder))
        assert not (folder / "model.safetensors").exists()
        with torch.no_grad():
            model.get_parameter(next(name for name, _ in model.named_parameters())).zero_()
        accelerator.load_state(str(folder))
        assert torch.equal(flat(model), start)
        assert [call[:3] for call in calls] == [("save", 1, True), ("load", 1, True)]
        assert Path(calls[0][3]).parent == folder.parent, "next to it until complete"
        assert calls[1][3] == str(folder)
        for handle in handles:
            handle.remove()
        accelerator.save_state(str(folder))
        assert (folder / "model.safetensors").exists()
        assert len(calls) == 2
        assert accelerator.models == [model], "hooks change copies of the lists"


# --- models for other programs ----------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


@case
def tied_weights_stay_tied() -> None:
    folder = scratch("tied")
    torch.manual_seed(0)
    with accelerate() as accelerator:
        net = Tied()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        x = torch.arange(12)
        accelerator.backward(cross_entropy(model(x), x))
        optimizer.step()
        inner = accelerator.unwrap_model(model)
        assert inner.head.weight is inner.embedding.weight
        trained = flat(inner)
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(model, folder / "model")
        accelerator.wait_for_everyone()
        assert len(load_file(folder / "model" / "model.safetensors")) == 1, "stored once"
        with torch.no_grad():
            inner.head.weight.zero_()
        accelerator.load_state(str(folder / "state"))
        assert torch.equal(flat(inner), trained)
        assert inner.head.weight is inner.embedding.weight
        fresh = Tied()
        load_checkpoint_in_model(fresh, str(folder / "model"))
        assert torch.equal(flat(fresh), trained)
        assert fresh.head.weight is fresh.embedding.weight


@case
def saved_model_loads_into_a_new_model() -> None:
    with accelerate() as accelerator:
        model = accelerator.prepare(make_net(3))
        for name, safe, size in (("safe", True, "10GB"), ("bin", False, "10GB"), ("s", True, 8000)):
            folder = scratch(f"model_{name}")
            accelerator.save_model(model, folder, size, safe)
            accelerator.wait_for_everyone()
            fresh = make_net(4)
            load_checkpoint_in_model(fresh, str(folder))
            assert torch.equal(flat(fresh), flat(model)), name
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


class Pretrained(nn.Linear):
    """Has `save_pretrained`, as models of other libraries do."""

    def save_pretrained(
        self, directory: Path, save_function: Any, state_dict: dict[str, Any], is_main_process: bool
    ) -> None:
        if is_main_process:
            save_function(state_dict, directory / "weights.bin")


@case
def save_pretrained_pattern_works() -> None:
    folder = scratch("pretrained")
    for dynamo in (None, WHOLE):
        with accelerate(mixed_precision="bf16", dynamo_plugin=dynamo) as accelerator:
            model = accelerator.prepare(Pretrained(2, 2))
            accelerator.wait_for_everyone()
            accelerator.unwrap_model(model).save_pretrained(
                folder,
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
            )
            accelerator.wait_for_everyone()
            saved = torch.load(folder / "weights.bin", weights_only=True)
            assert sorted(saved) == ["bias", "weight"]
            own = accelerator.gather(saved["weight"].flatten()).view(SIZE, -1)
            inner = accelerator.unwrap_model(model)
            assert torch.equal(own[0], inner.weight.detach().flatten())
            accelerator.wait_for_everyone()


@case
def state_dict_keys_have_no_prefixes() -> None:
    for dynamo in (None, WHOLE, REGIONAL):
        with accelerate(dynamo_plugin=dynamo) as accelerator:
            model = accelerator.prepare(make_net())
            assert set(accelerator.get_state_dict(model)) == KEYS
            assert set(accelerator.unwrap_model(model).state_dict()) == KEYS
            prefix = "module." if SIZE > 1 else ""
            wrapped = accelerator.get_state_dict(model, unwrap=False)
            assert set(wrapped) == {prefix + key for key in KEYS}


# --- unwrapping, copying ----------------------------------------------------------------------


def _compiled(module: nn.Module) -> bool:
    return any(getattr(m, "_compiled_call_impl", None) for m in module.modules())


@case
def unwrap_model_removes_the_requested_wrappers() -> None:
    x = digits(4).tensors[0]
    for dynamo in (None, WHOLE, REGIONAL):
        with accelerate(mixed_precision="bf16", dynamo_plugin=dynamo) as accelerator:
            net = make_net()
            plain = net(x)
            model = accelerator.prepare(net)
            mixed = model(x)
            assert mixed.dtype is torch.float32, "outputs are converted"
            assert not torch.equal(mixed, plain)
            inner = accelerator.unwrap_model(model)
            assert inner is net
            assert torch.equal(inner(x), mixed), "still mixed"
            assert _compiled(inner) is (dynamo is not None)
            bare = accelerator.unwrap_model(model, keep_torch_compile=False)
            assert not _compiled(bare)
            assert _compiled(inner) is (dynamo is not None), "the model itself stays compiled"
            assert type(bare) is type(net)
            assert bare.head.weight is net.head.weight
            assert torch.equal(bare(x), mixed)
            half = accelerator.unwrap_model(
                model, keep_fp32_wrapper=False, keep_torch_compile=False
            )
            assert torch.equal(half(x), plain), "neither compiled nor mixed"
            assert "forward" not in vars(half)


@case
def prepared_models_can_be_copied_and_pickled() -> None:
    x, y = digits(4).tensors
    with accelerate(mixed_precision="bf16") as accelerator:
        model = accelerator.prepare(make_net())
        before = model(x)
        inner = accelerator.unwrap_model(model)
        for twin in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
            assert twin.head.weight is not inner.head.weight
            with torch.no_grad():
                twin.head.weight.zero_()
                twin.head.bias.fill_(7)
            assert torch.equal(twin(x), torch.full((4, 10), 7.0)), "forward uses the copy's weights"
            assert torch.equal(model(x), before)
        if SIZE > 1:
            assert isinstance(model, DistributedDataParallel)
        dead = weakref.ref(twin)
        del twin
        accelerator.backward(cross_entropy(model(x), y))
        assert same_on_ranks(flat([p.grad for p in model.parameters()]))
        patched = make_net()
        patched.forward = partial(torch.mul, other=torch.tensor(2.0))
        patched = accelerator.unwrap_model(accelerator.prepare(patched))
        assert torch.equal(pickle.loads(pickle.dumps(patched))(x), 2 * x)
    import gc

    gc.collect()
    assert dead() is None


if __name__ == "__main__":
    run_cases(sys.argv[1:])
