"""Config files: those of every version of Accelerate, our templates, and sixty invalid ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate_core.config.files import parse_config, read_config
from accelerate_core.errors import AccelerateError
from accelerate_core.plugins import catalog
from accelerate_launch import devices
from accelerate_launch.cli import cli
from accelerate_launch.options import LAUNCH_OPTIONS
from accelerate_launch.planning import decide, make_plan

TEMPLATES = sorted((Path(__file__).parents[2] / "examples/config_templates").glob("*.yaml"))

# --- files of Accelerate ----------------------------------------------------------------------------

V0_11 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
fp16: true
fsdp_config:
  min_num_params: 2000
  offload_params: false
  sharding_strategy: 1
  fsdp_backward_prefetch_policy: BACKWARD_PRE
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
num_machines: 1
num_processes: 2
use_cpu: true
"""
V0_16 = """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config: {}
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: true
"""
V0_24 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_min_num_params: 2000
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
ipex_config:
  ipex: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
V1_15 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
EXPECTED = {
    "0.11": (V0_11, {"mixed_precision": "fp16", "backend": "fsdp2", "FSDP_MIN_NUM_PARAMS": 2000}),
    "0.16": (V0_16, {"mixed_precision": "bf16", "backend": None, "cpu": True}),
    "0.24": (V0_24, {"mixed_precision": "no", "backend": "fsdp2", "dynamo_backend": "INDUCTOR"}),
    "1.15": (V1_15, {"backend": "fsdp2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": 2}),
}


@pytest.mark.parametrize("version", EXPECTED)
def test_accelerate_config_files_of_every_version_are_read(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, expected = EXPECTED[version]
    made = decide({}, {"HOME": str(tmp_path)}, parse_config(text, Path("theirs.yaml")))
    values = {name: one.value for name, one in {**made.chosen, **made.contributed}.items()}
    assert {name: values[name] for name in expected} == expected
    assert values["num_processes"] == 2
    said = [text for text in caplog.messages if "obsolete keys" in text]
    assert len(said) == (1 if "ipex_config" in text else 0)
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    result = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert result.exit_code == 0, result.output


def test_update_writes_current_keys_and_keeps_a_backup(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(V0_16)
    result = CliRunner().invoke(cli, ["config", "update", "--config_file", str(file)])
    assert result.exit_code == 0, result.output
    made = yaml.safe_load(file.read_text())
    assert made["dynamo_config"] == {"backend": "NO"}
    assert "main_training_function" not in made
    assert (tmp_path / "old.yaml.bak").read_text() == V0_16
    again = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert again.exit_code == 0, again.output


# --- templates ------------------------------------------------------------------------------------

MISSING = {
    "deepspeed": "accelerate-core[deepspeed]",
    "deepspeed_file": "accelerate-core[deepspeed]",
    "fp8": "accelerate-core[fp8]",
    "megatron": "accelerate-core[megatron]",
}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_launches_or_names_the_missing_package(
    template: Path, tmp_path: Path
) -> None:
    from accelerate_core.plugins.discovery import installed

    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 3}}')
    arguments = ["launch", "--config_file", str(template), "--dry_run"]
    if template.stem == "mpi_cpu":
        arguments += ["--mpirun_hostfile", str(tmp_path / "hosts")]
    # The command is only printed, so a fake mpirun is enough to tell its version.
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    gpus = template.stem in ("multi_gpu", "multi_xpu", "single_accelerator")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "SLURM_")):
                patch.delenv(name)
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        patch.chdir(tmp_path)
        result = CliRunner().invoke(cli, [*arguments, str(tmp_path / "train.py")])
    plugin = template.stem.partition("_")[0]
    here = {record.name for record in installed().plugins}
    if template.stem in MISSING and plugin not in here:
        assert f'pip install "{MISSING[template.stem]}"' in result.output
    else:
        assert result.exit_code == 0, result.output
        assert "train.py" in result.output
        assert gpus or "ACCELERATE_CONFIG_FILE" in result.output


#: Every key for fp8 in Accelerate's files, in each of its spellings.
FP8 = """
mixed_precision: fp8
fp8_config:
  backend: te
  use_autocast_during_eval: false
  margin: 0
  interval: 1
  fp8_format: E4M3
  amax_history_length: 16
  amax_compute_algorithm: most_recent
  override_linear_precision: [false, false, false]
  use_mxfp8_block_scaling: false
  optimization_level: O1
  enable_fsdp_float8_all_gather: true
  pad_inner_dim: false
"""
FP8_LAUNCHED = """
mixed_precision: fp8
fp8_config:
  fp8_backend: MSAMP
  fp8_format: hybrid
  fp8_amax_history_len: 16
  fp8_amax_compute_algo: max
  fp8_override_linear_precision: false
  fp8_use_mxfp8_block_scaling: false
  fp8_opt_level: O1
  fp8_enable_fsdp_float8_all_gather: true
  fp8_pad_inner_dim: false
"""


