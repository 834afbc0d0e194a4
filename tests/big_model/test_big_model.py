"""Models that are created empty, loaded, dispatched or offloaded have the plain model's output."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import run_workers
from torch import nn

from accelerate_big_model.device_map import get_max_memory
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.utils import (
    AlignDevicesHook,
    ModelHook,
    OffloadedWeightsLoader,
    PrefixedDataset,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_layerwise_casting_hooks,
    clean_device_map,
    clean_state_dict_for_safetensors,
    compute_module_sizes,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    extract_submodules_state_dict,
    find_tied_parameters,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    remove_hook_from_module,
    remove_hook_from_submodules,
    save_offload_index,
    shard_state_dict,
)

WORKER = Path(__file__).with_name("rank_0_worker.py")
VOCABULARY, WIDTH = 50, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x) * (1 if scale is None else scale)


class TinyGPT(nn.Module):
    """Has tied embeddings, a lone parameter, both kinds of buffers, attention and an LSTM."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 8, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, scale=self.scale)
        x, _ = self.memory(x)
        return {"logits": self.head(self.norm(x))}


TOKENS = torch.arange(16).reshape(2, 8)
SPLIT: dict[str, Any] = {
    "embed": "cpu",
    "position": "cpu",
    "scale": "cpu",
    "blocks.0": "disk",
    "blocks.1": "cpu",
    "blocks.2": "disk",
    "memory": "disk",
    "norm": "disk",
    "head": "cpu",
}
ALL_ON_DISK = {"": "disk"}
TIED_ON_DISK = {**dict.fromkeys(SPLIT, "cpu"), "embed": "disk", "head": "disk"}
TIED_APART = {**dict.fromkeys(SPLIT, "cpu"), "head": "disk"}
MAPS = {"split": SPLIT, "disk": ALL_ON_DISK, "tied": TIED_ON_DISK, "apart": TIED_APART}


@pytest.fixture
def model() -> TinyGPT:
    torch.manual_seed(0)
    made = TinyGPT()
    with torch.no_grad():
        made.norm.running_mean.uniform_()
    return made.eval()


@pytest.fixture
def expected(model: TinyGPT) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)["logits"]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)["logits"]


def empty(**kwargs: Any) -> TinyGPT:
    with init_empty_weights(**kwargs):
        return TinyGPT().eval()


def on_meta(module: nn.Module) -> bool:
    return all(p.device.type == "meta" for p in module.parameters())


# --- building -------------------------------------------------------------------------------------


def test_empty_model_has_shapes_and_ties_and_real_buffers() -> None:
    model = empty()
    assert on_meta(model)
    assert model.embed.weight is model.head.weight
    assert model.scale.item() == 2.0
    assert TinyGPT().position.device.type == "cpu", "the block must have no lasting effect"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_buffers_are_empty_if_requested(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "yes")
    model = empty(include_buffers=True if how == "argument" else None)
    assert model.norm.running_mean.device.type == "meta"


def test_empty_parameters_keep_their_class_and_stay_frozen() -> None:
    class Marked(nn.Parameter):
        pass

    with init_on_device("meta"):
        module = nn.Module()
        module.weight = Marked(torch.ones(2), requires_grad=False)
    assert type(module.weight) is Marked
    assert not module.weight.requires_grad


def test_error_during_creation_leaves_no_hook_behind() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert nn.Linear(1, 1).weight.device.type == "cpu"


