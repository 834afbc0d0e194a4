"""Launching: how a launch is planned, what it starts, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import run_cli
from support import clean_environment, run_workers

from accelerate_core.config.files import read_config
from accelerate_core.config.provenance import PROVENANCE_VARIABLE
from accelerate_core.errors import ConfigurationError, RuntimeConflictError
from accelerate_launch import (
    LaunchPlan,
    PrepareForLaunch,
    child_environment,
    choose_launcher,
    make_plan,
    notebook_launcher,
)
from accelerate_launch.options import LAUNCH_OPTIONS

SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_PORT")
found = {n: v for n, v in os.environ.items() if n in names or n.startswith("ACCELERATE_")}
said = {"env": found, "argv": sys.argv[1:], "torch": "torch" in sys.modules}
sys.stdout.write(json.dumps(said) + "\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


def plan_of(script: Path, environ: dict[str, str] | None = None, **given: Any) -> LaunchPlan:
    return make_plan(str(script), [], given, environ or {})


def shown(output: str) -> list[dict[str, Any]]:
    lines = (line[line.index("{") :] for line in output.splitlines() if '"argv"' in line)
    return [json.loads(line) for line in lines]


# --- planning -------------------------------------------------------------------------------------


def test_single_process_runs_the_script_directly(script: Path) -> None:
    plan = plan_of(script, cpu=True)
    assert choose_launcher(plan).launch_command(plan) == [sys.executable, str(script)]
    assert plan.environment["ACCELERATE_USE_CPU"] == "true"
    assert "OMP_NUM_THREADS" not in plan.environment


def test_two_processes_are_started_with_torchs_agent(script: Path) -> None:
    plan = plan_of(script, num_processes=2)
    command = choose_launcher(plan).launch_command(plan)
    assert command[1:3] == ["-m", "accelerate_launch.agent"]
    assert command[command.index("--nproc_per_node") + 1] == "2"
    assert "--standalone" in command
    assert int(plan.environment["OMP_NUM_THREADS"]) >= 1


def test_thread_count_of_the_user_is_kept(script: Path) -> None:
    plan = plan_of(script, {"OMP_NUM_THREADS": "3"}, num_processes=2)
    assert "OMP_NUM_THREADS" not in plan.environment
    plan = plan_of(script, num_processes=2, num_cpu_threads_per_process=5)
    assert plan.environment["OMP_NUM_THREADS"] == "5"


def test_only_command_line_values_are_passed_on_with_their_source(script: Path) -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    plan = plan_of(script, environ, cpu=True, mixed_precision="bf16")
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in plan.environment
    origins = json.loads(plan.environment[PROVENANCE_VARIABLE])
    assert origins["ACCELERATE_MIXED_PRECISION"] == "command line --mixed_precision"
    said = plan.provenance["gradient_accumulation_steps"].origin
    assert said == "environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def test_environment_of_the_launcher_is_not_changed(script: Path) -> None:
    before = dict(os.environ)
    environ = {"PATH": "/usr/bin"}
    plan = plan_of(script, environ, cpu=True, num_processes=2)
    assert child_environment(plan, environ)["ACCELERATE_USE_CPU"] == "true"
    assert environ == {"PATH": "/usr/bin"}
    assert dict(os.environ) == before


def test_dynamo_options_are_passed_on_as_environment_variables(script: Path) -> None:
    given = {"dynamo_backend": "aot_eager", "dynamo_use_fullgraph": True, "cpu": True}
    made = plan_of(script, **given).environment
    assert made["ACCELERATE_DYNAMO_BACKEND"] == "aot_eager"
    assert made["ACCELERATE_DYNAMO_USE_FULLGRAPH"] == "true"


def test_config_file_values_have_their_line_as_source(script: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n")
    plan = make_plan(str(script), [], {}, {}, read_config(file))
    assert plan.num_processes == 2
    assert plan.provenance["num_processes"].origin == f"{file} line 2"
    assert plan.environment["ACCELERATE_CONFIG_FILE"] == str(file)
    plan = make_plan(str(script), [], {"num_processes": 1}, {}, read_config(file))
    assert plan.num_processes == 1


STATIC = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rdzv_backend": "static"}, [*STATIC, "--master_port", "29500"]),
        ({"main_process_port": 4000}, [*STATIC, "--master_port", "4000"]),
        (
            {"rdzv_backend": "c10d"},
            ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.0.0.1:29500"],
        ),
    ],
)
def test_rendezvous_options_for_several_machines(
    script: Path, given: dict[str, Any], expected: list[str]
) -> None:
    machines = {"num_machines": 2, "num_processes": 4, "machine_rank": 1}
    plan = plan_of(script, **machines, main_process_ip="10.0.0.1", **given)
    command = choose_launcher(plan).launch_command(plan)
    assert " ".join(expected) in " ".join(command)
    assert command[command.index("--nproc_per_node") + 1] == "2"


def test_every_option_has_a_help_text_and_a_group() -> None:
    names = [option.name for option in LAUNCH_OPTIONS]
    assert len(set(names)) == len(names)
    assert all(option.help and option.group for option in LAUNCH_OPTIONS)


# --- refused launches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_launch_inside_a_launch_is_refused(script: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="Another launch inside it"):
        plan_of(script, environ, num_processes=2)


def test_world_size_of_a_scheduler_is_not_mistaken_for_a_launch(script: Path) -> None:
    given = {"num_machines": 2, "num_processes": 2, "main_process_ip": "10.0.0.1"}
    assert plan_of(script, {"WORLD_SIZE": "2", "RANK": "0"}, **given).num_machines == 2


def test_modules_are_found_without_importing_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    plan = make_plan("my_package.train", ["--x"], {"module": True, "cpu": True}, {})
    command = choose_launcher(plan).launch_command(plan)
    assert command == [sys.executable, "-m", "my_package.train", "--x"]
    with pytest.raises(ConfigurationError, match="Did you mean 'train'"):
        make_plan("my_package.trian", [], {"module": True, "cpu": True}, {})


# --- started processes ----------------------------------------------------------------------------


def test_arguments_reach_the_script_unchanged(script: Path) -> None:
    done = run_cli("launch", "--cpu", script, "--num_processes", "9", "--", "-x", "a b")
    assert done.returncode == 0, done.stderr
    (ran,) = shown(done.stdout)
    assert ran["argv"] == ["--num_processes", "9", "--", "-x", "a b"]
    assert ran["torch"] is False
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(ran["env"])


@pytest.mark.dist
def test_launch_runs_two_processes(script: Path) -> None:
    done = run_cli("launch", "--num-processes", "2", "--mixed_precision", "bf16", script, "--x")
    assert done.returncode == 0, done.stderr
    ran = shown(done.stdout)
    assert sorted(one["env"]["RANK"] for one in ran) == ["0", "1"]
    assert all(one["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16" for one in ran)
    assert all(one["argv"] == ["--x"] for one in ran)


@pytest.mark.dist
def test_requested_port_is_used(script: Path) -> None:
    done = run_cli("launch", "--num_processes", "2", "--main_process_port", "29731", script)
    assert done.returncode == 0, done.stderr
    assert {one["env"]["MASTER_PORT"] for one in shown(done.stdout)} == {"29731"}


def test_modules_and_programs_are_launched(script: Path) -> None:
    done = run_cli("launch", "--cpu", "-m", "show", "1", cwd=script.parent)
    assert shown(done.stdout)[0]["argv"] == ["1"], done.stderr
    done = run_cli("launch", "--cpu", "--no_python", sys.executable, "-c", "print('ran')")
    assert done.stdout.strip() == "ran", done.stderr


def test_launcher_exits_with_the_status_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text("raise SystemExit(7)")
    assert run_cli("launch", "--cpu", tmp_path / "end.py").returncode == 7


def test_dry_run_starts_nothing(script: Path) -> None:
    done = run_cli("launch", "--num_processes", "2", "--mixed_precision=fp16", "--dry_run", script)
    assert done.returncode == 0, done.stderr
    assert "accelerate_launch.agent --standalone" in done.stdout
    assert "ACCELERATE_MIXED_PRECISION" in done.stdout
    assert "command line --mixed_precision" in done.stdout
    assert not shown(done.stdout)


def test_explain_shows_the_source_of_values(script: Path) -> None:
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    done = run_cli("launch", "--cpu", "--explain", script, env=env)
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in done.stderr
    assert "command line --cpu" in done.stderr
    assert len(shown(done.stdout)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo.py"], "Did you mean 'show.py'?"),
        (["--dynamo_mode", "max-autotun", "show.py"], "Did you mean 'max-autotune'?"),
        ([], "No script was given."),
    ],
)
def test_user_mistakes_give_one_message_and_no_traceback(
    script: Path, arguments: list[str], message: str
) -> None:
    done = run_cli("launch", *arguments, cwd=script.parent)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# --- from Python ----------------------------------------------------------------------------------

FUNCTIONS = """
import os, sys, json
from datetime import timedelta
from accelerate_launch import debug_launcher, notebook_launcher

