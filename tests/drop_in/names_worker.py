"""Use names of Accelerate as scripts do. Each function is a case."""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import pickle
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate import optimizer as optimizers
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate.commands.accelerate_cli import CustomArgumentParser, env_command_parser
from accelerate.commands.config import get_config_parser
from accelerate.commands.estimate import estimate_command, estimate_command_parser, gather_data
from accelerate.commands.launch import clean_option, simple_launcher
from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)
from accelerate.inference import find_pippy_batch_size, generate_device_map, prepare_pippy
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    SharedDict,
    ThreadLocalSharedDict,
)
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers
from accelerate.utils import (
    BnbQuantizationConfig,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    GradientAccumulationPlugin,
    get_model_tp_size,
    has_ao_layers,
    has_transformer_engine_layers,
)
from accelerate.utils.ao import filter_first_and_last_linear_layers, torchao_required
from accelerate.utils.bnb import get_keys_to_not_convert, get_parameter_device
from accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accelerate.utils.dataclasses import FP8BackendType
from accelerate.utils.launch import (
    env_var_path_add,
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    setup_fp8_env,
)
from accelerate.utils.modeling import (
    check_device_same,
    fallback_allocate,
    get_module_leaves,
    get_module_size_with_ties,
    get_state_dict_from_offload,
)
from accelerate.utils.operations import (
    TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT,
    get_shape,
    is_torch_xpu_tensor,
    verify_operation,
)
from accelerate.utils.other import TORCH_SAFE_GLOBALS, has_repeated_blocks, is_repeated_blocks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def states_work_before_and_after_an_accelerator(folder: Path) -> None:
    PartialState._reset_state()
    assert GradientState() is GradientState()
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert GradientState(plugin).num_steps == 3
    GradientState(GradientAccumulationPlugin(num_steps=1))
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert (state.mixed_precision, AcceleratorState().mixed_precision) == ("bf16", "bf16")
    assert isinstance(state, AcceleratorState)
    with pytest.raises(RuntimeError, match="bf16"):
        AcceleratorState(mixed_precision="fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    shared = ThreadLocalSharedDict()

    class Borg:
        state: Any = shared

    Borg().state["a"] = 1
    assert Borg().state == {"a": 1}
    assert SharedDict() == {}


def loaders_created_by_a_script(folder: Path) -> None:
    rows = list(range(16))
    shard = DataLoaderShard(rows, batch_size=4)
    ends = [(batch.tolist(), shard.end_of_dataloader) for batch in shard]
    assert ends[-1] == ([12, 13, 14, 15], True)
    assert not any(end for _, end in ends[:-1])
    assert [len(DataLoaderShard(rows, batch_size=4, skip_batches=skip)) for skip in (0, 3)] == [
        4,
        1,
    ]
    dispatcher = DataLoaderDispatcher(rows, batch_size=4, iteration=2)
    assert len(list(dispatcher)) == 4
    assert dispatcher.iteration == 3
    prepared = prepare_data_loader(DataLoader(rows, 4), num_processes=1, process_index=0)
    for made in (shard, prepared):
        assert isinstance(made, DataLoaderShard)
        assert isinstance(made, DataLoader)
        assert isinstance(made, DataLoaderStateMixin)
        assert isinstance(made.base_dataloader, DataLoader)
        assert isinstance(pickle.loads(pickle.dumps(made)), DataLoader)
    assert isinstance(dispatcher, DataLoaderDispatcher)
    assert not isinstance(shard, DataLoaderDispatcher)
    assert not isinstance(shard, SkipDataLoader)
    skipping = SkipDataLoader(rows, batch_size=4, skip_batches=2)
    assert [batch.tolist() for batch in skipping] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert isinstance(skipping, DataLoader)
    assert isinstance(skipping, SkipDataLoader)
    assert isinstance(skipping.base_dataloader, DataLoader)
    assert len(pickle.loads(pickle.dumps(skipping))) == 2
    stateful = DataLoaderShard(rows, batch_size=4, use_stateful_dataloader=True)
    assert len(list(stateful)) == 4
    order = torch.utils.data.SequentialSampler(rows)
    assert get_sampler(DataLoader(rows, sampler=BatchSampler(order, 4, False))) is order
    assert get_sampler(DataLoader(rows, batch_size=4, sampler=order)) is order


class Counted(torch.utils.data.IterableDataset):
    """A stream without a state."""

    def __iter__(self) -> Any:
        return iter(range(12))


def loaders_exchange_states_with_torchdata_loaders(folder: Path) -> None:
    rows = list(range(12))

    def read(batches: Any) -> list[list[int]]:
        return [batch.tolist() for batch in batches]

    def begun(kind: Any, workers: int) -> Any:
        order = torch.Generator().manual_seed(3)
        more = {} if kind is StatefulDataLoader else {"use_stateful_dataloader": True}
        return kind(rows, batch_size=2, shuffle=True, num_workers=workers, generator=order, **more)

    pairs = [(StatefulDataLoader, DataLoaderShard), (DataLoaderShard, StatefulDataLoader)]
    pairs += [(DataLoaderDispatcher, DataLoaderShard), (SkipDataLoader, DataLoaderDispatcher)]
    for workers, (first, second) in [
        *((0, pair) for pair in pairs),
        *((2, one) for one in pairs[:2]),
    ]:
        whole = read(begun(StatefulDataLoader, workers))
        one, other = begun(first, workers), begun(second, workers)
        seen = read(islice(one, 4))
        state = one.state_dict()
        other.load_state_dict(state)
        if hasattr(other, "set_epoch"):
            other.set_epoch(1)
        assert seen + read(other) == whole
        assert len(read(other)) == len(read(begun(second, workers))) == 6
    for workers in (0, 2):
        parts, state = [], None
        for count in (2, 1, 99):
            stream = DataLoaderShard(
                Counted(), batch_size=2, num_workers=workers, use_stateful_dataloader=True
            )
            if state is not None:
                stream.load_state_dict(state)
            parts += read(islice(stream, count))
            state = stream.state_dict()
        assert parts == read(StatefulDataLoader(Counted(), batch_size=2, num_workers=workers))
    for made in (DataLoaderShard, DataLoaderDispatcher):
        ended = made(rows, batch_size=4, use_stateful_dataloader=True)
        plain = StatefulDataLoader(rows, batch_size=4)
        assert ended.state_dict() == plain.state_dict()
        for batch, _ in zip(ended, plain, strict=True):
            finished = {"_iterator_finished": ended.end_of_dataloader}
            assert ended.state_dict() == plain.state_dict() | finished, batch
        assert ended.state_dict() == plain.state_dict()
        ended.load_state_dict(plain.state_dict())
        assert len(list(ended)) == 3


def optimizer_and_scheduler_created_by_a_script(folder: Path) -> None:
    model = tower()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = AcceleratedOptimizer(sgd)
    decay = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    scheduler = AcceleratedScheduler(decay, [optimizer])
    model(torch.ones(1, 4)).sum().backward()
    for sync in (False, True):
        GradientState()._set_sync_gradients(sync)
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        moved = not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
        assert moved is sync
        assert (model[0].weight.grad is None) is sync
    assert scheduler.get_last_lr() == [0.5]
    assert not optimizer.step_was_skipped
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    scaler.scale(model(torch.ones(1, 4)).sum() * float("inf")).backward()
    scaled.step()
    assert scaled.step_was_skipped
    for wrapper in (DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper):
        assert not isinstance(optimizer, wrapper)
        assert not isinstance(scheduler, wrapper)
    stepped = DeepSpeedSchedulerWrapper(decay, [DeepSpeedOptimizerWrapper(sgd)])
    stepped.step()
    stepped.optimizers[0].step()
    assert scheduler.get_last_lr() == stepped.get_last_lr() == [0.5]
    assert not stepped.optimizers[0].step_was_skipped


def state_of_a_run_is_saved_and_loaded(folder: Path) -> None:
    model, other = tower(), tower()
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    decay = torch.optim.lr_scheduler.StepLR(adam, 1)
    for safe in (True, False):
        place = folder / str(safe)
        random.seed(3)
        np.random.seed(3)
        states = [model.state_dict(), other.state_dict()]
        save_accelerator_state(place, states, [adam], [decay], [], 0, 7, safe_serialization=safe)
        drawn = (random.random(), np.random.rand())
        fresh, second = tower(), tower()
        again = torch.optim.Adam(fresh.parameters())
        after = torch.optim.lr_scheduler.StepLR(again, 1)
        loaded = load_accelerator_state(place, [fresh, second], [again], [after], [], 0)
        assert loaded == {"step": 7}
        assert torch.equal(fresh[0].weight, model[0].weight)
        assert again.state_dict()["state"][0]["step"] == 1
        assert (random.random(), np.random.rand()) == drawn
    # The keys and types in Accelerate's file of random states.
    theirs = {
        "step": 9,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(theirs, place / "random_states_0.pkl")
    assert load_accelerator_state(place, [], [], [], [], 0) == {"step": 9}
    with pytest.raises(ValueError, match="on_device"):
        load_accelerator_state(place, [], [], [], [], 0, map_location="cuda")
    with pytest.raises(RuntimeError, match="optimizer_1"):
        load_accelerator_state(place, [], [again, again], [], [], 0)
    save_custom_state(decay, folder)
    load_custom_state(after, folder)
    assert after.state_dict() == decay.state_dict()


def modules_are_assigned_to_devices(folder: Path) -> None:
    one, other = torch.device("cuda"), torch.device("cuda", 0)
    assert check_device_same(one, other)
    assert not check_device_same(one, torch.device("cpu"))
    sizes = {"": 20, "a": 8, "a.x": 5, "a.y": 3, "b": 12, "b.w": 12}
    assert get_module_leaves(sizes) == ["a.x", "a.y", "b.w"]
    b = nn.Linear(1, 1)
    assert get_module_size_with_ties(["b.w"], 8, sizes, [("b", b)]) == (8, ["b"], [b])
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.Linear(5, 1), "y": nn.Linear(3, 1)})})
    modules = list(model.named_children())
    name, found, left = fallback_allocate(modules, sizes, 5)
    assert (name, found) == ("a.x", model["a"]["x"])
    assert [name for name, _ in left] == ["a.y"]
    assert fallback_allocate(modules, sizes, 2)[0] is None
    assert fallback_allocate(modules, sizes, 5, ["ModuleDict"])[0] is None
    state = get_state_dict_from_offload(b, "b.weight", {"b.weight": "", "c": ""})
    assert torch.equal(state["b.weight"], b.weight)
    assert state["c"] == ""


