"""Checkpoints of one process: atomic, verified, safe to load, and cleaned up after dead runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from torch import nn
from torch.nn.functional import mse_loss

from accelerate_checkpoint import directories
from accelerate_checkpoint.load import LoadedState, open_together, read_checkpoint
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import ProjectConfiguration, set_seed

CPU = {"cpu": True}


class Box:
    """A registered object with any state. If the state is an exception, reading it raises that."""

    def __init__(self, state: Any = None) -> None:
        self.state = {"n": 1} if state is None else state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Run:
    """A small run with one of everything."""

    def __init__(self, folder: Path, limit: int | None = None, steps: int = 1, **more: Any) -> None:
        config = ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=True, total_limit=limit
        )
        self.accelerator = Accelerator(
            **CPU, project_config=config, gradient_accumulation_steps=steps, **more
        )
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        adam = torch.optim.AdamW(net.parameters(), lr=0.01)
        decay = torch.optim.lr_scheduler.StepLR(adam, 2, gamma=0.5)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.box = Box()
        self.net = net
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, adam, decay, loader
        )
        self.accelerator.register_for_checkpointing(self.box)

    def train(self, batches: int) -> None:
        for count, (x, y) in enumerate(self.loader, 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(mse_loss(self.model(x), y))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if count == batches:
                break

    def save(self, blocking: bool) -> None:
        """Save and wait for the result."""
        self.accelerator.save_state(blocking=blocking)
        self.accelerator.wait_for_checkpoint()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.net.parameters()])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    with contextlib.suppress(Exception):
        made.accelerator.end_training()


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# --- manifest and damage --------------------------------------------------------------------------


def test_manifest_lists_files_and_facts(run: Run) -> None:
    run.train(3)
    directory = Path(run.accelerator.save_state())
    content = json.loads((directory / "manifest.json").read_text())["content"]
    assert set(content["files"]) == set(folders(directory)) - {"manifest.json"}
    for name, entry in content["files"].items():
        data = (directory / name).read_bytes()
        assert entry == {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}, name
    facts = [content[name] for name in ("step", "epoch", "world_size", "format")]
    assert facts == [3, 0, 1, 1]
    plugins = {(p["kind"], p["name"]) for p in content["written_by"]["plugins"]}
    assert ("backend", run.accelerator.backend.name) in plugins
    assert content["objects"] == dict.fromkeys(
        ("models", "optimizers", "schedulers", "loaders", "registered"), 1
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


def test_damage_to_any_file_is_refused_and_named(run: Run) -> None:
    accelerator = run.accelerator
    run.train(3)
    first = Path(accelerator.save_state())
    run.train(1)
    second = Path(accelerator.save_state(max_shard_size=100))
    names = folders(second)
    assert len(names) == 8
    assert any("-of-" in name for name in names)
    kept = second.with_name("kept")
    shutil.copytree(second, kept)
    before = run.weights()
    for name in names:
        for what, damage in DAMAGES.items():
            damage(second / name)
            with pytest.raises(CheckpointError) as refused:
                accelerator.load_state(second)
            assert str(second / name) in str(refused.value), (name, what)
            assert torch.equal(run.weights(), before), "nothing was changed"
            shutil.copy(kept / name, second / name)
    flip(second / "optimizer.bin")
    with pytest.warns(UserWarning, match=r"skipped checkpoint_1: .*optimizer\.bin.*checkpoint_0"):
        assert accelerator.load_state() == str(first)
    assert accelerator.save_iteration == 1, "numbering continues after the loaded checkpoint"
    shutil.copy(kept / "optimizer.bin", second / "optimizer.bin")
    assert accelerator.load_state() == str(second)
    assert torch.equal(run.weights(), before)
    assert accelerator.save_iteration == 2


def test_reading_a_checkpoint_changes_nothing_until_apply(run: Run) -> None:
    run.train(3)
    place = Path(run.accelerator.save_state())
    saved = run.weights()
    run.train(2)
    now = run.weights()
    checkpointer = run.accelerator.checkpointer
    source, _ = open_together(checkpointer._state, checkpointer.storage, str(place), True)
    assert source is not None
    loaded = read_checkpoint(checkpointer._state, source, {}, {}, False)
    assert torch.equal(run.weights(), now)
    applied: list[str] = []
    parts = {
        "scheduler": run.scheduler.scheduler,
        "registered": run.box,
        "loader": run.loader,
        "optimizer": run.optimizer.optimizer,
        "model": run.net,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, part in parts.items():

            def load(
                *args: Any, name: str = name, of: Any = part.load_state_dict, **more: Any
            ) -> Any:
                applied.append(name)
                return of(*args, **more)

            patch.setitem(vars(part), "load_state_dict", load)
        loaded.apply_objects()
        loaded.call_hooks()
        assert torch.equal(run.weights(), now)
        loaded.apply()
    assert applied == list(parts)
    assert torch.equal(run.weights(), saved)


def test_weights_of_another_model_are_refused_before_apply(run: Run) -> None:
    place = run.accelerator.save_state()
    run.net[2] = nn.Linear(8, 2)
    applied: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedState, "apply", lambda self: applied.append(None))
        with pytest.raises(CheckpointError, match=r"weights model of .* do not fit the model"):
            run.accelerator.load_state(place)
    assert not applied


def test_load_hook_may_load_a_changed_model_itself(run: Run) -> None:
    place = run.accelerator.save_state()
    run.net[2] = nn.Linear(8, 2)
    run.accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    assert run.accelerator.load_state(place) == place


def test_damaged_later_checkpoint_is_replaced_and_an_intact_one_kept(run: Run) -> None:
    made = [Path(run.accelerator.save_state()) for _ in range(3)]
    flip(made[2] / "model.safetensors")
    with pytest.warns(UserWarning, match="skipped checkpoint_2"):
        run.accelerator.load_state()
    assert run.accelerator.save_state() == str(made[2])
    run.accelerator.load_state(made[0])
    with pytest.warns(UserWarning, match="checkpoint_2 is later"):
        assert run.accelerator.save_state().endswith("checkpoint_3")


def test_new_run_refuses_to_number_among_checkpoints_of_an_earlier_one(tmp_path: Path) -> None:
    first = Run(tmp_path, limit=2)
    for _ in range(4):
        first.accelerator.save_state()
    second = Run(tmp_path, limit=2)
    with pytest.raises(CheckpointError, match=r"checkpoint_3 already exists.*iteration=4"):
        second.accelerator.save_state()
    kept = tmp_path / "checkpoints"
    assert folders(kept) == ["checkpoint_2", "checkpoint_3"]
    second.accelerator.load_state(kept / "checkpoint_2")
    with pytest.warns(UserWarning, match="checkpoint_3 is later"):
        assert second.accelerator.save_state().endswith("checkpoint_4")


def test_directory_that_only_has_the_name_of_a_checkpoint_is_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    kept = tmp_path / "checkpoints"
    (kept / "checkpoint_9").mkdir(parents=True)
    for _ in range(3):
        last = Path(run.accelerator.save_state())
    (last / "manifest.json").unlink()
    assert folders(kept) == ["checkpoint_1", "checkpoint_2", "checkpoint_9"]
    with pytest.warns(UserWarning, match="skipped"):
        assert run.accelerator.load_state().endswith("checkpoint_1")
    assert run.accelerator.save_state() == str(last), "without a manifest it is replaced"


def test_damaged_checkpoint_is_removed_before_an_intact_one(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    made = [Path(run.accelerator.save_state()) for _ in range(2)]
    flip(made[1] / "optimizer.bin")
    with pytest.warns(UserWarning, match="skipped checkpoint_1"):
        run.accelerator.load_state()
    again = [Path(run.accelerator.save_state()) for _ in range(2)]
    assert again[0] == made[1], "the number of the damaged checkpoint is reused"
    assert folders(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    run.accelerator.load_state(again[0])


def test_without_verification_sizes_are_still_compared(run: Run) -> None:
    directory = Path(run.accelerator.save_state())
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1  # in a weight
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        run.accelerator.load_state(directory)
    run.accelerator.load_state(directory, verify=False)
    (directory / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes"):
        run.accelerator.load_state(directory, verify=False)


def test_checkpoint_of_other_objects_is_refused_before_anything_changes(
    run: Run, tmp_path: Path
) -> None:
    directory = run.accelerator.save_state()
    other = Run(tmp_path / "other")
    other.accelerator.register_for_checkpointing(Box())
    with pytest.raises(
        CheckpointError,
        match=r"saved with 1 object passed to register_for_checkpointing, and this run has 2",
    ):
        other.accelerator.load_state(directory)
    fresh = Accelerator(**CPU)
    first, second = fresh.prepare(nn.Linear(4, 8), nn.Linear(9, 1))
    fresh.save_state(tmp_path / "two")
    del first, second
    again = Accelerator(**CPU)
    good, bad = again.prepare(nn.Linear(4, 8), nn.Linear(7, 1))
    before = good.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"model_1.*weight has shape \[1, 9\] in the check"):
        again.load_state(tmp_path / "two")
    assert torch.equal(good.weight, before)
    del bad


# --- safety ---------------------------------------------------------------------------------------


class Planted:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


def forge(directory: Path) -> None:
    """Rewrite the manifest so that it matches the changed files, as an attacker would."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())["content"]
    for name, entry in content["files"].items():
        data = (directory / name).read_bytes()
        entry.update(size=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    body = json.dumps(content, indent=2, sort_keys=True)
    whole = {"content": content, "xxh3_128": xxhash.xxh3_128_hexdigest(body.encode())}
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_planted_pickle_is_not_executed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run.train(2)
    run.accelerator.gradient_accumulation_steps = 2
    run.train(1)
    directory = Path(run.accelerator.save_state(safe_serialization=safe))
    kept = directory.with_name("kept")
    shutil.copytree(directory, kept)
    assert "gradients_0.bin" in folders(directory)
    for name in folders(directory):
        for plant in (
            lambda path: path.write_bytes(pickle.dumps(Planted())),
            lambda path: torch.save(Planted(), path),
            lambda path: torch.save({"a": Planted()}, path, _use_new_zipfile_serialization=False),
        ):
            plant(directory / name)
            with pytest.raises(CheckpointError):
                run.accelerator.load_state(directory)
            if name != "manifest.json":
                forge(directory)
                with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                    run.accelerator.load_state(directory)
            (directory / "manifest.json").unlink()
            with pytest.raises(CheckpointError):
                run.accelerator.load_state(directory)
            assert not Path("planted").exists(), name
            shutil.rmtree(directory)
            shutil.copytree(kept, directory)
    run.accelerator.load_state(directory)


def test_checkpoint_without_its_manifest_is_refused(run: Run) -> None:
    for safe in (True, False):
        directory = Path(run.accelerator.save_state(safe_serialization=safe))
        (directory / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            run.accelerator.load_state(directory)
        (directory / "random_states_0.pkl").unlink()
        with pytest.raises(CheckpointError):
            run.accelerator.load_state(directory)


def test_python_objects_need_trust(run: Run) -> None:
    run.box.state = {"when": Path("here")}
    directory = run.accelerator.save_state()
    run.box.state = None
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl.*trust=True"):
        run.accelerator.load_state(directory)
    run.accelerator.load_state(directory, trust=True)
    assert run.box.state == {"when": Path("here")}


def test_refused_checkpoint_has_changed_nothing(run: Run, tmp_path: Path) -> None:
    run.train(3)
    run.box.state = {"why": ValueError("reason")}
    directory = run.accelerator.save_state()
    run.train(3)
    before, step = run.weights(), run.accelerator.step
    moments = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(
        CheckpointError, match=r"Python objects \(exceptions\.ValueError\).*trust=True"
    ):
        run.accelerator.load_state(directory)
    group = {"params": [nn.Parameter(torch.zeros(1))]}
    inner = run.optimizer.optimizer
    run.optimizer.optimizer = torch.optim.SGD(run.net.parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match="is the state of AdamW, but the optimizer here is SGD"
    ):
        run.accelerator.load_state(directory, trust=True)
    run.optimizer.optimizer = inner
    run.optimizer.add_param_group(group)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin does not fit the optimizer"):
        run.accelerator.load_state(directory, trust=True)
    assert torch.equal(run.weights(), before)
    assert run.accelerator.step == step
    assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], moments)


