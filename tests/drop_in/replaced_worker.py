"""Clients replace functions and methods of Accelerate, and read names that its modules import."""

from __future__ import annotations

import copy
import inspect
import pickle
import pickletools
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate.accelerator
import accelerate.data_loader
import accelerate.hooks
import accelerate.state
import accelerate.utils.fsdp_utils as fsdp_utils
import accelerate.utils.modeling
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.utils.data import DataLoader

calls: list[str] = []


def counting(original: Any, name: str) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return counted


@contextmanager
def replaced(owner: Any, name: str) -> Any:
    original = getattr(owner, name)
    calls.clear()
    setattr(owner, name, counting(original, name))
    yield
    setattr(owner, name, original)


def prepared(**arguments: Any) -> Any:
    accelerator = Accelerator(cpu=True, **arguments)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    made = accelerator.prepare(model, optimizer, DataLoader(torch.zeros(4, 2), 2), scheduler)
    for batch in made[2]:
        accelerator.backward(made[0](batch).sum())
        made[1].step()
        made[1].zero_grad()
    return accelerator, made


def test_replacements_are_called() -> None:
    warnings.simplefilter("error", UserWarning)
    sharded = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    for owner, name, arguments in (
        (accelerate.accelerator, "prepare_data_loader", {}),
        (accelerate.data_loader, "prepare_data_loader", {}),
        (accelerate.accelerator, "fsdp2_prepare_model", {"fsdp_plugin": sharded}),
        (Accelerator, "prepare_model", {}),
        (Accelerator, "prepare_optimizer", {}),
        (Accelerator, "prepare_scheduler", {}),
        (Accelerator, "prepare_data_loader", {}),
        (Accelerator, "__init__", {}),
        (Accelerator, "_prepare_fsdp2", {"fsdp_plugin": sharded}),
    ):
        with replaced(owner, name):
            prepared(**arguments)
            assert calls == [name], (owner, name, calls)
        calls.clear()
        prepared(**arguments)
        assert not calls
    with replaced(Accelerator, "get_state_dict"):
        accelerator, made = prepared()
        accelerator._prepared.get_state_dict(made[0])
        assert calls == ["get_state_dict"]
    Accelerator.verify_device_map = lambda *_: "replaced"
    assert prepared()[0]._prepared.verify_device_map(None) == "replaced"


def test_replacement_that_shards_by_itself() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def shard(accelerator: Any, model: Any) -> Any:
        calls.append("fully_shard")
        return fully_shard(model, mesh=accelerator.torch_device_mesh["dp_shard"])

    sharded = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    calls.clear()
    with mock.patch("accelerate.accelerator.fsdp2_prepare_model", shard):
        _, made = prepared(fsdp_plugin=sharded)
    assert calls == ["fully_shard"]
    assert isinstance(made[0], FSDPModule)
    assert {id(one) for one in made[1].param_groups[0]["params"]} == set(
        map(id, made[0].parameters())
    )


def test_replacements_without_effect_warn_once_with_their_line() -> None:
    warnings.simplefilter("always")
    for owner, name in (
        (Accelerator, "_prepare_cp"),
        (Accelerator, "no_sync"),
        (fsdp_utils, "fsdp2_load_full_state_dict"),
        (fsdp_utils, "_get_model_state_dict"),
        (accelerate.utils.operations, "recursively_apply"),
    ):
        with warnings.catch_warnings(record=True) as seen:
            for _ in range(2):
                with replaced(owner, name):
                    pass
        (warning,) = seen
        assert name in str(warning.message)
        assert f"{__file__}:" in str(warning.message)


def test_dimensions_that_a_client_adds() -> None:
    config = ParallelismConfig()
    config._set_size("dp_replicate", 1)
    before = ParallelismConfig.__post_init__
    size = 1

    def post_init(self: Any) -> None:
        before(self)
        self._sizes["ep"] = size

    ParallelismConfig.__post_init__ = post_init
    with replaced(ParallelismConfig, "_validate_accelerator"):
        sharded = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(), fsdp_plugin=sharded)
        assert calls == ["_validate_accelerator"]
        size = 2
        with pytest.raises(ValueError, match="ep_size=2"):
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(), fsdp_plugin=sharded)
    ParallelismConfig.__post_init__ = before


