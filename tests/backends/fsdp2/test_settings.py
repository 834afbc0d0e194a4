"""`FullyShardedDataParallelPlugin`: Accelerate's names from all sources, and options of FSDP1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from dummies import distribution, run
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.torch_version import TorchVersion

from accelerate_core import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import TorchTensorParallelConfig
from accelerate_fsdp2 import FSDP2Backend

CPU = torch.device("cpu")
_SHARDED = "SHARDED_STATE_DICT"


def test_default_settings_and_policies():
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"
    assert plugin.precision_policy(torch.float32) == MixedPrecisionPolicy()
    half = plugin.precision_policy(torch.float16)
    assert (half.param_dtype, half.reduce_dtype) == (torch.float16, torch.float32)
    assert type(plugin.offload_policy(CPU)) is OffloadPolicy


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "reshard_after_forward", False),
        ({"sharding_strategy": 1}, "reshard_after_forward", True),
        (
            {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": 4},
            "reshard_after_forward",
            4,
        ),
        ({"reshard_after_forward": "true"}, "reshard_after_forward", True),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "reshard_after_forward", False),
        ({"reshard_after_forward": "2"}, "reshard_after_forward", 2),
        (
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
            "auto_wrap_policy",
            "transformer_based_wrap",
        ),
        ({"state_dict_type": "full_state_dict"}, "state_dict_type", "FULL_STATE_DICT"),
        ({"transformer_cls_names_to_wrap": "A, B"}, "transformer_cls_names_to_wrap", ["A", "B"]),
        ({"cpu_offload": "true"}, "cpu_offload", True),
        ({"cpu_offload": "on"}, "cpu_offload", True),
        ({"reshard_after_forward": "No"}, "reshard_after_forward", False),
        ({"use_orig_params": True}, "use_orig_params", True),
        ({"state_dict_type": StateDictType.FULL_STATE_DICT}, "state_dict_type", "FULL_STATE_DICT"),
        ({"reshard_after_forward": ShardingStrategy.FULL_SHARD}, "reshard_after_forward", True),
        ({"reshard_after_forward": ShardingStrategy.SHARD_GRAD_OP}, "reshard_after_forward", False),
    ],
)
def test_values_are_converted(given, field, value):
    assert getattr(FullyShardedDataParallelPlugin(**given), field) == value


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fsdp_version": 1}, "fsdp_version=1 is not supported"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "dp_replicate_size"),
        ({"sharding_strategy": "NO_SHARD"}, "backend ddp"),
        ({"sharding_strategy": "FULL_SHART"}, "Did you mean 'FULL_SHARD'"),
        ({"use_orig_params": False}, "is an option of FSDP1"),
        ({"param_init_fn": print}, "meta device"),
        ({"state_dict_config": 1}, "not torch's FullStateDictConfig"),
        (
            {"state_dict_config": FullStateDictConfig(True, True), "state_dict_type": _SHARDED},
            "implies FULL_STATE_DICT, but state_dict_type is SHARDED",
        ),
        ({"optim_state_dict_config": LocalStateDictConfig(True)}, "not supported"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "not supported"),
        ({"auto_wrap_policy": "size_wrap"}, "Did you mean 'size_based_wrap'"),
        ({"mixed_precision_policy": "bf17"}, "Did you mean 'bf16'"),
        ({"mixed_precision_policy": {"param_dtyp": "bf16"}}, "Did you mean 'param_dtype'"),
        ({"backward_prefetch": "SOMETIMES"}, "is not a valid value"),
        ({"reshard_after_forward": 0}, "must be True, False or a number"),
        ({"cpu_offload": "perhaps"}, "must be True, False or a CPUOffloadPolicy"),
        ({"min_num_parameters": 3}, "Did you mean 'min_num_params'"),
    ],
)
def test_invalid_setting_gives_an_error_that_says_what_to_do(given, text):
    with pytest.raises((ConfigurationError, TypeError), match=text):
        FullyShardedDataParallelPlugin(**given)


def test_old_torch_is_rejected(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    with pytest.raises(
        ConfigurationError, match=r"2\.11 or newer, but torch 2\.10\.0 is installed"
    ):
        FSDP2Backend()


def test_config_objects_of_fsdp1_set_the_state_dict_type():
    def kind(**given):
        return FullyShardedDataParallelPlugin(**given).state_dict_type

    assert kind(state_dict_config=FullStateDictConfig(True, True)) == "FULL_STATE_DICT"
    assert kind(optim_state_dict_config=ShardedOptimStateDictConfig(True)) == _SHARDED
    assert (
        kind(state_dict_config=ShardedStateDictConfig(True), state_dict_type=_SHARDED) == _SHARDED
    )
    with pytest.warns(UserWarning, match="rank0_only have no effect"):
        assert kind(state_dict_config=FullStateDictConfig(True, False)) == "FULL_STATE_DICT"


def test_policies_are_created_from_dicts_and_strings():
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "torch.bfloat16"},
        cpu_offload=CPUOffloadPolicy(),
    )
    policy = plugin.precision_policy(torch.float32)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    offload = plugin.offload_policy(CPU)
    assert isinstance(offload, CPUOffloadPolicy)
    assert not offload.pin_memory, "pinning needs an accelerator"
    with pytest.warns(UserWarning, match="BACKWARD_POST has no effect"):
        FullyShardedDataParallelPlugin(backward_prefetch="BACKWARD_POST")


def test_settings_come_from_environment_and_config_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block,Layer")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    with Accelerator(cpu=True) as accelerator:
        plugin = accelerator.fsdp_plugin
        assert isinstance(accelerator.backend, FSDP2Backend)
        assert plugin.cpu_offload is True
        assert plugin.transformer_cls_names_to_wrap == ["Block", "Layer"]
        assert plugin.reshard_after_forward is False
        assert accelerator.parallelism_config.total_size == 1
    for name in ("ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("FSDP_RESHARD_AFTER_FORWARD")
    path = tmp_path / "config.yaml"
    path.write_text(
        "fsdp_config:\n  fsdp_offload_params: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_min_num_params: 7\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(path))
    with Accelerator(cpu=True) as accelerator:
        plugin = accelerator.fsdp_plugin
        assert (plugin.cpu_offload, plugin.min_num_params) == (True, 7)
        assert plugin.transformer_cls_names_to_wrap == ["Block"]


def test_unsupported_options_of_the_mesh_are_rejected():
    with pytest.raises(ConfigurationError, match=r"1 was started"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    handler = TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.raises(ConfigurationError, match="enable_async_tp is not supported"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_handler=handler))
    with pytest.raises(ConfigurationError, match="has its own implementation of Ulysses"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_backend="deepspeed"))


PRECISION = """
import torch
from accelerate_core import Precision

