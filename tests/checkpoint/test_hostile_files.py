"""Checkpoints whose checksums are right, but whose content was chosen to break the reader."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelerate_big_model.offload import load_offload_index
from accelerate_checkpoint import files
from accelerate_checkpoint.contents import check_optimizer_state, check_rank_state
from accelerate_checkpoint.lease import LEASE, _is_held
from accelerate_checkpoint.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from accelerate_checkpoint.stream_position import resume_stream
from accelerate_checkpoint.weights import checkpoint_files
from accelerate_core import Accelerator
from accelerate_core.plugin import CheckpointError, ConfigurationError, parse_json, read_limited

SECONDS, MEGABYTES = 2.0, 100  # a loaded machine takes twice as long

#: Any JSON, in which hostile numbers and texts are frequent.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**12, -1, 1 << 64, float("inf"), float("nan"), "", "\0", "\ud800", "../x"])
    | st.floats()
    | st.text(max_size=5)
)
KEYS = st.text(max_size=5) | st.sampled_from(["param_groups", "state", "step", "world_size"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
#: Plain data as in a file of torch.
PLAIN = JSON | st.sampled_from([torch.zeros(()), torch.zeros(3), torch.zeros(2, dtype=torch.uint8)])


@contextmanager
def limited() -> Iterator[None]:
    """Fail if the block takes long, or needs much memory."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert time.process_time() - begin < SECONDS
    assert grown < MEGABYTES


def new_run() -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(list(range(8)), 2, shuffle=True)
    model, optimizer, _, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in loader:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        break
    return accelerator, model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    accelerator, _ = new_run()
    return Path(accelerator.save_state(tmp_path_factory.mktemp("saved") / "state"))


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "state"))


def sign(place: Path, **facts: Any) -> None:
    """Write a manifest with the checksums of the present files."""
    manifest = read_manifest(place)
    listed = {name: files.checksum(place / name) for name in manifest.files}
    text = Manifest(listed, {**manifest.facts, **facts}).render()
    (place / MANIFEST).write_text(text)


