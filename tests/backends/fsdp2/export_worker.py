"""Export sharded models with all ranks, and train with Muon. Runs on two or four ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import fsdp, whole
from gpt import GPT, LENGTH, loss_of, text
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from worker import RANK, SIZE, case, run_cases, scratch

import accelerate_checkpoint.files
from accelerate_big_model.loading import load_checkpoint_in_model
from accelerate_checkpoint import load_shards
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.utils import set_seed
from accelerate_fsdp2.gradients import local

MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}],
    4: [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
}


class Uneven(nn.Module):
    """Has dimensions that no mesh divides, a frozen and a scalar parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 3), nn.Linear(3, 1, bias=False)
        self.frozen = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("count", torch.arange(5))


def read(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    names = json.loads(index.read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(names.values())):
        found |= load_file(folder / name)
    assert found.keys() == names.keys()
    return found


def nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a whole tensor was gathered")

    monkeypatch.setattr(DTensor, "full_tensor", refused)


@case
def ranks_write_their_parts_of_the_whole_weights() -> None:
    for sizes in MESHES[SIZE]:
        for tied in (False, True):
            for model in (GPT(tied=tied), Uneven()):
                if "tp" in sizes and (tied or isinstance(model, Uneven)):
                    continue
                set_seed(1)
                accelerator = fsdp(sizes)
                prepared = accelerator.prepare(model)
                expected = whole(prepared)
                folder = scratch(f"parts-{'-'.join(sizes)}-{type(model).__name__}-{tied}")
                for size in ("1GB", "10KB"):
                    with pytest.MonkeyPatch.context() as monkeypatch:
                        nothing_is_gathered(monkeypatch)
                        accelerator.save_model(prepared, folder, max_shard_size=size)
                    found = read(folder)
                    if tied and isinstance(model, GPT):
                        found.setdefault("head.weight", found["tokens.weight"])
                    assert found.keys() == expected.keys(), (sizes, size)
                    for name, value in expected.items():
                        assert found[name].dtype is value.dtype
                        assert torch.equal(found[name], value), (sizes, size, name)
                    left = [path.name for path in folder.iterdir() if "saving" in path.name]
                    assert not left
                    dist.barrier()


@case
def each_rank_reads_only_its_parts() -> None:
    for sizes in MESHES[SIZE]:
        set_seed(1)
        accelerator = fsdp(sizes)
        model = accelerator.prepare(GPT())
        expected = whole(model)
        folder = scratch(f"loading-{'-'.join(sizes)}")
        total = sum(value.nbytes for value in expected.values())
        for options in ({"max_shard_size": "10KB"}, {"safe_serialization": False}):
            accelerator.save_model(model, folder, **options)
            dist.barrier()
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter.detach()).zero_()
            with pytest.MonkeyPatch.context() as monkeypatch:
                nothing_is_gathered(monkeypatch)
                load_checkpoint_in_model(model, folder, strict=True)
            for name, value in whole(model).items():
                assert torch.equal(value, expected[name]), (sizes, name)
        files = [folder / "pytorch_model.bin"]
        read = load_shards(model.state_dict(), files).bytes
        held = sum(local(value.detach()).nbytes for value in model.state_dict().values())
        assert read == held, (sizes, read, held, total)
        if "dp_shard" in sizes:
            assert read <= 1.1 * total / sizes["dp_shard"], (sizes, read, total)
        dist.barrier()


@case
def weights_of_another_model_are_refused_by_shards() -> None:
    set_seed(1)
    accelerator = fsdp()
    model = accelerator.prepare(Uneven())
    folder = scratch("refused")
    accelerator.save_model(model, folder)
    dist.barrier()
    other = accelerator.prepare(nn.Sequential(nn.Linear(7, 4)))
    with pytest.raises(CheckpointError, match=r"lacks 0\.bias, 0\.weight"):
        load_checkpoint_in_model(other, folder, strict=True)
    wrong = {"first.weight": other.state_dict()["0.weight"]}
    with pytest.raises(
        CheckpointError, match=r"first.weight has shape \[3, 7\] in .* and \[4, 7\]"
    ):
        load_shards(wrong, [folder / "model.safetensors"])
    with pytest.raises(ConfigurationError, match="already sharded"):
        load_checkpoint_in_model(model, folder, device_map={"": "cpu"})
    dist.barrier()


