"""Ray clusters on this machine, with one raylet per node: launching, failures, dead nodes and jobs.

Needs `pip install --group ray` (Ray with its job server and Tune). Without it, all tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install --group ray")
from elastic_runs import ELASTIC_WORKER, records, run_alone, wait_until  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from support import clean_environment  # noqa: E402
from table import Row  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

from accelerate_core import notebook_launcher  # noqa: E402
from accelerate_testing import LauncherSuite  # noqa: E402

HERE = Path(__file__).parent
DIGITS = HERE / "ray_digits.py"
MEMORY = 80 * 2**20
#: Without the first, Ray would use the token of the user for some of its processes. Without the second,
#: its workers would wait for all other programs of this machine.
RAY_VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def ray_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in RAY_VARIABLES.items():
            patch.setenv(name, text)
        yield


def start_in_time(start: Callable[[], Any]) -> Any:
    """Start a node of a cluster. Ray gives it 30 seconds, which a busy machine may exceed."""
    for last in (False, False, True):
        try:
            return start()
        except Exception as error:
            if last or "timed out during startup" not in str(error):
                raise
    return None


class Nodes:
    """A head and one more node, of which tests can kill and add others."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
        self.cluster = start_in_time(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.other: Any = None
        self.add()

    def add(self) -> None:
        self.other = start_in_time(
            lambda: self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        )

    def kill(self) -> None:
        """Kill all processes of the second node."""
        self.cluster.remove_node(self.other, allow_graceful=False)
        self.other = None

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture(scope="module")
def started(ray_variables: None) -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


@pytest.fixture
def nodes(started: Nodes) -> Nodes:
    """Two nodes with one CPU each, all of which is free."""
    if started.other is None:
        started.add()
    return started


class Launch:
    """A running `accelerate-core launch --launcher ray`, whose output is read line by line."""

    def __init__(
        self, folder: Path, address: str, *arguments: object, environ: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", "--launcher", "ray"]
        self.out = folder / "out"
        self.err = folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*command, "--ray_address", address, *map(str, arguments)],
                stdout=out,
                stderr=err,
                cwd=folder,
                env=clean_environment(**RAY_VARIABLES, **(environ or {})),
            )

    @property
    def story(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}"

    def wait_for(self, text: str, limit: float = 120) -> None:
        """Wait until the output contains a text."""
        last = time.monotonic() + limit
        while text not in self.story:
            assert time.monotonic() < last, f"no {text!r} within {limit} s:\n{self.story}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.story}"
            time.sleep(0.1)

    def end(self, limit: float = 180) -> int:
        """Return the exit status."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"still running after {limit} s:\n{self.story}")


@pytest.fixture
def launch(tmp_path: Path, nodes: Nodes) -> Iterator[Callable[..., Launch]]:
    made: list[Launch] = []

    def start(*arguments: object, **more: Any) -> Launch:
        folder = tmp_path / f"launch_{len(made)}"
        folder.mkdir()
        made.append(Launch(folder, nodes.address, *arguments, **more))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def processes_of(path: Path) -> list[psutil.Process]:
    """Return the ranks that run a script, without the launcher."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if str(path) in words and "accelerate_ray.driver" not in words and "launch" not in words:
            found.append(one)
    return found


def gone(path: Path, limit: float = 15) -> bool:
    last = time.monotonic() + limit
    while processes_of(path) and time.monotonic() < last:
        time.sleep(0.1)
    return not processes_of(path)


def free_cpus(address: str) -> float:
    code = f"import ray; ray.init({address!r}, logging_level='ERROR'); "
    code += "print(ray.available_resources().get('CPU', 0))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout.split()[-1])


REPORT = """
import json, os, sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(process_group_timeout=60)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "OF_THE_USER",
         "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
said = {name: os.environ.get(name) for name in names}
said |= {"sum": accelerator.reduce(torch.ones(1), "sum").item(), "folder": os.getcwd()}
print("REPORT", json.dumps(said), sys.argv[1:])
print("to stderr", file=sys.stderr)
accelerator.end_training()
"""