def test_imported_and_private_names() -> None:
    assert accelerate.data_loader.DataLoader is DataLoader
    assert accelerate.accelerator.torch is torch
    assert not hasattr(accelerate.accelerator, "torch_npu"), "a library that is not installed"
    assert "to" in accelerate.hooks._accelerate_added_attributes
    assert accelerate.utils.modeling._get_proper_dtype("torch.float16") is torch.float16
    accelerator = Accelerator(cpu=True)
    assert accelerator.__dict__["state"].distributed_type == accelerator.distributed_type
    assert accelerate.state.PartialState._prepare_backend(accelerator.state)[1] == "NO"
    model = torch.nn.Linear(2, 2)
    options = fsdp_utils._prepare_sd_options(FullyShardedDataParallelPlugin(fsdp_version=2))
    state = fsdp_utils._get_model_state_dict(model, sd_options=options)
    fsdp_utils._set_model_state_dict(model, state, sd_options=options)
    text = Path(fsdp_utils.__file__).read_text()
    assert "def fsdp2_prepare_model" in text
    assert "def _prepare_sd_options" in text
    assert "full_state_dict" in inspect.getsource(fsdp_utils._get_model_state_dict)


def test_pickled_states_have_public_names() -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._reset_state()  # the Accelerators of other tests decide the type of a run
    state = PartialState(cpu=True)
    written = pickle.dumps([state, DistributedType.NO])
    names = {text for _, text, _ in pickletools.genops(written) if isinstance(text, str)}
    assert {"accelerate.state", "accelerate.utils.dataclasses"} <= names
    assert not any(name.startswith("accelerate_") for name in names)
    assert pickle.loads(written)[0].num_processes == 1
    PartialState._reset_state()
    stored, kind = pickle.loads(written)
    assert (stored.num_processes, stored.distributed_type, kind) == (1, "NO", "NO")
    assert pickle.loads(pickle.dumps(stored)).num_processes == 1


def _text_in(written: bytes) -> set[str]:
    return {text for _, text, _ in pickletools.genops(written) if isinstance(text, str)}


def test_pickled_settings_have_public_names_and_attributes() -> None:
    from accelerate import utils

    for settings, given, unknown in (
        (utils.DistributedDataParallelKwargs(static_graph=True), {"static_graph"}, "__given__"),
        (utils.GradScalerKwargs(growth_interval=7), {"growth_interval"}, "__given__"),
        (utils.InitProcessGroupKwargs(), set(), "__given__"),
        (utils.AutocastKwargs(cache_enabled=False), {"cache_enabled"}, "upcast_outputs"),
        (utils.GradientAccumulationPlugin(num_steps=2), {"num_steps"}, "__given__"),
        (utils.TorchDynamoPlugin("inductor"), {"backend"}, "__given__"),
        (utils.DataLoaderConfiguration(even_batches=True), {"even_batches"}, None),
        (utils.ProjectConfiguration("folder"), {"project_dir"}, None),
        (utils.FullyShardedDataParallelPlugin(fsdp_version=2), {"fsdp_version"}, None),
        (utils.DeepSpeedPlugin(zero_stage=2), {"zero_stage"}, None),
        (utils.ParallelismConfig(tp_size=2), {"tp_size"}, None),
    ):
        written = pickle.dumps(settings, 2)
        name = type(settings).__name__
        assert not any(text.startswith("accelerate_") for text in _text_in(written)), name
        # `to_kwargs` of Accelerate's handlers raises an error for attributes that the class doesn't have.
        assert unknown not in settings.__getstate__(), name
        for result in (pickle.loads(written), copy.copy(settings), copy.deepcopy(settings)):
            assert type(result) is type(settings)
            assert result.to_kwargs() == settings.to_kwargs() if unknown else True, name
            assert result.__given__ >= given, name


def test_settings_pickled_by_accelerate_are_read() -> None:
    from accelerate import utils

    compiler = object.__new__(utils.TorchDynamoPlugin)
    compiler.__setstate__({"backend": utils.DynamoBackend("INDUCTOR"), "mode": "default"})
    assert (compiler.backend, compiler.disable) == ("inductor", False)
    loaders = object.__new__(utils.DataLoaderConfiguration)
    loaders.__setstate__({"even_batches": False, "split_batches": False, "later_field": 1})
    assert (loaders.even_batches, loaders.read_ahead) == (False, True)
    assert loaders.__given__ == {"even_batches"}
    config = object.__new__(utils.ParallelismConfig)
    config.__setstate__({"tp_size": 2, "cp_backend": "torch", "_sizes": {"tp": 2}})
    assert (config.tp_size, config.cp_backend, config.pp_size) == (2, None, 1)


def test_hyperparameters_of_tensorboard_are_where_accelerate_writes_them() -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("run", {"lr": 0.1, "name": "small"})
        accelerator.end_training()
        (path,) = Path(folder).rglob("hparams.*")
        assert path.name == "hparams.yml"
        assert path.parents[1].name == "run"
        assert float(path.parent.name) > 0
        assert path.read_text() == "lr: 0.1\nname: small\n"
        assert len(list(Path(folder, "run").glob("*/events.out.tfevents.*"))) == 1


if __name__ == "__main__":
    tests = [value for name, value in list(globals().items()) if name.startswith("test_")]
    for test in tests:
        with warnings.catch_warnings():
            test()
        print("ended", test.__name__)
