"""The Ray launcher without a cluster: options, commands, errors, and the process of one rank.

None of this needs Ray. tests/engines/test_ray.py runs it on real clusters.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import clean_environment

from accelerate_core.config.provenance import SourcedValue
from accelerate_core.errors import ConfigurationError
from accelerate_launch import LaunchPlan, Target, make_plan
from accelerate_launch.starting import child_environment, choose_launcher
from accelerate_ray.launcher import RayLauncher, processes_of
from accelerate_ray.options import rank_command, shipped_variables
from accelerate_ray.output import Output
from accelerate_ray.rank_actor import News, Place, RankActor, _split
from accelerate_ray.ranks import number_ranks, shared_devices
from accelerate_ray.settings import RaySettings, parse_resources, parse_runtime_env

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return Path("train.py")


def launch(*arguments: str, code: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `launch --dry_run` in a process in which `import ray` fails."""
    block = "import sys; sys.modules['ray'] = None; "
    block += "from accelerate_core.cli import main; sys.argv[0] = 'accelerate-core'; main()"
    return subprocess.run(
        [sys.executable, "-c", block, "launch", *arguments],
        env=clean_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


def plan_of(script: Path, **given: object) -> LaunchPlan:
    return make_plan(str(script), ["--lr", "1"], {"launcher": "ray", "cpu": True, **given}, {})


def command_of(plan: LaunchPlan, **settings: Any) -> list[str]:
    return RayLauncher(RaySettings(**settings)).launch_command(plan)


def test_dry_run_prints_the_command_without_importing_ray(script: Path) -> None:
    done = launch(
        *("--launcher", "ray", "--num_processes", "2", "--cpu", "--dry_run"),
        *("--ray_strategy", "spread", "--ray_cpus", "4", "--ray_resources", "tape=1", str(script)),
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert "-m accelerate_ray.driver --num_processes 2 " in first
    assert "--strategy spread --cpus 4.0 --resources tape=1 " in first
    assert first.endswith("--kind script -- train.py")
    assert "OMP_NUM_THREADS" in done.stdout


@pytest.mark.parametrize("way", ["option", "variable"])
def test_switch_selects_the_launcher(script: Path, way: str) -> None:
    option = ["--ray"] if way == "option" else []
    environ = {} if option else {"ACCELERATE_USE_RAY": "true"}
    done = launch(*option, "--num_processes", "2", "--dry_run", str(script), **environ)
    assert "accelerate_ray.driver" in done.stdout, done.stderr


def test_threads_follow_from_reserved_cpus(script: Path) -> None:
    plan = plan_of(script, num_processes=2)
    assert RayLauncher(RaySettings(cpus=4)).launch_environment(plan) == {"OMP_NUM_THREADS": "4"}
    assert RayLauncher(RaySettings(cpus=0.5)).launch_environment(plan) == {"OMP_NUM_THREADS": "1"}
    chosen = plan_of(script, num_processes=2, num_cpu_threads_per_process=3)
    assert RayLauncher(RaySettings(cpus=4)).launch_environment(chosen) == {}
    assert child_environment(chosen, {})["OMP_NUM_THREADS"] == "3"


def test_counted_processes_are_counted_again_on_the_cluster(script: Path) -> None:
    assert processes_of(plan_of(script, cpu=None)) is None
    assert "auto" in command_of(plan_of(script, cpu=None))
    assert processes_of(plan_of(script)) == 1  # on the CPU, one is the default
    assert processes_of(plan_of(script, num_processes=3)) == 3


def test_range_of_machines_becomes_a_range_of_ranks(script: Path) -> None:
    plan = plan_of(script, num_machines="2:4", num_processes=8)
    command = command_of(plan)
    assert command[command.index("--least") : command.index("--share") + 2] == (
        ["--least", "4", "--share", "2"]
    )
    assert command[command.index("--max_restarts") + 1] == "100"
    environ = RayLauncher(RaySettings()).launch_environment(plan)
    assert environ["ACCELERATE_ELASTIC_PROCESSES"] == "8"
    with pytest.raises(ConfigurationError, match="strict_pack places all ranks on one node"):
        command_of(plan, strategy="strict_pack")


@pytest.mark.parametrize(
    "given",
    [
        {"num_machines": 2, "main_process_ip": "10.0.0.1"},
        {"gpu_ids": "0,1"},
        {"rdzv_conf": "timeout=3"},
    ],
)
def test_options_that_ray_decides_are_refused(script: Path, given: dict[str, object]) -> None:
    name, value = next(iter(given.items()))
    plan = plan_of(script, num_processes=2)
    sourced = {one: SourcedValue(given[one], f"command line --{one}") for one in given}
    plan = replace(plan, provenance={**plan.provenance, **sourced})
    with pytest.raises(ConfigurationError) as error:
        command_of(plan)
    said = f"{name}={value!r} (command line --{name}) has no effect with Ray"
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"resources": "tape"}, "must have the form name=amount"),
        ({"resources": "tape=0"}, "must have the form name=amount"),
        ({"resources": "GPU=1"}, "Use --ray_gpus instead"),
        ({"runtime_env": "nowhere.yaml"}, "Cannot read ray_runtime_env file nowhere.yaml"),
        ({"runtime_env": "{"}, "Cannot read ray_runtime_env"),
    ],
)
def test_invalid_settings_are_refused_before_ray_is_imported(
    script: Path, settings: Any, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        command_of(plan_of(script), **settings)


def test_resources_and_runtime_env_are_parsed(tmp_path: Path) -> None:
    assert parse_resources("") == {}
    assert parse_resources("tape=1, disk = 0.5") == {"tape": 1.0, "disk": 0.5}
    (tmp_path / "env.yaml").write_text("pip: [a]\n")
    assert parse_runtime_env(str(tmp_path / "env.yaml")) == {"pip": ["a"]}
    assert parse_runtime_env('{"pip": ["a"]}') == {"pip": ["a"]}
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigurationError, match="must be a mapping"):
        parse_runtime_env(str(tmp_path / "list.yaml"))


