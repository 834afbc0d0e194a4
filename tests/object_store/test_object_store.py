"""A URL as `project_dir` keeps checkpoints in an object store, and credentials stay hidden."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import KEY, SECRET, s3_client

from accelerate_core import Accelerator, ObjectStoreSettings
from accelerate_core.errors import CheckpointError, ConfigurationError, MissingPluginError
from accelerate_core.plugins import discovery
from accelerate_core.utils import ProjectConfiguration


def prepared(**arguments: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, **arguments)
    return accelerator, accelerator.prepare(torch.nn.Linear(3, 1))


def chosen(accelerator: Accelerator) -> str:
    (line,) = [one for one in accelerator.explain().splitlines() if "plugin checkpointer" in one]
    return line


@pytest.mark.parametrize("how", ["argument", "config", "environment"])
def test_url_chooses_the_checkpointer(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://chosen/{how}"
    arguments: dict[str, Any] = {}
    if how == "argument":
        arguments = {"project_dir": url}
    elif how == "config":
        arguments = {"project_config": ProjectConfiguration(url)}
    else:
        monkeypatch.setenv("ACCELERATE_OBJECT_STORE_URL", url)
    accelerator, model = prepared(**arguments)
    assert accelerator.save_state("step_1") == f"{url}/step_1"
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state("step_1")
    assert torch.equal(model.weight, weight)
    assert "object_store (accelerate-object-store" in chosen(accelerator)
    accelerator.end_training()


def test_directory_as_project_dir_keeps_the_usual_checkpointer(tmp_path: Path) -> None:
    accelerator, _ = prepared(project_dir=str(tmp_path))
    assert "directory (accelerate-checkpoint" in chosen(accelerator)
    accelerator.end_training()


def test_url_does_not_replace_a_backend_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_BACKEND", "ddp")
    accelerator, _ = prepared(project_dir="memory://chosen/backend")
    assert "backend = 'ddp'  (environment variable ACCELERATE_BACKEND)" in accelerator.explain()
    accelerator.end_training()


def test_url_without_the_plugin_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before training starts, although nothing has been saved."""
    found = discovery.installed()
    others = tuple(one for one in found.plugins if one.name != "object_store")
    without = type(found)(others, found.exports, found.triggers, found.groups)
    monkeypatch.setattr(discovery, "installed", lambda: without)
    monkeypatch.setattr("accelerate_core.plugins.selection.installed", lambda: without)
    with pytest.raises(MissingPluginError, match=r"s3://bucket/run.*pip install .*object.store"):
        Accelerator(cpu=True, project_dir="s3://bucket/run")


def test_named_directory_checkpointer_refuses_a_url() -> None:
    with pytest.raises(CheckpointError, match=r"s3://bucket/run is a URL, but the checkpointer"):
        Accelerator(cpu=True, project_dir="s3://bucket/run", checkpointer="directory")


def test_numbered_checkpoints_are_kept_to_the_limit_and_a_damaged_one_is_passed_over(
    s3: object,
) -> None:
    url = "s3://tests/numbered"
    project = ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model = prepared(project_config=project)
    saved = [accelerator.save_state(blocking=False) for _ in range(3)]
    accelerator.wait_for_checkpoint()
    weight = model.weight.detach().clone()
    listed = accelerator.checkpointer.storage.list(f"{url}/checkpoints")
    assert sorted(listed) == ["checkpoint_1", "checkpoint_2"]
    client = s3_client()
    (key,) = [
        one["Key"]
        for one in client.list_objects_v2(Bucket="tests", Prefix="numbered/")["Contents"]
        if "checkpoint_2" in one["Key"] and one["Key"].endswith("model.safetensors")
    ]
    data = bytearray(client.get_object(Bucket="tests", Key=key)["Body"].read())
    data[-1] ^= 1
    client.put_object(Bucket="tests", Key=key, Body=bytes(data))
    with pytest.raises(CheckpointError, match=f"s3://tests/{key} is damaged: its checksum"):
        accelerator.load_state(saved[2])
    with torch.no_grad():
        model.weight.zero_()
    with pytest.warns(UserWarning, match=r"skipped .*checkpoint_2.*is damaged"):
        assert accelerator.load_state() == saved[1]
    assert torch.equal(model.weight, weight)
    accelerator.end_training()


def test_models_and_objects_are_saved_to_urls_and_to_local_paths(tmp_path: Path) -> None:
    accelerator, model = prepared(project_dir="memory://models/run")
    storage = accelerator.checkpointer.storage
    accelerator.save_model(model, "final")
    accelerator.save({"a": 1}, "object.bin")
    assert "model.safetensors" in storage.list("memory://models/run", "final")
    assert "object.bin" in storage.list("memory://models/run")
    accelerator.save_model(model, tmp_path / "final")
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert (tmp_path / "state" / "manifest.json").is_file()
    accelerator.load_state(tmp_path / "state")
    accelerator.end_training()


def test_credentials_are_in_no_output_error_or_object(
    s3: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    settings = ObjectStoreSettings(
        url="s3://tests/hidden",
        options={"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"},
    )
    accelerator, _ = prepared(checkpointer="object_store", kwargs_handlers=[settings])
    told = [accelerator.explain(), repr(settings), str(accelerator.checkpointer.storage.__dict__)]
    assert "'region': 'us-east-1'" in told[0]
    accelerator.save_state("step_1")
    for target in ("step_2", "s3://missing/step_1"):
        with pytest.raises(CheckpointError) as failure:
            accelerator.load_state(target)
        error: BaseException | None = failure.value
        while error is not None:
            told.append(repr(error))
            error = error.__cause__ or error.__context__
    accelerator.end_training()
    client = s3_client()
    monkeypatch.undo()
    client = s3_client()
    objects = client.list_objects_v2(Bucket="tests", Prefix="hidden/")["Contents"]
    assert len(objects) > 2
    for one in objects:
        told.append(one["Key"])
        body = client.get_object(Bucket="tests", Key=one["Key"])["Body"].read()
        told.append(body.decode("latin-1"))
    told += [record.getMessage() for record in caplog.records if "boto" not in record.name]
    told += capfd.readouterr()
    text = "\n".join(told)
    assert KEY not in text
    assert SECRET not in text


@pytest.mark.parametrize("text", ['{"secret_access_key": "hunter2hunter2"', '"hunter2hunter2"'])
def test_invalid_options_in_the_environment_are_an_error_without_their_text(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_OBJECT_STORE_OPTIONS", text)
    with pytest.raises(ConfigurationError, match="ACCELERATE_OBJECT_STORE_OPTIONS") as failure:
        prepared(project_dir="memory://invalid/run")
    assert "hunter2" not in str(failure.value)


def test_settings_come_from_the_environment_and_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("object_store_config:\n  parallel: 3\n  part_size: 6000000\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    monkeypatch.setenv("ACCELERATE_OBJECT_STORE_PART_SIZE", "7000000")
    accelerator, _ = prepared(project_dir="memory://settings/run")
    text = accelerator.explain()
    assert "object_store.parallel = 3" in text
    assert "object_store.part_size = 7000000  (environment variable" in text
    assert accelerator.checkpointer.storage.parallel == 3
    accelerator.end_training()
