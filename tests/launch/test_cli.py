"""The command line starts quickly and gives clear answers."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pool
import pytest
import torch
from click.shell_completion import BashComplete
from click.testing import CliRunner
from launched import run_cli
from support import clean_environment
from warm_python import warm_python

from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import PluginRecord, installed
from accelerate_launch.cli import cli
from accelerate_launch.commands.env import driver_version, environment_report
from accelerate_launch.commands.launch import EXAMPLES

COMMANDS = ("config", "launch", "env", "plugins", "estimate-memory", "test")
HELP = [[], *([name] for name in COMMANDS)]


@pytest.mark.parametrize("command", HELP, ids=lambda c: c[0] if c else "top")
def test_help_is_quick_and_does_not_import_torch(command: list[str]) -> None:
    code = (
        "import sys\n"
        "from accelerate_launch.cli import cli\n"
        f"cli.main({[*command, '--help']!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if 'torch' in heavy else 0)\n"
    )
    for _ in range(3):
        start = _seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        seconds = _seconds_of_children() - start
        assert done.returncode == 0, done.stderr
        assert "Usage:" in done.stdout
        if seconds < 0.5:
            return
    pytest.fail(f"the help took {seconds:.2f} s, and at least half a second in two earlier runs")


def _seconds_of_children() -> float:
    """Return the CPU time of ended children, which unlike the clock ignores other processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_lists_all_commands() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output
    assert all(name in output for name in COMMANDS)