def work(kind):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total = torch.ones(1); dist.all_reduce(total)
    (torch.ones(600, 600) @ torch.ones(600, 600)).sum()
    names = ("RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
    said = {n: os.environ.get(n) for n in names}
    sys.stdout.write(json.dumps({"argv": [kind], "env": said, "total": total.item()}) + "\\n")
    sys.stdout.flush()
    if kind == "raise" and dist.get_rank() == 1:
        raise ValueError("only here")
    if kind == "raise":
        dist.barrier()
    dist.destroy_process_group()

import torch
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # OpenMP threads that a fork does not inherit
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.dist
def test_functions_run_in_several_processes() -> None:
    done = run_python(
        FUNCTIONS
        + "before = dict(os.environ)\n"
        + "debug_launcher(work, ('debug',))\n"
        + "notebook_launcher(work, ('nb',), num_processes=2, mixed_precision='bf16')\n"
        + "assert dict(os.environ) == before\n"
    )
    assert done.returncode == 0, done.stderr
    ran = shown(done.stdout)
    assert sorted((one["argv"][0], one["env"]["RANK"]) for one in ran) == [
        ("debug", "0"),
        ("debug", "1"),
        ("nb", "0"),
        ("nb", "1"),
    ]
    assert all(one["total"] == 2 for one in ran)
    for one in ran:
        debug = one["argv"] == ["debug"]
        assert one["env"]["ACCELERATE_MIXED_PRECISION"] == (None if debug else "bf16")
        assert one["env"]["ACCELERATE_USE_CPU"] == ("true" if debug else None)


@pytest.mark.dist
def test_failing_function_is_reported_with_its_rank() -> None:
    done = run_python(FUNCTIONS + "debug_launcher(work, ('raise',))\n")
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("ChildFailedError: Rank 1 failed: exit status 1") :]
    assert said.endswith("ValueError: only here\n")


