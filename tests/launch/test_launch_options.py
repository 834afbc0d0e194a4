"""Launch options of plugins, the options of Accelerate's launcher, and launcher plugins."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import dummies
import pytest
from click.testing import CliRunner
from launched import run_cli
from support import clean_environment

from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import installed
from accelerate_launch import accelerate_options
from accelerate_launch.cli import cli
from accelerate_launch.paths import cache_directory
from accelerate_launch.schemas import plugin_schemas

MEGATRON = """
tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree
num_micro_batches sequence_parallelism recompute_activations use_distributed_optimizer
gradient_clipping recompute_granularity recompute_method recompute_num_layers attention_backend
expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
use_rotary_position_embeddings
"""

#: Every option of Accelerate 1.15's launcher with a valid value; None for a flag.
ACCELERATE_OPTIONS: dict[str, str | None] = {
    "quiet": None, "cpu": None, "multi_gpu": None, "tpu": None, "mixed_precision": "bf16",
    "num_processes": "2", "num_machines": "1", "num_cpu_threads_per_process": "1",
    "enable_cpu_affinity": None, "dynamo_backend": "inductor", "dynamo_mode": "default",
    "dynamo_use_fullgraph": None, "dynamo_use_dynamic": None,
    "dynamo_use_regional_compilation": None, "use_deepspeed": None, "use_fsdp": None,
    "use_parallelism_config": None, "use_megatron_lm": None, "gpu_ids": "all",
    "same_network": None, "machine_rank": "0", "main_process_ip": "127.0.0.1",
    "main_process_port": "0", "tee": "3", "log_dir": "logs", "role": "trainer",
    "rdzv_backend": "static", "rdzv_conf": "timeout=900", "max_restarts": "0",
    "monitor_interval": "1", "module": None, "no_python": None, "tpu_cluster": None,
    "no_tpu_cluster": None, "tpu_use_sudo": None, "vm": "a", "env": "A=1",
    "main_training_function": "main", "downcast_bf16": None, "deepspeed_config_file": "ds.json",
    "zero_stage": "2", "offload_optimizer_device": "none", "offload_param_device": "none",
    "offload_optimizer_nvme_path": "/n", "offload_param_nvme_path": "/n",
    "gradient_accumulation_steps": "1", "gradient_clipping": "1.0", "zero3_init_flag": "true",
    "zero3_save_16bit_model": "true", "deepspeed_hostfile": "h",
    "deepspeed_exclusion_filter": "h:0", "deepspeed_inclusion_filter": "h:1",
    "deepspeed_multinode_launcher": "pdsh", "deepspeed_moe_layer_cls_names": "Moe",
    "fsdp_version": "2", "fsdp_offload_params": "false", "fsdp_min_num_params": "10",
    "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "true",
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_forward_prefetch": "false", "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true", "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false", "fp8_backend": "te",
    "fp8_use_autocast_during_eval": None, "fp8_margin": "0", "fp8_interval": "1",
    "fp8_format": "HYBRID", "fp8_amax_history_len": "1024", "fp8_amax_compute_algo": "max",
    "fp8_override_linear_precision": "false,false,false", "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": "true", "fp8_pad_inner_dim": "true",
    "aws_access_key_id": "k", "aws_secret_access_key": "k", "debug": None,
    "mpirun_hostfile": "hosts", "parallelism_config_dp_replicate_size": "1",
    "parallelism_config_dp_shard_size": "1", "parallelism_config_tp_size": "1",
    "parallelism_config_cp_size": "1", "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather", "parallelism_config_sp_size": "1",
    "parallelism_config_sp_backend": "torch", "parallelism_config_sp_seq_length": "8",
    "parallelism_config_sp_seq_length_is_variable": "true",
    "parallelism_config_sp_attn_implementation": "sdpa",
    **{f"megatron_lm_{name}": "1" for name in MEGATRON.split()},
    "megatron_lm_recompute_granularity": "full", "megatron_lm_recompute_method": "uniform",
    "megatron_lm_attention_backend": "true",
}  # fmt: skip

#: Options that a dry run alone can't test: they need accelerators, a module or a host file.
APART = {"multi_gpu", "module", "no_python", "mpirun_hostfile"}


def test_only_the_catalog_maps_options_to_plugins() -> None:
    owners = {
        name: accelerate_options.owner_of_option(name)
        for name in ("tpu", "vm", "fp8_format", "num_machines")
    }
    assert owners == {"tpu": "xla", "vm": "xla", "fp8_format": "fp8", "num_machines": None}
    assert not re.search("megatron|xla|fp8", Path(accelerate_options.__file__).read_text())


@pytest.mark.parametrize("name", sorted(ACCELERATE_OPTIONS.keys() - APART))
def test_every_accelerate_option_is_accepted_or_refused_with_a_reason(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text("")
    value = [ACCELERATE_OPTIONS[name]] if ACCELERATE_OPTIONS[name] is not None else []
    owner = accelerate_options.owner_of_option(name)
    asked = name in catalog.SWITCHES or owner not in {one.name for one in installed().plugins}
    kind = "--mixed_precision" if owner == "fp8" else "--backend"
    more = [] if owner is None or asked else [kind, owner]
    arguments = ["launch", *more, f"--{name}", *value, "--dry_run", str(tmp_path / "s.py")]
    result = CliRunner().invoke(cli, [text for text in arguments if text is not None])
    if result.exit_code == 0:
        return
    reasons = ('pip install "accelerate-core[', "is not supported. ")
    # The ranks refuse these without another option.
    reasons += ("'ds.json' is not an existing file", "needs mixed_precision='bf16'")
    reasons += ("without a compiler backend", "is an option of Transformer Engine")
    reasons += ("The host file 'h'", "needs a host file", "Name it with --tpu_name")
    assert result.exit_code == 2, result.output
    assert any(reason in result.output for reason in reasons), result.output
    assert not result.output.startswith("Traceback")


def test_accelerate_options_for_modules_programs_and_gpus(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "s.py").write_text("")
    launch = ["launch", "--cpu", "--dry_run"]
    run = lambda *more: CliRunner().invoke(cli, [*launch, *more])  # noqa: E731
    assert "-m json.tool" in run("-m", "json.tool").output
    assert sys.executable in run("--no_python", sys.executable).output
    assert "contradicts" in run("--multi_gpu", str(tmp_path / "s.py")).output


def test_plugin_options_are_listed_under_the_plugins_name() -> None:
    text = CliRunner().invoke(cli, ["launch", "--help"]).output
    assert "Backend fsdp2 (accelerate-fsdp2" in text
    assert "Backend ddp (accelerate-ddp" in text
    assert text.index("--use_fsdp") > text.index("Backend fsdp2")
    assert "--ddp_bucket_cap_mb N" in text
    assert "default: 25" in text


def test_help_lists_each_option_once_and_no_fsdp1_options(tmp_path: Path) -> None:
    text = CliRunner().invoke(cli, ["launch", "--help"]).output
    rows = re.findall(r"^  (-.*?)(?:  |$)", text, re.M)
    listed = [name for row in rows for name in re.findall(r"--[\w-]+", row)]
    assert len({name.replace("-", "_") for name in listed}) == len(listed) > 80
    assert not [name for name in listed if "-" in name.strip("-")]
    older = ("sharding_strategy", "backward_prefetch", "limit_all_gathers", "use_orig_params")
    older += ("param_init_fn", "state_dict_config")
    assert not [name for name in listed if name.endswith(older)]
    (tmp_path / "s.py").write_text("")
    unused = ["--same-network", "--main_training_function", "train"]
    arguments = ["launch", "--cpu", "--dry_run", *unused, str(tmp_path / "s.py")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert "--same_network has no effect: " in result.output
    assert "--main_training_function has no effect: " in result.output


@pytest.mark.needs("torchft")
def test_backend_that_is_built_on_another_one_shares_its_options(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    chosen = ["--backend", "torchft_fsdp2", "--num_processes", "4"]
    options = [*chosen, "--fsdp_offload_params", "true"]
    arguments = ["launch", "--cpu", "--dry_run", *options, str(tmp_path / "s.py")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "FSDP_OFFLOAD_PARAMS" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fsdp_offload_param", "true"], "Did you mean '--fsdp_offload_params'?"),
        (["--use_fsdp", "--fsdp_min_num_params", "few"], "must be a whole number"),
        (["--use_fsdp", "--fsdp_min_num_params", "-3"], "must be at least 0"),
        (
            ["--use_fsdp", "--fsdp_state_dict_type", "SHARDED_STATE"],
            "Did you mean 'SHARDED_STATE_DICT'?",
        ),
        (["--use_fsdp", "--fsdp_use_orig_params", "maybe"], "The script 'maybe' does not exist"),
        (["--fsdp_offload_params", "true"], "Add --use_fsdp or --backend fsdp2"),
        (["--use_fsdp", "--backend", "ddp"], "Leave one of them out"),
        (["--parallelism_config_tp_size", "0"], "must be at least 1"),
        (["--ddp_comm_hook", "fp61"], "Did you mean 'fp16'?"),
        (["--megatron_lm_tp_degree", "2"], "Add --use_megatron_lm or --backend megatron"),
        (["--fp8_format", "HYBRID"], "Add --mixed_precision fp8, or leave the option out"),
        (["--mixed_precision", "fp8", "--fp8_backend", "tee"], "Did you mean 'TE'?"),
        (["--mixed_precision", "fp8", "--fp8_opt_lvl", "O1"], "Did you mean '--fp8_opt_level'?"),
        (
            ["--tpu_nam", "a"],
            "The plugin 'xla' has no option --tpu_nam. Did you mean '--tpu_name'?",
        ),
        (["--aws_access_key_id", "k"], "Don't pass credentials on a command line"),
    ],
)
def test_invalid_plugin_options_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "s.py").write_text("")
    result = CliRunner().invoke(cli, ["launch", *arguments, str(tmp_path / "s.py")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_boolean_plugin_option_needs_no_value(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    for value in ([], ["true"]):
        arguments = ["launch", "--use-fsdp", "--fsdp-offload-params", *value, "--dry_run"]
        result = CliRunner().invoke(cli, [*arguments, str(tmp_path / "s.py"), "--fsdp_y"])
        assert result.exit_code == 0, result.output
        assert "FSDP_OFFLOAD_PARAMS  true" in result.output
        assert "s.py --fsdp_y" in "".join(result.output.splitlines())


@pytest.mark.parametrize(
    "values",
    [
        {"backend": "ao", "recipe": "rowwise", "pad_inner_dim": "true"},
        {"backend": "te", "te_recipe": "delayed", "amax_history_len": "8"},
    ],
)
def test_fp8_options_are_passed_on_as_environment_variables(
    tmp_path: Path, values: dict[str, str]
) -> None:
    (tmp_path / "s.py").write_text("")
    # Two settings classes of fp8 have a field `recipe`.
    options = [word for name, value in values.items() for word in (f"--fp8_{name}", value)]
    arguments = ["launch", "--cpu", "--mixed_precision", "fp8", *options]
    result = CliRunner().invoke(cli, [*arguments, "--dry_run", str(tmp_path / "s.py")])
    assert result.exit_code == 0, result.output
    for name, value in values.items():
        line = rf"ACCELERATE_FP8_{name.upper()} +{value} "
        assert re.search(line, result.output), (name, result.output)


def test_mesh_sizes_request_a_mesh(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    arguments = ["launch", "--cpu", "--num_processes", "2", "--parallelism_config_tp_size", "2"]
    arguments.append("--dry_run")
    output = CliRunner().invoke(cli, [*arguments, str(tmp_path / "s.py")]).output
    assert "ACCELERATE_USE_PARALLELISM_CONFIG  true" in output
    assert "PARALLELISM_CONFIG_TP_SIZE" in output


# --- plugins are imported once --------------------------------------------------------------------

RING = """
import sys
open({log!r}, "a").write("imported\\n")
from accelerate_core import Backend, BackendSettings, Claim, option, settings

