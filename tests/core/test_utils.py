"""The public utilities: every name resolves and works as documented."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

import accelerate_core
import accelerate_core.utils as utils
from accelerate_core.errors import ConfigurationError, MissingPluginError
from accelerate_core.plugins.discovery import exported_names

# --- the namespace --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*accelerate_core.__all__, *exported_names()}))
def test_every_listed_name_resolves(name: str) -> None:
    assert getattr(utils, name) is not None
    assert name in dir(utils)


def test_importing_utils_does_not_import_torch() -> None:
    code = (
        "import sys, accelerate_core.utils as u; dir(u); u.str_to_bool('yes'); u.is_rich_available();"
        " assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'set_seed'"):
        _ = utils.set_sed
    with pytest.raises(ImportError):
        from accelerate_core.utils import nonsense  # noqa: F401


def test_name_from_a_missing_plugin_gives_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_core.plugins import catalog

    monkeypatch.setitem(catalog.EXPORTS, "SomePlugin", "some")
    with pytest.raises(MissingPluginError, match=r'pip install "accelerate-core\[some\]"'):
        _ = utils.SomePlugin


@pytest.mark.parametrize("name", [n for n in dir(utils) if re.fullmatch(r"is_\w+_available", n)])
def test_availability_checks_return_a_bool(name: str) -> None:
    assert getattr(utils, name)() in (True, False)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("is_pytest_available", True),
        ("is_rich_available", True),
        ("is_weights_only_available", True),
        ("is_bf16_available", True),
        ("is_bnb_available", False),
        ("is_cuda_available", torch.cuda.is_available()),
        ("is_npu_available", False),
    ],
)
def test_availability_checks_match_the_installed_libraries(name: str, answer: bool) -> None:
    assert getattr(utils, name)() is answer


def test_directory_with_a_librarys_name_is_not_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bitsandbytes").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert utils.is_bnb_available() is False


# --- tensors and sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("5MB", 5_000_000), ("5MiB", 5 * 2**20), ("1.5GiB", 3 * 2**29), ("2 kb", 250)),
        *(("7", 7), (9, 9), ("1TB", 10**12), ("8B", 8)),
    ],
)
def test_memory_sizes_are_parsed(text: str | int, count: int) -> None:
    assert utils.convert_file_size_to_int(text) == count


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.bool, 1 / 8),
        ("int64", 8),
        (utils.CustomDtype.INT4, 0.5),
        (utils.CustomDtype.FP8, 1),
    ],
)
def test_bytes_per_element_of_dtypes(dtype: Any, size: float) -> None:
    assert utils.dtype_byte_size(dtype) == size


def test_sizes_of_modules_are_computed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    sizes = utils.compute_module_sizes(model)
    assert sizes[""] == sum(t.nbytes for t in model.state_dict().values())
    assert sizes["0.weight"] == 64
    assert utils.compute_module_sizes(model, dtype="float16")["0"] == 40
    assert utils.compute_module_total_buffer_size(model) == 8 * 4 * 2 + 8
    total, (largest, names) = utils.calculate_maximum_sizes(model)
    assert (total, largest, names) == (sizes[""], 160, ["1.0"])


def test_memory_is_balanced_between_accelerators() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    given = {1: "10KB", 0: "10KB", "cpu": "1GB"}
    assert utils.get_balanced_memory(model, given) == {0: 1300, 1: 10_000, "cpu": 10**9}
    spared = utils.get_balanced_memory(model, given, low_zero=True)
    assert spared == {0: 0, 1: 10_000, "cpu": 10**9}
    assert utils.get_max_memory()["cpu"] > 0
    assert list(utils.get_max_memory({"disk": 1, "cpu": 1, 1: 1, "cuda:0": 1})) == [
        *(0, 1, "cpu", "disk")
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("wieght", {"device": "cpu"}, "Did you mean 'weight'"),
        ("weight", {"device": "cpu", "value": torch.ones(3)}, r"shape \(3,\)"),
        ("weight", {"device": "cpu"}, "meta device"),
    ],
)
def test_error_for_an_invalid_tensor_placement_explains_it(
    name: str, arguments: dict[str, Any], text: str
) -> None:
    layer = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigurationError, match=text):
        utils.set_module_tensor_to_device(layer, name, **arguments)


def test_tensor_is_placed_on_a_device() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, device="meta"))
    model[0].weight.requires_grad_(False)
    utils.set_module_tensor_to_device(model, "0.weight", "cpu", torch.ones(2, dtype=torch.float64))
    assert model[0].weight.dtype == torch.float32
    assert not model[0].weight.requires_grad
    utils.set_module_tensor_to_device(model, "0.weight", "cpu", dtype=torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    utils.set_module_tensor_to_device(model, "0.running_mean", "cpu", torch.full((2,), 3.0))
    assert model.state_dict()["0.running_mean"].tolist() == [3, 3]


def test_tensors_and_tied_parameters_of_a_module_are_found() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2, bias=False)
    model.b = nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    names = [name for name, _ in utils.named_module_tensors(model, recurse=True)]
    assert names == ["a.weight", "hidden"]
    kept = utils.named_module_tensors(model, recurse=True, remove_non_persistent=True)
    assert [name for name, _ in kept] == ["a.weight"]
    tied = utils.find_tied_parameters(model)
    assert tied == [["a.weight", "b.weight"]]
    with pytest.warns(UserWarning, match="different devices"):
        assert not utils.check_tied_parameters_on_same_device(tied, {"a": 0, "b": 1})
    model.a.weight = nn.Parameter(torch.zeros(2, 2, device="meta"))
    utils.retie_parameters(model, tied)
    assert model.a.weight is model.b.weight
    assert model.a.weight.device.type == "cpu"


def test_modules_are_listed_from_the_bottom_up() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    names = [name for name, _ in utils.get_module_children_bottom_up(model, return_fqns=True)]
    assert names == ["0.0", "1", "0", ""]
    assert utils.get_module_children_bottom_up(model)[-1] is model


# --- state dicts ----------------------------------------------------------------------------------


def test_aliases_are_removed_for_safetensors(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    state = {
        "whole": base.view(2, 3),
        "same": base.view(2, 3),
        "transposed": base.view(2, 3).t(),
        "part": base[2:4],
        "own": torch.ones(2, 2).t(),
        "none": torch.ones(0),
        "text": "left out",
    }
    clean = utils.clean_state_dict_for_safetensors(state)
    assert list(clean) == ["whole", "transposed", "part", "own", "none"]
    save_file(clean, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], state[name]) for name in clean)
    assert clean["whole"].data_ptr() == base.data_ptr(), "the tensor was copied unnecessarily"


def test_state_dicts_are_split_into_shards() -> None:
    state = {name: torch.ones(size) for name, size in [("a", 10), ("b", 10), ("c", 100), ("d", 1)]}
    files, index = utils.shard_state_dict(state, "80B")
    assert [list(part) for part in files.values()] == [["a", "b"], ["c"], ["d"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    assert index["metadata"]["total_size"] == 4 * 121
    assert index["weight_map"]["c"] == "model-00002-of-00003.safetensors"
    assert utils.shard_state_dict(state) == ({"model.safetensors": state}, None)


@pytest.mark.parametrize("safe", [True, False])
def test_single_object_is_saved_and_loaded(safe: bool, tmp_path: Path) -> None:
    shared = torch.ones(2)
    state = {"a": shared, "b": shared, "c": torch.zeros(1)}
    path = tmp_path / ("x.safetensors" if safe else "x.bin")
    utils.save(state, path, safe_serialization=safe)
    loaded = utils.load_state_dict(path) if safe else utils.load(path)
    assert set(loaded) == ({"a", "c"} if safe else {"a", "b", "c"})
    placed = utils.load_state_dict(path, {"a": "meta", "b": "disk", "c": "cpu"})
    assert (placed["a"].device.type, placed["c"].device.type) == ("meta", "cpu")


def test_load_runs_no_code(tmp_path: Path) -> None:
    torch.save({"f": print}, tmp_path / "x.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        utils.load(tmp_path / "x.bin")
    assert utils.load(tmp_path / "x.bin", weights_only=False) == {"f": print}


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "truth"), [("Yes", True), ("1", True), ("off", False)])
def test_booleans_are_parsed(text: str, truth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert utils.str_to_bool(text) == int(truth)
    assert utils.str_to_bool(text, to_bool=True) is truth
    monkeypatch.setenv("SOME_FLAG", text)
    assert utils.parse_flag_from_env("SOME_FLAG") is truth


def test_environment_variables_are_parsed_and_invalid_ones_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WRONG", "perhaps")
    with pytest.raises(ValueError, match=r"WRONG.*'perhaps' is not a boolean"):
        utils.parse_flag_from_env("WRONG")
    with pytest.raises(ValueError, match="WRONG='perhaps' must be a whole number"):
        utils.get_int_from_env(["WRONG"], 1)
    monkeypatch.setenv("SECOND", "4")
    monkeypatch.setenv("FIRST", "-1")
    assert utils.get_int_from_env(["ABSENT", "FIRST", "SECOND"], 1) == 4
    assert utils.get_int_from_env(["ABSENT"], 1) == 1
    assert utils.parse_choice_from_env("SECOND") == "4"
    assert utils.parse_choice_from_env("ABSENT") == "no"
    assert utils.parse_flag_from_env("ABSENT", True) is True


def test_ranks_are_read_from_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1}.items():
        monkeypatch.setenv(name, str(value))
    found = utils.get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 1)


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "old")
    before = dict(os.environ)
    with utils.patch_environment(kept="new", added=1):
        assert (os.environ["KEPT"], os.environ["ADDED"]) == ("new", "1")
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError), utils.patch_environment(kept="new"):
        raise ZeroDivisionError
    assert dict(os.environ) == before
    with utils.clear_environment():
        assert not os.environ
        os.environ["KEPT"] = "lost"
    assert dict(os.environ) == before


def test_accelerate_variables_are_purged_after_a_function_or_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "old")

    @utils.purge_accelerate_environment
    def function() -> None:
        os.environ["ACCELERATE_KEPT"] = "new"
        os.environ["ACCELERATE_ADDED"] = "new"
        monkeypatch.setenv("OTHER", "stays")

    @utils.purge_accelerate_environment
    class Tests:
        def test_it(self) -> None:
            function.__wrapped__()

    for call in (function, Tests().test_it):
        call()
        assert os.environ["ACCELERATE_KEPT"] == "old"
        assert "ACCELERATE_ADDED" not in os.environ
        assert os.environ["OTHER"] == "stays"


def test_variables_are_formatted_as_lines(caplog: pytest.LogCaptureFixture) -> None:
    lines = utils.convert_dict_to_env_variables({"A": "1", "B": "x;y", "C": "a\nb"})
    assert lines == ["A=1\n"]
    assert "'B'" in caplog.text


def test_machine_is_described() -> None:
    names, count = utils.get_gpu_info()
    assert len(names) == count == (torch.accelerator.device_count() or 0)
    kind, many = utils.get_current_device_type()
    assert torch.device(kind)
    assert many.startswith("MULTI_")
    assert utils.check_cuda_p2p_ib_support() in (True, False)
    assert utils.check_cuda_fp8_capability() in (True, False)
    assert utils.are_libraries_initialized("torch", "not_a_library") == ["torch"]


# --- other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 bytes"), (1536, "1.5 KB"), (3 * 2**40, "3.0 TB")]
)
def test_byte_counts_are_formatted(size: int, text: str) -> None:
    assert utils.convert_bytes(size) == text


def test_helpers_for_names_dicts_and_attributes() -> None:
    assert utils.get_pretty_name(nn.Linear) == "Linear"
    assert utils.get_pretty_name(nn.Linear(1, 1)) == "Linear"
    merged = utils.merge_dicts({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "c": 4})
    assert merged == {"a": {"x": 1, "y": 3}, "b": 2, "c": 4}
    assert utils.recursive_getattr(nn.Sequential(nn.Linear(1, 2)), "0.out_features") == 2
    utils.check_os_kernel()


def test_used_and_free_ports_are_found() -> None:
    import socket

    port = utils.get_free_port()
    assert not utils.is_port_in_use(port)
    with socket.create_server(("localhost", port)):
        assert utils.is_port_in_use(port)


def test_versions_are_compared() -> None:
    assert utils.is_torch_version(">=", "2.8")
    assert utils.compare_versions("torch", ">", "1.0")
    assert not utils.compare_versions(Version("1.2"), "==", "1.3")
    with pytest.raises(ConfigurationError, match="must be one of"):
        utils.compare_versions("torch", "~=", "1")


def test_set_seed_seeds_every_generator() -> None:
    import numpy as np

    def draw() -> list[float]:
        utils.set_seed(7)
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    assert draw() == draw()
    try:
        utils.set_seed(1, device_specific=True, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_collective_functions_on_one_process() -> None:
    tree = {"x": torch.arange(3), "y": [torch.ones(1, 2)]}
    for result in (
        utils.gather(tree),
        utils.broadcast(tree),
        utils.pad_across_processes(tree, dim=1),
        utils.reduce(tree, "sum"),
    ):
        torch.testing.assert_close(result, tree)
    assert utils.reduce(torch.tensor([2.0]), scale=0.5).tolist() == [1.0]
    assert utils.gather_object([1, "a"]) == [1, "a"]
    assert utils.broadcast_object_list([1, "a"]) == [1, "a"]
    utils.wait_for_everyone()
    utils.synchronize_rng_state("torch")
    utils.synchronize_rng_states(["torch", "generator"], torch.Generator())


@pytest.mark.parametrize(("rank", "disabled"), [("0", False), ("1", True)])
def test_progress_bar_is_drawn_by_one_process(
    rank: str, disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate_core.distributed import process as runtime

    monkeypatch.setattr(runtime, "_current", None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    bar = utils.tqdm([1], desc="x")
    assert bar.disable is disabled
    assert list(bar) == [1]
    assert utils.tqdm([1], main_process_only=False).disable is False
    with pytest.raises(TypeError, match="keyword"):
        utils.tqdm(True, [1])


def test_importing_the_progress_bar_without_tqdm_gives_the_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.delitem(sys.modules, "accelerate_drop_in.progress", raising=False)
    with pytest.raises(MissingPluginError, match=r'^Progress bars .* pip install "tqdm>=4.66"$'):
        from accelerate_core.utils import tqdm  # noqa: F401


def test_basic_config_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "config.yaml"
    assert utils.write_basic_config("bf16", path) == path
    written = yaml.safe_load(path.read_text())
    assert written["mixed_precision"] == "bf16"
    assert written["use_cpu"] is not torch.accelerator.is_available()
    assert utils.write_basic_config("no", path) is False
    assert yaml.safe_load(path.read_text()) == written
    with pytest.raises(ValueError, match="bf61"):
        utils.write_basic_config("bf61", tmp_path / "other.yaml")


def test_models_are_extracted_from_torch_wrappers() -> None:
    inner = nn.Linear(2, 2)
    wrapped = nn.DataParallel(inner)
    assert utils.extract_model_from_parallel(wrapped) is inner
    assert utils.extract_model_from_parallel(inner) is inner
    outer = nn.Sequential(nn.DataParallel(inner))
    assert utils.extract_model_from_parallel(outer, recursive=True)[0] is inner


def test_wrapper_converts_outputs_to_float32() -> None:
    half = utils.convert_outputs_to_fp32(lambda x: {"y": x.half()})
    assert half(torch.ones(1))["y"].dtype == torch.float32


def test_precision_helpers_work_without_an_accelerator() -> None:
    with utils.get_mixed_precision_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    assert utils.get_grad_scaler(enabled=False).is_enabled() is False


def test_third_party_models_are_recognised_without_their_libraries() -> None:
    assert not utils.is_peft_model(nn.Linear(1, 1))
    assert not utils.has_4bit_bnb_layers(nn.Linear(1, 1))
    assert not utils.model_has_dtensor(nn.Linear(1, 1))
    assert not utils.check_tied_parameters_in_config(nn.Linear(1, 1))