# --- dispatching and offloading -------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.filterwarnings("ignore:The tied parameters")
def test_dispatched_model_has_the_same_output(
    name: str, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    dispatched = dispatch_model(model, MAPS[name], offload_dir=tmp_path)
    assert dispatched is model
    assert model.hf_device_map == MAPS[name]
    for _ in range(2):
        torch.testing.assert_close(logits(model), expected)
    for part, place in MAPS[name].items():
        module = model.get_submodule(part) if part not in ("position", "scale") else None
        if place == "disk" and module is not None:
            assert on_meta(module), f"{part} must not be kept in memory"


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.filterwarnings("ignore:The tied parameters")
def test_removing_the_hooks_restores_the_weights(
    name: str, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    dispatch_model(model, MAPS[name], offload_dir=tmp_path)
    remove_hook_from_module(model, recurse=True)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(logits(model), expected)


def test_offloaded_model_has_the_same_output(
    model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    for offloaded in (
        cpu_offload(copy.deepcopy(model), "cpu"),
        cpu_offload(copy.deepcopy(model), offload_buffers=True),
        disk_offload(copy.deepcopy(model), tmp_path / "a", "cpu"),
        disk_offload(copy.deepcopy(model), tmp_path / "b", "cpu", offload_buffers=True),
        disk_offload(copy.deepcopy(model), tmp_path / "c", preload_module_classes=["Block"]),
    ):
        assert on_meta(offloaded)
        torch.testing.assert_close(logits(offloaded), expected)
        assert on_meta(offloaded), "weights must be unloaded after the call"
        torch.testing.assert_close(
            get_state_dict_offloaded_model(offloaded), dict(model.state_dict())
        )


def test_deep_copy_of_an_offloaded_model_is_independent(
    model: TinyGPT, expected: torch.Tensor
) -> None:
    first = cpu_offload(model, "cpu")
    second = copy.deepcopy(first)
    remove_hook_from_module(first, recurse=True)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    torch.testing.assert_close(logits(second), expected)


def test_weights_are_unloaded_after_a_failing_call(model: TinyGPT) -> None:
    cpu_offload(model, "cpu")
    with pytest.raises(IndexError):
        model(torch.full((1, 8), VOCABULARY))
    assert on_meta(model)


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_single_device_needs_no_hooks(device: Any, model: TinyGPT) -> None:
    dispatch_model(model, {"": device})
    assert not hasattr(model, "_hf_hook")
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}


def test_hooks_can_be_forced(model: TinyGPT, expected: torch.Tensor) -> None:
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    torch.testing.assert_close(logits(model), expected)


def test_inputs_and_output_are_moved_between_devices() -> None:
    # The meta device replaces a second device. It has shapes but no data.
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    dispatch_model(model, {"0": "meta", "1": "meta"}, force_hooks=True)
    assert model[0](torch.ones(2, 4)).device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        model(torch.ones(2, 4))  # torch refuses to move a meta tensor to the CPU


@pytest.mark.parametrize(
    ("device_map", "text"),
    [
        ({"embed": "cpu"}, "has no device for position"),
        ({"": "disk"}, "Pass a folder"),
        ({"": 7}, "torch finds none"),
    ],
)
def test_invalid_device_map_is_refused_with_an_explanation(
    device_map: dict[str, Any], text: str, model: TinyGPT
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        dispatch_model(model, device_map)


def test_unknown_name_in_a_device_map_is_a_warning(model: TinyGPT) -> None:
    with pytest.warns(UserWarning, match="'heads'.* Did you mean 'head'"):
        dispatch_model(model, {"": "cpu", "heads": "cpu"})


def test_dispatching_a_model_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'position' is on the meta device"):
        dispatch_model(empty(), {"": "cpu"})
    with pytest.raises(ConfigurationError, match="Load a checkpoint first"):
        disk_offload(empty(), tmp_path)


def test_calling_one_model_moves_the_previous_one_back() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "meta")
    second, last = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    assert second(torch.ones(1, 2)).shape == (1, 2)
    assert first.weight.device.type == "cpu"
    last.offload()
    last.remove()
    assert not hasattr(second, "_hf_hook")


def test_offloaded_parts_run_on_the_main_device(model: TinyGPT, tmp_path: Path) -> None:
    # The meta device replaces an accelerator. It has shapes but no data.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dispatch_model(model, SPLIT, main_device="meta", offload_dir=tmp_path, offload_buffers=True)
    for _ in range(2):
        output = model(TOKENS.to("meta"))["logits"]
        assert (output.device.type, output.shape) == ("meta", (2, 8, VOCABULARY))
    remove_hook_from_module(model, recurse=True)
    found = dict(model.state_dict())
    # Tensors that the map names directly stay on the main device.
    del found["position"], state["position"]
    torch.testing.assert_close(found, state)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", ["auto", "small", *MAPS])
@pytest.mark.filterwarnings("ignore:The tied parameters")
def test_parts_that_are_not_on_the_accelerator_are_offloaded(
    name: str, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "safetensors")
    made: Any = "auto"
    limits: Any = {0: 25_000, "cpu": 20_000} if name == "small" else None
    if name in MAPS:
        made = {**MAPS[name], **({} if name == "disk" else {"norm": 0})}
    loaded = load_checkpoint_and_dispatch(
        empty(), checkpoint, made, limits, ["Block"], offload_folder=tmp_path / "offload"
    )
    for _ in range(2):
        found = logits(loaded)
        assert found.device.type == "cpu", "the output must be on the device of the input"
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    state = {k: v.cpu() for k, v in get_state_dict_offloaded_model(loaded).items()}
    torch.testing.assert_close(state, dict(model.state_dict()))
    if name == "small":
        assert set(loaded.hf_device_map.values()) >= {0, "cpu"}
    for part, place in loaded.hf_device_map.items():
        owner = loaded.get_submodule(part) if part not in ("position", "scale") else nn.Module()
        for parameter in owner.parameters():
            # With an accelerator in the map, "cpu" and "disk" are offloaded.
            alone = set(loaded.hf_device_map.values()) <= {"cpu", "disk"}
            kept = "meta" if place == "disk" or (place == "cpu" and not alone) else None
            assert kept is None or parameter.device.type == kept


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_whole_models_alternate_on_the_accelerator() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2))
    second, last = cpu_offload_with_hook(nn.Linear(2, 2), prev_module_hook=hook)
    for _ in range(2):
        second(first(torch.ones(1, 2)))
        assert first.weight.device.type == "cpu"
        assert second.weight.device.type != "cpu"
    last.offload()
    assert second.weight.device.type == "cpu"