def test_accelerate_keys_for_fp8_are_read(tmp_path: Path) -> None:
    from accelerate_core.config.lookup import Sources, resolve_settings
    from accelerate_core.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

    file = tmp_path / "c.yaml"
    for text, form, algorithm in (
        (FP8, "E4M3", "most_recent"),
        (FP8_LAUNCHED, "HYBRID", "max"),
    ):
        file.write_text(text)  # a run would refuse options of several libraries together
        sources = Sources({}, read_config(str(file)))
        ao, te, msamp = (
            resolve_settings(cls, None, sources, owner="fp8")[0]
            for cls in (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
        )
        assert (ao.pad_inner_dim, ao.enable_fsdp_float8_all_gather) == (False, True)
        assert (te.fp8_format, te.amax_history_len, te.amax_compute_algo) == (form, 16, algorithm)
        assert te.override_linear_precision == (False, False, False)
        assert msamp.opt_level == "O1"
    file.write_text(FP8.replace("[false, false, false]", "[false, true, false]"))
    result = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert result.exit_code == 2
    assert "Transformer Engine removed the option" in " ".join(result.output.split())


# --- mistakes -------------------------------------------------------------------------------------

#: For the text of each file with one mistake, the words that the error must contain.
WRONG_FILES: dict[str, tuple[str, ...]] = {
    "num_proceses: 2": ("line 1", "Did you mean 'num_processes'?"),
    "mixed_precison: bf16": ("line 1", "Did you mean 'mixed_precision'?"),
    "debug: true\nmachine_rnk: 0": ("line 2", "Did you mean 'machine_rank'?"),
    "zebra: 1": ("Unknown key 'zebra'", "line 1"),
    "1: 2": ("Unknown key '1'",),
    "num_processes: two": ("line 1", "must be a whole number"),
    "num_processes: 2.5": ("must be a whole number",),
    "num_processes: [2]": ("must be a whole number",),
    "num_processes: true": ("must be a whole number",),
    "num_processes: 0": ("must be at least 1",),
    "num_processes: -4": ("must be at least 1",),
    "num_machines: 0": ("must be at least 1",),
    "num_machines: 2:1": ("begins with the larger number", "line 1"),
    "num_machines: x": ("must be a number of machines", "line 1"),
    "num_processes: 3\nnum_machines: 2": ("is not divisible by num_machines=2", "line 1"),
    "num_machines: 2": ("needs --main_process_ip",),
    "machine_rank: 1": ("must be less than", "line 1"),
    "machine_rank: -1": ("must be at least 0",),
    "main_process_port: 70000": ("must be at most 65535", "line 1"),
    "main_process_port: http": ("must be a whole number",),
    "main_process_ip: a b": ("must be an address", "line 1"),
    "use_cpu: perhaps": ("is not a boolean", "line 1"),
    "debug: 3": ("is not a boolean",),
    "use_cpu: {a: 1}": ("is not a boolean",),
    "mixed_precision: bf61": ("Did you mean 'bf16'?", "line 1"),
    "mixed_precision: [fp16]": ("must be a string",),
    "fp8_config:\n  fp8_backnd: te": ("line 2", "Did you mean 'fp8_backend'?"),
    "fp8_config:\n  backend: tea": ("line 2", "Did you mean 'TE'?"),
    "fp8_config:\n  margin: 0\n  amax_history_size: 3": (
        "line 3",
        "Did you mean 'amax_history_len'?",
    ),
    "fp8_config:\n  opt_level: O3": ("line 2", "is not one of 'O1', 'O2'"),
    "backend: dpd": ("Did you mean 'ddp'?",),
    "launcher: torchrum": ("Did you mean 'torchrun'?",),
    "distributed_type: MULTIGPU": ("Did you mean 'MULTI_GPU'?", "line 1"),
    "distributed_type: FDSP": ("Did you mean 'FSDP'?",),
    "compute_environment: LOCAL": ("is not one of", "line 1"),
    "compute_environment: AMAZON_SAGEMAKER": ("cannot be started from here",),
    "gpu_ids: 0,0": ("must be distinct numbers", "line 1"),
    "gpu_ids: first": ("must be distinct numbers",),
    "gpu_ids: [0, 1]": ("must be a string",),
    "max_restarts: -1": ("must be at least 0",),
    "monitor_interval: 0": ("must be a positive number",),
    "monitor_interval: .nan": ("must be a number",),
    "monitor_interval: soon": ("must be a number",),
    "rdzv_backend: c10": ("Did you mean 'c10d'?", "line 1"),
    "rdzv_conf: timeout": ("must have the form key=value", "line 1"),
    "tee: 7": ("must have the form", "line 1"),
    "gradient_accumulation_steps: 0": ("must be at least 1",),
    "fsdp_config: 3": ("must be a mapping", "line 1"),
    "fsdp_config:\n  fsdp_offload_param: true": ("line 2", "Did you mean 'fsdp_offload_params'?"),
    "fsdp_config:\n  fsdp_min_num_params: few": ("line 2", "must be a whole number"),
    "fsdp_config:\n  fsdp_min_num_params: -1": ("line 2", "must be at least 0"),
    "fsdp_config:\n  fsdp_use_orig_params: maybe": ("line 2", "is not a boolean"),
    "fsdp_config:\n  fsdp_state_dict_type: FULL": ("line 2", "is not one of"),
    "fsdp_config:\n  fsdp_version: two": ("line 2", "must be a whole number"),
    "parallelism_config:\n  tp_sise: 2": ("line 2", "Did you mean 'tp_size'?"),
    "parallelism_config:\n  tp_size: 0": ("line 2", "must be at least 1"),
    "parallelism_config: 2": ("must be a mapping",),
    "ddp_config:\n  comm_hook: fp61": ("line 2", "Did you mean 'fp16'?"),
    "dynamo_config:\n  dynamo_mod: x": ("line 2", "Did you mean 'dynamo_mode'?"),
    "dynamo_config:\n  dynamo_mode: fast": ("line 2", "is not one of"),
    "mpirun_config:\n  hosts: a": ("line 2", "mpirun_config"),
    "mpirun_config:\n  mpirun_hostfile: nowhere": ("Cannot read the host file",),
    "deepspeed_config: on": ("must be a mapping",),
    "debug: true\ndebug: false": ("defines 'debug' twice", "lines 1 and 2"),
    "debug: [": ("not valid YAML", "line"),
    "debug: true\n  use_cpu: x": ("not valid YAML", "line 2"),
    "\tdebug: true": ("not valid YAML", "line 1"),
    "debug: !!python/object:os.system x": ("not valid YAML",),
    "? [a]\n: 1": ("is not a plain name", "line 1"),
    "- debug": ("must be a mapping",),
    "just words": ("must be a mapping",),
    "when: 2020-13-45": ("cannot represent",),
    "[" * 3000: ("cannot represent",),
    "---\na: 1\n---\nb: 2": ("not valid YAML",),
}

WRONG_COMMANDS: dict[tuple[str, ...], str] = {
    ("--num_procs", "2"): "Did you mean '--num_processes'?",
    ("--num_processes", "two"): "'two' is not a valid integer",
    ("--num_processes", "0"): "0 is not in the range",
    ("--monitor_interval", "soon"): "is not a valid float",
    ("--monitor_interval", "nan"): "must be a positive number",
    ("--gpu_ids", "0,0"): "must be distinct numbers",
    ("--mixed_precision", "bf61"): "Did you mean 'bf16'?",
    ("--rdzv_backend", "c10"): "Did you mean 'c10d'?",
    ("--machine_rank", "3"): "must be less than",
    ("--main_process_port", "99999", "--num_processes", "2"): "is not in the range 0<=x<=65535",
    ("--tee", "9"): "must have the form",
    ("--cpu", "--multi_gpu"): "contradicts",
    ("--module", "--no_python"): "cannot be used together",
    ("--config_file", "nowhere.yaml"): "Cannot read the config file nowhere.yaml",
}


def test_there_are_at_least_sixty_wrong_examples() -> None:
    assert len(WRONG_FILES) + len(WRONG_COMMANDS) >= 60


@pytest.mark.parametrize("text", WRONG_FILES, ids=lambda text: repr(text[:40]))
def test_invalid_config_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (tmp_path / "s.py").write_text("")
    _clear(["launch", "--config_file", str(file), str(tmp_path / "s.py")], WRONG_FILES[text])


def test_all_mistakes_in_a_config_file_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "mixed_precision: bf61\nnum_processes: many\ndebugg: true\nzebra: 1\n"
        "dynamo_config:\n  mode: fast\n  colour: red\nbackend: fdsp\n"
        "checkpointer: directroy\n"
    )
    for command in (
        ["config", "validate", str(path)],
        ["launch", "--config_file", str(path), "s.py"],
    ):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code != 0
        text = done.output
        assert "There are 8 mistakes" in text, text
        assert [
            f"line {line}" for line in (1, 2, 3, 4, 6, 7, 8, 9) if f"line {line}" not in text
        ] == []