@pytest.mark.parametrize("module", ["accelerate_core", "accelerate_core.cli"])
def test_version(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("accelerate-core 0.")


def test_unknown_command_suggests_the_most_similar_one() -> None:
    result = CliRunner().invoke(cli, ["lunch"])
    assert result.exit_code == 2
    assert "Did you mean 'launch'?" in result.output


def test_options_accept_dashes_and_underscores(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("")
    for option in ("--gradient_accumulation_steps", "--gradient-accumulation-steps"):
        arguments = ["launch", "--cpu", option, "4", "--dry_run", str(script)]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in result.output


def test_plugins_command_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from accelerate_launch.cli import cli\n"
        "cli.main(['plugins', '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(ACCELERATE_MIXED_PRECISION="bf16"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)}
    assert rows["precision", "bf16"]["state"] == "active"
    assert "ACCELERATE_MIXED_PRECISION" in rows["precision", "bf16"]["reason"]
    assert rows["precision", "fp16"]["state"] == "available"


def test_plugins_command_prints_a_table() -> None:
    result = CliRunner(env={"ACCELERATE_DISABLED_PLUGINS": "fp16"}).invoke(cli, ["plugins"])
    assert result.exit_code == 0, result.output
    assert "reason" in result.output
    assert "disabled" in result.output


def test_plugins_that_nothing_requests_are_only_named() -> None:
    said = CliRunner().invoke(cli, ["plugins"]).output
    table, rest = said.split("Also installed, but not requested here (--all shows them in full):")
    rows = {tuple(line.split()[:2]) for line in table.splitlines()}
    assert ("backend", "single") in rows
    assert ("launcher", "torchrun") in rows  # it was a candidate
    assert not {("backend", "ddp"), ("command", "launch"), ("tracker", "jsonl")} & rows
    assert re.search(r"backend +.*\bddp\b", rest)
    assert "command" not in rest
    everything = CliRunner().invoke(cli, ["plugins", "--all"]).output
    rows = {tuple(line.split()[:2]) for line in everything.splitlines()}
    assert {("backend", "ddp"), ("command", "launch"), ("tracker", "jsonl")} <= rows
    assert "Also installed" not in everything
    precisions = CliRunner().invoke(cli, ["plugins", "--kind", "precision"]).output
    assert "fp16" in precisions


def test_env_lists_versions_and_active_plugins_only() -> None:
    said = CliRunner(env={"ACCELERATE_BACKEND": None}).invoke(cli, ["env"]).output
    assert re.search(r"^ backend +single +one process", said, re.MULTILINE)
    assert re.search(r"^ accelerate-ddp +0\.", said, re.MULTILINE)
    assert "available" not in said
    assert "not requested" not in said
    assert "accelerate-core plugins --all" in said


def test_env_lists_all_distributions_with_entry_points_for_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also third-party ones, those that export names only, and a disabled plugin."""
    infos = {
        "else_tracker": "[accelerate_core.trackers]\nelse = else_tracker:Tracker\n",
        "Names_Only": "[accelerate_core.exports]\nName = names_only:Name\n",
        "accelerate_bare": "",
        "unrelated": "[console_scripts]\nrun = unrelated:main\n",
    }
    for name, points in infos.items():
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ACCELERATE_DISABLED_PLUGINS", "wandb")
    said = json.loads(CliRunner().invoke(cli, ["env", "--json"]).output)["versions"]
    for name in ("else-tracker", "names-only", "accelerate-bare"):
        assert said[name] == "1.5", name
    assert "unrelated" not in said
    for name in ("accelerate-dispatch", "accelerate-drop-in", "accelerate-wandb"):
        assert name in said
    assert re.search(
        r"^ accelerate-dispatch +\d", CliRunner().invoke(cli, ["env"]).output, re.MULTILINE
    )


def test_env_and_config_show_print_values_in_config_file_notation() -> None:
    for arguments in (["env"], ["config", "show"]):
        words = CliRunner().invoke(cli, arguments).output.split()
        assert "false" in words
        assert not {"None", "True", "False"} & set(words)
    values = environment_report({})["configuration"].values()
    assert {"none", "false", "true"} <= {row["value"] for row in values}


def test_launch_without_a_script_shows_a_complete_command() -> None:
    result = CliRunner().invoke(cli, ["launch", "--cpu", "--num-processes", "2"])
    assert result.exit_code == 2
    assert "No script was given." in result.output
    assert "launch --cpu --num-processes 2 train.py\n" in result.output


def test_help_of_launch_begins_with_examples_that_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.yaml").write_text("num_processes: 1\n")
    said = run_cli("launch", "--help", forked=True).stdout
    examples = said.split("Examples:\n")[1].split("\n\n")[0]
    lines = re.sub(r" \\\n +", " ", examples).splitlines()
    commands = [line.split("launch ", 1)[1] for line in lines if not line.startswith("  #")]
    assert len(commands) == len(EXAMPLES)
    for arguments in commands:
        tried = run_cli("launch", "--dry_run", *arguments.split(), cwd=tmp_path, forked=True)
        assert tried.returncode == 0, tried.stderr
    groups = said.split("in this order:\n")[1].split("\n\n")[0]
    assert re.search(r"Processes;\s+Machines;.*Backend\s+ddp;.*Other", groups, re.DOTALL)


def test_help_lists_packages_that_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(kind: str) -> tuple[PluginRecord, ...]:
        found = installed().of_kind(kind)
        gone = ("accelerate-big-model", "accelerate-testing", "accelerate-wandb")
        return tuple(one for one in found if one.distribution not in gone)

    monkeypatch.setattr("accelerate_launch.cli.installed", lambda: SimpleNamespace(of_kind=without))
    monkeypatch.setattr(catalog, "pip_command", lambda extra: f"pip install {extra}")
    said = CliRunner().invoke(cli, ["--help"]).output
    listed = said.split("Not installed (add with pip install NAME):\n")[1]
    assert re.search(r"commands +.*estimate-memory \[big-model\]", listed)
    assert re.search(r"trackers +wandb\n", listed)
    assert "fsdp" not in listed  # another name of an installed backend
    said = CliRunner().invoke(cli, ["plugins", "--help"]).output
    assert re.search(r"commands +check \[testing\], hooks \[testing\], new \[testing\]", said)


def test_env_hides_secrets_and_shows_sources() -> None:
    environ = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_API_KEY": "hush",
        "HF_TOKEN": "hush",
        "ACCELERATE_PROXY": "http://me:hush@there/",
        "PATH": "/usr/bin",
    }
    made = environment_report(environ)
    assert "hush" not in json.dumps(made)
    assert made["configuration"]["mixed_precision"] == {
        "value": "bf16",
        "from": "environment variable ACCELERATE_MIXED_PRECISION",
    }
    assert made["versions"]["torch"]
    assert "PATH" not in made["variables"]


#: The shell sets this variable when it asks the command for completions.
COMPLETE = "_ACCELERATE_CORE_COMPLETE"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelerate-core la", "launch"),
        ("accelerate-core launch --num_p", "--num_processes"),
        ("accelerate-core launch --fsdp_off", "--fsdp_offload_params"),
        ("accelerate-core to-", "to-fsdp2"),
        ("accelerate-core config va", "validate"),
    ],
)
def test_shell_completes_commands_and_options(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    said = BashComplete(cli, {}, "accelerate-core", COMPLETE).complete()
    assert f"plain,{expected}" in said.split()


def test_installed_command_supports_shell_completion() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("accelerate-core"))],
        env=clean_environment(
            **{COMPLETE: "bash_complete", "COMP_WORDS": "accelerate-core la", "COMP_CWORD": "1"}
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "plain,launch" in done.stdout.split()


def test_env_prints_json_and_tables(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("mixed_precision: bf16\n")
    made = json.loads(run_cli("env", "--json", "--config_file", config, forked=True).stdout)
    assert made["configuration"]["mixed_precision"]["from"] == f"{config} line 1"
    result = CliRunner().invoke(cli, ["env"])
    assert result.exit_code == 0, result.output
    assert "accelerate-core" in result.output


@pytest.mark.dist
def test_self_check_passes_on_two_processes() -> None:
    # Only the command is forked. The agent and the ranks that it starts are real interpreters.
    done = run_cli("test", "--timeout", "100", forked=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for check in (
        "ranks",
        "collectives",
        "sharded loader",
        "dispatching loader",
        "training",
        "saving",
    ):
        assert check in done.stdout
    assert "2 processes on cpu" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.dist
def test_matrix_checks_every_installed_backend() -> None:
    # The test above covers DDP, DeepSpeed has its own tests, Megatron needs CUDA, and XLA needs
    # another torch.
    environ = {"ACCELERATE_DISABLED_PLUGINS": "ring, ddp, deepspeed, megatron, xla"}
    environ[pool.EXECUTABLE] = str(warm_python())  # the test above has real interpreters
    done = run_cli("test", "--matrix", "--json", env=environ, forked=True)
    made = json.loads(done.stdout)
    assert [check["error"] for check in made["single"]["checks"]] == [""] * 6
    if torch.__version__ < "2.11":
        assert done.returncode == 1
        output = made.pop("fsdp2")["output"]
        assert f"needs torch 2.11 or newer, but torch {torch.__version__} is installed" in output
        assert {name for name, one in made.items() if one["passed"]} == {"single"} == set(made)
        return
    assert {"fsdp2", "single"} <= set(made)
    assert {name: one["passed"] for name, one in made.items()} == dict.fromkeys(made, True), made
    assert done.returncode == 0
    assert [check["name"] for check in made["fsdp2"]["checks"]][-1] == "saving"


def test_self_check_with_an_invalid_setting_fails() -> None:
    environ = {"ACCELERATE_USE_CPU": "perhaps"}
    done = run_cli("test", "--num_processes", "1", env=environ, forked=True)
    assert done.returncode == 2
    assert "(from environment variable ACCELERATE_USE_CPU) is not a boolean" in done.stderr


NVIDIA = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  Wed Feb 26
GCC version:  gcc version 12.2.0
"""


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("proc/driver/nvidia/version", NVIDIA, "570.124.06"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue",
            "550.54.15",
        ),
        ("sys/module/amdgpu/version", "6.8.5\n", "6.8.5"),
        ("sys/module/other/version", "1.0", ""),
    ],
)
def test_env_shows_the_version_of_the_driver(
    tmp_path: Path, name: str, text: str, version: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert driver_version(object(), tmp_path) == version
    xpu = SimpleNamespace(driver_version="1.6.33")
    assert driver_version(xpu, tmp_path) == "1.6.33"
