"""Checkpoints of one and two ranks: errors on all ranks, and resuming on another number of ranks."""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from worker import PG_TIMEOUT, RANK, SIZE, case, flat, run_cases, same_on_ranks, scratch

from accelerate_checkpoint import rendezvous
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import FullyShardedDataParallelPlugin, ProjectConfiguration


class Box:
    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ValueError("no state")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("cannot load")


def make(folder: Path, steps: int = 4, **more: Any) -> tuple[Accelerator, Any, Any, Any]:
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True,
        process_group_timeout=PG_TIMEOUT,
        gradient_accumulation_steps=steps,
        project_config=config,
        **more,
    )
    torch.manual_seed(0)
    net = nn.Linear(4, 1).double()
    data = TensorDataset(torch.randn(32, 4).double(), torch.randn(32, 1).double())
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader
    )
    return accelerator, model, optimizer, loader


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, n: int, counted: bool) -> None:
    for count, (x, y) in enumerate(loader, 1):
        items = float(len(x)) if counted else None
        with accelerator.accumulate(model, num_items=items):
            loss = mse_loss(model(x), y, reduction="sum" if counted else "mean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if count == n:
            break


def save(accelerator: Any, blocking: bool) -> None:
    accelerator.save_state(blocking=blocking)
    accelerator.wait_for_checkpoint()


def straight(folder: Path, counted: bool) -> torch.Tensor:
    accelerator, *parts = make(folder)
    train(accelerator, *parts, 8, counted)
    accelerator.end_training()
    return flat(parts[0])


@case
def save_that_fails_on_one_rank_raises_on_all() -> None:
    folder = scratch("fails")
    accelerator, *_ = make(folder)
    box = Box()
    accelerator.register_for_checkpointing(box)
    first = accelerator.save_state()
    for blocking in (True, False):
        box.fails = RANK == SIZE - 1
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match="no state") as failure:
            save(accelerator, blocking)
        assert SIZE == 1 or f"rank {SIZE - 1}" in str(failure.value)
        assert time.monotonic() - begun < 20
        box.fails = False
        accelerator.wait_for_everyone()
        left = sorted(p.name for p in (folder / "checkpoints").iterdir())
        assert left == ["checkpoint_0"], left
        accelerator.wait_for_everyone()
    assert accelerator.load_state() == first
    accelerator.save_state(blocking=False)
    accelerator.wait_for_checkpoint()
    accelerator.end_training()


@case
def load_that_fails_on_one_rank_raises_on_all() -> None:
    folder = scratch("loads")
    accelerator, *_ = make(folder)
    box = Box()
    accelerator.register_for_checkpointing(box)
    accelerator.save_state()
    box.fails = RANK == SIZE - 1
    text = f"rank {SIZE - 1}: "
    if box.fails:
        text = "custom_checkpoint_0.pkl cannot be loaded into .*: ValueError: cannot load"
    with pytest.raises(CheckpointError, match=text):
        accelerator.load_state()
    box.fails = False
    accelerator.load_state()
    accelerator.end_training()


@case
def all_ranks_skip_the_same_damaged_checkpoint() -> None:
    folder = scratch("fallback")
    accelerator, *_ = make(folder)
    first = accelerator.save_state()
    second = Path(accelerator.save_state())
    accelerator.wait_for_everyone()
    if RANK == 0:
        data = bytearray((second / f"random_states_{SIZE - 1}.pkl").read_bytes())
        data[100] ^= 4
        (second / f"random_states_{SIZE - 1}.pkl").write_bytes(data)
    accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert accelerator.load_state() == first
    texts = [str(one.message) for one in caught]
    skipped = [text for text in texts if "skipped checkpoint_1" in text]
    assert len(skipped) == (RANK == 0), texts
    accelerator.end_training()


@case
def save_on_each_node_writes_to_each_machines_disk() -> None:
    """Simulate one machine per rank by one directory per rank."""
    if SIZE == 1:
        return
    shared = scratch("nodes")
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    config = ProjectConfiguration(save_on_each_node=True)
    accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, project_config=config)
    accelerator.prepare(nn.Linear(3, 3))
    mine = shared / f"node_{RANK}" / "state"
    accelerator.save_state(mine)
    names = sorted(path.name for path in mine.iterdir())
    assert names == ["manifest.json", "model.safetensors", f"random_states_{RANK}.pkl"], names
    accelerator.end_training()
    config = ProjectConfiguration(save_on_each_node=False)
    accelerator = Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT, project_config=config)
    accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="save_on_each_node"):
        accelerator.save_state(shared / f"other_{RANK}" / "state")
    accelerator.end_training()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(RANK), str(SIZE)


@case
def save_in_the_middle_of_a_cycle() -> None:
    """Save here. The run with the other number of ranks resumes from it."""
    folder = Path(sys.argv[1])
    for counted in (False, True):
        mine = folder / f"{SIZE}_{counted}"
        if mine.exists():
            return  # the first run with this number of ranks has saved it
        expected = straight(scratch(f"straight_{counted}"), counted)
        accelerator, *parts = make(mine)
        train(accelerator, *parts, 6, counted)
        accelerator.save_state()
        accelerator.end_training()
        accelerator, *parts = make(mine)
        accelerator.load_state()
        train(accelerator, *parts, 8, counted)
        assert torch.equal(flat(parts[0]), expected), "bit for bit on the same number of ranks"
        assert same_on_ranks(flat(parts[0]))
        accelerator.end_training()
        if RANK == 0:
            torch.save(expected, folder / f"{SIZE}_{counted}.pt")


