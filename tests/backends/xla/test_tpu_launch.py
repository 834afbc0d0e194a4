"""Launches on TPUs, without a TPU and without torch_xla: commands, options, keys and pods."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launched import run_cli
from support import clean_environment

from accelerate_core.config.files import read_config
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.errors import ConfigurationError
from accelerate_launch.cli import cli
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.planning import make_plan
from accelerate_launch.starting import child_environment, command_of
from accelerate_xla.launch import hosts, local, spawning
from accelerate_xla.launch.run import Program, main
from accelerate_xla.launch.tpu_settings import TPULaunch

RUN = "-m accelerate_xla.launch.run"

#: A fake program that appends its arguments as a line of JSON to a file, and fails on the host `bad`.
FAKE = """#!{python}
import json, os, sys, time
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "slow" in sys.argv:
    time.sleep(60)
sys.exit(7 if "bad" in sys.argv else 0)
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_DEVICE", "TPU_NAME", "ACCELERATE_USE_CPU", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "s.py").write_text("def main():\n    print('called')\n")
    return str(tmp_path / "s.py")


@pytest.fixture
def fakes(tmp_path: Path) -> tuple[dict[str, str], Any]:
    """Return an environment with fakes of gcloud and ssh, and a function that returns their calls."""
    (tmp_path / "bin").mkdir()
    log = tmp_path / "calls"
    for name in ("gcloud", "ssh"):
        program = tmp_path / "bin" / name
        program.write_text(FAKE.format(python=sys.executable, log=str(log)))
        program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    return {"PATH": path}, lambda: [json.loads(line) for line in log.read_text().splitlines()]


def launch(*words: str) -> Result:
    return CliRunner().invoke(cli, ["launch", *words])


def planned(script: str, config: Path | None = None, **given: Any) -> LaunchPlan:
    return make_plan(script, [], given, dict(os.environ), config and read_config(config))


def started(plan: LaunchPlan) -> tuple[str, dict[str, str]]:
    return shlex.join(command_of(plan)).removeprefix(sys.executable).strip(), child_environment(
        plan, os.environ
    )


# --- one host -------------------------------------------------------------------------------------


def test_tpu_option_starts_torch_xlas_processes(script: str) -> None:
    words = ("--tpu", "--downcast_bf16", "--mixed_precision", "bf16")
    result = launch(*words, "--dry_run", script, "--lr", "1")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].endswith(f"{RUN} {script} --lr 1")
    for name, value in {"BACKEND": "xla", "DOWNCAST_BF16": "true", "USE_TPU": "true"}.items():
        assert f"ACCELERATE_{name} " in result.output
        assert f"  {value} " in result.output
    assert "PJRT_DEVICE " in result.output
    options = ("--tpu", "--num_processes", "8", "-m", "--main_training_function", "train")
    first = launch(*options, "--dry_run", "json.tool").output.splitlines()[0]
    assert first.endswith(f"{RUN} --num_processes 8 --function train -m json.tool")


