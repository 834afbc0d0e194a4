"""`MegatronLMPlugin`: Accelerate's names from every source, invalid values, and indivisible sizes."""

from __future__ import annotations

import importlib.machinery
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import case_names, check_case, run_workers

from accelerate_core.config.files import read_config
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.schema import settings_fields
from accelerate_core.errors import ConfigurationError
from accelerate_launch.cli import cli
from accelerate_megatron import MegatronLMDummyDataLoader, build_datasets
from accelerate_megatron import settings as ours
from accelerate_megatron.settings import (
    MegatronLMPlugin,
    Sizes,
)
from accelerate_megatron.split_checks import check_batch, check_model, check_sizes

WORKER = Path(__file__).with_name("megatron_settings_worker.py")
RECORD = Path(__file__).parents[2] / "drop_in" / "signatures.json"
FIELDS = settings_fields(MegatronLMPlugin, owner="megatron")


@pytest.fixture(scope="module")
def run():
    return run_workers(WORKER, 1, timeout=150)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_with_megatron_core(run, case):
    check_case(run, case)


def test_accelerates_fields_are_supported_in_the_same_order():
    told = json.loads(RECORD.read_text())["utils.dataclasses.MegatronLMPlugin"]["()"]
    shown = [f"{field.name}={field.default!r}" for field in FIELDS]
    assert shown == [*told, "forward_runs_step=False", "multiply_batch=False"]


#: Field -> a text and its value, for every field that Accelerate's launcher passes on.
TEXTS = {
    "tp_degree": ("2", 2), "pp_degree": ("2", 2), "num_micro_batches": ("4", 4),
    "use_custom_fsdp": ("False", False), "no_load_optim": ("True", True),
    "no_save_optim": ("true", True), "eod_mask_loss": ("False", False),
    "overlap_cpu_optimizer_d2h_h2d": ("False", False), "optimizer_cpu_offload": ("0", False),
    "use_precision_aware_optimizer": ("no", False), "sequence_parallelism": ("1", True),
    "decoder_last_pipeline_num_layers": ("3", 3), "use_distributed_optimizer": ("true", True),
    "gradient_clipping": ("0.5", 0.5), "recompute_granularity": ("Full", "full"),
    "recompute_method": ("block", "block"), "recompute_num_layers": ("2", 2),
    "attention_backend": ("True", "auto"), "expert_model_parallel_size": ("2", 2),
    "context_parallel_size": ("1", 1), "attention_dropout": ("0.1", 0.1),
    "hidden_dropout": ("0.0", 0.0), "attention_softmax_in_fp32": ("True", True),
    "expert_tensor_parallel_size": ("2", 2), "calculate_per_token_loss": ("false", False),
    "use_rotary_position_embeddings": ("True", True), "recompute_activations": ("false", False),
}  # fmt: skip


def test_options_of_accelerates_launcher_are_variables_keys_and_options(tmp_path):
    environ = {f"MEGATRON_LM_{name.upper()}": text for name, (text, _) in TEXTS.items()}
    file = tmp_path / "c.yaml"
    lines = [f"  megatron_lm_{name}: {text}" for name, (text, _) in TEXTS.items()]
    file.write_text("\n".join(["megatron_lm_config:", *lines]))
    for sources in (Sources(environ), Sources({}, read_config(str(file)))):
        made, provenance = resolve_settings(MegatronLMPlugin, None, sources, owner="megatron")
        for name, (_, value) in TEXTS.items():
            assert getattr(made, name) == value, name
            assert provenance[name].origin != "default"
    shown = {field.cli[0] for field in FIELDS if field.cli}
    assert {f"megatron_lm_{name}" for name in TEXTS} <= shown
    (tmp_path / "s.py").write_text("")
    options = [
        part for name, (text, _) in TEXTS.items() for part in (f"--megatron_lm_{name}", text)
    ]
    started = ["launch", "--cpu", "--num_processes", "4", "--use_megatron_lm"]
    arguments = [*started, *options, "--dry_run"]
    result = CliRunner().invoke(cli, [*arguments, str(tmp_path / "s.py")])
    assert result.exit_code == 0, result.output
    assert re.search(r"MEGATRON_LM_TP_DEGREE\W+2\b", result.output)