def test_warns_about_objects_that_the_run_does_not_have(run: Run, tmp_path: Path) -> None:
    run.accelerator.register_for_checkpointing(Box())
    directory = run.accelerator.save_state()
    counts = (
        "saved with 2 objects passed to register_for_checkpointing, and this run has 1.*ignored"
    )
    with pytest.warns(UserWarning, match=counts):
        Run(tmp_path / "other").accelerator.load_state(directory)


def test_manifest_cannot_name_files_outside_the_checkpoint(run: Run) -> None:
    directory = Path(run.accelerator.save_state())
    path = directory / "manifest.json"
    content = json.loads(path.read_text())["content"]
    content["files"]["../../outside"] = {"size": 1, "xxh3_128": "0"}
    path.write_text(json.dumps({"content": content, "xxh3_128": ""}))
    (directory.parent.parent / "outside").write_text("x")
    with contextlib.suppress(KeyError):
        del content["files"]["nothing"]
    body = json.dumps(content, indent=2, sort_keys=True)
    own = xxhash.xxh3_128_hexdigest(body.encode())
    whole = {"content": content, "xxh3_128": own}
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        run.accelerator.load_state(directory)


# --- directories ----------------------------------------------------------------------------------


def test_replacing_a_named_directory_keeps_files_of_others(run: Run, tmp_path: Path) -> None:
    config = run.accelerator.project_configuration
    config.automatic_checkpoint_naming = False
    target = tmp_path / "last"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "logs").mkdir()
    (target / "logs" / "a.txt").write_text("a")
    run.accelerator.save_state(target, max_shard_size=100)
    assert (target / "model.safetensors.index.json").exists()
    run.train(1)
    run.accelerator.save_state(target)
    assert not (target / "model.safetensors.index.json").exists(), "belonged to the replaced one"
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "logs" / "a.txt").read_text() == "a"
    run.accelerator.load_state(target)
    assert folders(tmp_path) == ["last"]
    monkey = tmp_path / "here"
    monkey.mkdir()
    before = Path.cwd()
    os.chdir(monkey)
    try:
        with pytest.raises(CheckpointError, match="current directory"):
            run.accelerator.save_state(".")
    finally:
        os.chdir(before)