def change(place: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    """Replace one value in a file of torch. An empty path replaces the whole content."""
    content = torch.load(place / name, weights_only=True)
    (place / name).unlink()
    torch.save(replaced(content, path, value), place / name)


GONE = object()


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if value is GONE:
        del parent[path[-1]]
    elif isinstance(parent, tuple):
        head = replaced(content, path[:-1], (*parent[: path[-1]], value, *parent[path[-1] + 1 :]))
        return head
    else:
        parent[path[-1]] = value
    return content


OWN = "accelerate_core"
RANK, OPTIMIZER, SCHEDULER = "random_states_0.pkl", "optimizer.bin", "scheduler.bin"
CHANGES: list[tuple[str, tuple[Any, ...], Any, str]] = [
    (RANK, (), [1, 2], "dict"),
    (RANK, (), None, "dict"),
    (RANK, ("step",), "x", "step"),
    (RANK, ("random_state",), GONE, "random_state"),
    (RANK, ("random_state",), (3, [1], None), "random_state"),
    (RANK, ("random_state", 1), 5, "random_state"),
    (RANK, ("torch_manual_seed",), GONE, "torch_manual_seed"),
    (RANK, ("torch_manual_seed",), torch.zeros(3), "torch_manual_seed"),
    (RANK, ("numpy_random_seed",), ("MT19937", [1, 2], 0, 0, 0.0), "numpy_random_seed"),
    (RANK, ("numpy_random_seed", 2), 10**9, "numpy_random_seed"),
    (RANK, ("devices",), [1], "devices"),
    (RANK, (OWN,), 3, OWN),
    (RANK, (OWN, "cycle"), GONE, "cycle"),
    (RANK, (OWN, "cycle"), 3, "cycle"),
    (RANK, (OWN, "cycle", "step"), -1, "cycle.step"),
    (RANK, (OWN, "cycle", "items"), None, "cycle.items"),
    (RANK, (OWN, "cycle", "items", "local"), "many", "items.local"),
    (RANK, (OWN, "cycle", "items", "divisor"), "x", "items.divisor"),
    (RANK, (OWN, "cycle", "steps_taken"), [None], "steps_taken.0"),
    (RANK, (OWN, "loaders"), 7, "loaders"),
    (RANK, (OWN, "loaders"), ["x"], "loaders.0"),
    (RANK, (OWN, "loaders", 0, "epoch"), "x", "loaders.0.epoch"),
    (RANK, (OWN, "loaders", 0, "global_batches"), float("inf"), "global_batches"),
    (RANK, (OWN, "loaders", 0, "samples_seen"), GONE, "samples_seen"),
    (RANK, (OWN, "loaders", 0, "torch_rng"), torch.zeros(3, dtype=torch.uint8), "torch_rng"),
    (RANK, (OWN, "loaders", 0, "draws"), 5, "draws"),
    (RANK, (OWN, "trackers"), 5, "trackers"),
    (RANK, (OWN, "generators"), [5], "generators"),
    (OPTIMIZER, (), [1], "dict"),
    (OPTIMIZER, (), {}, "state"),
    (OPTIMIZER, ("state",), [], "state"),
    (OPTIMIZER, ("state",), GONE, "state"),
    (OPTIMIZER, ("state", 0), 4, "state.0"),
    (OPTIMIZER, ("param_groups",), 4, "param_groups"),
    (OPTIMIZER, ("param_groups", 0), 4, "param_groups.0"),
    (OPTIMIZER, ("param_groups", 0, "params"), 4, "param_groups.0.params"),
    (OPTIMIZER, ("param_groups", 0, "params"), ["x", {}], "param_groups.0.params.0"),
    (OPTIMIZER, ("param_groups", 0, "lr"), "x", "param_groups.0.lr"),
    (SCHEDULER, (), 4, "dict"),
    (SCHEDULER, ("last_epoch",), "x", "last_epoch"),
    (SCHEDULER, ("base_lrs",), [None], "base_lrs.0"),
]


@pytest.mark.parametrize(("name", "path", "value", "key"), CHANGES)
def test_changed_value_is_an_error_that_names_file_and_key(
    place: Path, name: str, path: tuple[Any, ...], value: Any, key: str
) -> None:
    accelerator, model = new_run()
    before = copy.deepcopy(model.state_dict())
    change(place, name, path, value)
    sign(place)
    with limited(), pytest.raises(CheckpointError) as caught:
        accelerator.load_state(place)
    assert name in str(caught.value)
    assert key in str(caught.value)
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


FACTS: list[tuple[str, Any]] = [
    ("world_size", 10**12),
    ("world_size", 0),
    ("world_size", "1"),
    ("world_size", float("inf")),
    ("objects", 3),
    ("objects", {"models": float("inf")}),
    ("objects", {"models": "x"}),
    ("mesh", [1]),
    ("mesh", {"dp": None}),
    ("optimizers", 5),
    ("optimizers", [5]),
    ("step", "x"),
    ("epoch", []),
    ("saved_at", 1e300),
    ("saved_at", float("nan")),
    ("written_by", 3),
    ("written_by", {"plugins": [3]}),
]


@pytest.mark.parametrize(("key", "value"), FACTS)
def test_fact_of_another_kind_is_an_error_that_names_it(place: Path, key: str, value: Any) -> None:
    accelerator, _ = new_run()
    sign(place, **{key: value})
    with limited(), pytest.raises(CheckpointError, match=rf"{MANIFEST}.*'{key}'"):
        accelerator.load_state(place)


MANIFESTS: dict[str, bytes] = {
    "infinite size": b'{"content": {"kind": "accelerate-core checkpoint", "format": 1, '
    b'"files": {"a": {"size": 1e999, "xxh3_128": ""}}}}',
    "infinite format": b'{"content": {"kind": "accelerate-core checkpoint", "format": 1e999, "files": {}}}',
    "deep": b'{"content": ' + b"[" * 100_000,
    "many values": b"[" + b"{}," * 3_000_000,
    "large": b" " * (40 << 20),
    "long number": b'{"content": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifest_that_needs_time_or_memory_is_refused(place: Path, kind: str) -> None:
    accelerator, _ = new_run()
    (place / MANIFEST).write_bytes(MANIFESTS[kind])
    with limited(), pytest.raises(CheckpointError, match=MANIFEST):
        accelerator.load_state(place)


@pytest.mark.parametrize("name", ["\0", "a\0b", "\ud800", "../x", "/x"])
def test_name_that_cannot_be_a_file_inside_is_refused(place: Path, name: str) -> None:
    manifest = read_manifest(place)
    manifest.files[name] = files.FileEntry(0, "")
    with pytest.raises(CheckpointError, match="names"):
        parse_manifest(manifest.render().encode(), "the manifest")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize(
    "name", [MANIFEST, RANK, "model.safetensors", "model.safetensors.index.json"]
)
def test_pipe_in_a_checkpoint_does_not_block(place: Path, name: str) -> None:
    accelerator, _ = new_run()
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    caught: list[BaseException] = []

    def load() -> None:
        try:
            accelerator.load_state(place)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    if name != "model.safetensors.index.json":  # no manifest lists it, so it is not opened
        assert isinstance(caught[0], CheckpointError)
        assert name in str(caught[0])


def test_packed_file_is_refused(place: Path) -> None:
    accelerator, _ = new_run()
    with zipfile.ZipFile(place / OPTIMIZER, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20), compresslevel=1)
    sign(place)
    with limited(), pytest.raises(CheckpointError, match=OPTIMIZER):
        accelerator.load_state(place)


INDEXES = [
    "[]", "3", "null", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}',
    '{"weight_map": {"a": "\\u0000"}}', '{"weight_map": {"a": "\\ud800"}}', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", INDEXES)
def test_index_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with limited(), pytest.raises(CheckpointError, match=r"index\.json"):
        checkpoint_files(tmp_path)


OFFLOADED = [
    "[]", "3", '{"a": 3}', '{"a": {}}', '{"a": {"dtype": 3, "shape": [1]}}',
    '{"a": {"dtype": "float32", "shape": [-1]}}', '{"a": {"dtype": "float32", "shape": 3}}',
    '{"a": {"dtype": "float32", "shape": [1e999]}}', '{"a": {"dtype": "nn", "shape": [1]}}',
    '{"a": {"safetensors_file": 3}}', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", OFFLOADED)
def test_offload_index_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with limited(), pytest.raises(CheckpointError, match=r"index\.json"):
        load_offload_index(tmp_path)


STREAMS = [None, 3, {}, {"counts": 3}, {"counts": ["x"], "before": [None], "latest": [None]},
           {"counts": [1], "before": [], "latest": [None]}]  # fmt: skip


@pytest.mark.parametrize("state", STREAMS)
def test_position_of_a_stream_of_another_form_is_refused(state: Any) -> None:
    with pytest.raises(ConfigurationError, match="counts"):
        resume_stream(DataLoader([1]), state)


@pytest.mark.parametrize("text", [b"[]", b"3", b'{"machine": 1, "expires": "x"}', b"[" * 100_000,
                                  b'{"machine": 1, "expires": null}'])  # fmt: skip
def test_lease_of_another_form_is_not_held(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stored:
        def read(self, place: str, name: str) -> bytes:
            return text

    monkeypatch.setattr("accelerate_checkpoint.lease._AGAIN", 0.0)
    storage: Any = Stored()
    assert not _is_held(storage, "place", LEASE)


# --- any content --------------------------------------------------------------------------------


def passes(job: Callable[[], object]) -> None:
    """Call a function that may raise one of our errors, and no other."""
    try:
        job()
    except (CheckpointError, ConfigurationError):
        pass


@given(
    JSON, st.sampled_from(["world_size", "objects", "mesh", "optimizers", "written_by", "folder"])
)
@settings(deadline=None)
def test_any_fact_is_accepted_or_refused(value: Any, key: str) -> None:
    manifest = Manifest({"a": files.FileEntry(1, "x")}, {key: value})
    passes(lambda: parse_manifest(manifest.render().encode(), "the manifest"))


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    passes(lambda: parse_manifest(data, "the manifest"))
    try:
        parse_json(data)
    except ValueError:
        pass


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the place of each value in nested containers, without those in long lists."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_in(inner, (*path, key))
    elif isinstance(value, list | tuple) and len(value) < 10:
        for index, inner in enumerate(value):
            yield from paths_in(inner, (*path, index))


@given(st.data())
@settings(
    deadline=None,
    max_examples=max(1, settings.default.max_examples // 10),  # each loads a checkpoint
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("name", [RANK, OPTIMIZER, SCHEDULER])
def test_any_value_in_a_file_is_loaded_or_refused(
    saved: Path, tmp_path: Path, name: str, data: Any
) -> None:
    content = torch.load(saved / name, weights_only=True)
    path = data.draw(st.sampled_from(list(paths_in(content))))
    changed = replaced(content, path, data.draw(PLAIN))
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    if name == RANK:
        passes(lambda: check_rank_state(saved / name, changed))
    elif name == OPTIMIZER:
        passes(lambda: check_optimizer_state(saved / name, changed, optimizer))
    place = tmp_path / "state"
    shutil.copytree(saved, place, dirs_exist_ok=True)
    torch.save(changed, place / name)
    sign(place)
    accelerator, _ = new_run()
    passes(lambda: accelerator.load_state(place))


@given(st.data())
@settings(deadline=None)
@pytest.mark.parametrize("name", [RANK, OPTIMIZER])
def test_any_damage_to_a_file_is_loaded_or_refused(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: Any
) -> None:
    content = bytearray((saved / name).read_bytes())
    begin = data.draw(st.integers(0, len(content)))
    content[begin : begin + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    passes(lambda: files.read(path))


def test_limits_of_small_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_limited(path, 4)
    with pytest.raises(OSError, match=r"directory|denied"):
        read_limited(tmp_path)