def test_function_in_one_process_runs_in_this_process() -> None:
    seen: list[Any] = []
    before = dict(os.environ)

    def work(value: int) -> None:
        seen.append((value, os.environ["ACCELERATE_MIXED_PRECISION"], os.getpid()))

    notebook_launcher(work, (3,), num_processes=1, mixed_precision="fp16")
    assert seen == [(3, "fp16", os.getpid())]
    assert dict(os.environ) == before


def test_prepare_for_launch_calls_the_function() -> None:
    assert PrepareForLaunch(lambda x: x + 1)(1) == 2


def test_launching_a_function_next_to_an_accelerator_is_refused() -> None:
    done = run_python(
        "from accelerate_core.distributed.process import current_runtime\n"
        "from accelerate_launch import debug_launcher\n"
        "current_runtime()\n"
        "debug_launcher(print)\n"
    )
    assert "RuntimeConflictError: This process already has an Accelerator" in done.stderr
    assert "end_training" in done.stderr


def test_forking_after_the_device_was_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Device:
        type = "cuda"

    class Module:
        @staticmethod
        def is_initialized() -> bool:
            return True

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: Device())
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    with pytest.raises(RuntimeConflictError, match=r"already used the cuda device.*kernel"):
        notebook_launcher(print, num_processes=2)


def test_signal_handlers_are_restored() -> None:
    from accelerate_launch.functions import _signal_handlers_kept

    before = signal.getsignal(signal.SIGTERM)
    with _signal_handlers_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


# --- local SGD ---------------------------------------------------------------------------------