@pytest.mark.parametrize("options", [{"safe_serialization": False}, {"max_shard_size": 40}])
def test_replaced_weights_are_never_loaded_again(run: Run, tmp_path: Path, options: Any) -> None:
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    place = tmp_path / "named"
    run.accelerator.save_state(place)
    os.truncate(place / "manifest.json", 5)  # the list of its files is lost
    (place / "notes.txt").write_text("mine")
    with torch.no_grad():
        run.net[0].weight.fill_(2.0)
    run.accelerator.save_state(place, **options)
    assert not (place / "model.safetensors").exists()
    assert (place / "notes.txt").read_text() == "mine"
    with torch.no_grad():
        run.net[0].weight.fill_(3.0)
    run.accelerator.save_state(tmp_path / "x")
    shutil.copy(tmp_path / "x" / "model.safetensors", place)  # the manifest does not list it
    run.accelerator.load_state(place)
    assert torch.equal(run.net[0].weight, torch.full_like(run.net[0].weight, 2.0))


@pytest.mark.parametrize("exchange", [True, False])
def test_kill_between_any_two_renames_loses_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Stop before each rename in turn, and check what the next run finds."""
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    if not exchange:
        monkeypatch.setattr(directories, "_exchange", lambda one, other: False)
    target = tmp_path / "last"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    run.box.state = {"n": 0}
    run.accelerator.save_state(target)

    class Death(BaseException):
        pass

    real, renames = os.rename, 0
    died = True
    allowed = 0
    while died:
        died, renames = False, 0

        def dying(*names: Any) -> None:
            nonlocal renames
            if renames == allowed:  # noqa: B023
                raise Death
            renames += 1
            real(*names)

        run.box.state = {"n": allowed + 1}
        with monkeypatch.context() as patch:
            patch.setattr(directories.os, "rename", dying)
            patch.setattr(directories.SaveInProgress, "abandon", lambda self: self.release())
            try:
                run.accelerator.save_state(target)
            except Death:
                died = True
        run.accelerator.load_state(target)
        assert run.box.state["n"] in (allowed, allowed + 1), (allowed, run.box.state)
        assert folders(tmp_path) == ["last"], "cleaned up"
        assert (target / "notes.txt").read_text() == "mine"
        run.box.state = {"n": allowed + 1}
        run.accelerator.save_state(target)
        allowed += 1
    assert allowed > (2 if exchange else 3)


def test_only_leftovers_of_dead_runs_are_removed(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    dead = root / ".checkpoint_7.saving-0123456789ab"
    dead.mkdir(parents=True)
    (dead / "half").write_text("x")
    code = (
        "import sys, time; from pathlib import Path; "
        "from accelerate_checkpoint.directories import SaveInProgress as Saving; "
        "saving = Saving(Path(sys.argv[1]), 'ba9876543210'); saving.make(); "
        "print('made', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(root / "checkpoint_8")], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"made\n"
        run.accelerator.save_state()
        assert folders(root) == [".checkpoint_8.saving-ba9876543210", "checkpoint_0"]
    finally:
        other.kill()
        other.wait()
    left = root / ".checkpoint_8.saving-ba9876543210"
    os.utime(left, (time.time() - 10,) * 2)
    run.accelerator.save_state()
    assert folders(root) == ["checkpoint_0", "checkpoint_1"]


def test_new_directory_is_not_removed_before_its_run_has_locked_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    mkdir = Path.mkdir

    def then_another_cleans_up(path: Path, *arguments: Any, **named: Any) -> None:
        mkdir(path, *arguments, **named)
        if ".saving-" in path.name:
            directories.clean_up(path.parent)

    monkeypatch.setattr(Path, "mkdir", then_another_cleans_up)
    run.accelerator.save_state()
    assert folders(root) == ["checkpoint_0"]


def test_oldest_checkpoint_is_deleted_only_after_the_new_one_is_complete(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    for _ in range(3):
        run.accelerator.save_state()
    run.box.state = ValueError("no state today")
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match="no state today"):
            run.save(blocking)
        run.accelerator.project_configuration.iteration = 3
        assert folders(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    run.box.state = {"n": 2}
    run.accelerator.save_state()
    assert folders(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    """Mount a disk of `size` bytes, or limit the size of files if mounting is not allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    )
    if done.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("blocking", [True, False])