def test_config_file_that_needs_a_missing_package_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.NAMES["backend"], "warp", "warp")
    (tmp_path / "c.yaml").write_text("backend: warp")
    (tmp_path / "s.py").write_text("")
    arguments = ["launch", "--config_file", str(tmp_path / "c.yaml"), str(tmp_path / "s.py")]
    _clear(arguments, ('pip install "accelerate-core[warp]"',))


@pytest.mark.parametrize("arguments", WRONG_COMMANDS, ids=lambda words: " ".join(words))
def test_invalid_command_line_is_one_clear_error(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "s.py").write_text("")
    _clear(["launch", *arguments, str(tmp_path / "s.py")], (WRONG_COMMANDS[arguments],))


@pytest.mark.parametrize("kind", ["latin", "folder", "unreadable", "binary"])
def test_unreadable_config_file_is_one_clear_error(kind: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    file = tmp_path / "c.yaml"
    said: tuple[str, ...] = ("Cannot read the config file",)
    if kind == "folder":
        file.mkdir()
    elif kind == "unreadable":
        file.write_text("debug: true")
        file.chmod(0)
        if os.access(file, os.R_OK):
            pytest.skip("this user may read everything")
    else:
        file.write_bytes("debug: ä".encode("latin-1") if kind == "latin" else bytes(range(256)))
        said = ("codec can't decode byte",) if kind == "latin" else ("config file",)
    _clear(["launch", "--config_file", str(file), str(tmp_path / "s.py")], said)


def _clear(arguments: list[str], said: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, arguments)
    shown = " ".join(result.output.split())
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert all(part in shown for part in said), result.output
    assert "Traceback" not in shown
    assert len(result.output) < 1500


# --- random input ---------------------------------------------------------------------------------

KEYS = [key for option in LAUNCH_OPTIONS for key in option.yaml if "." not in key]
KEYS += ["distributed_type", "compute_environment", "fsdp_config", "parallelism_config", "fp16"]
KEYS += ["ddp_config", "dynamo_config", "dynamo_backend", "mpirun_config", "backend", "ipex_config"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.dates(),
    st.sampled_from(["NO", "FSDP", "bf16", "c10d", "0,1", "127.0.0.1", "MULTI_CPU"]),
)  # fmt: skip
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(
        st.sampled_from(
            ["fsdp_version", "tp_size", "comm_hook", "dynamo_mode", "backend", "x", "1"]
        ),
        SCALARS,
        max_size=3,
    ),
)