def helpers_for_models_of_other_libraries(folder: Path) -> None:
    blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    holder = nn.Sequential(blocks)
    assert is_repeated_blocks(blocks)
    assert has_repeated_blocks(holder)
    assert not is_repeated_blocks(holder)
    assert get_model_tp_size(holder) is None
    assert not has_ao_layers(holder)
    assert not has_transformer_engine_layers(holder)
    assert isinstance(blocks[0], SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
    assert not filter_first_and_last_linear_layers(tower(), "0")
    assert torchao_required(len)("ab") == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)
        with pytest.raises(ImportError, match="pip install torchao"):
            torchao_required(len)("ab")
    assert "TE" in FP8BackendType
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert config.torch_dtype is torch.bfloat16
    for wrong in ({}, {"load_in_8bit": True, "load_in_4bit": True}, {"load_in_8bit": 1}):
        with pytest.raises(ValueError, match="load_in_"):
            BnbQuantizationConfig(**wrong)
    with pytest.raises(ValueError, match="fp12"):
        BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp12")
    assert get_keys_to_not_convert(tower()) == ["2"]
    assert get_parameter_device(tower()).type == "cpu"
    from accelerate.utils import load_and_quantize_model
    from accelerate.utils.bnb import quantize_and_offload_8bit

    class Own(quantize_and_offload_8bit):
        pass

    for refused in (Own, quantize_and_offload_8bit):
        with pytest.raises(ImportError, match="skip_modules"):
            refused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(ImportError, match=r"pip install -U .bitsandbytes>="):
            load_and_quantize_model(tower(), config)
    with pytest.raises(AttributeError, match="is not available"):
        assert optimizers.patch_optimizer_step