class Halved(Precision):
    name = "halved"
    api_version = (1, 0)
    compute_dtype = torch.bfloat16
"""


def test_layers_compute_in_the_dtype_of_a_third_party_precision(tmp_path: Path) -> None:
    distribution(tmp_path, "halved", PRECISION, {"precisions": {"halved": "Halved"}})
    code = """
    import torch
    from accelerate_core import Accelerator
    class Sees(torch.nn.Linear):
        def forward(self, x):
            self.seen = str(self.weight.dtype)
            return super().forward(x)
    seen = []
    for precision in ("no", "halved"):
        accelerator = Accelerator(cpu=True, backend="fsdp2", mixed_precision=precision)
        model = accelerator.prepare(Sees(4, 4))
        model(torch.ones(2, 4))
        seen.append(accelerator.unwrap_model(model).seen)
        accelerator.end_training()
    out(seen)
    """

    assert run(tmp_path, code) == ["torch.float32", "torch.bfloat16"]


@pytest.mark.parametrize(
    ("word", "wanted"), [("1", True), ("yes", True), ("no", False), ("0", False)]
)
def test_variable_accepts_all_words_for_true_and_false(
    monkeypatch: pytest.MonkeyPatch, word: str, wanted: bool
) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", word)
    made, _ = resolve_settings(FullyShardedDataParallelPlugin, None, Sources.of(os.environ))
    assert made.cpu_offload is wanted