def test_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, blocking: bool) -> None:
    with small_disk(tmp_path, 1 << 20):
        run = Run(tmp_path)
        first = run.accelerator.save_state()
        run.box.state = {"big": torch.zeros(1 << 20)}
        with pytest.raises(CheckpointError, match="Earlier checkpoints are unchanged") as failure:
            run.save(blocking)
        assert re.search("No space left on device|File too large", str(failure.value))
        assert "custom_checkpoint_0.pkl" in str(failure.value)
        assert folders(tmp_path / "checkpoints") == ["checkpoint_0"]
        assert run.accelerator.load_state() == first


def test_checkpoint_on_a_read_only_disk_can_be_loaded(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1 << 20):
        run = Run(tmp_path)
        first = Path(run.accelerator.save_state())
        shutil.copytree(first, first.with_name(".checkpoint_0.swap-0123456789ab"))
        if subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)]).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            with pytest.raises(CheckpointError, match="Read-only file system"):
                run.accelerator.save_state()
            assert run.accelerator.load_state() == str(first)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(tmp_path)], check=True)


def test_error_for_an_invalid_directory_names_it(run: Run, tmp_path: Path) -> None:
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        run.accelerator.save_state(tmp_path / "file" / "state")
    with pytest.raises(CheckpointError, match="is a file"):
        run.accelerator.save_state(tmp_path / "file")
    with pytest.raises(CheckpointError, match="is a file"):
        run.accelerator.load_state(tmp_path / "file")
    with pytest.raises(CheckpointError, match="needs the path of a directory, not 3"):
        run.accelerator.save_state(3)
    with pytest.raises(CheckpointError, match="max_shard_size=0 is not valid"):
        run.accelerator.save_state(tmp_path / "state", max_shard_size=0)
    with pytest.raises(CheckpointError, match=r"load_state\(\) got no directory"):
        run.accelerator.load_state()


