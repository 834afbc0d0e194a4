"""Replicas on torchft: one dies, the others continue, and it is healed when it returns."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import clean_environment

pytest.importorskip("torchft")

WORKER = Path(__file__).with_name("torchft_worker.py")


@dataclass
class Run:
    """The records of a run.

    Attributes:
        rows: process -> [epoch, samples, whether the step was taken, replicas, time] for each batch.
        ends: process -> the weights and counts at its end.
        text: the output of all processes.
    """

    rows: dict[str, list[Any]]
    ends: dict[str, dict[str, Any]]
    text: str


def launch(
    folder: Path,
    *arguments: str,
    replicas: int = 2,
    ranks: int = 1,
    timeout: float = 150,
    **options: Any,
) -> Run:
    """Run the worker, and return what its processes recorded."""
    records = folder / "records"
    records.mkdir()
    options = {"backend": "torchft", **options}
    command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu"]
    command += ["--num_processes", str(replicas * ranks), "--torchft_replicas", str(replicas)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    command += [str(WORKER), str(records), *arguments]
    environment = clean_environment(TEST_REPLICAS=str(replicas), OMP_NUM_THREADS="1")
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = "no end"
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    assert status == 0, text
    rows: dict[str, list[Any]] = {}
    ends = {}
    for file in sorted(records.glob("[0-9]*-*")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        rows[file.name] = [line for line in lines if isinstance(line, list)]
        if lines and isinstance(lines[-1], dict):
            ends[file.name] = lines[-1]
    return Run(rows, ends, text)


def trained(run: Run, epoch: int) -> Counter[int]:
    """Return how often each sample was trained in an epoch."""
    rows = [row for its in run.rows.values() for row in its if row[2] and row[0] == epoch]
    return Counter(number for row in rows for number in row[1])


def longest_stall(run: Run) -> float:
    """Return the most seconds in which no process took a step."""
    times = sorted(row[4] for rows in run.rows.values() for row in rows if row[2])
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.dist
def test_survivor_continues_and_the_dead_replica_is_healed(tmp_path: Path) -> None:
    run = launch(tmp_path, "--kill", "1:0:6", "--wait")
    first, second = run.ends.values()
    assert len(run.rows) == 3  # replica 1 ran twice
    assert first["weights"] == second["weights"]
    assert first["lr"] == second["lr"]
    assert (first["counts"]["heals"], second["counts"]["heals"]) == (0, 1)
    assert first["counts"]["replicas"] == 2
    assert "2 of 2 replicas train" in first["explain"]
    assert first["steps"] == second["steps"] == first["counts"]["commits"]
    sizes = [row[3] for row in next(iter(run.rows.values()))]
    assert {1, 2} == set(sizes)
    for epoch in (0, 1):  # the last batch of an epoch may be filled up
        seen = trained(run, epoch)
        assert set(seen) == set(range(240))
        assert seen.total() <= 240 + 4
    assert "did not commit step 6 and repeats it" in run.text
    assert "replica 1 ended with status -9; it is started again" in run.text


@pytest.mark.dist
def test_shards_of_a_dead_replica_are_healed(tmp_path: Path) -> None:
    options = {"backend": "torchft_fsdp2", "max_restarts": 5}
    run = launch(tmp_path, "--kill", "0:1:5", "--wait", ranks=2, **options)
    assert len(run.ends) == 4
    weights = [end["weights"] for end in run.ends.values()]
    assert weights == [weights[0]] * 4
    heals = {name[:3]: end["counts"]["heals"] for name, end in run.ends.items()}
    assert heals == {"0-0": 1, "0-1": 1, "1-0": 0, "1-1": 0} or heals["0-0"] == 1
    for epoch in (0, 1):
        assert set(trained(run, epoch)) == set(range(240))
        assert trained(run, epoch).total() <= 240 + 8


@pytest.mark.dist
def test_replica_without_a_prepared_loader_is_healed_before_its_forward(tmp_path: Path) -> None:
    run = launch(tmp_path, "--unprepared", "--samples", "40", "--epochs", "1")
    first, second = run.ends.values()
    assert first["weights"] == second["weights"]
    assert first["counts"]["heals"] + second["counts"]["heals"] == 1
    assert first["counts"]["replicas"] == 2


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["local_sgd", "diloco"])
def test_local_steps_survive_a_death(tmp_path: Path, mode: str) -> None:
    options = {"torchft_mode": mode, "torchft_sync_every": 5}
    run = launch(tmp_path, "--kill", "1:0:12", "--wait", **options)
    first, second = run.ends.values()
    assert first["weights"] == second["weights"]
    assert first["counts"]["commits"] == pytest.approx(first["steps"] / 5, abs=4)
    assert f"mode {mode}, averaged every 5 steps" in first["explain"]


def test_processes_must_be_divisible_by_the_replicas(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", "--backend", "torchft"]
    command += ["--num_processes", "3", "--torchft_replicas", "2", str(WORKER), str(tmp_path)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "num_processes=3 (command line --num_processes) is not divisible by" in done.stderr


def test_conformance_suite_without_a_lighthouse_fails_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "accelerate_core",
        "plugins",
        "check",
        "torchft_fsdp2",
        "--json",
    ]
    command += [
        "--kind",
        "backend",
        "--only",
        "attributes",
        "--only",
        "prepare",
        "--only",
        "training",
    ]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert {name: one["state"] for name, one in checks.items()} == {
        "attributes": "failed",
        "prepare": "skipped",  # in one process
        "training": "skipped",  # on ranks
    }
    error = checks["attributes"]["error"]
    assert "torchft_fsdp2 needs a lighthouse, but TORCHFT_LIGHTHOUSE is not set" in error
    assert "torchft_lighthouse --min_replicas 1" in error
    assert checks["attributes"]["trace"] == ""
    assert checks["training"]["detail"] == "not run: attributes failed"


@pytest.mark.dist
@pytest.mark.parametrize("when", ["first", "quorum"])
def test_death_around_the_first_quorum_of_a_run(tmp_path: Path, when: str) -> None:
    # The survivor may wait for the dead replica until a collective's timeout, which is 60 s by default.
    options = {"torchft_heartbeat_timeout": 2, "torchft_timeout": 20}
    run = launch(tmp_path, "--kill", f"1:0:0:{when}", "--wait", **options)
    assert (tmp_path / "records" / f"killed-{when}-0").exists()
    first, second = run.ends.values()
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"]
    for epoch in (0, 1):
        assert set(trained(run, epoch)) == set(range(240))
        assert trained(run, epoch).total() <= 240 + 4
    assert "replica 1 ended with status -9; it is started again" in run.text


def kills(seed: int, replicas: int, ranks: int, count: int, steps: int) -> list[str]:
    """Return a seeded schedule of deaths: around the first quorum of the run, then at any time."""
    draw = random.Random(seed)
    early, late = draw.sample(range(replicas), 2)
    schedule = ["--kill", f"{early}:{draw.randrange(ranks)}:0:first"]
    schedule += ["--kill", f"{late}:{draw.randrange(ranks)}:0:quorum"]
    for index in range(count - 2):
        at = (index + 1) * steps // (count - 1)
        when = draw.choice(["step", "step", "step", "heal", "start"])
        place = f"{draw.randrange(replicas)}:{draw.randrange(ranks)}"
        schedule += ["--kill", f"{place}:{at}:{when}"]
    return schedule


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.dist
@pytest.mark.parametrize(
    ("backend", "replicas", "ranks", "seed", "deaths"),
    [
        ("torchft", 2, 1, 1, 20),
        ("torchft", 3, 1, 2, 20),
        ("torchft_fsdp2", 2, 2, 3, 8),
        ("torchft_fsdp2", 2, 2, 4, 20),
    ],
)
def test_many_deaths(
    tmp_path: Path, backend: str, replicas: int, ranks: int, seed: int, deaths: int
) -> None:
    schedule = kills(seed, replicas, ranks, deaths, 230)
    options = {"backend": backend, "torchft_heartbeat_timeout": 2, "torchft_timeout": 30}
    samples = ["--samples", str(300 * replicas * ranks), "--epochs", "2"]
    arguments = [*schedule, *samples, "--wait", "--pause", "0.01"]
    run = launch(tmp_path, *arguments, replicas=replicas, ranks=ranks, timeout=1500, **options)
    died = Counter(file.name.split("-")[1] for file in (tmp_path / "records").glob("killed-*"))
    stall = longest_stall(run)
    print(f"{died.total()} of {deaths} deaths: {dict(died)}; longest stall {stall:.0f} s")
    assert stall < 90  # two collectives that time out, and the start of new processes
    assert died["first"] == died["quorum"] == 1
    assert died.total() >= deaths * 0.6  # a death while healing needs a death before it
    weights = [end["weights"] for end in run.ends.values()]
    assert len(weights) >= ranks
    assert weights == [weights[0]] * len(weights)
