"""Runs that are killed while they save to S3, an archive or files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_fsspec import FsspecStorage
from servers import storage

from accelerate_checkpoint import MANIFEST, is_save, join, parse_manifest

WORKER = Path(__file__).with_name("killed_worker.py")


def train(url: str, out: Path, how: str, when: str) -> int:
    """Run the worker and return its exit status."""
    environ = {**os.environ, "ACCELERATE_FSSPEC_URL": url, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(out), how, when]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def whole(store: FsspecStorage, url: str) -> list[str]:
    """Return the checkpoints with a manifest, and check that every listed file is complete."""
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


#: Kind of store -> how each run saves, and when it dies.
DEATHS = {
    "s3": [("blocking", "write 4"), ("background", "published"), ("blocking", "publish")],
    "zip": [("background", "publish")],
    "file": [("background", "write 5")],
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a run that was never killed."""
    out = tmp_path_factory.mktemp("expected") / "weights.pt"
    assert train("memory://run", out, "blocking", "never") == 0
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", DEATHS)
def test_killed_runs_end_with_the_same_weights_as_an_uninterrupted_run(
    kind: str, tmp_path: Path, expected: Path, request: pytest.FixtureRequest
) -> None:
    """An incomplete checkpoint is never loaded, and its files are deleted by a later save."""
    if kind == "s3":
        request.getfixturevalue("s3")
    base = {"s3": "s3://tests/killed", "zip": f"zip://{tmp_path}", "file": f"file://{tmp_path}"}
    url, weights = f"{base[kind]}/run", tmp_path / "weights.pt"
    store: Any = storage()
    for number, (how, when) in enumerate(DEATHS[kind]):
        assert train(url, weights, how, when) == -signal.SIGKILL, when
        there = whole(store, url)
        assert there or when == "publish", f"nothing can be loaded after death {number}"
    assert train(url, weights, "background", "never") == 0
    for one, other in zip(torch.load(weights), torch.load(expected), strict=True):
        assert torch.equal(one, other)
    assert whole(store, url) == ["checkpoint_4", "checkpoint_5"]
    for name in store.list(join(url, "checkpoints")):
        place = join(url, f"checkpoints/{name}")
        saves = [one for one in store.list(place) if is_save(one)]
        assert len(saves) == 1, f"{place} still holds {saves}"
        assert ".lease" not in store.list(place, saves[0])