@settings(argument="halo_plugin")
class Halo(BackendSettings):
    chunk_mb: int = option(default=25, help="size of a chunk in MiB", ge=1)
    hostfile: str = option(default="", help="hosts to start on", env="HALO_HOSTFILE")

class Plugin(Backend):
    name = "halo"
    api_version = (1, 0)
    reduces_gradients = "never"
    Settings = Halo
    @classmethod
    def detect(cls, request):
        return Claim(50, "asked") if request.env_flag("ACCELERATE_USE_HALO") else None

class Launcher:
    name = "halo"
    api_version = (1, 0)
    def accepts(self, plan):
        return plan.num_machines == 1
    def launch_command(self, plan):
        return [sys.executable, "-c", "print('started by halo on', " + repr(
            plan.contributed["HALO_HOSTFILE"].value) + ")"]

class Extension:
    name = "glow"
    api_version = (1, 0)
    Settings = settings(argument="glow_plugin")(
        type("Glow", (BackendSettings,), {"__annotations__": {"every": int}, "every": option(
            default=1, help="steps between two glows")}))
    @classmethod
    def detect(cls, request):
        return Claim(50, "asked") if request.env_flag("ACCELERATE_USE_GLOW") else None

import click
@click.command()
def command():
    '''Draw a halo.'''
    click.echo("halo drawn")