def test_one_process_or_a_mesh_runs_the_script_directly(
    script: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sized = ("--parallelism_config_dp_replicate_size", "4")
    for words in (("--num_processes", "1"), sized, (*sized, "--num_processes", "4")):
        output = launch("--tpu", *words, "--dry_run", script).output
        assert output.splitlines()[0] == f"{sys.executable} {script}", output
        assert "PJRT_DEVICE " in output
    assert "one process is started for all devices" in caplog.text
    words = ("--tpu", *sized, "--main_training_function", "main", "--dry_run")
    called = launch(*words, script).output
    assert f"{RUN} --here --function main {script}" in called.splitlines()[0]
    monkeypatch.setenv("ACCELERATE_XLA_SPMD", "true")
    plan = planned(script, tpu=True)
    assert started(plan)[0] == script


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--num_processes", "2"], {"PJRT_DEVICE": "CPU"}, "does not connect processes"),
        ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, "CPU_NUM_DEVICES=4 and --parallelism"),
        (["--cpu"], {}, "--tpu contradicts running on the CPU (command line --cpu)"),
        (["--backend", "ddp"], {}, "'xla', but command line --backend requests 'ddp'"),
        (["--no_python"], {}, "--no_python cannot be used with --tpu"),
        (["--max_restarts", "1"], {}, "--max_restarts is an option of torchrun"),
        (
            ["--num_machines", "2", "--num_processes", "8", "--main_process_ip", "127.0.0.1"],
            {},
            "pass --tpu_cluster to start the script on all hosts",
        ),
    ],
)
def test_options_that_torch_xla_does_not_support_are_rejected(
    words: list[str],
    environment: dict[str, str],
    message: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    target = sys.executable if "--no_python" in words else script
    result = launch("--tpu", *words, "--dry_run", target)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_config_file_of_accelerate_selects_the_launcher(script: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    own = "downcast_bf16: 'yes'\nmain_training_function: main\nnum_processes: 8\ntpu_env: []\n"
    for kind in ("XLA", "TPU"):
        file.write_text(f"distributed_type: {kind}\n{own}tpu_use_cluster: false\ntpu_vm: null\n")
        command, environment = started(planned(script, file))
        assert command == f"{RUN} --num_processes 8 --function main {script}"
        assert environment["ACCELERATE_DOWNCAST_BF16"] == "true"
        assert environment["PJRT_DEVICE"] == "TPU"
    # A script that calls its `main` runs as a program, because every config file names `main`.
    Path(script).write_text("def main(): ...\nif __name__ == '__main__':\n    main()\n")
    assert started(planned(script, file))[0] == f"{RUN} --num_processes 8 {script}"
    file.write_text(f"distributed_type: XLA\n{own.replace(': main', ': train')}")
    assert "--function train" in started(planned(script, file))[0]
    assert "accelerate_xla" not in started(planned(script, file, cpu=True, num_processes=1))[0]
    # Options of TPUs alone don't select the launcher.
    file.write_text(own.replace("8", "1"))
    assert started(planned(script, file))[0] == script
    file.write_text("tpu_use_sudo: perhaps\n")
    with pytest.raises(ConfigurationError, match="tpu_use_sudo: 'perhaps'"):
        planned(script, file)


def test_function_starts_on_an_available_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = local.TPULauncher(TPULaunch())
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(spawning, "spawn", lambda *_, **more: asked.append(more))
    plan = LaunchPlan(Target("train", kind="function"))
    assert not launcher.accepts(plan)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert launcher.accepts(plan)
    assert not launcher.accepts(LaunchPlan(Target("s.py")))
    launcher.launch_function(print, (), plan)
    eight = {"num_processes": SourcedValue(8, "notebook_launcher(num_processes=...)")}
    launcher.launch_function(
        print, (), LaunchPlan(plan.target, num_processes=8, provenance=eight, start_method="spawn")
    )
    assert asked == [
        {"start_method": "fork", "num_processes": None},
        {"start_method": "spawn", "num_processes": 8},
    ]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not launcher.accepts(plan)


def test_wrong_number_of_processes_is_rejected() -> None:
    for right in (None, 4, 16):
        spawning.check_number(right, 4, 4)
    with pytest.raises(ConfigurationError, match="this host has 4 TPUs, 16 on 4 hosts"):
        spawning.check_number(8, 4, 4)


def test_missing_or_mismatched_torch_xla_gives_a_one_line_error(
    script: str, tmp_path: Path
) -> None:
    asked = ("launch", "--tpu", script)
    environment = {"PJRT_DEVICE": "CPU"}
    package = tmp_path / "site" / "torch_xla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('_XLAC.so: undefined symbol: _ZN5torch')"
    )
    about = tmp_path / "site" / "torch_xla-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    path = clean_environment()["PYTHONPATH"]
    there = {**environment, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), path])}
    done = run_cli(*asked, env=there, forked=True)
    assert done.returncode == 1
    assert "undefined symbol" in done.stderr
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in done.stderr
    assert "Traceback" not in done.stderr
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch_xla'\", name='torch_xla')"
    )
    done = run_cli(*asked, env=there, forked=True)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "torch_xla, which is not installed" in done.stderr


