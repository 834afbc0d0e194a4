"""Runs that are killed during an upload to S3 resume on another machine, from the bucket alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
from s3_server import s3_client, storage

from accelerate_checkpoint import MANIFEST, is_save, join, parse_manifest

WORKER = Path(__file__).with_name("killed_run.py")


def train(url: str, machine: Path, how: str, when: str) -> str:
    """Run the worker in an empty directory, with nothing of an earlier machine."""
    home = machine / "home"
    for folder in (machine, home, machine / "tmp"):
        folder.mkdir()
    environ = {**os.environ, "RUN": url, "OMP_NUM_THREADS": "1", "HOME": str(home)}
    environ |= {"TMPDIR": str(machine / "tmp"), "PYTHONPATH": str(WORKER.parent)}
    command = [WORKER, machine / "weights.pt", how, when]
    done = pool.run(command, environ, 240, cwd=machine)
    expected = 0 if when == "never" else -signal.SIGKILL
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


def whole(url: str) -> list[str]:
    """Return the checkpoints with a manifest, and check that every listed object is complete."""
    store: Any = storage()
    root, found = join(url, "checkpoints"), []
    for name in store.list(root):
        place = join(root, name)
        try:
            manifest = parse_manifest(store.read(place, MANIFEST), place)
        except FileNotFoundError:
            continue
        for file, entry in manifest.files.items():
            stored = join(manifest.folder, file)
            assert len(store.read(place, stored)) == entry.size, stored
        found.append(name)
    return sorted(found)


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("s3")
def test_killed_runs_end_with_the_same_weights_as_an_uninterrupted_run(tmp_path: Path) -> None:
    """An incomplete checkpoint is never loaded, and its objects are deleted by a later save."""
    train("memory://run", tmp_path / "undisturbed", "blocking", "never")
    url = "s3://tests/killed/run"
    deaths = [("blocking", "part 9"), ("background", "part 4"), ("blocking", "publish")]
    for number, (how, when) in enumerate(deaths):
        told = train(url, tmp_path / f"machine_{number}", how, when)
        assert whole(url), f"nothing can be loaded after death {number}"
        assert ("resumed" in told) == (number > 0)
        if when.startswith("part"):
            left = s3_client().list_multipart_uploads(Bucket="tests").get("Uploads", [])
            assert len(left) > number, "it did not die during an upload"
    told = train(url, tmp_path / "last", "background", "never")
    assert f"resumed {url}/checkpoints/checkpoint_" in told
    ours = torch.load(tmp_path / "last" / "weights.pt")
    others = torch.load(tmp_path / "undisturbed" / "weights.pt")
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)
    assert whole(url) == ["checkpoint_4", "checkpoint_5"]
    store: Any = storage()
    for name in store.list(join(url, "checkpoints")):
        place = join(url, f"checkpoints/{name}")
        saves = [one for one in store.list(place) if is_save(one)]
        assert len(saves) == 1, f"{place} still holds {saves}"
        assert ".lease" not in store.list(place, saves[0])
