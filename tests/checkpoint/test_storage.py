"""Checkpoints in a store that files are uploaded to: retries, names, kills, retention."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_storage import PlainStorage
from support import clean_environment

from accelerate_checkpoint import DirectoryCheckpointer, lease, transfer
from accelerate_checkpoint.lease import LEASE
from accelerate_checkpoint.manifest import read_manifest
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_core.plugins import selection
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.utils import ProjectConfiguration

SAVE = "save-0123456789ab"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.001)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> PlainStorage:
    """Select the checkpointer "plain", and return its store."""
    made = PlainStorage()

    class Plain(DirectoryCheckpointer):
        name = "plain"

        def __init__(self, project: Any, signals: str | None) -> None:
            super().__init__(project, signals, made)

    monkeypatch.setattr(sys.modules[__name__], "Plain", Plain, raising=False)
    record = PluginRecord("checkpointer", "plain", f"{__name__}:Plain", "tests", "1.0")
    find = selection.find
    monkeypatch.setattr(
        selection,
        "find",
        lambda kind, name, **how: record if name == "plain" else find(kind, name, **how),
    )
    monkeypatch.setenv("ACCELERATE_CHECKPOINTER", "plain")
    return made


def prepared(folder: Path, **project: Any) -> tuple[Accelerator, torch.nn.Module]:
    config = ProjectConfiguration(str(folder), **project)
    accelerator = Accelerator(cpu=True, project_config=config)
    return accelerator, accelerator.prepare(torch.nn.Linear(3, 2))


def objects(place: str | Path) -> list[str]:
    return sorted(p.relative_to(place).as_posix() for p in Path(place).rglob("*") if p.is_file())


# --- transfers ------------------------------------------------------------------------------------


class Busy(CheckpointError):
    """An error of a store's own, for which it recommends another attempt."""