# --- hooks ----------------------------------------------------------------------------------------


class Adds(ModelHook):
    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"init {self.number}")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.number, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"detach {self.number}")
        return module


def test_hooks_change_arguments_and_output_and_are_replaced_or_combined() -> None:
    log: list[str] = []
    module = nn.Identity()
    add_hook_to_module(module, Adds(1, log))
    assert module(torch.tensor(1.0)) == 4
    add_hook_to_module(module, Adds(2, log))
    assert module(torch.tensor(1.0)) == 6
    add_hook_to_module(module, Adds(3, log), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(torch.tensor(1.0)) == 24
    remove_hook_from_module(module)
    assert module(torch.tensor(1.0)) == 1
    assert log == ["init 1", "detach 1", "init 2", "init 3", "detach 2", "detach 3"]
    assert type(module) is nn.Identity
    assert "forward" not in vars(module)


def test_no_grad_hook_restores_the_gradient_mode() -> None:
    class NoGrad(ModelHook):
        no_grad = True

    module = add_hook_to_module(nn.Linear(2, 2), NoGrad())
    assert not module(torch.ones(1, 2)).requires_grad
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert torch.is_grad_enabled()


class Interrupts(nn.Linear):
    """Simulates Ctrl-C, after which torch calls no hooks because it is not an `Exception`."""

    interrupted = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        return super().forward(x)


def test_interrupted_model_can_run_again() -> None:
    inner = Interrupts(2, 2)
    model = nn.Sequential(inner, nn.Linear(2, 2))
    expected = model[1](nn.functional.linear(torch.ones(1, 2), inner.weight, inner.bias))
    attach_align_device_hook(model, "cpu", offload=True)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2))
    inner.interrupted = False
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert on_meta(model)


def test_all_hooks_run_even_if_one_fails() -> None:
    class Fails(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            raise ArithmeticError("the first")

    module = nn.Linear(2, 2)
    add_hook_to_module(module, Fails())
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True), append=True)
    add_hook_to_module(module, Fails(), append=True)
    with pytest.raises(ArithmeticError, match="the first"):
        module(torch.ones(1, 2))
    assert module.weight.is_meta