@case
def rank_that_cannot_write_leaves_older_weights_unchanged() -> None:
    set_seed(1)
    accelerator = fsdp()
    model = accelerator.prepare(GPT())
    folder = scratch("failing")
    accelerator.save_model(model, folder)
    expected = whole(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if RANK == SIZE - 1:

            def full(*args: Any) -> None:
                raise OSError("No space left on device")

            monkeypatch.setattr(accelerate_checkpoint.files, "starts_in_file", full)
        with pytest.raises(CheckpointError, match=f"rank {SIZE - 1}: No space left"):
            accelerator.save_model(model, folder)
    found = read(folder)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    if RANK == 0:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    dist.barrier()


@case
def weights_that_cannot_be_written_in_parallel_are_gathered() -> None:
    set_seed(1)
    accelerator = fsdp()
    model = accelerator.prepare(GPT())
    folder = scratch("gathered")
    accelerator.save_model(model, folder, safe_serialization=False)
    expected = whole(model)
    if RANK == 0:
        found = torch.load(folder / "pytorch_model.bin", weights_only=True)
        for name, value in expected.items():
            assert torch.equal(found[name], value)
    dist.barrier()


# --- Muon -------------------------------------------------------------------------------------------


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = [name for name, one in named.items() if one.dim() == 2 and "layers" in name]
    muon = torch.optim.Muon([named[name] for name in matrices])
    rest = [one for name, one in named.items() if name not in matrices]
    return [muon, torch.optim.AdamW(rest, lr=1e-3)]


def trained_with_muon(
    sizes: dict[str, int] | None, same_batches: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return losses, weights and this rank's bytes of momentum after eight steps.

    Args:
        same_batches: give all ranks the whole batch, and don't clip, so that averaging the gradients
            changes no bit of them.
    """
    set_seed(0)
    model: Any = GPT()
    steppers: list[Any] = optimizers(model)
    accelerator = fsdp(sizes, gradient_accumulation_steps=2) if sizes is not None else None
    index, parts = 0, 1
    if accelerator is not None:
        model, *steppers = accelerator.prepare(model, *steppers)
        index, parts = accelerator.hooks.data_shard()
    losses = []
    for number, rows in enumerate(text(16 * 8).split(8)):
        batch = rows if same_batches else rows.chunk(parts)[index]
        places = torch.arange(LENGTH).expand(len(batch), LENGTH)
        if accelerator is None:
            loss = loss_of(model, batch[:, :-1], places, batch[:, 1:])
            (loss / 2).backward()
            losses.append(loss.detach())
            clip = torch.nn.utils.clip_grad_norm_
        else:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch[:, :-1], places, batch[:, 1:])
                accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            clip = accelerator.clip_grad_norm_
        if number % 2:
            if not same_batches:
                clip(model.parameters(), 0.5)
            for one in steppers:
                one.step()
                one.zero_grad()
    held = sum(local(state["momentum_buffer"]).nbytes for state in steppers[0].state.values())
    return torch.stack(losses), list(whole(model).values()), held


@case
def muon_trains_like_one_process() -> None:
    losses, _, held = trained_with_muon(None)
    for sizes in MESHES[SIZE]:
        found, _, part = trained_with_muon(sizes)
        # Muon rounds the update to bf16, so even plain data parallelism changes the last bits.
        assert (found - losses).abs().max() <= 1e-5, (sizes, found, losses)
        assert part == held // (SIZE // sizes.get("dp_replicate", 1)), sizes


@case
def ranks_share_the_computation_of_muon() -> None:
    from torch.optim import _muon

    orthogonalise = _muon._zeropower_via_newtonschulz
    computed = []

    def counted(update: torch.Tensor, *args: Any) -> torch.Tensor:
        assert not isinstance(update, DTensor)
        computed.append(tuple(update.shape))
        return orthogonalise(update, *args)

    steps, matrices = 8, len(optimizers(GPT())[0].param_groups[0]["params"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", counted)
        for sizes in MESHES[SIZE]:
            computed.clear()
            trained_with_muon(sizes)
            ranks = max(sizes.values())
            assert matrices % ranks == 0
            assert len(computed) == steps * matrices // ranks, sizes


@case
def muon_on_shards_computes_the_same_bits_as_on_whole_matrices() -> None:
    _, weights, _ = trained_with_muon(None, same_batches=True)
    for sizes in MESHES[SIZE]:
        if "tp" in sizes:
            continue  # layers add up partial products
        _, found, _ = trained_with_muon(sizes, same_batches=True)
        for one, other in zip(found, weights, strict=True):
            assert torch.equal(one, other), (sizes, (one - other).abs().max())


if __name__ == "__main__":
    run_cases(sys.argv[1:])