"""


@pytest.fixture
def halo(tmp_path: Path) -> dict[str, str]:
    groups = {
        "backends": {"halo": "Plugin"},
        "launchers": {"halo": "Launcher"},
        "commands": {"halo": "command"},
        "extensions": {"glow": "Extension"},
        "triggers": {
            "ACCELERATE_USE_HALO": "Plugin",
            "HALO_HOSTFILE": "Launcher",
            "ACCELERATE_USE_GLOW": "Extension",
        },
    }
    log = str(tmp_path / "log")
    dummies.distribution(tmp_path, "halo", RING.replace("{log!r}", repr(log)), groups)
    (tmp_path / "s.py").write_text("print('plain')")
    return {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_plugin_is_imported_only_once_for_its_options(halo: dict[str, str], tmp_path: Path) -> None:
    for _ in range(2):
        done = run_cli("launch", "--help", env=halo, forked=True)
        assert "--halo_chunk_mb N" in done.stdout, done.stderr
    assert (tmp_path / "log").read_text() == "imported\n"
    assert (
        "dummy_halo:Plugin"
        in Path(halo["XDG_CACHE_HOME"], "accelerate-core", "plugins.json").read_text()
    )
    package = tmp_path / "dummy_halo" / "__init__.py"
    package.write_text(package.read_text().replace("chunk_mb", "piece_mb"))
    assert "--halo_piece_mb N" in run_cli("launch", "--help", env=halo, forked=True).stdout


def test_launch_without_plugin_options_imports_no_plugin(
    halo: dict[str, str], tmp_path: Path
) -> None:
    done = run_cli("launch", "--cpu", "s.py", env=halo, cwd=tmp_path)
    assert done.stdout == "plain\n"
    assert not (tmp_path / "log").exists()


def test_launcher_plugin_is_selected_by_its_option(halo: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("halo_config:\n  hostfile: there\n")
    asked = {
        ("--use_halo", "--halo_hostfile", "here"): "here",
        ("--config_file", "c.yaml"): "there",
    }
    for arguments, host in asked.items():
        done = run_cli("launch", *arguments, "s.py", env=halo, cwd=tmp_path, forked=True)
        assert done.stdout == f"started by halo on {host}\n", done.stderr
    done = run_cli(
        "launch", "s.py", env={**halo, "HALO_HOSTFILE": "around"}, cwd=tmp_path, forked=True
    )
    assert done.stdout == "started by halo on around\n", done.stderr
    variables = {**halo, "HALO_HOSTFILE": "0"}  # a false value requests nothing
    done = run_cli("launch", "--cpu", "s.py", env=variables, cwd=tmp_path, forked=True)
    assert done.stdout == "plain\n", done.stderr


def test_switch_of_an_extension_selects_no_backend(halo: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import os; print(os.environ['ACCELERATE_USE_GLOW'], os.environ['ACCELERATE_GLOW_EVERY'])"
    )
    (tmp_path / "s.py").write_text(script)
    options = ("launch", "--cpu", "--use_glow", "--glow_every", "3")
    done = run_cli(*options, "s.py", env=halo, cwd=tmp_path, forked=True)
    assert done.stdout == "true 3\n", done.stderr
    done = run_cli(*options, "--use_halo", "--dry_run", "s.py", env=halo, cwd=tmp_path, forked=True)
    assert "ACCELERATE_USE_HALO" in done.stdout
    assert "ACCELERATE_USE_GLOW" in done.stdout


def test_command_of_a_plugin_appears_in_the_help(halo: dict[str, str]) -> None:
    shown = run_cli("--help", env=halo, forked=True).stdout
    assert re.search(r"^  halo +from dummy-halo 1", shown, re.M), shown  # without importing it
    assert run_cli("halo", env=halo, forked=True).stdout == "halo drawn\n"


def test_broken_plugin_and_damaged_cache_do_not_affect_other_plugins(tmp_path: Path) -> None:
    dummies.distribution(tmp_path, "torn", "raise OSError('no wafer')", {"backends": {"torn": "X"}})
    cache = tmp_path / "cache" / "accelerate-core" / "plugins.json"
    cache.parent.mkdir(parents=True)
    cache.write_text('{"a": 3')
    env = {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_cli("launch", "--help", env=env, forked=True)
    assert done.returncode == 0
    assert "--fsdp_version" in done.stdout
    assert "torn" not in json.loads(cache.read_text())
    code = (
        "import json; from accelerate_launch.schemas import plugin_schemas;"
        "print(json.dumps({s.name: s.problem for s in plugin_schemas()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(**env), capture_output=True, timeout=90
    )
    assert json.loads(done.stdout)["torn"] == "OSError: no wafer"


def test_unwritable_cache_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate-core").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "accelerate-core"
    assert any(one.name == "ddp" for one in plugin_schemas())