def test_deleted_model_is_freed_immediately(tmp_path: Path) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path)
    model(torch.ones(1, 2))
    layer = weakref.ref(model[1])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_hooks_of_submodules_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    attach_align_device_hook(model, "cpu", offload=True)
    assert all(has_offloaded_params(layer) for layer in model)
    assert "offload=True" in repr(model[0]._hf_hook)
    remove_hook_from_submodules(model)
    assert not any(has_offloaded_params(layer) for layer in model)
    assert model(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("offloaded", [False, True])
def test_align_module_device_moves_weights_inside_the_block(offloaded: bool) -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    if offloaded:
        add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    home = layer.weight.device.type
    with align_module_device(layer, "cpu"):
        assert torch.equal(layer.weight, weight)
    assert layer.weight.device.type == home
    with align_module_device(layer, "meta"):
        assert layer.weight.device.type == "meta"
    assert layer.weight.device.type == home


def test_layerwise_casting_stores_weights_in_a_smaller_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern="^3$")
    for _ in range(2):
        assert model(torch.ones(1, 4)).dtype == torch.float32
        dtypes = [layer.weight.dtype for layer in model]
        assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert model[0].weight.dtype == torch.bfloat16


# --- planning -------------------------------------------------------------------------------------


def plan(model: nn.Module, **memory: Any) -> dict[str, Any]:
    limits = {int(k[1:]) if k.startswith("g") else k: v for k, v in memory.items()}
    return infer_auto_device_map(model, limits, no_split_module_classes="Block")