@case
def resume_in_the_middle_of_a_cycle_on_another_number_of_processes() -> None:
    folder = Path(sys.argv[1])
    other = 3 - SIZE
    for counted in (False, True):
        theirs = folder / f"{other}_{counted}"
        if not theirs.exists():
            return  # the run with the other number of ranks comes later
        copy = scratch(f"of_other_{counted}") / "run"
        if RANK == 0:
            shutil.copytree(theirs, copy)
        accelerator, *parts = make(copy)
        accelerator.wait_for_everyone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state()
        texts = [str(one.message) for one in caught]
        assert sum("was saved by" in text for text in texts) == (RANK == 0), texts
        train(accelerator, *parts, 8, counted)
        expected = torch.load(folder / f"{other}_{counted}.pt")
        torch.testing.assert_close(flat(parts[0]), expected, rtol=1e-12, atol=1e-12)
        accelerator.end_training()


@contextmanager
def main_process_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings about saves that not all ranks make."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        every: list[warnings.WarningMessage] = []
        yield every
    every += [one for one in caught if "main process" in str(one.message)]


@case
def main_process_can_save_alone() -> None:
    if SIZE == 1:
        return
    rendezvous.ALONE, folder = 1.0, scratch("alone")
    accelerator, *parts = make(folder, steps=1)
    hooked: list[str] = []
    accelerator.register_save_state_pre_hook(lambda *a: hooked.append(a[2]))
    with main_process_warnings() as warned:
        for number in range(3):
            train(accelerator, *parts, 2, counted=False)
            begun = time.monotonic()
            if accelerator.is_main_process:
                line = sys._getframe().f_lineno + 1
                accelerator.save_state(blocking=number != 1)
                assert (time.monotonic() - begun > 0.5) == (number == 0), "it waits once"
    accelerator.wait_for_checkpoint()
    assert len(hooked) == (3 if RANK == 0 else 0)
    if RANK == 0:
        (one,) = warned
        assert (one.filename, one.lineno) == (__file__, line), one
        assert "rank 1 did not within 1 s" in str(one.message)
    weights, draws = flat(parts[0]), torch.get_rng_state()
    # All ranks save at another line. The numbering continues.
    with main_process_warnings() as warned:
        directory = accelerator.save_state()
    assert not warned
    assert Path(directory).name == "checkpoint_3"
    assert (Path(directory) / "random_states_1.pkl").exists()
    # A save by the main process alone, directly followed by one on all ranks.
    accelerator.project_configuration.automatic_checkpoint_naming = False
    with main_process_warnings() as warned:
        if accelerator.is_main_process:
            accelerator.save_state(folder / "own")
        accelerator.save_state(folder / "all")
    assert len(warned) == (RANK == 0)
    accelerator.wait_for_everyone()
    there = [(folder / name / "random_states_1.pkl").exists() for name in ("own", "all")]
    assert there == [False, True]
    train(accelerator, *parts, 2, counted=False)
    torch.manual_seed(7 + RANK)
    own = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as loading:
        warnings.simplefilter("always")
        accelerator.load_state(folder / "checkpoints/checkpoint_2")
    assert torch.equal(flat(parts[0]), weights)
    assert torch.equal(torch.get_rng_state(), draws if RANK == 0 else own)
    assert ["saved by 1 process" in str(one.message) for one in loading] == [True] * (RANK == 0)
    train(accelerator, *parts, 2, counted=False)
    assert same_on_ranks(flat(parts[0]))
    accelerator.end_training()


@case
def rank_that_calls_save_late_gets_a_warning() -> None:
    if SIZE == 1:
        return
    rendezvous.ALONE = 0.5
    folder = scratch("late")
    accelerator, *parts = make(folder, steps=1)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    with main_process_warnings() as caught:
        for number in range(3):
            train(accelerator, *parts, 2, counted=False)
            time.sleep(2 * RANK * (number < 2))
            directory = accelerator.save_state(folder / f"{number}")
            assert directory == str(folder / f"{number}")
    assert [(one.filename, "alone" in str(one.message)) for one in caught] == [(__file__, True)]
    accelerator.wait_for_everyone()
    there = [(folder / f"{number}" / "random_states_1.pkl").exists() for number in range(3)]
    assert there == [False, True, True], "waits longer at a line where the rank was late before"
    assert same_on_ranks(flat(parts[0]))
    accelerator.end_training()


@case
def sharded_state_cannot_be_saved_by_one_rank() -> None:
    if SIZE == 1 or torch.__version__ < "2.11":  # fsdp2 needs 2.11
        return
    rendezvous.SHARDED, folder = 0.5, scratch("sharded")
    accelerator = Accelerator(
        cpu=True, process_group_timeout=PG_TIMEOUT, fsdp_plugin=FullyShardedDataParallelPlugin()
    )
    model = accelerator.prepare(nn.Linear(4, 4))
    for save in (accelerator.save_state, partial(accelerator.save_model, model)):
        time.sleep(1.5 * RANK)  # calls after the main process has given up
        with pytest.raises(CheckpointError, match=r"checkpoint_worker.py:\d+, but rank 1 did not"):
            save(folder / "state")
        assert not (folder / "state").exists()
        accelerator.wait_for_everyone()
        save(folder / "state")
        accelerator.wait_for_everyone()
        assert (folder / "state").exists()
        accelerator.wait_for_everyone()
        if RANK == 0:
            shutil.rmtree(folder / "state")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    run_cases()