@pytest.fixture(scope="module")
def counted_once() -> Iterator[None]:
    """Count the accelerators once, because counting may import torch for each of 300 examples."""
    count = devices.count_accelerators(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "count_accelerators", lambda environ: count)
        yield


@pytest.mark.usefixtures("counted_once")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=8)), VALUES, max_size=5))
def test_any_mapping_is_accepted_or_refused_cleanly(values: dict[str, Any]) -> None:
    _taken_or_refused(yaml.safe_dump(values, allow_unicode=True))


@pytest.mark.usefixtures("counted_once")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(alphabet="abn_u:{}[]-'\"#&*!|>%@` \n\t0123456789é\x00\x85", max_size=60))
def test_any_text_is_accepted_or_refused_cleanly(text: str) -> None:
    _taken_or_refused(text)


def _taken_or_refused(text: str) -> None:
    said, mistakes = "", 1
    try:
        decide({}, {"PATH": "/usr/bin", "HOME": os.devnull}, parse_config(text, Path("c.yaml")))
    except AccelerateError as error:
        said = str(error)
        mistakes += len(getattr(error, "mistakes", ()))
        refused = True
    else:
        refused = False
    assert refused == bool(said.strip())
    assert len(said.splitlines()) <= 6 * mistakes


def test_config_file_values_reach_the_processes_as_variables(tmp_path: Path) -> None:
    path, script = tmp_path / "c.yaml", tmp_path / "s.py"
    path.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
    )
    script.write_text("")
    plan = make_plan(str(script), [], {"cpu": True}, {}, read_config(path))
    assert {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    }.items() <= plan.environment.items()
    given = {"cpu": True, "mixed_precision": "no"}
    overruled = make_plan(str(script), [], given, {}, read_config(path)).environment
    assert overruled["ACCELERATE_MIXED_PRECISION"] == "no"