def check_plan(model: nn.Module, device_map: dict[str, Any], limits: dict[Any, int]) -> None:
    """Check a device map against the sizes of the tensors."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    held: dict[Any, dict[int, int]] = {}
    for name, tensor in tensors.items():
        prefix = name
        while prefix not in device_map:
            prefix = prefix.rpartition(".")[0]
        held.setdefault(device_map[prefix], {})[id(tensor)] = tensor.nbytes
    for device, limit in limits.items():
        assert sum(held.get(device, {}).values()) <= limit, device
    for index in range(3):
        blocks = {d for n, d in device_map.items() if n.startswith(f"blocks.{index}.")}
        assert len(blocks) <= 1, "a block must not be split"


@pytest.mark.parametrize(
    "limits",
    [
        {0: 10**9, "cpu": 10**9},
        {0: 20_000, 1: 20_000, "cpu": 10**9},
        {0: 16_000, 1: 12_000, "cpu": 20_000},
        {0: 14_000, "cpu": 14_000},
        {0: 14_000},
        {"cpu": 30_000},
        {"cpu": 100},
        {0: 0, "cpu": 40_000},
    ],
)
@pytest.mark.filterwarnings("ignore:The buffers")
def test_device_map_covers_the_model_and_respects_the_limits(
    limits: dict[Any, int], model: TinyGPT
) -> None:
    made = infer_auto_device_map(empty(), limits, "Block")
    check_plan(model, made, limits)
    assert made == infer_auto_device_map(model, limits, ["Block"]), (
        "empty and real models must agree"
    )


def test_device_map_has_one_entry_if_everything_fits(model: TinyGPT) -> None:
    assert plan(model, g0="1GB") == {"": 0}


def test_memory_is_reserved_for_the_largest_offloaded_layer() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(6)))
    assert plan(model, g0=2400) == {"": 0}
    made = plan(model, g0=2000, cpu=10**6)
    assert [made[str(i)] for i in range(6)] == [0, 0, 0, 0, "cpu", "cpu"]
    made = plan(model, g0=1200, cpu=800)
    assert [made[str(i)] for i in range(6)] == [0, 0, "cpu", "disk", "disk", "disk"]


def test_tied_weights_count_once_and_stay_together(model: TinyGPT) -> None:
    sizes = compute_module_sizes(model)
    assert sizes[""] == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert (sizes["embed"], sizes["head"]) == (model.embed.weight.nbytes, 0)
    made = plan(model, g0=25_000, cpu=10**6)
    assert made["embed"] == made["head"] == 0
    assert "cpu" in made.values()


def test_smaller_dtype_lets_more_layers_fit() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    assert infer_auto_device_map(model, {0: 800}, dtype="float16") == {"": 0}
    special = {"3.weight": torch.float32}
    made = infer_auto_device_map(model, {0: 1200}, dtype=torch.float16, special_dtypes=special)
    assert made == {"": 0}


def test_fallback_allocation_finds_a_later_part_that_fits() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Sequential(nn.Linear(100, 100), nn.Linear(5, 5)))
    # Next to the memory reserved for a large offloaded layer, only the small one fits.
    memory = {0: 41_000, "cpu": 10**6}
    assert set(infer_auto_device_map(model, memory).values()) == {"cpu"}
    made = infer_auto_device_map(model, memory, fallback_allocation=True)
    assert made == {"0": "cpu", "1.0": "cpu", "1.1": 0}


def test_offloaded_buffers_that_do_not_fit_are_a_warning() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("big", torch.zeros(1000))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        infer_auto_device_map(model, {0: 100, "cpu": 10**6})


def test_verbose_prints_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(nn.Linear(2, 2), {0: 1000}, verbose=True)
    assert "weight (16 bytes) goes to 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 0, "b": 0}, {"": 0}),
        ({"a.x": 0, "a.y": 0, "b": 1}, {"a": 0, "b": 1}),
        ({"a.x.p": 0, "a.x.q": 0, "a.y": 1, "ab": 1}, {"a.x": 0, "a.y": 1, "ab": 1}),
    ],
)
def test_clean_device_map_merges_entries(before: dict[str, int], after: dict[str, int]) -> None:
    assert clean_device_map(before) == after


# --- checkpoints ----------------------------------------------------------------------------------


def write_checkpoint(model: nn.Module, folder: Path, form: str) -> Path:
    """Write the model in one of the formats, and return the path to load."""
    folder.mkdir()
    clean = clean_state_dict_for_safetensors(model.state_dict())
    if form == "safetensors":
        save_file(clean, folder / "model.safetensors")
        return folder / "model.safetensors"
    if form == "bin":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return folder
    if form == "old bin":
        torch.save(
            model.state_dict(),
            folder / "pytorch_model.bin",
            _use_new_zipfile_serialization=False,
        )
        return folder / "pytorch_model.bin"
    sharded_bin = form == "sharded bin"
    pattern = "pytorch_model{suffix}.bin" if sharded_bin else "model{suffix}.safetensors"
    files, index = shard_state_dict(clean, "6KB", pattern)
    assert index is not None
    assert len(files) > 2
    for name, part in files.items():
        (torch.save if sharded_bin else save_file)(part, folder / name)
    path = folder / pattern.format(suffix="").__add__(".index.json")
    path.write_text(json.dumps(index))
    return path if form == "index" else folder


FORMS = ["safetensors", "bin", "old bin", "sharded", "index", "sharded bin"]


@pytest.mark.parametrize("form", FORMS)
def test_every_checkpoint_format_is_loaded(
    form: str, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", form)
    for loaded in (empty(), TinyGPT().eval()):
        load_checkpoint_in_model(loaded, checkpoint, strict=True)
        assert loaded.embed.weight is loaded.head.weight
        torch.testing.assert_close(logits(loaded), expected)


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.filterwarnings("ignore:The tied parameters")
def test_checkpoint_is_loaded_and_dispatched(
    form: str, name: str, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", form)
    loaded = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map=MAPS[name], offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(logits(loaded), expected)
    torch.testing.assert_close(get_state_dict_offloaded_model(loaded), dict(model.state_dict()))


@pytest.mark.parametrize(
    "device_map", ["auto", "balanced", "balanced_low_0", "sequential", "cpu", "disk", None]
)
def test_strategies_and_single_devices_are_accepted_as_device_map(
    device_map: str | None, model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "safetensors")
    loaded = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map, offload_folder=tmp_path / "offload"
    )
    assert hasattr(loaded, "hf_device_map") == (device_map is not None)
    torch.testing.assert_close(logits(loaded), expected)


def test_parts_that_do_not_fit_into_memory_go_to_disk(
    model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "safetensors")
    loaded = load_checkpoint_and_dispatch(
        empty(),
        checkpoint,
        device_map="auto",
        max_memory={"cpu": "25KB"},
        no_split_module_classes=["Block"],
        offload_folder=tmp_path / "offload",
    )
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    torch.testing.assert_close(logits(loaded), expected)


def test_memory_limits_are_converted_in_place() -> None:
    limits: dict[Any, Any] = {"disk": "1MB", "cpu": 2.5e4}  # a float, as transformers passes
    assert get_max_memory(limits) == limits == {"cpu": 25_000, "disk": 1_000_000}
    assert isinstance(limits["cpu"], int)


@pytest.mark.parametrize("device_map", [None, SPLIT])
def test_weights_are_cast_except_those_kept_in_float32(
    device_map: Any, model: TinyGPT, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "bin")
    loaded = empty()
    load_checkpoint_in_model(
        loaded,
        checkpoint,
        device_map,
        offload_folder=tmp_path / "offload",
        dtype="bfloat16",
        keep_in_fp32_modules=["mlp"],
    )
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if "mlp" in name else torch.bfloat16), name
    assert loaded.norm.num_batches_tracked.dtype == torch.int64


def test_missing_and_unexpected_names_are_reported(
    model: TinyGPT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = clean_state_dict_for_safetensors(model.state_dict())
    state["unknown"] = state.pop("position")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks position and has unknown"):
        load_checkpoint_in_model(empty(), tmp_path, strict=True)
    load_checkpoint_in_model(empty(), tmp_path)
    assert "lacks position" in caplog.text


def _wrong_shape(folder: Path) -> Path:
    save_file({"position": torch.ones(3)}, folder / "model.safetensors")
    return folder


def _nothing(folder: Path) -> Path:
    return folder


def _missing(folder: Path) -> Path:
    return folder / "nowhere"


def _missing_shard(folder: Path) -> Path:
    index = {"weight_map": {"position": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _escaping_shard(folder: Path) -> Path:
    inner = folder / "inner"
    inner.mkdir()
    save_file({"position": torch.ones(3)}, folder / "secret.safetensors")
    index = {"weight_map": {"position": "../secret.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    return inner


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (_wrong_shape, r"'position' has the shape \(3,\) in the checkpoint, but \(1, 8, 16\)"),
        (_nothing, "must contain one checkpoint"),
        (_missing, "There is no checkpoint"),
        (_missing_shard, "does not exist next to it"),
        (_escaping_shard, "outside its folder"),
    ],
)
def test_invalid_checkpoint_is_refused_with_an_explanation(
    prepare: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint_in_model(empty(), prepare(tmp_path))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code from a checkpoint ran",)


def test_code_in_a_checkpoint_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"position": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load_checkpoint_in_model(empty(), tmp_path)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device_map": "autom"}, "Did you mean 'auto'"),
        (
            {"device_map": {"": "disk"}, "dtype": "float16"},
            "has dtype torch.float32 in the checkpoint.*offload_folder",
        ),
        ({"device_map": "auto", "max_memory": {"gpu": 1}}, "max_memory has the key 'gpu'"),
        ({"device_map": "auto", "max_memory": {"cpu": "lots"}}, "'lots' is not a size"),
    ],
)
def test_invalid_arguments_are_refused_with_an_explanation(
    arguments: dict[str, Any], text: str, model: TinyGPT, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "safetensors")
    with pytest.raises(ConfigurationError, match=text):
        load_checkpoint_and_dispatch(empty(), checkpoint, **arguments)


def load_from_rank_0(checkpoint: str, result: str) -> None:
    """Run on two ranks by `rank_0_worker.py`."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = TinyGPT().eval()
    with pytest.raises(CheckpointError, match="Rank 0 could not read"):
        load_checkpoint_in_model(model, result, broadcast_from_rank0=True)
    if rank == 1:
        # Only rank 0 needs the file.
        checkpoint = "nowhere"
    load_checkpoint_in_model(model, checkpoint, broadcast_from_rank0=True, strict=True)
    assert model.embed.weight is model.head.weight
    torch.save(logits(model), f"{result}/{rank}")
    _load_own_part(rank, result)
    dist.destroy_process_group()


