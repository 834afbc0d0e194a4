"""Weights that stay in the files of the checkpoint are mapped, read ahead, freed and never written."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_big_model import device_map, mapped, prefetch
from accelerate_big_model.mapped import SafetensorsFile, read_in
from accelerate_big_model.tensors import offload_hook
from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.utils import (
    ModelHook,
    OffloadedWeightsLoader,
    add_hook_to_module,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_module,
)

WIDTH = 64
INPUT = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Both(nn.Module):
    """An encoder that runs once and a decoder that runs in a loop, in reverse order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = self.encoder(x) if memory is None else memory
        for layer in reversed(self.decoder):
            x = torch.tanh(layer(x)) + memory
        return self.head(x)


def generate(model: nn.Module, steps: int = 3) -> torch.Tensor:
    with torch.no_grad():
        memory, x = model.encoder(INPUT), INPUT
        for _ in range(steps):
            x = model(x, memory=memory)
    return x


@pytest.fixture
def model() -> Both:
    torch.manual_seed(0)
    return Both().eval()


@pytest.fixture
def checkpoint(model: Both, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, {"format": "pt"})
    return path


def empty() -> Both:
    with init_empty_weights():
        return Both().eval()


def on_disk(checkpoint: Path, **more: Any) -> nn.Module:
    return load_checkpoint_and_dispatch(empty(), checkpoint, device_map={"": "disk"}, **more)


# --- files ----------------------------------------------------------------------------------------


def test_every_dtype_is_mapped_correctly(tmp_path: Path) -> None:
    kinds = [one for one in mapped._DTYPES.values() if one not in (torch.bool, torch.complex64)]
    tensors = {str(one): torch.arange(6).reshape(2, 3).to(one) for one in kinds}
    tensors |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "many": torch.randn(5, 4096),
    }
    save_file(tensors, tmp_path / "all.safetensors")
    file = SafetensorsFile(tmp_path / "all.safetensors")
    assert set(file.names()) == set(tensors)
    for name, tensor in tensors.items():
        found = file.read(name)
        read_in(found)
        assert found.dtype == tensor.dtype
        assert torch.equal(found.float(), tensor.float()), name


@pytest.mark.parametrize("way", ["linux", "elsewhere"])
def test_pages_are_read_on_use_and_freed_with_the_tensor(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "elsewhere":
        monkeypatch.setattr(mapped, "_libc", None)
    elif sys.platform != "linux":
        pytest.skip("madvise of Linux")
    save_file({"a": torch.ones(1 << 20)}, tmp_path / "a.safetensors")
    tensor = SafetensorsFile(tmp_path / "a.safetensors").read("a")

    def resident() -> int:
        maps = Path("/proc/self/smaps").read_text().split("a.safetensors\n")[1:]
        return sum(int(one.split("Rss:")[1].split()[0]) for one in maps)

    assert resident() < 1024
    read_in(tensor)
    assert resident() >= 4096
    assert tensor.sum() == 1 << 20
    del tensor
    assert resident() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's page cache")
def test_fetch_reads_a_weight_into_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(3), "none": torch.ones(0)}, path)
    file = SafetensorsFile(path)
    assert file.is_cached("a") is not None
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not file.is_cached("a")
    for name in file.names():
        file.fetch(name)
    if not file.is_cached("a"):
        pytest.skip("this version of Linux cannot report what is cached")
    assert file.is_cached("b")
    assert file.is_cached("none")
    maps = Path("/proc/self/smaps").read_text().split("a.safetensors\n")[1:]
    assert sum(int(one.split("Rss:")[1].split()[0]) for one in maps) == 0
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="Input/output"):
        file.fetch("a")