LOCAL_SGD = """
import torch
from accelerate_core import Accelerator, LocalSGD

def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def loss(model, rank, step):
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()
    return (model(data) - data.sum(1, keepdim=True)).square().mean()

STEPS, EVERY = 5, 2
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(*build())
with LocalSGD(accelerator, model, EVERY) as local_sgd:
    for step in range(STEPS):
        accelerator.backward(loss(model, accelerator.process_index, step))
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()

runs = [build() for _ in range(accelerator.num_processes)]
for step in range(STEPS):
    for rank, (plain, plain_optimizer) in enumerate(runs):
        loss(plain, rank, step).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    if (step + 1) % EVERY == 0 or step == STEPS - 1:
        with torch.no_grad():
            for group in zip(*(plain.parameters() for plain, _ in runs)):
                mean = torch.stack(group).mean(0)
                [one.copy_(mean) for one in group]
for got, expected in zip(model.parameters(), runs[0][0].parameters()):
    assert torch.allclose(got, expected, rtol=0, atol=1e-12), (got, expected)
accelerator.print("averaged", accelerator.num_processes)
accelerator.end_training()
"""


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_local_sgd_averages_every_few_steps_and_at_the_end(tmp_path: Path, processes: int) -> None:
    (tmp_path / "local.py").write_text(LOCAL_SGD)
    run = run_workers(tmp_path / "local.py", processes).checked()
    assert f"averaged {processes}" in run.stdout


SPAWNED = """
import os, sys
from accelerate_launch import debug_launcher, notebook_launcher

def work(kind):
    import torch, torch.distributed as dist
    from accelerate_core import Accelerator
    accelerator = Accelerator(process_group_timeout=60)
    total = accelerator.reduce(torch.ones(1), "sum").item()
    sys.stdout.write(f"{kind} {accelerator.process_index} {total}\\n")
    sys.stdout.flush()
    accelerator.end_training()

if __name__ == "__main__":
    from accelerate_core.distributed.process import current_runtime
    current_runtime()  # a forked process could not use it
    debug_launcher(work, ("spawned",), start_method="spawn")
"""


@pytest.mark.dist
def test_spawn_works_next_to_an_accelerator(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, "spawned.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert sorted(said) == ["spawned 0 2.0", "spawned 1 2.0"]


def test_function_that_cannot_be_spawned_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="needs to pickle function"):
        notebook_launcher(lambda: None, num_processes=2, start_method="spawn")
    with pytest.raises(ConfigurationError, match="Did you mean 'spawn'"):
        notebook_launcher(print, num_processes=2, start_method="spwan")
    done = run_python(
        "from accelerate_launch import notebook_launcher\n"
        "def cell(): pass\n"
        "notebook_launcher(cell, num_processes=2, start_method='spawn')\n"
    )
    assert "it is defined in the notebook" in done.stderr


FAILING = """
import os, signal, sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True, process_group_timeout=60)
if accelerator.process_index == 1 and sys.argv[1] == "raise":
    raise ValueError("only here")
if accelerator.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
accelerator.reduce(torch.ones(3))
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "failed: exit status 1"),
        ("kill", 137, "failed: killed by SIGKILL, possibly because memory ran out"),
    ],
)
def test_failed_rank_is_reported_with_traceback_and_log(
    tmp_path: Path, how: str, status: int, said: str
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    more = ["--log_dir", "logs", "--tee", "3"]
    done = run_cli("launch", "--cpu", "--num_processes", "2", *more, "train.py", how, cwd=tmp_path)
    assert done.returncode == status
    assert f"Rank 1 on {socket.gethostname()} {said}" in done.stderr
    assert "Stopped afterwards: rank 0" in done.stderr
    assert "torch/distributed/run.py" not in done.stderr  # no traceback of the agent itself
    if how == "raise":
        log = Path(done.stderr.split("Log: ")[1].splitlines()[0])
        assert "ValueError: only here" in (tmp_path / log).read_text()
        first = done.stderr.split("Traceback", 1)[1].split("File", 2)[1]
        assert "ValueError" in first  # the first file in the traceback is the one that raised
        assert done.stderr.count("Traceback (most recent call last)") == 1  # printed by the rank
        assert "ValueError: only here (traceback above)" in done.stderr


def test_failed_rendezvous_is_one_error(script: Path) -> None:
    machines = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", "1"]
    address = ["--main_process_ip", "127.0.0.9", "--main_process_port", "29519"]
    how = ["--rdzv_backend", "c10d", "--rdzv_conf", "read_timeout=2,join_timeout=2,is_host=0"]
    done = run_cli("launch", "--cpu", *machines, *address, *how, script)
    assert done.returncode == 1
    assert "This machine could not connect to machine 0 at 127.0.0.9, port 29519" in done.stderr
    assert "Traceback" not in done.stderr