def _load_own_part(rank: int, folder: str) -> None:
    """Load a sharded model, empty or with real weights, and check that each rank reads its half."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    file = Path(folder, "whole.safetensors")
    if rank == 0:
        save_file(whole.state_dict(), file)
    torch.distributed.barrier()
    mesh = init_device_mesh("cpu", (2,))
    x = torch.linspace(-1, 1, 2048).reshape(2, 1024)
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        load_checkpoint_in_model(model, file, strict=True)
        if device == "meta" and sys.platform == "linux":
            maps = Path("/proc/self/smaps").read_text().split("whole.safetensors\n")[1:]
            read = sum(int(one.split("Rss:")[1].split()[0]) for one in maps) * 1024
            assert read < 0.6 * file.stat().st_size, read
        for (name, part), value in zip(model.named_parameters(), whole.state_dict().values()):
            assert isinstance(part, DTensor)
            assert torch.equal(part.full_tensor(), value), name
        torch.testing.assert_close(model(x), whole(x))


@pytest.mark.dist
@pytest.mark.timeout(180)
def test_rank_0_reads_and_sends_the_weights_to_the_others(
    model: TinyGPT, expected: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", "safetensors")
    run_workers(WORKER, 2, [checkpoint, tmp_path]).checked()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), expected)


# --- offloaded weights ----------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_offloaded_weight_is_read_back_unchanged(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weight = torch.rand(shape).mul(3).to(dtype)
    index = offload_weight(weight, "layer.weight", tmp_path)
    loaded = load_offloaded_weight(tmp_path / "layer.weight.dat", index["layer.weight"])
    assert loaded.dtype == dtype
    assert loaded.shape == weight.shape
    assert loaded.tolist() == weight.tolist()


def test_offloaded_weights_are_loaded_back_into_a_model(model: TinyGPT, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, state)
    index = json.loads((tmp_path / "index.json").read_text())
    other = empty()
    load_offloaded_weights(other, index, tmp_path)
    torch.testing.assert_close(dict(other.state_dict()), state)


def test_loader_reads_from_memory_disk_and_safetensors(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"disk": torch.ones(2)})
    save_offload_index({}, tmp_path)
    save_file({"inside": torch.full((2,), 3.0)}, tmp_path / "file.safetensors")
    index = json.loads((tmp_path / "index.json").read_text())
    index["safe"] = {
        "safetensors_file": str(tmp_path / "file.safetensors"),
        "weight_name": "inside",
        "dtype": "float16",
    }
    loader = OffloadedWeightsLoader({"memory": torch.zeros(2)}, tmp_path, index)
    assert list(loader) == ["memory", "disk", "safe"]
    assert len(loader) == 3
    assert [loader[key].tolist() for key in loader] == [[0, 0], [1, 1], [3, 3]]
    assert loader["safe"].dtype == torch.float16
    with pytest.raises(KeyError, match="Did you mean 'safe'"):
        loader["saf"]
    with pytest.raises(ConfigurationError):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_offloaded_weight(tmp_path / "none.dat", {"dtype": "float32", "shape": [1]})


def test_prefixed_dataset_contains_the_weights_of_one_module() -> None:
    weights = {"a.w": torch.ones(1), "a.b": torch.zeros(1), "ab.w": torch.ones(2)}
    inside = PrefixedDataset(weights, "a.")
    assert list(inside) == ["w", "b"]
    assert len(inside) == 2
    assert inside["w"] is weights["a.w"]
    assert list(extract_submodules_state_dict(weights, ["a"])) == ["a.w", "a.b"]


def test_tied_parameters_are_found() -> None:
    assert find_tied_parameters(empty()) == [["embed.weight", "head.weight"]]