def reports(run: Launch) -> list[dict[str, Any]]:
    found = re.findall(r"\[rank (\d)\] REPORT (\{.*?\}) \['an argument'\]", run.out.read_text())
    said = [json.loads(text) for _, text in sorted(found)]
    assert [one["RANK"] for one in said] == [rank for rank, _ in sorted(found)]
    return said


def test_ranks_run_on_two_nodes(launch: Callable[..., Launch], tmp_path: Path) -> None:
    path = script(tmp_path, REPORT)
    options = ("--num_processes", 2, "--ray_strategy", "strict_spread")
    run = launch(*options, path, "an argument", environ={"OF_THE_USER": "untouched"})
    assert run.end() == 0, run.story
    said = reports(run)
    assert [(one["RANK"], one["GROUP_RANK"]) for one in said] == [("0", "0"), ("1", "1")]
    for one in said:
        expected = {
            "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "sum": 2.0,
            "OF_THE_USER": "untouched", "folder": str(tmp_path / "launch_0"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        assert {name: one[name] for name in expected} == expected
    assert "[rank 1] to stderr" in run.err.read_text()


def test_ranks_of_one_node_follow_each_other(launch: Callable[..., Launch], tmp_path: Path) -> None:
    path = script(tmp_path, REPORT)
    run = launch("--num_processes", 4, "--ray_cpus", 0.5, path, "an argument")
    assert run.end() == 0, run.story
    said = reports(run)
    assert [one["GROUP_RANK"] for one in said] == ["0", "0", "1", "1"]
    assert [one["LOCAL_RANK"] for one in said] == ["0", "1", "0", "1"]
    assert {one["sum"] for one in said} == {4.0}


def test_directory_is_shipped(nodes: Nodes, tmp_path: Path) -> None:
    script(tmp_path, REPORT.replace("import json", "import json, beside"))
    (tmp_path / "beside.py").write_text("")
    options = ("--num_processes", 2, "--ray_files", "ship")
    run = Launch(tmp_path, nodes.address, *options, "script.py", "an argument")
    assert run.end() == 0, run.story
    said = reports(run)
    assert len(said) == 2
    assert all("working_dir_files" in one["folder"] for one in said)
    assert "save checkpoints to a path that all nodes share" in run.story


def test_failing_rank_is_reported_once(launch: Callable[..., Launch], tmp_path: Path) -> None:
    code = "if said['RANK'] == '1':\n    raise ValueError('this rank gives up')\n"
    code = REPORT.replace("accelerator.end_training()", f"{code}import time; time.sleep(60)")
    path = script(tmp_path, code)
    run = launch("--num_processes", 2, "--log_dir", "logs", path)
    assert run.end() == 1
    err = run.err.read_text()
    assert err.count("ValueError: this rank gives up") == 1, run.story
    assert re.search(r"Rank 1 on \S+ failed: exit status 1", err)
    assert err.count("Traceback") == 1
    assert "Stopped afterwards: rank 0." in err
    log = tmp_path / "launch_0" / "logs" / "attempt_0" / "1" / "stdout.log"
    assert log.read_text().startswith("REPORT")


def test_missing_resources_are_an_error(launch: Callable[..., Launch], tmp_path: Path) -> None:
    path = script(tmp_path, REPORT)
    run = launch("--num_processes", 3, "--ray_wait", 2, "--ray_resources", "tape=1", path)
    assert run.end() == 1
    assert "could not reserve 3 x CPU 1, tape 1 (pack) within 2 s. It has 2 nodes" in run.story


@pytest.fixture(scope="module")
def undisturbed(started: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The accuracy and the weights of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Launch(folder, started.address, "--num_processes", 2, DIGITS, folder, 0)
    assert run.end() == 0, run.story
    return accuracy(run), torch.load(folder / "weights.pt")


def accuracy(run: Launch) -> str:
    return re.findall(r"\[rank 0\] accuracy (\S+)", run.out.read_text())[-1]


def check_same(run: Launch, folder: Path, expected: tuple[str, Any]) -> None:
    assert accuracy(run) == expected[0]
    weights = torch.load(folder / "weights.pt")
    for name, value in expected[1].items():
        assert torch.equal(weights[name], value), name
    assert float(expected[0]) > 0.8


@pytest.mark.parametrize("where", ["new", "remaining"])
def test_run_continues_after_a_node_dies(
    where: str, launch: Callable[..., Launch], nodes: Nodes, undisturbed: Any, tmp_path: Path
) -> None:
    options = ["--num_processes", 2, "--ray_strategy", "spread", "--max_restarts", 1]
    if where == "new":
        options += ["--ray_wait", 60]
    else:
        options += ["--ray_cpus", 0.5]  # so that the head has room for both ranks
    run = launch(*options, DIGITS, tmp_path, 0.1)
    run.wait_for("[rank 0] step 13")
    nodes.kill()
    run.wait_for("Restarting all ranks (restart 1 of 1)")
    if where == "new":
        nodes.add()
    assert run.end() == 0, run.story
    assert "Rank 1 was lost: its node" in run.err.read_text()
    assert re.search(r"continues at step \d+", run.out.read_text())
    check_same(run, tmp_path, undisturbed)


def test_dead_node_ends_the_run_without_restarts(
    launch: Callable[..., Launch], nodes: Nodes, tmp_path: Path
) -> None:
    run = launch("--num_processes", 2, "--ray_strategy", "spread", DIGITS, tmp_path, 0.1)
    run.wait_for("[rank 0] step 3")
    nodes.kill()
    assert run.end(60) == 1
    err = run.err.read_text()
    assert re.search(r"Rank 1 was lost: its node \w{8} on \S+ died\.", err), run.story
    assert gone(DIGITS)


def test_elastic_run_continues_on_one_node_and_grows_again(
    launch: Callable[..., Launch], nodes: Nodes, tmp_path: Path
) -> None:
    steps, whole = run_alone(tmp_path / "alone", 2)
    folder = tmp_path / "elastic"
    folder.mkdir()
    for step in (6, 13):
        (folder / f"hold-{step}").touch()
    machines = ("--num_machines", "1:2", "--num_processes", "2")
    options = (*machines, "--ray_strategy", "spread", "--ray_join_wait", "2")
    run = launch(*options, ELASTIC_WORKER, folder)
    wait_until((folder / "step-6").exists, 120, "2 ranks take 6 steps")
    nodes.kill()
    run.wait_for("Starting 1 of 2 ranks")
    (folder / "hold-6").unlink()
    wait_until((folder / "step-13").exists, 120, "1 rank takes 13 steps")
    nodes.add()
    run.wait_for("A node has joined. Restarting all ranks.")
    (folder / "hold-13").unlink()
    assert run.end() == 0, run.story
    changes = re.findall(r"Machines now: .*", run.err.read_text())
    assert [re.sub(r"\S+ \(node \w{8}\)", "HOST", change) for change in changes] == [
        "Machines now: 1 (was 2); left: HOST; 1 process",
        "Machines now: 2 (was 1); joined: HOST; 2 processes",
    ]
    assert (folder / "size-1").exists()
    taken, ends = records(folder)
    assert {step: sorted(ids) for step, ids in taken.items()} == {
        step: sorted(ids) for step, ids in steps.items()
    }
    assert len(ends) == 2
    for end in ends:
        assert end["weights"] == pytest.approx(whole["weights"], abs=1e-5)
        assert "elastic: 2 of 2 processes, policy keep_global_batch; 3 accum" in end["explain"]


def test_elastic_run_needs_room_for_the_smallest_number(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    machines = ("--num_machines", "3:4", "--num_processes", "4")
    run = launch(*machines, "--ray_join_wait", "1", "--ray_wait", "1", script(tmp_path, REPORT))
    assert run.end() == 1
    assert "could not reserve 3 x CPU 1 (pack) within 1 s" in run.story


def test_killed_rank_continues_from_its_checkpoint(
    launch: Callable[..., Launch], undisturbed: Any, tmp_path: Path
) -> None:
    run = launch("--num_processes", 2, "--max_restarts", 1, DIGITS, tmp_path, 0.1)
    run.wait_for("[rank 0] step 7")
    processes_of(DIGITS)[0].kill()
    assert run.end() == 0, run.story
    assert "killed by SIGKILL" in run.err.read_text()
    assert re.search(r"continues at step \d+", run.out.read_text())
    check_same(run, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_stopped_launch_leaves_nothing_behind(
    number: signal.Signals,
    status: int,
    launch: Callable[..., Launch],
    nodes: Nodes,
    tmp_path: Path,
) -> None:
    run = launch("--num_processes", 2, "--max_restarts", 3, DIGITS, tmp_path, 0.1)
    run.wait_for("[rank 0] step 3")
    assert len(processes_of(DIGITS)) == 2
    run.process.send_signal(number)
    assert run.end(60) == status, run.story
    assert "Restarting" not in run.story
    assert gone(DIGITS), processes_of(DIGITS)
    assert free_cpus(nodes.address) == 2


def test_preempted_run_saves_and_is_not_restarted(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    options = ("--num_processes", 2, "--max_restarts", 3, "--preemption_signals", "SIGTERM")
    run = launch(*options, DIGITS, tmp_path, 0.1)
    run.wait_for("[rank 0] step 3")
    run.process.terminate()
    assert run.end(60) == 75, run.story
    again = launch(*options, DIGITS, tmp_path, 0)
    assert again.end() == 0, again.story
    assert re.search(r"continues at step [34]", again.out.read_text()), again.story


def report_rank(word: str) -> tuple[str, int, int]:
    from accelerate_core import Accelerator

    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    found = word, accelerator.process_index, accelerator.num_processes
    accelerator.end_training()
    return found


def give_up() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this rank gives up")
    time.sleep(60)


def test_notebook_launcher_returns_the_values(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    words = notebook_launcher(report_rank, ("hello",), num_processes=2, launcher="ray")
    assert words == [("hello", 0, 2), ("hello", 1, 2)]
    assert not ray.is_initialized()
    with pytest.raises(ChildFailedError) as error:
        notebook_launcher(give_up, num_processes=2, launcher="ray")
    text = str(error.value)
    assert text.startswith("Rank 1 failed: exit status 1"), text
    assert "in give_up" in text
    assert text.endswith("ValueError: this rank gives up")
    assert "accelerate_ray" not in text


def test_notebook_launcher_keeps_an_existing_connection(nodes: Nodes) -> None:
    ray.init(nodes.address, logging_level="ERROR")
    try:
        assert notebook_launcher(report_rank, ("a",), num_processes=1, launcher="ray") == [
            ("a", 0, 1)
        ]
        assert ray.is_initialized()
    finally:
        ray.shutdown()


PORT = 6399

#: Waits until its input is closed, which also happens if pytest is killed.
_END = """
import shutil, sys, psutil
sys.stdin.read()
for _ in range(2):  # a process may start another one before it is killed
    for one in psutil.process_iter(["cmdline"]):
        if one.pid != psutil.Process().pid and any(sys.argv[1] in word for word in one.info["cmdline"] or []):
            one.kill()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


@contextlib.contextmanager
def ended_with_this_process(folder: str) -> Iterator[None]:
    """Kill the processes with this folder in their command line at the end, and delete the folder.

    `ray start` leaves daemons, which would outlive a killed pytest. `Cluster` ends its nodes itself.
    """
    command = [sys.executable, "-c", _END, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # the end of the block closes the input, and waits


@pytest.fixture(scope="module")
def head(ray_variables: None) -> Iterator[str]:
    """A cluster that `ray start` has started, with a job server and two GPUs that don't exist."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of Ray's sockets must be short
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--temp-dir={folder}"]
    start += [f"--port={PORT}", "--num-cpus=8", "--num-gpus=2", f"--object-store-memory={MEMORY}"]
    start += ["--include-dashboard=true", "--dashboard-port=8299"]
    start += ["--dashboard-agent-listen-port=8298", "--disable-usage-stats"]
    with ended_with_this_process(folder):
        done = subprocess.run(start, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield f"127.0.0.1:{PORT}"


def test_ranks_of_a_node_see_all_of_its_gpus(head: str, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os\nprint('SEES', *(os.environ.get(name) for name in"
        " ('LOCAL_RANK', 'CUDA_VISIBLE_DEVICES', 'WORLD_SIZE')))",
    )
    command = [sys.executable, "-m", "accelerate_core", "launch", "--launcher", "ray"]
    done = subprocess.run(
        [*command, "--ray_address", head, str(path)],
        env=clean_environment(**RAY_VARIABLES),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    seen = sorted(re.findall(r"SEES (.*)", done.stdout))
    assert seen == ["0 0,1 2", "1 0,1 2"]  # without --num_processes: one rank per GPU


LAUNCH = f"{sys.executable} -m accelerate_core launch --launcher ray --cpu"
SUBMIT = f"{sys.executable} -m ray.scripts.scripts job submit --address http://127.0.0.1:8299"


def shell(command: str, folder: Path, head: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the head node."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=clean_environment(RAY_ADDRESS=head, **RAY_VARIABLES),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_submitted_job(head: str, tmp_path: Path) -> None:
    script(tmp_path, REPORT.replace("import json", "import json, beside"))
    (tmp_path / "beside.py").write_text("")
    command = f"{SUBMIT} --working-dir . -- {LAUNCH} --num_processes 2 script.py"
    done = shell(command, tmp_path, head)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    for rank in range(2):
        assert re.search(rf'\[rank {rank}\] REPORT .*"sum": 2.0', done.stdout), done.stdout


NOTEBOOK = """
import sys
sys.path.insert(0, {engines!r})
from accelerate_core import notebook_launcher

def train(folder, kill, fail):
    from argparse import Namespace
    from pathlib import Path
    sys.path.insert(0, {engines!r})
    import train_digits
    Path(folder).mkdir(parents=True, exist_ok=True)
    train_digits.main(Namespace(folder=Path(folder), kill=kill, fail=fail, preempt=False, pace=0.0))

flags = [name in sys.argv for name in ("--kill", "--fail")]
notebook_launcher(train, (sys.argv[1], *flags), num_processes=2, launcher="ray", max_restarts=1)
"""
TRAIN = HERE / "train_digits.py"
#: What starts the run -> its command. "{run}" is a folder and the options of the script.
WAYS = {
    "`launch --launcher ray`": f"{LAUNCH} --num_processes 2 --max_restarts 1 {TRAIN} {{run}}",
    "`ray job submit`, with `launch` inside": f"{SUBMIT} -- {LAUNCH} --num_processes 2 --max_restarts 1"
    f" {TRAIN} {{run}}",
    '`notebook_launcher(launcher="ray")`': f"{sys.executable} notebook.py {{run}}",
}


@pytest.mark.parametrize("way", WAYS)
def test_killed_digits_end_as_a_run_without_a_break(
    way: str,
    head: str,
    tmp_path: Path,
    reference: Callable[[int], dict[str, Any]],
    table_row: Callable[[Row], None],
) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(engines=str(HERE)))
    begun = time.time()
    failed = shell(
        WAYS[way].replace("--max_restarts 1", "").format(run=f"{tmp_path / 'failing'} --fail"),
        tmp_path,
        head,
    )
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "this rank fails on purpose" in failed.stdout + failed.stderr
    first = min(float(file.read_text()) for file in (tmp_path / "failing").glob("first.*"))
    killed = shell(WAYS[way].format(run=f"{tmp_path / 'killed'} --kill"), tmp_path, head)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    resumed = json.loads((tmp_path / "killed" / "result.json").read_text())
    assert resumed == {**reference(2), "resumed": 40}
    text = "restarts, continues at step 40"
    table_row(Row(way, 2, first - begun, failed.returncode, text, resumed["correct"]))


@pytest.mark.parametrize("page", ["how_to/ray.md", "how_to/ray_tune.md"])
def test_guide_runs_as_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE.parent / "examples"))
    from test_guides import test_page_runs_as_printed

    (tmp_path / "page").mkdir()
    (tmp_path / "home").mkdir()
    test_page_runs_as_printed(page, tmp_path / "page", tmp_path / "home")


@pytest.mark.usefixtures("head")
class TestSuite(LauncherSuite):
    plugin = "ray"
    options = {"most_ranks": 8}  # each needs an actor
    environ = {"RAY_ADDRESS": f"127.0.0.1:{PORT}", "ACCELERATE_RAY_GPUS": "0", **RAY_VARIABLES}