@pytest.mark.parametrize("cached", [True, False, None])
def test_thread_reads_only_weights_that_are_not_cached(
    cached: bool | None, checkpoint: Path, model: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(file: SafetensorsFile, name: str) -> bool | None:
        asked.append(name)
        return cached

    monkeypatch.setattr(SafetensorsFile, "is_cached", note)
    loaded = on_disk(checkpoint)
    assert torch.equal(generate(loaded), generate(model))
    assert "head.weight" in asked
    assert (offload_hook(loaded.head).ahead._pool is None) is (cached is True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a resource limit of Linux")
def test_file_larger_than_the_address_space_limit_is_used(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({f"{i}.weight": torch.full((1024, 8192), float(i)) for i in range(8)}, path)
    script = f"""
import resource, torch
from torch import nn
from accelerate_core import init_empty_weights, load_checkpoint_and_dispatch
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(8192, 1024, bias=False) for _ in range(8)))
model = load_checkpoint_and_dispatch(model, {str(path)!r}, {{str(i): "disk" for i in range(8)}})
weights = model[0]._hf_hook.weights_map
weights["weight"]  # opens the file
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
with torch.no_grad():
    for i, layer in enumerate(model):
        assert layer(torch.ones(1, 8192))[0, 0] == i * 8192, i
assert weights.dataset.is_cached("0.weight") is None
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep a file open per mapping")
def test_model_may_have_more_weights_than_open_files_are_allowed(tmp_path: Path) -> None:
    import resource

    save_file(
        {f"{i}.weight": torch.full((1, 1), float(i)) for i in range(300)},
        tmp_path / "m.safetensors",
    )
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(300)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        load_checkpoint_and_dispatch(model, tmp_path / "m.safetensors", device_map={"": "cpu"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [one.weight.item() for one in model] == list(range(300))


def test_unaligned_tensor_is_read_instead_of_mapped(tmp_path: Path) -> None:
    # Files from other writers than safetensors may have a header of any length.
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (5 - len(header) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    file = SafetensorsFile(path)
    assert (8 + len(header)) % 4
    assert not file.can_map("a")
    assert torch.equal(file.read("a"), torch.zeros(2))


def test_replaced_file_is_an_error(checkpoint: Path) -> None:
    index = {"head.bias": {"safetensors_file": str(checkpoint), "dtype": "float32"}}
    weights = OffloadedWeightsLoader(index=index)
    before = weights["head.bias"].clone()
    other = checkpoint.with_name("other")
    save_file({"head.bias": before + 1}, other)
    os.replace(other, checkpoint)
    with pytest.raises(CheckpointError, match="has changed since 'head"):
        weights["head.bias"]
    assert torch.equal(OffloadedWeightsLoader(index=index)["head.bias"], before + 1)


def test_file_truncated_during_use_is_an_error(checkpoint: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("other systems kill the process")
    model = on_disk(checkpoint)
    expected = generate(model)
    whole = checkpoint.read_bytes()
    os.truncate(checkpoint, 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        generate(model)
    checkpoint.write_bytes(whole)
    assert torch.equal(generate(on_disk(checkpoint)), expected)


def test_disk_errors_name_the_tensor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("accelerate_big_model.loading.read_in", fails)
    with pytest.raises(
        CheckpointError, match=r"'[a-z0-9.]+' from .*model.safetensors.*Input/output"
    ):
        load_checkpoint_and_dispatch(empty(), checkpoint, device_map={"": "cpu"}, dtype="float16")
    model = on_disk(checkpoint)
    monkeypatch.setattr(prefetch, "read_in", fails)
    with pytest.raises(CheckpointError, match=r"weight 'encoder\.layers\.0\.weight'"):
        generate(model)


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_nothing_is_written_if_the_file_can_be_mapped(
    kind: str, model: Both, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "offload"
    if kind == "bin":
        checkpoint = tmp_path / "weights" / "pytorch_model.bin"
        checkpoint.parent.mkdir()
        torch.save(model.state_dict(), checkpoint)
    loaded = on_disk(checkpoint, offload_folder=folder)
    assert [path.name for path in folder.iterdir()] == ["index.json"]
    assert torch.equal(generate(loaded), generate(model))
    assert torch.equal(generate(on_disk(checkpoint)), generate(model))


def test_weights_of_another_dtype_are_written(
    model: Both, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "offload"
    loaded = on_disk(checkpoint, offload_folder=folder, dtype="float64")
    assert len(list(folder.glob("*.dat"))) == len(model.state_dict())
    assert loaded.head.weight.dtype == torch.float64


def test_hub_name_is_found_in_the_cache(
    model: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0" * 40
    place = tmp_path / "models--some--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    save_file(model.state_dict(), snapshot / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(empty(), "some/model", device_map={"": "disk"})
    assert torch.equal(generate(loaded), generate(model))
    with pytest.raises(
        CheckpointError, match="no file or folder 'some/other', and it could not be"
    ):
        load_checkpoint_and_dispatch(empty(), "some/other", device_map={"": "disk"})


# --- reading ahead --------------------------------------------------------------------------------


class Watch:
    """Records which layers were ready when they were needed."""

    def __init__(self, ahead: prefetch.ReadAhead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready: list[tuple[int, bool]] = []
        enter = prefetch.ReadAhead.enter

        def watched(one: prefetch.ReadAhead, at: int) -> Any:
            self.ready.append((at, at in one._begun))
            return enter(one, at)

        monkeypatch.setattr(prefetch.ReadAhead, "enter", watched)
        self.ahead = ahead

    def missed(self) -> list[int]:
        taken = [at for at, ready in self.ready if not ready]
        self.ready.clear()
        return taken


def test_order_of_layers_is_learnt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_disk(checkpoint)
    ahead = offload_hook(model.head).ahead
    watch = Watch(ahead, monkeypatch)
    generate(model)
    # The decoder does not run in the order of registration, which can't be predicted at first.
    assert len(watch.missed()) >= 4
    generate(model)
    generate(model)
    watch.missed()
    generate(model)
    # After the head, the loop continues or a new text begins. The prediction is what happened last.
    encoder, decoder = 4, 3
    assert watch.missed() == [encoder, decoder]
    with torch.no_grad():
        model.head(INPUT)  # out of order
    assert len(watch.missed()) == 1


def test_reading_ahead_is_limited_by_free_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_disk(checkpoint)
    ahead = offload_hook(model.head).ahead
    layer = ahead.layers[0].bytes
    most = 0
    monkeypatch.setattr(prefetch, "free_memory", lambda device: 2 * layer)
    for _ in range(2):
        generate(model)
    enter = prefetch.ReadAhead.enter

    def watched(one: prefetch.ReadAhead, at: int) -> Any:
        nonlocal most
        found = enter(one, at)
        most = max(most, sum(one.layers[at].bytes for at in one._begun))
        return found

    monkeypatch.setattr(prefetch.ReadAhead, "enter", watched)
    generate(model)
    assert most == layer


def test_models_on_disk_can_be_copied_and_pickled(model: Both, checkpoint: Path) -> None:
    loaded = on_disk(checkpoint)
    expected = generate(model)
    assert torch.equal(generate(loaded), expected)
    twin = copy.deepcopy(loaded)
    assert offload_hook(twin.head).ahead is not offload_hook(loaded.head).ahead
    again = pickle.loads(pickle.dumps(loaded))
    assert len(pickle.dumps(loaded)) < checkpoint.stat().st_size
    for one in (twin, again, loaded):
        assert torch.equal(generate(one), expected)


def test_forked_process_reads_its_own_weights(checkpoint: Path, model: Both) -> None:
    loaded = on_disk(checkpoint)
    expected = generate(loaded)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(generate(loaded), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_gradients_flow_through_layers_on_disk(model: Both, checkpoint: Path) -> None:
    loaded = on_disk(checkpoint)
    ours, theirs = (INPUT.clone().requires_grad_() for _ in range(2))
    loaded(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "place", [{"": "disk"}, {"encoder": "cpu", "decoder": "disk", "head": "disk"}]
)
def test_model_on_disk_can_be_compiled(
    place: dict[str, str], model: Both, checkpoint: Path
) -> None:
    """Graphs end where weights are loaded and unloaded. A block in memory is one graph."""
    torch.compiler.reset()
    graphs: list[list[Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    made = load_checkpoint_and_dispatch(empty(), checkpoint, device_map=place)
    for in_place in (False, True):
        if in_place:
            made.compile(backend=backend)
        compiled = made if in_place else torch.compile(made, backend=backend)
        for _ in range(2):
            x, theirs = INPUT.clone().requires_grad_(), INPUT.clone().requires_grad_()
            found, wanted = compiled(x), model(theirs)
            assert torch.equal(found, wanted)
            found.sum().backward()
            wanted.sum().backward()
            assert torch.equal(x.grad, theirs.grad)
            with torch.no_grad():
                assert torch.equal(compiled(INPUT), wanted)
    assert all(one.is_meta for one in made.decoder.parameters())
    linear = [sum("linear" in str(target) for target in graph) for graph in graphs]
    one = int(torch.__version__ >= "2.13")  # torch 2.8 and 2.11 don't compile layers on disk
    assert max(linear, default=0) == (one if place == {"": "disk"} else 3)
    torch.compiler.reset()


def test_model_on_disk_can_be_dispatched_again(model: Both, checkpoint: Path) -> None:
    loaded = dispatch_model(on_disk(checkpoint), {"": "cpu"})
    assert offload_hook(loaded.head) is None
    assert torch.equal(generate(loaded), generate(model))


class Wrapper(nn.Module):
    """Reads missing attributes from the model inside, as the wrappers of adapter libraries do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_hook_on_a_wrapper_is_separate_from_the_inner_hook(model: Both, checkpoint: Path) -> None:
    whole = Wrapper(on_disk(checkpoint))
    add_hook_to_module(whole, ModelHook(), append=True)
    assert torch.equal(whole(INPUT), model(INPUT))
    remove_hook_from_module(whole)
    assert torch.equal(whole(INPUT), model(INPUT))
    assert offload_hook(whole.inner.head) is not None


def test_offload_files_are_read_ahead(model: Both, tmp_path: Path) -> None:
    expected = generate(model)
    disk_offload(model, tmp_path / "folder", execution_device="cpu")
    assert offload_hook(model.head).ahead is not None
    assert torch.equal(generate(model), expected)


# --- free memory ----------------------------------------------------------------------------------


def test_free_memory_respects_control_group_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path("/sys/fs/cgroup/memory")
    old = root.is_dir()
    group = root / f"test-{os.getpid()}" if old else root.parent / f"test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if old else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"cannot create a control group: {error}")
    child = os.fork()
    if child == 0:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        free = device_map.free_memory(torch.device("cpu"))
        os._exit(0 if 1 << 28 < free <= 1 << 30 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for _ in range(50):  # the group can only be removed once the system has removed the process
        with suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.1)
    assert code == 0
    assert device_map.free_memory(torch.device("cpu")) > 1 << 30


def test_free_memory_is_known_without_control_group_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_map, "_left_in_cgroups", lambda: iter(()))
    assert device_map.free_memory(torch.device("cpu")) > 0


# --- files and weights that must not be mixed up --------------------------------------------------


def test_shards_may_be_symbolic_links(model: Both, tmp_path: Path) -> None:
    state = model.state_dict()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    names: dict[str, str] = {}
    for at, (name, tensor) in enumerate(state.items()):
        file = f"model-{at:05d}.safetensors"
        save_file({name: tensor}, tmp_path / "blobs" / f"{at}")
        (tmp_path / "snapshot" / file).symlink_to(f"../blobs/{at}")
        names[name] = file
    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert torch.equal(generate(on_disk(tmp_path / "snapshot")), generate(model))


def test_torch_file_can_be_overwritten_by_the_loaded_model(model: Both, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({**model.state_dict(), "epoch": 3, "nothing": None}, path)
    loaded = load_checkpoint_and_dispatch(empty(), path, device_map={"": "cpu"})
    torch.save(loaded.state_dict(), path)
    again = load_checkpoint_and_dispatch(empty(), path, device_map={"": "cpu"})
    assert torch.equal(generate(again), generate(model))


def test_weights_restored_from_disk_keep_later_changes(checkpoint: Path) -> None:
    loaded = on_disk(checkpoint)
    generate(loaded)
    block = loaded.encoder.layers[1]
    remove_hook_from_module(block, recurse=True)
    with torch.no_grad():
        block.weight.zero_()
    for _ in range(3):
        generate(loaded)
        assert not block.weight.any()
    state = get_state_dict_offloaded_model(loaded)
    before = generate(loaded)
    state["head.weight"].zero_()
    assert torch.equal(generate(loaded), before)
    assert not state["head.weight"].any()


def test_changes_to_an_offloaded_weight_in_forward_are_lost(checkpoint: Path) -> None:
    loaded = on_disk(checkpoint)
    expected = generate(loaded)

    def double(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)
            module.bias.mul_(2)

    handle = loaded.head.register_forward_pre_hook(double)
    first = generate(loaded)
    assert not torch.equal(first, expected)
    assert torch.equal(generate(loaded), first)
    handle.remove()
    assert torch.equal(generate(loaded), expected)


def test_trained_weights_are_not_replaced_by_those_on_disk(
    checkpoint: Path, tmp_path: Path
) -> None:
    loaded = dispatch_model(on_disk(checkpoint), {"": "cpu"})
    with torch.no_grad():
        loaded.head.bias.add_(1)
    with pytest.raises(ConfigurationError, match=r"has not been written yet\. Pass a folder"):
        dispatch_model(loaded, {"": "disk"})
    expected = generate(loaded)
    dispatch_model(loaded, {"": "disk"}, offload_dir=tmp_path / "trained")
    assert loaded.head.bias.is_meta
    assert torch.equal(generate(loaded), expected)


def test_offload_files_are_not_used_without_their_folder(checkpoint: Path, tmp_path: Path) -> None:
    model, off = empty(), tmp_path / "off"
    load_checkpoint_in_model(model, checkpoint, {"": "disk"}, off, dtype="float64")
    with pytest.raises(ConfigurationError, match="Pass a folder as offload_dir"):
        dispatch_model(model, {"": "disk"})
    dispatch_model(model, {"": "disk"}, offload_dir=off)
    assert model(INPUT.double()).dtype == torch.float64


def test_model_on_disk_can_be_dispatched_with_another_map(model: Both, checkpoint: Path) -> None:
    loaded = on_disk(checkpoint)
    parts = {"decoder": "disk", "encoder": "cpu", "head": "disk"}
    dispatch_model(loaded, parts)
    assert loaded.head.weight.is_meta
    assert not loaded.encoder.layers[0].weight.is_meta
    assert torch.equal(generate(loaded), generate(model))
    other = {name: value + 1 for name, value in model.state_dict().items()}
    second = checkpoint.with_name("second.safetensors")
    save_file(other, second)
    model.load_state_dict(other)
    load_checkpoint_and_dispatch(loaded, second, device_map={"": "cpu"})
    assert torch.equal(generate(loaded), generate(model))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_tied_model_on_disk_is_prepared_saved_and_tied_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Tied()
    save_file({"embed.weight": whole.embed.weight.detach()}, tmp_path / "model.safetensors")
    with init_empty_weights():
        loaded = Tied()
    load_checkpoint_and_dispatch(loaded, tmp_path, device_map={"": "disk"})
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(loaded)
    tokens = torch.arange(8)
    assert torch.equal(prepared(tokens), whole(tokens))
    accelerator.save_model(prepared, tmp_path / "saved")
    with init_empty_weights():
        again = Tied()
    load_checkpoint_and_dispatch(again, tmp_path / "saved", device_map={"": "cpu"})
    assert torch.equal(again(tokens), whole(tokens))
    remove_hook_from_module(loaded, recurse=True)
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(tokens), whole(tokens))


def test_other_models_and_working_directories_do_not_matter(
    model: Both, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    half = on_disk(checkpoint, offload_folder="off", dtype="float64")
    expected = half(INPUT.double())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(half(INPUT.double()), expected)
    # A second model in the same folder is an error. Its weights are never mixed in.
    other = checkpoint.with_name("other.safetensors")
    save_file({name: value + 1 for name, value in model.state_dict().items()}, other)
    on_disk(other, offload_folder=tmp_path / "off", dtype="float64")
    with pytest.raises(CheckpointError, match="has changed since"):
        half(INPUT.double())
    # Weights that this checkpoint lacks are not taken from an older one.
    save_file({"head.bias": torch.zeros(WIDTH)}, tmp_path / "part.safetensors")
    with pytest.raises((CheckpointError, ConfigurationError), match=r"meta|lacks|written yet"):
        on_disk(tmp_path / "part.safetensors", offload_folder=tmp_path / "off", strict=True)


@pytest.mark.parametrize(
    ("content", "text"),
    [([1, 2], "contains a list, not a state dict"), (b"", "Cannot read the weights")],
)
def test_file_without_weights_is_an_error(content: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content) if content == b"" else torch.save(content, path)
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint_and_dispatch(empty(), path, device_map={"": "cpu"})


def test_invalid_devices_and_folders_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"on 'dsik'.*Did you mean 'disk'"):
        load_checkpoint_and_dispatch(empty(), checkpoint, device_map={"": "dsik"})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used as a folder"):
        on_disk(checkpoint, offload_folder=tmp_path / "file")


def test_model_works_in_a_thread_that_outlives_the_main_one(checkpoint: Path) -> None:
    script = (
        "import sys, threading, time, torch\n"
        "from test_on_disk import INPUT, generate, on_disk\n"
        "from pathlib import Path\n"
        "model = on_disk(Path(sys.argv[1]))\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    print(generate(model).shape)\n"
        "threading.Thread(target=late).start()\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(checkpoint)],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "torch.Size([2, 64])" in done.stdout, done.stderr