def test_program_runs_as_a_script_a_module_or_a_function(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    Path(script).write_text(
        "import sys\nprint(__name__, sys.argv[1:])\ndef train():\n    print('called', sys.argv[1:])\n"
    )
    main(["--here", script, "--function", "mine"])  # options after the script belong to it
    assert capsys.readouterr().out == "__main__ ['--function', 'mine']\n"
    main(["--here", "-m", "s", "--lr", "1"])
    assert capsys.readouterr().out == "__main__ ['--lr', '1']\n"
    main(["--here", "--function", "train", script, "x"])
    assert capsys.readouterr().out == "s ['x']\ncalled ['x']\n"
    with pytest.raises(ConfigurationError, match=r"no function 'trian'\. Did you mean 'train'"):
        Program(script, function="trian")()


# --- pods -----------------------------------------------------------------------------------------


def test_pod_launch_runs_on_every_host(script: str, fakes: Any, tmp_path: Path) -> None:
    environment, calls = fakes
    file = tmp_path / "c.yaml"
    file.write_text(
        "distributed_type: TPU\ntpu_use_cluster: true\ntpu_name: pod\ntpu_zone: us-central2-b\n"
        "tpu_use_sudo: true\ntpu_env: ['A=1']\nmixed_precision: bf16\ndowncast_bf16: 'no'\n"
        "main_training_function: main\n"
    )
    around = {**environment, "ACCELERATE_LOG_LEVEL": "info"}
    words = ("launch", "--config_file", file, "--env", "B=it's here", "--env", "C=")
    done = run_cli(*words, script, "--text", "two words", env=around, cwd=tmp_path, forked=True)
    assert done.returncode == 0, done.stderr
    ((*ssh, line, worker, every),) = calls()
    assert ssh == shlex.split("compute tpus tpu-vm ssh pod --zone us-central2-b --command")
    assert (worker, every) == ("--worker", "all")
    folder, make, _, rest = line.split(" && ", 3)
    assert (folder, make) == (f"cd {tmp_path}", "config=$(mktemp)")
    brace, sudo, env, *pairs = shlex.split(rest)
    at = pairs.index(sys.executable)
    assert (brace, sudo, env, pairs[0]) == ("{", "sudo", "env", "ACCELERATE_IN_TPU_POD=1")
    # Variables on the command line replace those in the file.
    assert pairs[at - 2 : at] == ["B=it's here", "C="]
    assert "ACCELERATE_MIXED_PRECISION=bf16" in pairs[:at]
    assert "ACCELERATE_LOG_LEVEL=info" in pairs[:at]
    assert not [one for one in pairs[:at] if one.startswith(("A=", "ACCELERATE_TPU_", "OMP_"))]
    assert not [one for one in pairs[:at] if "CONFIG" in one]
    launched = ["-m", "accelerate_core.cli", "launch", "--config_file", "$config"]
    end = pairs.index("status=$?;")
    given = ["--tpu", "--no_tpu_cluster", script, "--text", "two words;"]
    assert pairs[at + 1 : end] == [*launched, *given]


#: Replaces Python on a host: a program that prints its arguments and the config file.
HOST = """#!/bin/sh
echo "$ACCELERATE_IN_TPU_POD $*"
while [ "$1" != --config_file ]; do shift; done
echo "$2"; cat "$2"; exit 3
"""


@pytest.mark.parametrize("sent", ["file", "default file", "none"])
def test_hosts_of_a_pod_get_the_config_file(
    script: str, fakes: Any, tmp_path: Path, sent: str
) -> None:
    environment, calls = fakes
    text = (
        '# it\'s "mine": $HOME %s\ntpu_use_cluster: true\ntpu_vm: [a]\ndistributed_type: XLA\n'
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: [Block, Layer]\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    file = home / "config.yaml" if sent == "default file" else tmp_path / "c.yaml"
    file.write_text(text)
    words = ["--config_file", str(file)] if sent == "file" else []
    words += ["--tpu_cluster", "--tpu", "--vm", "a"] if sent == "none" else []
    around = {**environment, "ACCELERATE_CONFIG_HOME": str(home)}
    done = run_cli("launch", *words, script, env=around, cwd=tmp_path, forked=True)
    assert done.returncode == 0, done.stderr
    line = calls()[0][-1]
    if sent == "none":
        assert "config_file" not in line
        return
    python = tmp_path / "python"
    python.write_text(HOST)
    python.chmod(0o755)
    run = ["sh", "-c", line.replace(sys.executable, str(python))]
    host = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert host.returncode == 3, host.stderr
    words_there, copy, *rest = host.stdout.splitlines(keepends=True)
    assert words_there.startswith("1 -m accelerate_core.cli launch --config_file /")
    assert words_there.endswith(f" --tpu --no_tpu_cluster {script}\n")
    assert "".join(rest) == text
    assert not Path(copy.strip()).exists(), "the copy is deleted when the script has ended"


def test_hosts_of_a_pod_launch_locally(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tpu", "--tpu_cluster", "--tpu_name", "a", "--tpu_zone", "b", "--dry_run", script]
    assert launch(*words).output.startswith("gcloud ")
    assert RUN in launch("--no_tpu_cluster", *words).output.splitlines()[0]
    monkeypatch.setenv("ACCELERATE_IN_TPU_POD", "1")
    assert RUN in launch(*words).output.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpu_name", "a"], "Name it with --tpu_zone (in a config file: tpu_zone)"),
        ([], "Name it with --tpu_name and --tpu_zone"),
        (["--vm", "h", "--env", "A"], "--env 'A' must have the form NAME=VALUE"),
        (["--tpu_nam", "a"], "Did you mean '--tpu_name'?"),
    ],
)
def test_error_names_missing_options_of_a_pod(words: list[str], message: str, script: str) -> None:
    result = launch("--tpu_cluster", *words, "--dry_run", script)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_listed_hosts_are_reached_with_ssh(script: str, fakes: Any) -> None:
    environment, calls = fakes
    words = ("launch", "--tpu", "--tpu_cluster", "--num_processes", "4", "--vm", "a", "--vm", "b")
    done = run_cli(*words, script, env=environment, forked=True)
    assert done.returncode == 0, done.stderr
    assert sorted(call[-2] for call in calls()) == ["a", "b"]
    for call in calls():
        assert call[:3] == ["-tt", "-o", "BatchMode=yes"]
        assert call[-1].startswith("cd ")
        assert call[-1].endswith(f"--tpu --no_tpu_cluster --num_processes 4 {script}")


def test_failure_on_one_host_terminates_the_others(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment, calls = fakes
    monkeypatch.setenv("PATH", environment["PATH"])
    assert hosts.run(["slow", "bad"], "true") == 7
    assert "The command failed on bad with exit status 7." in capfd.readouterr().err
    assert len(calls()) <= 2
    monkeypatch.setenv("PATH", "")
    assert hosts.run(["a"], "true") == 1
    assert "ssh was not found" in capfd.readouterr().err


# --- tpu-config -----------------------------------------------------------------------------------


def test_tpu_config_sets_up_the_hosts(fakes: Any, tmp_path: Path) -> None:
    environment, calls = fakes
    file, lines = tmp_path / "c.yaml", tmp_path / "lines"
    file.write_text("tpu_name: pod\ntpu_zone: zone\ncommands:\n- echo 'a b'\n- ls\n")
    lines.write_text("echo one  # first\necho two\n")
    command = ("tpu-config", "--config_file", file)
    start = "set -e\ncd /usr/share\n"
    install = "python3 -m pip install "
    cases = {
        (): "echo 'a b'\nls",
        ("--command", "date", "--command", "who am i"): "date\nwho am i",
        ("--command_file", str(lines)): "echo one  # first\necho two",
        ("--install_accelerate", "--command", "ls"): f"{install}-U 'accelerate-core[xla]'\nls",
        ("--install_accelerate", "--accelerate_version", "0.1", "--command", "ls"): (
            f"{install}'accelerate-core[xla]==0.1'\nls"
        ),
    }
    for words, expected in cases.items():
        result = CliRunner().invoke(cli, [*map(str, command), *words, "--debug"])
        assert result.exit_code == 0, result.output
        shown = shlex.split(result.output.removeprefix("Running "))
        assert shown[:7] == shlex.split("gcloud compute tpus tpu-vm ssh pod --zone")
        assert shown[7:] == ["zone", "--command", start + expected, "--worker", "all"]
    done = run_cli(*command, "--use_alpha", "--tpu_name", "other", env=environment, forked=True)
    assert (done.returncode, done.stdout) == (0, "The hosts of the pod are set up.\n"), done.stderr
    (call,) = calls()
    assert call[:6] == ["alpha", "compute", "tpus", "tpu-vm", "ssh", "other"]
    done = run_cli(*command, "--tpu_name", "bad", env=environment, forked=True)
    assert done.returncode == 7
    assert "gcloud failed with exit status 7" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpu_name", "a"], "There are no commands to run on the hosts. Pass --command"),
        (["--command", "ls", "--tpu_name", "a"], "Name it with --tpu_zone"),
        (["--command_file", "/none"], "Cannot read the command file /none"),
        (["--install_accelerate", "--accelerate_version", "dev"], "dev is not supported"),
        (["--command", "ls", "--tpu_name", "a", "--tpu_zone", "b"], "gcloud was not found"),
    ],
)
def test_tpu_config_rejects_invalid_options(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ACCELERATE_CONFIG_HOME", os.devnull)
    result = CliRunner().invoke(cli, ["tpu-config", *words])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


# --- functions of Accelerate ------------------------------------------------------------------------

DROP_IN = """
import sys
from argparse import Namespace
import accelerate_drop_in
accelerate_drop_in.install()
from accelerate.commands.launch import tpu_launcher, tpu_pod_launcher
from accelerate.commands.tpu import main, tpu_command_launcher, tpu_command_parser

words = ["--tpu_name", "one", "--tpu_zone", "b", "--command", "ls"]
tpu_command_launcher(tpu_command_parser().parse_args(words))
sys.argv = ["tpu", *words]
try:
    main()
except SystemExit as end:
    assert not end.code, end
script = {"training_script": SCRIPT, "training_script_args": ["x"]}
pod = {"tpu_name": "two", "tpu_zone": "b", "tpu_use_sudo": True, "env": ["A=1"], "vm": None}
tpu_pod_launcher(Namespace(**script, **pod, tpu=False, num_processes=None))
tpu_launcher(Namespace(**script, tpu=False, num_processes=1, tpu_use_cluster=False))
"""


def test_drop_in_provides_accelerates_tpu_launchers(
    script: str, fakes: Any, tmp_path: Path
) -> None:
    environment, calls = fakes
    Path(script).write_text("import sys\nprint('ran', sys.argv[1:])")
    (tmp_path / "drop_in.py").write_text(DROP_IN.replace("SCRIPT", repr(script)))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "drop_in.py")],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran ['x']"
    named = [call[4] for call in calls()]
    assert named == ["one", "one", "two"]
    line = calls()[-1][-3]
    assert "sudo env ACCELERATE_IN_TPU_POD=1" in line
    assert f" A=1 {sys.executable}" in line
    assert line.endswith(f"--tpu --no_tpu_cluster {script} x")


def test_install_xla_and_prepare_tpu_of_accelerate() -> None:
    from accelerate_core import install_xla, prepare_tpu

    with pytest.raises(ImportError, match=r"pip install \"torch==2\.9\.\*\""):
        install_xla(upgrade=True)
    said = {"mixed_precision": "bf16", "downcast_bf16": True, "debug": True}
    args = SimpleNamespace(**said, tpu_vm=["a"], tpu_name="pod")
    made, environment = prepare_tpu(args, {"A": "1"}, pod=True)
    assert (made.vm, made.tpu) == (["a"], "pod")
    expected = {"MIXED_PRECISION": "bf16", "DOWNCAST_BF16": "true", "DEBUG_MODE": "true"}
    expected["BACKEND"] = "xla"
    named = {f"ACCELERATE_{name}": value for name, value in expected.items()}
    assert environment == {"A": "1", "PJRT_DEVICE": "TPU", **named}