def test_the_defaults_change_nothing():
    plugin = MegatronLMPlugin()
    assert plugin.sizes() == Sizes() == plugin.sizes(num_layers=4)
    assert plugin.num_micro_batches is None
    assert set(plugin.transformer_options().values()) == {1}  # only sizes
    assert plugin.optimizer_options() == {"clip_grad": 0.0, "use_distributed_optimizer": False}
    assert (plugin.forward_runs_step, plugin.multiply_batch) == (False, False)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"recompute_activations": True}, {"recompute_granularity": "selective"}),
        (
            {"recompute_method": "block"},
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
        ),
        (
            {"recompute_granularity": "full"},
            {"recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ({"tp_degree": 2, "sequence_parallelism": True}, {"sequence_parallel": True}),
        ({"decoder_last_pipeline_num_layers": 3}, {"num_layers_in_last_pipeline_stage": 3}),
        (
            {"attention_dropout": 0.0, "hidden_dropout": 0.25, "attention_softmax_in_fp32": False},
            {"attention_dropout": 0.0, "hidden_dropout": 0.25, "attention_softmax_in_fp32": False},
        ),
        ({"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 2}),
    ],
)
def test_fields_become_options_of_megatron(given, made):
    options = MegatronLMPlugin(**given).transformer_options()
    assert made.items() <= options.items()


def test_fields_become_options_of_the_optimizer_and_of_data_parallelism():
    plugin = MegatronLMPlugin(
        gradient_clipping=0.5, use_distributed_optimizer=True, attention_backend=False
    )  # fmt: skip
    assert plugin.optimizer_options() == {"clip_grad": 0.5, "use_distributed_optimizer": True}
    assert plugin.ddp_options() == {"use_distributed_optimizer": True}
    assert plugin.attention_backend == "unfused"


def test_interleaving_does_not_batch_messages():
    plugin = MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=2)
    sizes = plugin.sizes(num_layers=8)
    assert (sizes.pp, sizes.vp, plugin.sizes().vp) == (2, 2, 1)
    options = plugin.transformer_options(sizes)
    assert options["virtual_pipeline_model_parallel_size"] == 2
    assert (options["overlap_p2p_comm"], options["batch_p2p_comm"]) == (True, False)
    with pytest.raises(ConfigurationError, match=r"9 layers / \(2 stages x .* 2\) = 2.25"):
        plugin.sizes(num_layers=9)
    with pytest.raises(ConfigurationError, match="pp_degree is 1"):
        plugin.virtual_stages(8, pp=1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp_degre": 2}, "Did you mean 'tp_degree'"),
        ({"tp_degree": 0}, "greater than or equal to 1"),
        ({"use_custom_fsdp": True}, "backend='fsdp2'"),
        ({"consumed_samples": [1, 2, 3, 4]}, "up to three"),
        ({"consumed_samples": [-1]}, "at least 0"),
        ({"optimizer_cpu_offload": True}, "'deepspeed'"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "'deepspeed'"),
        ({"use_precision_aware_optimizer": True}, "use_distributed_optimizer"),
        ({"pipeline_model_parallel_split_rank": 0}, "passed to prepare"),
        ({"encoder_seq_length": 8}, "own length"),
        ({"calculate_per_token_loss": True}, "num_items="),
        ({"custom_model_provider_function": len}, "pass the function itself to prepare"),
        ({"tensorboard_dir": "x"}, "log_with='tensorboard'"),
        ({"set_all_logging_options": True}, "log_with"),
        ({"no_wd_decay_cond": len}, "weight_decay=0"),
        ({"scale_lr_cond": len}, "its own lr"),
        ({"lr_mult": 2.0}, "its own lr"),
        ({"custom_prepare_model_function": len}, "Pass that function to prepare"),
        ({"custom_loss_function": 3}, "must be a function"),
        ({"custom_train_step_kwargs": {"a": 1}}, "custom_train_step_class"),
        ({"attention_backend": "flesh"}, "Did you mean 'flash'"),
        ({"attention_backend": "flash"}, "Transformer Engine"),
        ({"context_parallel_size": 2}, r"ParallelismConfig\(cp_size=2\)"),
        ({"recompute_granularity": "ful"}, "'full' or 'selective'"),
        ({"recompute_granularity": "full", "recompute_activations": True}, "Leave one"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 2}, "'full'"),
        ({"recompute_activations": False, "recompute_method": "block"}, "'full'"),
        (
            {"decoder_last_pipeline_num_layers": 1, "num_layers_per_virtual_pipeline_stage": 1},
            "Leave one",
        ),
        ({"lr_decay_style": "linnear"}, "Did you mean 'linear'"),
        ({"gradient_clipping": -1}, "greater than or equal to 0"),
    ],
)
def test_errors_for_invalid_fields_name_the_alternative(given, text):
    with pytest.raises(ConfigurationError, match=text):
        MegatronLMPlugin(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"seq_lenght": 8}, "'seq_lenght'.*Did you mean 'seq_length'"),
        ({"train_iters": 8}, "a field of MegatronLMPlugin"),
        ({"seq_length": None}, r"seq_length=None\): pass an integer greater than 0"),
        ({"micro_batch_size": 0}, r"micro_batch_size=0\): pass"),
        ({"mock_data": True}, "IndexedDatasetBuilder"),
        ({"data_args_path": "x"}, "read_text"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "tokenizer=AutoTokenizer"),
        ({"mask_prob": 0.1}, "custom_megatron_datasets_provider_function"),
        ({"dataloader_type": "cyclic"}, "shuffle=True"),
        ({"split": "1", "splits_string": "2"}, "Leave one of them out"),
        (
            {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False},
            "Leave one of them out",
        ),
    ],
)
def test_the_placeholder_for_loaders_rejects_invalid_arguments(given, text):
    with pytest.raises(ConfigurationError, match=text):
        MegatronLMDummyDataLoader(**{"seq_length": 8, "micro_batch_size": 2, **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "Pass either data_path, .* or some of"),
        ({"data_path": "a", "test_data_path": "b"}, "Pass either data_path, .* or some of"),
        ({"data_path": ["a", 0.5, "b"]}, "alternating weights and paths"),
        ({"data_path": [0.5]}, "alternating weights and paths"),
        ({"data_path": [0, "a", 1, "b"]}, "greater than 0"),
        ({"data_path": [1, "a", 1, "b"]}, r"pass samples=\(\.\.\.\)"),
        ({"data_path": "a", "split": "1,x"}, "up to three numbers"),
        ({"data_path": "a", "split": "0,0"}, "up to three numbers"),
        ({"data_path": "a", "samples": [1]}, "three numbers, for 'train'"),
        ({"data_path": "a", "reset_position_ids": True}, r"tokenizer=\.\.\. or eod="),
    ],
)
def test_invalid_datasets_are_rejected_before_any_is_built(given, text):
    with pytest.raises(ConfigurationError, match=text):
        build_datasets(None, seq_length=8, **given)


