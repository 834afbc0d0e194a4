"""Behaviour of this checkpointer that the conformance suite does not check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from accelerate_checkpoint import FileEntry, Manifest, read_manifest
from accelerate_core import Accelerator, FsspecSettings
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import ProjectConfiguration
from accelerate_testing import run_workers

WORKER = Path(__file__).with_name("worker.py")


def prepared(**arguments: Any) -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(cpu=True, checkpointer="fsspec", **arguments)
    model = torch.nn.Linear(3, 1)
    return accelerator, accelerator.prepare(model)


def test_relative_targets_are_below_the_url() -> None:
    settings = FsspecSettings(url="memory://below")
    accelerator, model = prepared(kwargs_handlers=[settings])
    assert accelerator.save_state("step_1") == "memory://below/step_1"
    assert fsspec.filesystem("memory").exists("/below/step_1/manifest.json")
    accelerator.save_model(model, "memory://below/model")
    accelerator.save({"a": 1}, "memory://below/object")
    with fsspec.open("memory://below/object") as file:
        assert torch.load(file, weights_only=True) == {"a": 1}
    assert fsspec.filesystem("memory").exists("/below/model/model.safetensors")
    assert "fsspec.url = 'memory://below'" in accelerator.explain()
    accelerator.end_training()


def test_numbered_checkpoints_are_below_the_url_and_a_damaged_one_is_skipped() -> None:
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    settings = FsspecSettings(url="memory://numbered")
    accelerator, model = prepared(project_config=project, kwargs_handlers=[settings])
    saved = [accelerator.save_state() for _ in range(3)]
    weights = model.weight.detach().clone()
    fs = fsspec.filesystem("memory")
    left = [path.rpartition("/")[2] for path in fs.ls("/numbered/checkpoints", detail=False)]
    assert sorted(left) == ["checkpoint_1", "checkpoint_2"]
    fs.pipe_file("/numbered/checkpoints/checkpoint_2/manifest.json", b"{}")
    with torch.no_grad():
        model.weight.zero_()
    with pytest.warns(UserWarning, match=r"skipped .*checkpoint_2"):
        assert accelerator.load_state() == saved[1]
    assert torch.equal(model.weight, weights)
    accelerator.end_training()


def test_next_save_deletes_leftovers_of_killed_saves_and_nothing_else(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    accelerator.save_state(tmp_path)
    (tmp_path / "save-0123456789ab").mkdir()
    (tmp_path / "save-0123456789ab" / "model.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    accelerator.save_state(tmp_path)
    accelerator.end_training()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["manifest.json", "notes.txt"]
    assert len(names) == 3
    assert names[2] != "save-0123456789ab"


def test_manifest_that_names_files_outside_is_refused(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    accelerator.save_state(tmp_path)
    made = read_manifest(tmp_path)
    for name, folder in (("../../outside", made.folder), ("/etc/x", ""), ("x", "../other")):
        forged = Manifest({**made.files, name: FileEntry(1, "0")}, made.facts, folder)
        (tmp_path / "manifest.json").write_text(forged.render())
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            accelerator.load_state(tmp_path)
    accelerator.end_training()


def test_local_copy_can_be_loaded_by_the_checkpointer_directory(tmp_path: Path) -> None:
    accelerator, model = prepared()
    accelerator.save_state("memory://copied/run")
    fsspec.filesystem("memory").get("/copied/run", str(tmp_path / "run"), recursive=True)
    weight = model.weight.detach().clone()
    accelerator.end_training()
    local = Accelerator(cpu=True, checkpointer="directory")
    model = local.prepare(torch.nn.Linear(3, 1))
    local.load_state(tmp_path / "run")
    assert torch.equal(model.weight, weight)
    local.end_training()


def test_damaged_object_is_refused_by_name_and_changes_nothing() -> None:
    accelerator, model = prepared()
    place = accelerator.save_state("memory://damaged/run")
    fs = fsspec.filesystem("memory")
    (path,) = [one for one in fs.find("/damaged/run") if one.endswith("model.safetensors")]
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))
    with torch.no_grad():
        model.weight.fill_(3)
    with pytest.raises(CheckpointError, match=f"{place}/save-.*/model.safetensors is damaged"):
        accelerator.load_state(place)
    assert bool((model.weight == 3).all())
    accelerator.end_training()


def test_error_for_an_unknown_file_system_names_the_url_and_the_plugin() -> None:
    accelerator, _ = prepared()
    with pytest.raises(CheckpointError, match="nowhere://x cannot be opened") as failure:
        accelerator.save_state("nowhere://x")
    assert any("accelerate-fsspec 0.1.0" in note for note in failure.value.__notes__)
    accelerator.end_training()


def test_two_ranks_share_files_but_refuse_memory_and_archives(tmp_path: Path) -> None:
    run = run_workers(WORKER, 2, [tmp_path], timeout=120)
    assert run.ok, run.story
    for rank in run.results:
        assert "All ranks must write to the same store" in rank["memory"]
        assert "only a single process can write" in rank["archive"]
        assert rank["read"] == "both"
    files = read_manifest(tmp_path / "run").files
    assert {"note.txt", "random_states_0.pkl", "random_states_1.pkl"} <= {*files}
    # One process loads it too, with the states of rank 0.
    accelerator, model = prepared()
    accelerator.load_state(tmp_path / "run")
    assert model.weight.tolist() == run.results[0]["weight"]
    accelerator.end_training()