# --- background saves -----------------------------------------------------------------------------


def test_background_save_has_the_state_at_the_call(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.box.state = {"tensor": torch.zeros(3), "list": [1]}
    run.train(2)
    now = run.weights()
    moments = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    first = run.accelerator.save_state(blocking=False)
    run.train(2)
    run.box.state["tensor"].fill_(7)
    run.box.state["list"].append(2)
    second = run.accelerator.save_state(blocking=False)
    assert Path(first).exists(), "a save waits for the previous one"
    run.accelerator.wait_for_checkpoint()
    run.accelerator.load_state(second)
    assert run.box.state["list"] == [1, 2]
    run.accelerator.load_state(first)
    assert torch.equal(run.weights(), now)
    assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert run.box.state == {"tensor": run.box.state["tensor"], "list": [1]}
    assert run.box.state["tensor"].eq(0).all()
    third = run.accelerator.save_state(blocking=False)
    run.accelerator.end_training()
    assert Path(third, "manifest.json").exists(), "end_training waits for the save"


def test_states_created_for_the_save_are_copied_separately(run: Run) -> None:
    class Fresh:
        def __init__(self, value: float) -> None:
            self.value = value

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"value": torch.full((1000,), self.value)}  # freed, so its address is reused

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.value = float(state["value"][0])

    objects = [Fresh(float(number)) for number in range(4)]
    run.accelerator.register_for_checkpointing(*objects)
    run.accelerator.save_state(blocking=False)
    run.accelerator.wait_for_checkpoint()
    run.accelerator.load_state()
    assert [one.value for one in objects] == [0.0, 1.0, 2.0, 3.0]


