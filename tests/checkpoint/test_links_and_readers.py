"""Checkpoints that are links, folders that hold other files, and readers beside a writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_checkpoint import directories
from accelerate_core import Accelerator, ProjectConfiguration
from accelerate_core.plugin import CheckpointError
from accelerate_core.utils import load_checkpoint_in_model

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


def new_run(root: Path, value: float = 0.0, limit: int | None = None, **options: Any) -> Any:
    project = ProjectConfiguration(
        str(root), automatic_checkpoint_naming=True, total_limit=limit, **options
    )
    accelerator = Accelerator(project_config=project, cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    fill(model, value)
    return accelerator, model


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / "checkpoints"))


@pytest.mark.parametrize("kind", ["archived", "other run", "chain"])
def test_total_limit_removes_a_link_and_not_what_it_points_to(tmp_path: Path, kind: str) -> None:
    root, archive = tmp_path / "run", tmp_path / "archive"
    accelerator, _ = new_run(root, limit=2)
    if kind == "other run":
        other, _ = new_run(archive)
        other.save_state()
        archive = archive / "checkpoints" / "checkpoint_0"
        (root / "checkpoints").mkdir(parents=True)
        accelerator.project_configuration.iteration = 1
    else:
        Path(accelerator.save_state()).rename(archive)
    link = root / "checkpoints" / "checkpoint_0"
    if kind == "chain":
        (tmp_path / "best").symlink_to(archive)
        link.symlink_to(tmp_path / "best")
    else:
        link.symlink_to(archive, target_is_directory=True)
    before = sorted(os.listdir(archive))
    for _ in range(3):
        accelerator.save_state()
    assert names(root) == ["checkpoint_2", "checkpoint_3"]
    assert sorted(os.listdir(archive)) == before
    accelerator.load_state(archive)


@pytest.mark.parametrize("kind", ["dangling", "looping"])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_link_that_leads_nowhere_is_skipped(tmp_path: Path, kind: str, number: int) -> None:
    root = tmp_path / "run"
    link = root / "checkpoints" / f"checkpoint_{number}"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "gone" if kind == "dangling" else link)
    accelerator, model = new_run(root, 3.0, limit=2)
    with pytest.warns(UserWarning, match=f"{link.name} is skipped"):
        accelerator.save_state()
    accelerator.save_state()
    last = accelerator.save_state()
    assert link.is_symlink()
    whole = [name for name in names(root) if name != link.name]
    assert len(whole) == 2
    assert Path(last).name == max(whole)
    fill(model, 0.0)
    assert accelerator.load_state() == last
    assert model.weight[0, 0] == 3.0


def test_save_over_a_link_with_its_number_replaces_the_link_only(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    link = tmp_path / "run" / "checkpoints" / "checkpoint_0"
    link.parent.mkdir(parents=True)
    link.symlink_to(folder)
    accelerator, _ = new_run(tmp_path / "run")
    assert Path(accelerator.save_state()) == link
    assert not link.is_symlink()
    assert os.listdir(folder) == ["notes.txt"]


def test_leftover_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    accelerator, _ = new_run(tmp_path / "run")
    accelerator.save_state()
    for stage in ("saving", "swap", "old", "deleted"):
        link = tmp_path / "run" / "checkpoints" / f".checkpoint_0.{stage}-0123456789ab"
        link.symlink_to(folder)
    accelerator.save_state()
    accelerator.load_state()
    assert (folder / "notes.txt").read_text() == "mine"
    assert names(tmp_path / "run")[-2:] == ["checkpoint_0", "checkpoint_1"]


FOREIGN = [
    "pytorch_model.bin",
    "optimizer_2.bin",
    "backend_notes",
    "scaler.pt",
    "custom_checkpoint_9.pkl",
]


def test_save_keeps_files_that_no_manifest_lists(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    target = tmp_path / "state"
    (target / "backend_folder").mkdir(parents=True)
    for name in (*FOREIGN, "backend_folder/weights.bin"):
        (target / name).write_text(name)
    with pytest.warns(UserWarning, match=r"which no manifest.json lists"):
        accelerator.save_state(target)
    for name in (*FOREIGN, "backend_folder/weights.bin"):
        assert (target / name).read_text() == name
    accelerator.load_state(target)


def test_save_keeps_files_in_folders_of_the_replaced_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    target = tmp_path / "state"

    def hook(models: Any, weights: Any, folder: str) -> None:
        Path(folder, "lora").mkdir()
        Path(folder, "lora", "adapter.txt").write_text("new")
        Path(folder, "lora", "old.txt").touch()

    handle = accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(target)
    (target / "lora" / "notes.txt").write_text("mine")
    (target / "lora" / "link").symlink_to(tmp_path)
    handle.remove()
    accelerator.save_state(target)
    assert sorted(os.listdir(target / "lora")) == ["link", "notes.txt"]
    assert (target / "lora" / "link").is_symlink()


@pytest.mark.parametrize("when", ["rename", "removal"])
def test_error_after_publishing_does_not_claim_that_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    target = tmp_path / "state"
    accelerator.save_state(target)
    fill(model, 5.0)
    with monkeypatch.context() as patch:
        if when == "rename":
            real = directories.sync_directory

            def failing(path: Path) -> None:
                if path == tmp_path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                real(path)

            patch.setattr(directories, "sync_directory", failing)
            with pytest.raises(CheckpointError, match="is complete, but it may be lost"):
                accelerator.save_state(target)
        else:
            patch.setattr(directories, "remove_tree", _raise_io_error)
            with pytest.warns(UserWarning, match="cannot be removed"):
                accelerator.save_state(target)
    fill(model, 0.0)
    accelerator.load_state(target)
    assert model.weight[0, 0] == 5.0
    assert os.listdir(tmp_path) == ["state"]


def _raise_io_error(path: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_names_of_new_parents_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    real = directories.sync_directory
    monkeypatch.setattr(
        directories, "sync_directory", lambda path: (synced.append(path), real(path))
    )
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "a" / "b" / "state")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


def test_saves_to_an_absolute_path_from_a_deleted_directory(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; from accelerate_core import Accelerator\n"
        "from accelerate_core.plugin import CheckpointError\n"
        "target, gone = sys.argv[1:]; os.mkdir(gone); os.chdir(gone); os.rmdir(gone)\n"
        "accelerator = Accelerator(cpu=True); accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "accelerator.save_state(target); accelerator.load_state(target)\n"
        "try: accelerator.save_state('relative')\n"
        "except CheckpointError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "state", tmp_path / "gone"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "relative is relative to the current directory, which was deleted" in run.stdout


WRITER = """
import sys, torch
from accelerate_core import Accelerator, ProjectConfiguration
root, automatic, count = sys.argv[1], sys.argv[2] == "numbered", int(sys.argv[3])
project = ProjectConfiguration(root, automatic_checkpoint_naming=automatic, total_limit=2)
accelerator = Accelerator(project_config=project, cpu=True)
model = accelerator.prepare(torch.nn.Linear(64, 64))
for number in range(1, count + 1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    accelerator.save_state(*([] if automatic else [root + "/state"]))
    if number == 2:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("kind", ["numbered", "fixed"])
def test_reader_and_writer_do_not_disturb_each_other(tmp_path: Path, kind: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", WRITER, tmp_path, kind, "80"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        project = ProjectConfiguration(
            str(tmp_path), automatic_checkpoint_naming=kind == "numbered"
        )
        accelerator = Accelerator(project_config=project, cpu=True)
        model = accelerator.prepare(torch.nn.Linear(64, 64))
        directory = [] if kind == "numbered" else [tmp_path / "state"]
        loads, latest = 0, 0.0
        while writer.poll() is None or not loads:
            accelerator.load_state(*directory)
            values = torch.cat(
                [tensor.flatten() for tensor in model.state_dict().values()]
            ).unique()
            assert len(values) == 1, "weights of two checkpoints"
            assert values.item() >= latest
            latest = values.item()
            loads += 1
        assert writer.wait() == 0, writer.stderr.read() if writer.stderr else ""
        assert loads > 10
    finally:
        writer.kill()
        writer.communicate()
    folder = tmp_path / "checkpoints" if kind == "numbered" else tmp_path
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


LAST_SAVE = """
import gc, resource, sys, torch
from accelerate_core import Accelerator
end, folder = sys.argv[1:]
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(512, 512))
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
accelerator.save_state(folder, blocking=False)
if end == "collected":
    del accelerator, model
    gc.collect()
elif end == "waited":
    try:
        accelerator.wait_for_checkpoint()
    except Exception as error:
        print("caught", error)
elif end == "raised":
    raise ValueError("mine")
"""


@pytest.mark.parametrize("end", ["exit", "collected", "waited", "raised"])
def test_failure_of_the_last_background_save_is_shown(tmp_path: Path, end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LAST_SAVE, end, str(tmp_path / "state")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == (0 if end == "waited" else 1), run.stderr
    shown = run.stdout if end == "waited" else run.stderr
    assert shown.count("Earlier checkpoints are unchanged") == 1
    assert "model.safetensors" in shown
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(("before", "after"), [(90, 90), (90, "1GB"), ("1GB", 90), (90, 200)])
def test_interrupted_save_model_never_leaves_weights_of_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool, before: Any, after: Any
) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    loaded = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))

    class Death(BaseException):
        pass

    allowed = 0
    died = True
    while died:
        folder = tmp_path / str(allowed)
        fill(model, 1.0)
        accelerator.save_model(model, folder, before, safe)
        fill(model, 2.0)
        calls = 0

        def dying(actual: Any, *arguments: Any) -> Any:
            nonlocal calls
            if calls == allowed:  # noqa: B023
                raise Death
            calls += 1
            return actual(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", partial(dying, os.replace))
            patch.setattr(Path, "unlink", partialmethod(_dying_unlink, dying, Path.unlink))
            try:
                accelerator.save_model(model, folder, after, safe)
                died = False
            except Death:
                pass
        fill(loaded, 0.0)
        try:
            load_checkpoint_in_model(loaded, folder)
            values = torch.cat([value.flatten() for value in loaded.state_dict().values()])
            assert len(values.unique()) == 1, (allowed, "weights of two models")
        except CheckpointError:
            assert died
        allowed += 1
    assert allowed > 1
    assert values.unique().item() == 2.0


def _dying_unlink(self: Path, dying: Any, actual: Any, **options: Any) -> None:
    dying(partial(actual, **options), self)
