"""The command `accelerate` accepts everything that Accelerate's command accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pool
import pytest
import yaml
from support import clean_environment

from accelerate_core.config.files import CONFIG_VARIABLE
from accelerate_drop_in.commands import _make_readable_for_accelerate

#: Runs the command. The first argument is "all" for all plugins, or "bare" for those the drop-in needs.
RUN = """
import importlib.metadata as metadata, sys, warnings
warnings.simplefilter("ignore")
needed = ("core", "launch", "checkpoint", "tracking", "compile", "dispatch", "big-model", "drop-in")
found = [one for group in metadata.entry_points().values() for one in group]
if sys.argv.pop(1) == "bare":
    found = [one for one in found if one.dist.name in [f"accelerate-{name}" for name in needed]]
    metadata.entry_points = lambda **asked: metadata.EntryPoints(found).select(**asked)
from accelerate_drop_in.commands import main
sys.argv[0] = "accelerate"
main()
"""


def accelerate(
    folder: Path, *arguments: str, plugins: str = "all", **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("import sys; print('trained', *sys.argv[1:])")
    environ = clean_environment(HF_HOME=str(folder / "cache"), COLUMNS="100", **environ)
    return pool.run(["-c", RUN, plugins, *arguments], environ, 120, cwd=folder)


@pytest.mark.parametrize("plugins", ["all", "bare"])
@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("--fsdp_offload_params true --fsdp-version=2", "fsdp_offload_params fsdp_version"),
        ("--fp8_backend te --fp8_use_autocast_during_eval", "fp8_backend"),
        ("--cpu --zero_stage 3", "zero_stage"),
        ("--megatron_lm_tp_degree 2", "megatron_lm_tp_degree"),
        ("--parallelism_config_tp_size 2", "parallelism_config_tp_size"),
        ("--aws_access_key_id key", "aws_access_key_id"),
    ],
)
def test_options_of_unused_plugins_are_ignored_with_a_warning(
    tmp_path: Path, words: str, unused: str, plugins: str
) -> None:
    done = accelerate(
        tmp_path, "launch", *words.split(), "train.py", "--zero_stage", "5", plugins=plugins
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained --zero_stage 5\n"
    for name in unused.split():
        assert f"--{name} has no effect: " in done.stderr


def test_downcast_bf16_is_ignored_without_a_tpu(tmp_path: Path) -> None:
    done = accelerate(tmp_path, "launch", "--downcast_bf16", "train.py", plugins="bare")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "--downcast_bf16 has no effect" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fsdp_offload_parms", "true"], "fsdp_offload_parms"),  # not an option of Accelerate
        (["--use_fsdp", "--fsdp_version", "2"], "not installed"),
        (["--tpu"], "not installed"),
    ],
)
def test_unknown_options_and_missing_plugins_are_errors(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = accelerate(tmp_path, "launch", *words, "train.py", plugins="bare")
    assert done.returncode == 2
    assert said in done.stderr


def test_options_of_requested_plugins_are_used(tmp_path: Path) -> None:
    words = ["--use_fsdp", "--fsdp_offload_params", "true", "--num_processes", "2", "--cpu"]
    done = accelerate(tmp_path, "launch", *words, "--dry_run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "FSDP_OFFLOAD_PARAMS" in done.stdout
    assert "has no effect" not in done.stderr


def test_config_default_writes_a_file_that_accelerate_accepts(tmp_path: Path) -> None:
    named = tmp_path / "named.yaml"
    for words in ((), ("--config_file", str(named))):
        done = accelerate(tmp_path, "config", "default", *words, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
    default = tmp_path / "cache/accelerate/default_config.yaml"
    assert named.read_text() == default.read_text()
    made = yaml.safe_load(default.read_text())
    assert made["distributed_type"] == "NO"
    assert made["use_cpu"] is True
    assert "gradient_accumulation_steps" not in made  # Accelerate refuses the key
    again = accelerate(tmp_path, "launch", "train.py")
    assert again.stdout == "trained\n", again.stderr


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"fsdp_config": {"fsdp_version": 2}, "num_processes": 2}, "FSDP"),
        ({"num_processes": 2, "use_cpu": True}, "MULTI_CPU"),
        ({"num_processes": 1, "use_cpu": False}, "NO"),
    ],
)
def test_distributed_type_is_derived_from_the_config_file(
    tmp_path: Path, values: dict[str, object], kind: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    _make_readable_for_accelerate(file)
    made = yaml.safe_load(file.read_text())
    assert made == {"use_cpu": made["use_cpu"], **values, "distributed_type": kind}


def test_env_prints_the_lines_that_issue_templates_ask_for(tmp_path: Path) -> None:
    done = accelerate(tmp_path, "env")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in (
        *("`Accelerate` version", "Platform", "`accelerate` bash location", "Python version"),
        *("Numpy version", "PyTorch version", "PyTorch accelerator", "System RAM"),
        "`Accelerate` default config",
    ):
        assert any(line.startswith(f"- {name}:") for line in lines), name
    assert "\tNot found" in lines
    assert "plugins" in done.stdout  # accelerate-core's own output follows
    file = tmp_path / "given.yaml"
    file.write_text("num_processes: 3\n")
    passed = accelerate(tmp_path, "env", "--config_file", str(file)).stdout
    assert "- `Accelerate` config passed:" in passed
    assert "\t- num_processes: 3" in passed


def test_tpu_config_joins_the_commands_in_order_without_the_plugin(tmp_path: Path) -> None:
    place = ["--tpu_name", "pod", "--tpu_zone", "zone", "--debug"]
    helped = accelerate(tmp_path, "tpu-config", "--help", plugins="bare")
    assert helped.returncode == 0
    assert "--tpu_name" in helped.stdout
    words = ["--command", "first", "--command", "second", "third", "--install_accelerate", *place]
    done = accelerate(tmp_path, "tpu-config", *words, plugins="bare")
    joined = "cd /usr/share; pip install accelerate -U; first; second; third"
    gcloud = f"gcloud compute tpus tpu-vm ssh pod --zone zone --command {joined} --worker all"
    assert done.stdout == f"Running {gcloud}\n", done.stderr
    (tmp_path / "setup.sh").write_text("one\ntwo\n")
    file = tmp_path / "pod.yaml"
    file.write_text("tpu_name: pod\ntpu_zone: zone\ncommand_file: setup.sh\n")
    done = accelerate(tmp_path, "tpu-config", "--config_file", str(file), "--debug")
    assert "--command cd /usr/share; one; two --worker all" in done.stdout
    nothing = accelerate(tmp_path, "tpu-config", *place)
    assert nothing.returncode == 1
    assert "There is nothing to run" in nothing.stderr


OLD = """
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_use_orig_params: true
  fsdp_forward_prefetch: true
  some_key: 5