def test_per_rank_tee_is_refused(script: Path) -> None:
    with pytest.raises(ConfigurationError, match="tee=0:1 is not supported with Ray"):
        command_of(plan_of(script, tee="0:1"))


def test_other_launches_are_not_affected(script: Path) -> None:
    plan = make_plan(str(script), [], {"cpu": True, "num_processes": 2}, {})
    assert type(choose_launcher(plan)).__name__ == "TorchrunLauncher"


def test_shipped_script_is_named_relative_to_the_directory(script: Path, tmp_path: Path) -> None:
    whole = Target(str(tmp_path / "train.py"), ("a",))
    assert rank_command(whole, shipped=True) == ["{python}", "train.py", "a"]
    assert rank_command(whole, shipped=False) == ["{python}", str(tmp_path / "train.py"), "a"]
    with pytest.raises(ConfigurationError, match="is outside of the current directory"):
        rank_command(Target("/bin/train.py"), shipped=True)
    assert rank_command(Target("ls", ("-l",), "program"), shipped=True) == ["ls", "-l"]


def test_other_machines_get_no_variables_of_this_one() -> None:
    environ = {"PATH": "/bin", "HOME": "/home/a", "WANDB_API_KEY": "k", "RAY_JOB_ID": "1"}
    assert shipped_variables(environ, shipped=True) == {"WANDB_API_KEY": "k"}
    assert shipped_variables(environ, shipped=False).keys() == {"PATH", "HOME", "WANDB_API_KEY"}


def place(node: str, **devices: str) -> Place:
    return Place(node, f"host of {node}", "10.0.0.1", "/work", devices)


def test_ranks_of_a_node_follow_each_other() -> None:
    places = [place("b"), place("a"), place("b"), place("a")]
    ranks = number_ranks([10, 11, 12, 13], places, here="a")
    assert [rank.actor for rank in ranks] == [11, 13, 10, 12]
    assert [rank.number for rank in ranks] == [0, 1, 2, 3]
    assert [rank.local_rank for rank in ranks] == [0, 1, 0, 1]


def test_ranks_of_a_node_see_all_of_its_devices() -> None:
    places = [
        place("a", CUDA_VISIBLE_DEVICES="1"),
        place("a", CUDA_VISIBLE_DEVICES="0"),
        place("b", CUDA_VISIBLE_DEVICES="3"),
    ]
    ranks = number_ranks([0, 1, 2], places, here="a")
    assert shared_devices(ranks) == {
        "a": {"CUDA_VISIBLE_DEVICES": "1,0"},
        "b": {"CUDA_VISIBLE_DEVICES": "3"},
    }


def test_progress_bars_are_split_into_lines() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a\nb\r\n1%\r2%\r50%")
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert list(_split(pipe)) == [b"a", b"b", b"2%\r", b"50%"]


def test_output_has_the_rank_and_is_written_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output("[${role_name} ${rank}/${local_rank}] ", str(tmp_path), "2")
    output.begin(1)
    output.show(5, 1, [("stdout", "a"), ("stderr", "b")])
    output.close()
    assert capsys.readouterr() == ("[rank 5/1] a\n", "[rank 5/1] b\n")
    assert (tmp_path / "attempt_1" / "5" / "stderr.log").read_text() == "b\n"
    assert not (tmp_path / "attempt_1" / "5" / "stdout.log").exists()


@pytest.fixture
def actor() -> Iterator[RankActor]:
    made = RankActor()
    yield made
    made.close()


def start(actor: RankActor, code: str) -> None:
    actor.start(["{python}", "-c", code], {}, os.getcwd(), {})


def all_news(actor: RankActor) -> News:
    """Wait until the rank has ended, and return all of its output."""
    lines: list[tuple[str, str]] = []
    last = time.monotonic() + 30
    while time.monotonic() < last:
        news = actor.news(1.0)
        lines += news.lines
        if news.ending is not None:
            return News(lines, news.ending)
    pytest.fail(f"the rank did not end; it printed {lines}")


def test_actor_reports_output_and_status_of_its_rank(actor: RankActor) -> None:
    start(actor, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    news = all_news(actor)
    assert sorted(news.lines) == [("stderr", "err"), ("stdout", "out")]
    assert news.ending is not None
    assert news.ending.status == 7


def test_actor_stops_a_rank_that_ignores_sigterm(actor: RankActor) -> None:
    start(
        actor,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); "
        "time.sleep(60)",
    )
    while not actor.news(1.0).lines:
        pass
    actor.stop(0.5)
    ending = all_news(actor).ending
    assert ending is not None
    assert ending.status == -signal.SIGKILL


def test_actor_ends_children_that_its_rank_has_left(actor: RankActor, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    start(
        actor,
        "import subprocess; one = subprocess.Popen(['sleep', '60']); "
        f"open({str(file)!r}, 'w').write(str(one.pid))",
    )
    all_news(actor)
    child = int(file.read_text())
    last = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < last:
        if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_rank_ends_with_its_actor(tmp_path: Path) -> None:
    code = (
        "import time; from accelerate_ray.rank_actor import RankActor; one = RankActor(); "
        "one.start(['sleep', '77'], {}, '.', {}); print(one._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    assert parent.stdout is not None
    rank = psutil.Process(int(parent.stdout.readline()))
    while rank.name() != "sleep":  # the guard has replaced itself
        time.sleep(0.02)
    parent.kill()
    parent.wait(10)
    psutil.wait_procs([rank], timeout=10)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
