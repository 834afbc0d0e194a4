"""Jobs from the launcher train in their pods, with exactly the variables that each operator sets.

The pods are processes of this machine: their addresses are local, everything else is as in a
cluster. No cluster was used.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from operators import CLUSTER, pods_of, start_here
from test_manifests import manifests_of, planned

from accelerate_core.config.files import read_config
from accelerate_core.errors import ConfigurationError
from accelerate_kubernetes.settings import KINDS
from accelerate_launch import LaunchPlan, make_plan
from accelerate_launch.devices import get_free_port

TRAIN = """
import json, os, sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(process_group_timeout=60)
total = accelerator.reduce(torch.ones(1), "sum").item()
said = {
    "rank": accelerator.process_index, "size": accelerator.num_processes, "total": total,
    "local": accelerator.local_process_index, "steps": accelerator.gradient_accumulation_steps,
    "argument": sys.argv[1], "variable": os.environ["FORMULA"],
}
open(f"{accelerator.process_index}.json", "w").write(json.dumps(said))
accelerator.end_training()
"""
WAIT = 120


def run(folder: Path, documents: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Run all pods of a job, and return their exit status and output."""
    port = get_free_port()
    started = []
    try:
        for pod in pods_of(documents):
            started.append(start_here(pod, folder, documents, port))
        said = [process.communicate(timeout=WAIT)[0] for process in started]
    finally:
        end(started)
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def end(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "machines", "per_pod"),
    # The operator of PyTorchJob sets RANK and WORLD_SIZE for any number of pods and processes.
    [*((kind, 2, 1) for kind in KINDS), ("pytorchjob", 1, 2), ("pytorchjob", 1, 1)],
)
def test_job_trains_in_its_pods(tmp_path: Path, kind: str, machines: int, per_pod: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    config = tmp_path / "c.yaml"
    config.write_text("use_cpu: true\ngradient_accumulation_steps: 3\nmachine_rank: 0\n")
    size = machines * per_pod
    given = {"launcher": "kubernetes", "num_machines": machines, "num_processes": size}
    plan = make_plan("train.py", ["two words"], given, {}, read_config(config))
    documents = manifests_of(plan, kind=kind, env=["FORMULA=$(HOME)"])
    for status, said in run(tmp_path, documents):
        assert status == 0, said
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert [one["total"] for one in told] == [float(size)] * size
    assert [one["local"] for one in told] == [rank % per_pod for rank in range(size)]
    assert {(one["steps"], one["argument"], one["variable"]) for one in told} == {
        (3, "two words", "$(HOME)")
    }


PREEMPTED = """
import time, torch
from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration
project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project, process_group_timeout=30)
net = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), torch.utils.data.DataLoader(torch.ones(4000, 4))
)
open(f"{accelerator.process_index}.started", "w").close()
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step(); optimizer.zero_grad()
    time.sleep(0.02)
"""


@pytest.mark.dist
def test_pod_that_is_evicted_ends_all_with_the_status_that_the_job_restarts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PREEMPTED)
    plan = planned(preemption_signals="SIGTERM", cpu=True)
    documents = manifests_of(plan, kind="jobset")
    port = get_free_port()
    started = []
    try:
        for pod in pods_of(documents):
            started.append(start_here(pod, tmp_path, documents, port))
        until = time.monotonic() + WAIT
        while len(list(tmp_path.glob("*.started"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        started[1].send_signal(signal.SIGTERM)  # as the kubelet does, to the first process
        said = [process.communicate(timeout=WAIT)[0] for process in started]
    finally:
        end(started)
    statuses = [process.returncode for process in started]
    assert statuses == [75, 75], said
    assert list((tmp_path / "run" / "checkpoints").iterdir())


# --- jobs that were not written by the launcher -----------------------------------------------------

TRAINJOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "0",
    "MASTER_PORT": "23456",
    "MASTER_ADDR": "run-master-0",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
}
ELASTIC = {
    "PYTHONUNBUFFERED": "0",
    "PET_RDZV_ENDPOINT": "run-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2",
    "PET_MAX_RESTARTS": "3",
    "PET_N_PROC_PER_NODE": "4",
    "PET_RDZV_ID": "run-1",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "1",
    "MASTER_ADDR": "run-workers-0-0.run",
    "MASTER_PORT": "3389",
}


def plan_in_pod(tmp_path: Path, variables: dict[str, str], **given: Any) -> LaunchPlan:
    script = tmp_path / "s.py"
    script.write_text("")
    return make_plan(str(script), [], {"cpu": True, **given}, {**CLUSTER, **variables})


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        (TRAINJOB, {}, (8, 2, 1, "run-node-0-0.run", 29400)),
        (PYTORCHJOB, {}, (8, 2, 1, "run-master-0", 23456)),
        (INDEXED, {"num_machines": 2}, (2, 2, 1, "run-workers-0-0.run", 3389)),
        # What the command line says takes precedence.
        (TRAINJOB, {"num_processes": 2}, (2, 2, 1, "run-node-0-0.run", 29400)),
        # The launcher counts the accelerators of the pod.
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "auto"}, {}, (2, 2, 1, "run-node-0-0.run", 29400)),
    ],
)
def test_rank_and_address_come_from_the_variables_of_the_operator(
    tmp_path: Path, variables: dict[str, str], given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    plan = plan_in_pod(tmp_path, variables, **given)
    found = (plan.num_processes, plan.num_machines, plan.machine_rank)
    assert (*found, plan.main_process_ip, plan.main_process_port) == expected
    assert plan.provenance["machine_rank"].origin.startswith("environment variable ")
    assert "timeout=900" in plan.rdzv_conf  # the pod of rank 0 may have no name yet


def test_elastic_pytorchjob_numbers_its_pods_itself(tmp_path: Path) -> None:
    plan = plan_in_pod(tmp_path, ELASTIC)
    assert (plan.num_processes, plan.num_machines, plan.max_restarts) == (8, 2, 3)
    assert (plan.rdzv_backend, plan.rdzv_id) == ("c10d", "run-1")
    assert (plan.main_process_ip, plan.main_process_port) == ("run-worker-0", 23456)


def test_pytorchjob_with_an_elastic_policy_changes_its_size(tmp_path: Path) -> None:
    plan = plan_in_pod(tmp_path, {**ELASTIC, "PET_NNODES": "1:4"})
    assert (plan.min_machines, plan.num_machines, plan.num_processes) == (1, 4, 16)
    assert plan.rdzv_backend == "c10d"
    with pytest.raises(ConfigurationError, match=r"PET_NNODES='1:4' lets pods leave and join, but"):
        plan_in_pod(tmp_path, {**TRAINJOB, "PET_NNODES": "1:4"})


def test_pods_of_one_machine_need_no_address(tmp_path: Path) -> None:
    variables = {**PYTORCHJOB, "PET_NNODES": "1", "WORLD_SIZE": "4", "RANK": "0"}
    plan = plan_in_pod(tmp_path, {**variables, "PET_NODE_RANK": "0"})
    assert (plan.num_processes, plan.num_machines, plan.main_process_ip) == (4, 1, None)


def test_indexed_job_without_an_address_is_several_runs(tmp_path: Path) -> None:
    plan = plan_in_pod(tmp_path, {"JOB_COMPLETION_INDEX": "3"})
    assert (plan.num_processes, plan.num_machines, plan.machine_rank) == (1, 1, 0)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (INDEXED, r"machine_rank=1 \(environment variable JOB_COMPLETION_INDEX=1\) must be less"),
        ({**TRAINJOB, "PET_NODE_RANK": "one"}, "PET_NODE_RANK='one' must be a number"),
        ({**TRAINJOB, "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "8"}, "already rank 0 of 8"),
    ],
)
def test_variables_that_do_not_fit_are_errors(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan_in_pod(tmp_path, variables)


def test_configuration_report_shows_the_variables_of_the_operator(tmp_path: Path) -> None:
    from launched import run_cli

    done = run_cli("config", "show", "--json", env={**CLUSTER, **TRAINJOB}, forked=True)
    rows = json.loads(done.stdout)
    assert rows["num_machines"] == {"value": 2, "from": "environment variable PET_NNODES=2"}
    done = run_cli("env", "--json", env={**CLUSTER, **TRAINJOB})
    assert json.loads(done.stdout)["variables"]["PET_MASTER_ADDR"] == "run-node-0-0.run"


def test_launch_imports_nothing_of_this_package_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    code = (
        "import sys; from accelerate_launch.cli import cli\n"
        "cli(['launch', '--dry_run', *sys.argv[1:], 's.py'], standalone_mode=False)\n"
        "print('accelerate_kubernetes' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    options = ["--launcher", "kubernetes", "--kubernetes_image", "i"]
    for words, loaded in (([], "False"), (options, "True")):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1:] == [loaded], done.stderr