def names_that_are_left_out_are_missing_for_hasattr(folder: Path) -> None:
    """`hasattr` is false for names that are left out, and importing them raises the reason."""
    from accelerate.commands import launch, merge

    assert not hasattr(merge, "description")
    assert getattr(launch, "FORMAT", None) is None
    assert "FORMAT" not in dir(launch)
    assert dict(inspect.getmembers(launch))["launch_command"] is launch.launch_command
    with pytest.raises(ImportError, match="has its own option groups"):
        from accelerate.commands.launch import FORMAT  # noqa: F401


def settings_compare_equal_to_enum_members(folder: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    state = Accelerator(cpu=True).state
    assert state.dynamo_plugin.backend == DynamoBackend.NO
    assert not state.dynamo_plugin.backend != DynamoBackend.NO  # noqa: SIM202
    assert TorchDynamoPlugin(backend="inductor").backend == DynamoBackend.INDUCTOR
    assert DynamoBackend.NO != DynamoBackend.EAGER
    assert state.parallelism_config is None
    assert state.fork_launched is False


def helpers_for_nested_data(folder: Path) -> None:
    assert get_shape({"a": torch.ones(2, 3)}) == {"a": [2, 3]}
    assert TENSOR_INT_TO_DTYPE[TENSOR_TYPE_TO_INT[torch.int64]] is torch.int64
    assert not is_torch_xpu_tensor(torch.ones(1))
    assert verify_operation(lambda tensor: tensor + 1)(torch.ones(1)) == 2
    assert np.ndarray in TORCH_SAFE_GLOBALS
    assert find_pippy_batch_size((3,), {"x": torch.ones(5, 2)}) == 5
    assert set(generate_device_map(tower(), 2).values()) == {0, 1}
    nine = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    assert sorted(generate_device_map(nine, 8).values()) == [*range(8), 7]
    alone = prepare_pippy(tower(), example_args=(torch.ones(2, 4),))
    assert alone(torch.ones(2, 4)).shape == (2, 4)


def launch_and_command_functions_for_programs(folder: Path) -> None:
    script = folder / "s.py"
    script.write_text(f"import os; open({str(folder / 'ran')!r}, 'w').write(os.environ['A'])")
    args: Any = argparse.Namespace(
        training_script=str(script), training_script_args=["--lr", "1"], num_processes=1,
        num_machines=1, machine_rank=0, main_process_ip=None, main_process_port=0, cpu=True,
        use_cpu=False, mixed_precision="bf16", module=False, no_python=False, use_fsdp=False,
        fsdp_offload_params="true", gpu_ids=None, dynamo_backend="no",
    )  # fmt: skip
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command[-3:] == [str(script), "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "FSDP_OFFLOAD_PARAMS" not in environment
    args.use_fsdp = True
    environment = prepare_multi_gpu_env(args)
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_OFFLOAD_PARAMS"]) == ("true",) * 2
    assert int(args.master_port) > 0
    args.use_fsdp = False
    os.environ["A"] = "3"
    simple_launcher(args)
    assert (folder / "ran").read_text() == "3"
    assert clean_option("--num-machines") == "num_machines"
    os.environ["PLACES"] = "a"
    assert env_var_path_add("PLACES", "b") == "a:b"
    fp8 = argparse.Namespace(fp8_format="E4M3", fp8_override_linear_precision=(True, False, False))
    assert setup_fp8_env(fp8, {})["ACCELERATE_FP8_OVERRIDE_FPROP"] == "True"
    sizes = argparse.Namespace(parallelism_config_tp_size=2)
    assert prepare_extend_env_parallelism_config(sizes, {})["PARALLELISM_CONFIG_TP_SIZE"] == "2"

    parser = CustomArgumentParser()
    parser.add_argument_group("g").add_argument("--num_machines", type=int)
    assert parser.parse_args(["--num-machines", "2"]).num_machines == 2
    several = argparse.ArgumentParser().add_subparsers()
    env_command_parser(several)
    get_config_parser(several)
    assert set(several.choices) == {"env", "config"}
    torch.save({"a.weight": torch.ones(4, 2), "b.weight": torch.ones(2)}, folder / "w.bin")
    asked = estimate_command_parser().parse_args([str(folder / "w.bin"), "--dtypes", "float16"])
    assert gather_data(asked)[0][:3] == ["float16", 16.0, 20.0]
    estimate_command(asked)
    save_accelerator_state(folder / "m", [tower().state_dict()], [], [], [], 0, 0)
    merge_command(merge_command_parser().parse_args([str(folder / "m"), str(folder / "merged")]))
    assert (folder / "merged" / "model.safetensors").is_file()


def trackers_and_plugins_by_name(folder: Path) -> None:
    assert LOGGER_TYPE_TO_CLASS["tensorboard"].name == "tensorboard"
    assert "jsonl" in LOGGER_TYPE_TO_CLASS
    assert "nobody" not in LOGGER_TYPE_TO_CLASS

    class Mine(GeneralTracker):
        name = "mine"
        requires_logging_directory = True

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None: ...

    LOGGER_TYPE_TO_CLASS["mine"] = Mine
    assert filter_trackers(["mine", "mine"], folder) == ["mine"]
    with pytest.raises(ValueError, match="logging_dir"):
        filter_trackers("mine")
    assert "mine" in filter_trackers("all", folder)
    del LOGGER_TYPE_TO_CLASS["mine"]

    config = ParallelismConfig(dp_replicate_size=2)
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.device_mesh is None
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(torch.bfloat16)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    plugin.set_mixed_precision("fp16", override=True)
    plugin.validate_mixed_precision_policy()
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.set_auto_wrap_policy(tower())
    assert plugin.state_dict_type == "FULL_STATE_DICT"
    zero = DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}, "train_batch_size": "auto"})
    assert zero.is_auto("train_batch_size")
    zero.set_mixed_precision("bf16")
    with pytest.raises(ValueError, match=r"bf16\.enabled"):
        zero.set_mixed_precision("fp16")


if __name__ == "__main__":
    for case in (
        states_work_before_and_after_an_accelerator,
        loaders_created_by_a_script,
        loaders_exchange_states_with_torchdata_loaders,
        optimizer_and_scheduler_created_by_a_script,
        state_of_a_run_is_saved_and_loaded,
        modules_are_assigned_to_devices,
        helpers_for_models_of_other_libraries,
        names_that_are_left_out_are_missing_for_hasattr,
        settings_compare_equal_to_enum_members,
        helpers_for_nested_data,
        launch_and_command_functions_for_programs,
        trackers_and_plugins_by_name,
    ):
        place = Path(sys.argv[1], case.__name__)
        place.mkdir()
        case(place)
        print("ended", case.__name__, flush=True)
