"""Loading a checkpoint that another backend wrote names that backend, and what reads the files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_checkpoint import FileEntry, Manifest
from accelerate_checkpoint.load import Source, check_format
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError

#: How each backend writes: a file of the weights, and whether the backend owns the format.
WRITES = {
    "single": ("model.safetensors", False),
    "ddp": ("model-00001-of-00002.safetensors", False),
    "torchft": ("pytorch_model.bin", False),
    "fsdp2": ("backend_fsdp2/.metadata", True),
    "torchft_fsdp2": ("backend_torchft_fsdp2/.metadata", True),
    "xla": ("backend_xla/.metadata", True),
    "deepspeed": ("backend_deepspeed/engines.json", True),
    "megatron": ("backend_megatron/part.pt", True),
}


def check(saved: str, loaded: str, owns: bool) -> None:
    names = [WRITES[saved][0], "scheduler.bin", "random_states_0.pkl"]
    manifest = Manifest({name: FileEntry(1, "") for name in names}, {})
    source = Source("run/ck", Path("run/ck"), manifest)
    state: Any = SimpleNamespace(backend=loaded, owns_format=owns)
    check_format(state, source)


@pytest.mark.parametrize("saved", WRITES)
def test_every_pair_of_backends_that_cannot_read_each_other(saved: str) -> None:
    name, owned = WRITES[saved]
    for loaded, (_, owns) in WRITES.items():
        if not owned or saved == loaded:
            check(saved, loaded, owns)  # whole weights are the backend's to refuse
            continue
        with pytest.raises(CheckpointError) as error:
            check(saved, loaded, owns)
        assert f"--backend {saved} " in str(error.value)
        assert repr(loaded) in str(error.value)
        assert ("merge-weights run/ck" in str(error.value)) == name.endswith(".metadata")
    if owned:
        with pytest.raises(CheckpointError, match="with its present settings"):
            check(saved, saved, owns=False)


@pytest.mark.parametrize(
    ("file", "merged"),
    [
        ("pytorch_model_fsdp_0/.metadata", True),
        ("pytorch_model/mp_rank_00_model_states.pt", False),
    ],
)
def test_shards_of_accelerate_are_named(tmp_path: Path, file: str, merged: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    path.write_bytes(b"")
    (tmp_path / "random_states_0.pkl").write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        check_format(Accelerator(cpu=True), Source(str(tmp_path), tmp_path, None))  # type: ignore[arg-type]
    assert path.parent.name in str(error.value)
    assert ("merge-weights" in str(error.value)) == merged