"""


def test_to_fsdp2_converts_files_as_accelerate_does(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)

    def convert(*words: str) -> subprocess.CompletedProcess[str]:
        return accelerate(tmp_path, "to-fsdp2", *words)

    assert convert().returncode == 2  # no --config_file
    assert convert("--config_file", "missing.yaml").returncode == 1
    assert convert("--config_file", str(old)).returncode == 1
    done = convert("--config_file", str(old), "--output_file", str(new))
    assert done.returncode == 0, done.stderr
    made = yaml.safe_load(new.read_text())["fsdp_config"]
    assert made == {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "some_key": 5}
    assert "fsdp_forward_prefetch is removed" in done.stderr
    again = convert("--config_file", str(old), "--output_file", str(new))
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    same = convert("--config_file", str(new), "--overwrite")
    assert same.returncode == 0
    assert yaml.safe_load(new.read_text())["fsdp_config"] == made


def test_env_shows_the_config_file_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("num_processes: 4\n")
    done = accelerate(tmp_path, "env", **{CONFIG_VARIABLE: str(file)})
    assert "\t- num_processes: 4" in done.stdout


SERVED = Path(__file__).parents[2] / "extensions/drop_in/src/accelerate_drop_in/served"


def test_command_modules_run_with_python_m(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('trained', *sys.argv[1:])")

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = clean_environment(HF_HOME=str(tmp_path / "cache"), PYTHONPATH=str(SERVED))
        command = ["-m", f"accelerate.commands.{module}", *arguments]
        return pool.run(command, environ, 120, cwd=tmp_path)

    launched = run("launch", "--cpu", "--num_processes", "1", "train.py", "--epochs", "3")
    assert launched.stdout == "trained --epochs 3\n", launched.stderr
    assert run("launch", "--nonsense", "train.py").returncode == 2
    assert "`Accelerate` version" in run("accelerate_cli", "env").stdout