class Failing(PlainStorage):
    """Fails some attempts to write or fetch, after transferring a part of the file."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.left = error, times
        self.running, self.most = 0, 0
        self._lock = threading.Lock()

    def is_transient(self, error: Exception) -> bool:
        return isinstance(error, Busy) or super().is_transient(error)

    def fail(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left >= 0:
                raise self.error

    def write(self, place: str, name: str, source: Path, progress: Any) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            progress(3)
            time.sleep(0.02)
            self.fail()
            super().write(place, name, source, lambda count: progress(count - 3))
        finally:
            with self._lock:
                self.running -= 1

    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        self.fail()
        return super().fetch(place, name, start, stop)


def sources(folder: Path, count: int = 12) -> dict[str, Path]:
    made = {}
    for number in range(count):
        path = folder / f"source_{number}"
        path.write_bytes(os.urandom(1000))
        made[f"{SAVE}/{number}"] = path
    return made


def test_files_are_sent_in_parallel_and_retried_after_transient_errors(tmp_path: Path) -> None:
    store, files = Failing(ConnectionResetError("connection reset"), 4), sources(tmp_path)
    counts: list[int] = []
    place = str(tmp_path / "place")
    transfer.upload(store, place, files, counts.append)
    assert store.most > 3
    assert sum(counts) == 12_000, "the bytes of failed attempts are subtracted"
    store.left = 4
    fetched = {name: (tmp_path / "fetched" / name, 1000) for name in files}
    transfer.download(store, place, fetched, lambda count: None)
    for name, (path, _) in fetched.items():
        assert path.read_bytes() == files[name].read_bytes()


def test_large_file_is_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART", 1000)
    asked: list[tuple[int, int]] = []

    class Asked(PlainStorage):
        def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
            asked.append((start, stop))
            return super().fetch(place, name, start, stop)

    content = os.urandom(3500)
    (tmp_path / "large").write_bytes(content)
    target = tmp_path / "fetched"
    transfer.download(Asked(), str(tmp_path), {"large": (target, 3500)}, lambda count: None)
    assert sorted(asked) == [(0, 1000), (1000, 2000), (2000, 3000), (3000, 3500)]
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    ("error", "attempts", "message"),
    [
        (TimeoutError("slow"), 5, "cannot be written after 5 attempts: TimeoutError: slow"),
        (PermissionError(13, "not yours"), 1, "cannot be written: PermissionError: .*not yours"),
        (ValueError("no such region"), 1, "cannot be written: ValueError: no such region"),
        (Busy("try again"), 5, "cannot be written after 5 attempts: Busy: try again"),
        (
            OSError(5, "no", "https://me:secret/1@host/x?sig=abc&y=1"),
            5,
            r"cannot be written after 5 attempts: OSError: .*https://\*\*\*@host/x\?sig=\*\*\*&y=1",
        ),
    ],
)
def test_only_transient_errors_are_retried_and_errors_name_the_object(
    tmp_path: Path, error: Exception, attempts: int, message: str
) -> None:
    store, files = Failing(error, 1000), sources(tmp_path, 1)
    counts: list[int] = []
    with pytest.raises(CheckpointError, match=f"{tmp_path}/place/{SAVE}/0 {message}"):
        transfer.upload(store, f"{tmp_path}/place", files, counts.append)
    assert 1000 - store.left == attempts
    assert sum(counts) == 0


# --- checkpoints in a store -----------------------------------------------------------------------


def save(accelerator: Accelerator, place: str, blocking: bool) -> None:
    accelerator.save_state(place, blocking=blocking)
    accelerator.wait_for_checkpoint()


def test_failed_save_keeps_the_earlier_checkpoint_and_deletes_its_objects(
    storage: PlainStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model = prepared(tmp_path)
    place = accelerator.save_state(tmp_path / "place")
    before, weight = objects(place), model.weight.detach().clone()
    write = storage.write

    def full(place: str, name: str, *more: Any) -> None:
        if name.endswith("random_states_0.pkl"):
            raise OSError(28, "No space left on device")
        write(place, name, *more)

    monkeypatch.setattr(storage, "write", full)
    for blocking in (True, False):
        with torch.no_grad():
            model.weight.fill_(1)
        with pytest.raises(
            CheckpointError, match=r"random_states_0.pkl cannot be written: .*space"
        ):
            save(accelerator, place, blocking)
        assert objects(place) == before
        accelerator.load_state(place)
        assert torch.equal(model.weight, weight)
    accelerator.end_training()


def test_temporary_files_are_deleted(
    storage: PlainStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    accelerator, model = prepared(tmp_path)
    for blocking in (True, False):
        accelerator.save_state(tmp_path / "place", blocking=blocking)
        accelerator.load_state(tmp_path / "place")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        accelerator.load_state(tmp_path / "nothing")
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save({"a": 1}, tmp_path / "objects" / "a.bin")
    assert torch.load(tmp_path / "objects" / "a.bin") == {"a": 1}
    assert objects(tmp_path / "model") == ["model.safetensors"]
    assert objects(tmp_path / "temporary") == []
    accelerator.end_training()


def test_save_model_deletes_weights_of_an_earlier_call(
    storage: PlainStorage, tmp_path: Path
) -> None:
    accelerator, model = prepared(tmp_path)
    accelerator.save_model(model, tmp_path / "model", max_shard_size="10B")
    assert "model.safetensors.index.json" in objects(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    accelerator.save_model(model, tmp_path / "model")
    assert objects(tmp_path / "model") == ["model.safetensors", "notes.txt"]
    accelerator.end_training()


def test_total_limit_is_kept_and_a_damaged_checkpoint_is_skipped(
    storage: PlainStorage, tmp_path: Path
) -> None:
    accelerator, _ = prepared(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    root = tmp_path / "checkpoints"
    saved = [accelerator.save_state() for _ in range(4)]
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    folder = read_manifest(Path(saved[3])).folder
    os.truncate(root / "checkpoint_3" / folder / "model.safetensors", 5)
    with pytest.warns(UserWarning, match=r"checkpoint_3/save-\w+/model.safetensors has 5 bytes"):
        assert accelerator.load_state() == saved[2]
    accelerator.save_state()
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    assert accelerator.load_state() == saved[3]
    accelerator.end_training()


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_error_for_a_damaged_object_has_its_name_in_the_store(
    storage: PlainStorage, tmp_path: Path, damage: str
) -> None:
    accelerator, model = prepared(tmp_path)
    place = Path(accelerator.save_state(tmp_path / "place"))
    path = place / read_manifest(place).folder / "model.safetensors"
    data = path.read_bytes()
    changed = {"cut": data[:-1], "changed": data[:-1] + bytes([data[-1] ^ 1])}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    problem = {"gone": "is missing", "cut": "bytes, but", "changed": "is damaged"}[damage]
    with torch.no_grad():
        model.weight.fill_(3)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} .*{problem}"):
        accelerator.load_state(place)
    assert bool((model.weight == 3).all())
    accelerator.end_training()


def test_loading_without_a_manifest_deletes_nothing(storage: PlainStorage, tmp_path: Path) -> None:
    accelerator, _ = prepared(tmp_path)
    place = Path(accelerator.save_state(tmp_path / "place"))
    manifest = (place / "manifest.json").read_bytes()
    (place / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        accelerator.load_state(place)
    (place / "manifest.json").write_bytes(manifest)
    accelerator.load_state(place)
    accelerator.end_training()


@pytest.mark.parametrize("took_effect", [True, False])
def test_publish_request_that_fails_may_still_have_succeeded(
    storage: PlainStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_effect: bool
) -> None:
    accelerator, model = prepared(tmp_path)
    place = accelerator.save_state(tmp_path / "place")
    earlier, publish = model.weight.detach().clone(), storage.publish

    def losing_the_answer(*arguments: Any) -> None:
        if took_effect:
            publish(*arguments)
        raise TimeoutError("no answer")

    monkeypatch.setattr(storage, "publish", losing_the_answer)
    with torch.no_grad():
        model.weight.fill_(1)
    if took_effect:
        accelerator.save_state(place)
    else:
        with pytest.raises(CheckpointError, match=r"manifest.json cannot be written after 5 att"):
            accelerator.save_state(place)
    with torch.no_grad():
        model.weight.fill_(2)
    accelerator.load_state(place)
    assert torch.equal(model.weight, torch.ones(2, 3) if took_effect else earlier)
    assert len([one for one in Path(place).iterdir() if one.is_dir()]) == 1
    accelerator.end_training()


def test_error_for_an_unreachable_store_names_it(
    storage: PlainStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = prepared(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator.save_state()

    def unreachable(*arguments: Any, **named: Any) -> Any:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(storage, "list", unreachable)
    message = f"{tmp_path}/checkpoints cannot be listed after 5 attempts"
    with pytest.raises(CheckpointError, match=message):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state()
    accelerator.end_training()


# --- leases ---------------------------------------------------------------------------------------

HOLD = """
import sys, time
from plain_storage import PlainStorage
with PlainStorage().lock(sys.argv[1], sys.argv[2]):
    print("held", flush=True)
    time.sleep(100)
"""


def test_lease_of_another_machine_holds_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = clean_environment(PYTHONPATH=str(Path(__file__).parent))
    command = [sys.executable, "-c", HOLD, str(tmp_path), SAVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGKILL)
    store = PlainStorage()
    file = tmp_path / SAVE / LEASE
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "machine": "another"}))
    with store.lock(str(tmp_path), SAVE) as locked:
        assert not locked
    file.write_text(json.dumps({**held, "machine": "another", "expires": time.time() - 1}))
    with store.lock(str(tmp_path), SAVE) as locked:
        assert locked
    file.write_text(json.dumps(held))
    with store.lock(str(tmp_path), SAVE) as locked:
        assert locked, "on the same machine, the lease of a killed process ends at once"
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED", 0.02)
    store = PlainStorage()
    with store.lock(str(tmp_path), SAVE):
        file = tmp_path / SAVE / LEASE
        first, until = json.loads(file.read_text())["expires"], time.monotonic() + 20
        while time.monotonic() < until:
            text = file.read_text()
            if text and json.loads(text)["expires"] > first:
                break
            time.sleep(0.01)
        else:
            pytest.fail("the lease was not renewed")
    assert not any(one.name == "checkpoint lease" for one in threading.enumerate())