def test_the_placeholder_for_loaders_keeps_its_arguments():
    given = {"seq_length": 8, "micro_batch_size": 2, "data_path": "a", "mask_prob": None}
    assert MegatronLMDummyDataLoader(**given).dataset_args == given


def test_transformer_engine_enables_its_attention_but_not_context_parallelism(monkeypatch):
    spec = importlib.machinery.ModuleSpec("transformer_engine", None)
    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda name: spec)
    assert MegatronLMPlugin(attention_backend="Flash").attention_backend == "flash"
    with pytest.raises(ConfigurationError, match="not even with Transformer Engine"):
        MegatronLMPlugin(context_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "sizes", "text"),
    [
        ({}, Sizes(tp=2, pp=2), r"tp 2 x pp 2 = 4 .* 6 ranks / 4 = 1\.5"),
        ({}, Sizes(ep=4), r"ep 4 x etp 1 x pp 1 = 4 .* 6 ranks / 4 = 1\.5"),
        ({"expert_tensor_parallel_size": 1}, Sizes(tp=2), "ignore the experts' gradients"),
        ({"sequence_parallelism": True}, Sizes(pp=2), "tp_degree is 1"),
        ({"decoder_last_pipeline_num_layers": 1}, Sizes(), "pp_degree is 1"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, Sizes(), "pp_degree is 1"),
    ],
)
def test_sizes_that_do_not_match_the_ranks_are_rejected(given, sizes, text):
    with pytest.raises(ConfigurationError, match=text):
        check_sizes(MegatronLMPlugin(**given), sizes, 6)