# --- resuming -------------------------------------------------------------------------------------


def test_accumulated_gradients_are_restored(tmp_path: Path) -> None:
    set_seed(3)
    straight = Run(tmp_path / "a", steps=4)
    set_seed(4)
    straight.train(12)
    set_seed(3)
    broken = Run(tmp_path / "b", steps=4)
    set_seed(4)
    broken.train(6)
    broken.accelerator.save_state()
    set_seed(99)
    resumed = Run(tmp_path / "b", steps=4)
    resumed.accelerator.load_state()
    assert resumed.accelerator.step == 6
    assert not resumed.accelerator.sync_gradients
    resumed.train(12)
    assert torch.equal(resumed.weights(), straight.weights())


def test_gradients_accumulated_by_hand_are_restored(run: Run) -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 1)
    run.accelerator.backward(mse_loss(run.model(x), y))
    held = [p.grad.clone() for p in run.net.parameters()]
    directory = Path(run.accelerator.save_state())
    run.optimizer.zero_grad()
    run.accelerator.load_state(directory)
    for one, parameter in zip(held, run.net.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)
    run.optimizer.step()
    again = Path(run.accelerator.save_state())
    assert "gradients_0.bin" in folders(directory)
    assert "gradients_0.bin" not in folders(again), "the optimizer has used them"


def test_skipping_after_loading_sees_each_sample_once(tmp_path: Path) -> None:
    def batches(loader: Any) -> list[Any]:
        return [y.flatten().tolist() for _, y in loader]

    set_seed(1)
    straight = Run(tmp_path / "a")
    set_seed(2)
    expected = [batches(straight.loader) for _ in range(2)]
    set_seed(1)
    broken = Run(tmp_path / "b")
    set_seed(2)
    seen = []
    for count, (_, y) in enumerate(broken.loader, 1):
        seen.append(y.flatten().tolist())
        if count == 5:
            broken.accelerator.save_state()
            break
    for skip in (True, False):
        set_seed(50)
        resumed = Run(tmp_path / "b")
        resumed.accelerator.load_state()
        loader = resumed.loader
        first = resumed.accelerator.skip_first_batches(loader, 5) if skip else loader
        assert seen + batches(first) == expected[0]
        assert batches(loader) == expected[1]


# --- directories of Accelerate --------------------------------------------------------------------


def write_accelerate_checkpoint(directory: Path, run: Run, prefix: str = "") -> None:
    """Write a checkpoint in the layout that Accelerate documents."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    state = {prefix + name: tensor.clone() for name, tensor in run.net.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    torch.save(run.optimizer.state_dict(), directory / "optimizer.bin")
    torch.save(run.scheduler.state_dict(), directory / "scheduler.bin")
    torch.save(run.box.state_dict(), directory / "custom_checkpoint_0.pkl")
    states = {
        "step": 3,
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, directory / "random_states_0.pkl")


@pytest.mark.parametrize("prefix", ["", "module."], ids=["one process", "DDP"])
def test_loads_directories_of_accelerate(run: Run, tmp_path: Path, prefix: str) -> None:
    run.train(3)
    write_accelerate_checkpoint(tmp_path / "theirs", run, prefix)
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())
    weights = run.weights()
    other = Run(tmp_path / "other")
    other.train(1)
    with pytest.warns(UserWarning, match="no position in the data"):
        other.accelerator.load_state(tmp_path / "theirs")
    assert torch.equal(other.weights(), weights)
    assert other.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
    assert other.accelerator.step == 3
    (tmp_path / "theirs" / "random_states_0.pkl").unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        other.accelerator.load_state(tmp_path / "theirs")


def test_ordinary_save_and_load_do_not_warn(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.accelerator.save_state()
        run.accelerator.load_state()
        run.train(2)
        run.accelerator.load_state(run.accelerator.save_state())