SMALL = {"num_layers": 4, "num_attention_heads": 6, "num_query_groups": 2, "hidden_size": 48}


@pytest.mark.parametrize(
    ("more", "sizes", "text"),
    [
        ({}, Sizes(tp=4), r"num_attention_heads 6 / tp 4 = 1\.5 .* '1', '2', '3', '6'"),
        ({}, Sizes(tp=6), r"num_query_groups 2 / tp 6 = 0\.333"),
        ({"ffn_hidden_size": 13}, Sizes(tp=2), r"ffn_hidden_size 13 / tp 2 = 6\.5"),
        ({}, Sizes(pp=3), r"4 layers / pp 3 = 1\.33"),
        ({}, Sizes(pp=2, vp=4), r"4 layers / pp 2 x vp 4 = 0\.5"),
        (
            {"num_layers_in_last_pipeline_stage": 2},
            Sizes(pp=4),
            r"\(4 layers - 2\) / \(4 stages - 1\)",
        ),
        ({"num_layers_in_last_pipeline_stage": 4}, Sizes(pp=2), "greater than 0"),
        ({"num_moe_experts": 4}, Sizes(ep=3), r"num_moe_experts 4 / ep 3 = 1\.33"),
        ({}, Sizes(ep=2), "the model has none"),
        ({"num_moe_experts": 4}, Sizes(tp=2), "sequence_parallelism=True"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_rejected(more, sizes, text):
    with pytest.raises(ConfigurationError, match=text):
        check_model({**SMALL, **more}, sizes)


def test_divisible_sizes_are_accepted():
    assert check_sizes(MegatronLMPlugin(), Sizes(tp=2, pp=2), 8) == 2
    check_model(SMALL, Sizes(tp=2, pp=2, vp=2))
    check_model({**SMALL, "num_layers_in_last_pipeline_stage": 1}, Sizes(pp=4))
    assert check_batch(8, 4, Sizes(pp=2, vp=2)) == 2
    with pytest.raises(ConfigurationError, match=r"6 / num_micro_batches 4 = 1\.5"):
        check_batch(6, 4, Sizes())
    with pytest.raises(ConfigurationError, match=r"num_micro_batches 3 / 2 = 1\.5"):
        check_batch(6, 3, Sizes(pp=2, vp=2))


def test_rotary_positions_must_match_the_model():
    plugin = MegatronLMPlugin(use_rotary_position_embeddings=True)
    plugin.check_positions(rotary=True, model="Llama")
    MegatronLMPlugin().check_positions(rotary=False, model="GPT-2")
    with pytest.raises(ConfigurationError, match="GPT-2 has learned positions"):
        plugin.check_positions(rotary=False, model="GPT-2")


@pytest.mark.parametrize(
    "given", [{"seq_length": 8}, {"decoder_seq_length": 8}, {"is_train_batch_min": False}]
)
def test_a_field_without_effect_warns(given):
    with pytest.warns(UserWarning, match=f"{next(iter(given))} has no effect"):
        MegatronLMPlugin(**given)


def test_every_supported_field_is_used():
    package = {path.name: path.read_text() for path in Path(ours.__file__).parent.glob("*.py")}
    own = package.pop("settings.py")
    others = "\n".join(package.values())
    for field in FIELDS:
        if field.name in ours._REFUSED or field.help == "no effect":
            continue
        by_name = rf"\b(plugin|args)\.{field.name}\b|\"{field.name}\""
        assert re.search(by_name, others) or re.search(rf"self\.{field.name}\b", own), field.name
