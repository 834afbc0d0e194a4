"""`config --to skypilot` writes a task that SkyPilot accepts, and whose commands train.

SkyPilot needs an older click, so it has an environment of its own: `make skypilot`. No machine was ever
rented.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import run_cli
from support import clean_environment

from accelerate_launch.devices import get_free_port
from accelerate_launch.skypilot import MOUNTED

#: The environment that `make skypilot` makes.
SKYPILOT = Path(sys.prefix, "skypilot", "bin", "python")
GPUS = "num_machines: 2\nnum_processes: 16\nbackend: fsdp2\npreemption_signals: SIGTERM\n"
CPUS = (
    "num_machines: 2\nnum_processes: 2\nuse_cpu: true\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
)


def convert(folder: Path, config: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "c.yaml").write_text(config)
    words = ("config", "--config_file", "c.yaml", "--to", "skypilot", *options)
    return run_cli(*words, cwd=folder, forked=True)


def task_of(folder: Path, config: str, *options: str) -> dict[str, Any]:
    done = convert(folder, config, *options)
    assert done.returncode == 0, done.stderr
    task: dict[str, Any] = yaml.safe_load(done.stdout)
    return task


def test_task_follows_from_the_config_file(tmp_path: Path) -> None:
    task = task_of(tmp_path, GPUS, "--accelerator", "H100", "--command", "train.py --lr 0.1")
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert task["file_mounts"] == {MOUNTED: "c.yaml"}
    assert task["envs"] == {"COMMAND": "train.py --lr 0.1"}
    assert task["setup"] == 'pip install "accelerate-core[standard,fsdp2]"\n'
    assert "resources" not in task_of(tmp_path, CPUS)
    done = convert(tmp_path, GPUS, "--accelerator", "A100:8", "--output", "task.yaml")
    assert done.stdout == "Written: task.yaml\n"
    written = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert written["resources"]["accelerators"] == "A100:8"


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (GPUS, (), "Add --accelerator NAME, such as --accelerator H100:8"),
        (
            GPUS,
            ("--accelerator", "H100:4"),
            "requests 4 accelerators per machine, but c.yaml starts 8",
        ),
        (GPUS, ("--accelerator", "H100:all"), "must have the form NAME or NAME:NUMBER"),
        (CPUS, ("--accelerator", "H100"), "--accelerator H100 contradicts use_cpu: true"),
        (
            CPUS + "launcher: ray\n",
            (),
            "launcher=ray (c.yaml line",
        ),
        ("num_procs: 2\n", (), "Unknown key 'num_procs' in c.yaml line 1"),
        (CPUS, ("--output", "no/task.yaml"), "Cannot write no/task.yaml"),
    ],
)
def test_error_says_what_is_missing_or_wrong(
    tmp_path: Path, config: str, options: tuple[str, ...], said: str
) -> None:
    done = convert(tmp_path, config, *options)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


TRAIN = """
import json, sys, torch
from accelerate_core import Accelerator
accelerator = Accelerator(process_group_timeout=60)
total = accelerator.reduce(torch.ones(1), "sum").item()
open(f"{accelerator.process_index}.json", "w").write(json.dumps([total, sys.argv[1:]]))
accelerator.end_training()
"""


@pytest.mark.dist
def test_commands_of_the_task_train_on_two_machines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    task = task_of(tmp_path, CPUS, "--command", "train.py --lr 0.1")
    (programs := tmp_path / "bin").mkdir()
    program = programs / "accelerate-core"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m accelerate_core.cli "$@"\n')
    program.chmod(0o755)
    run = task["run"].replace(MOUNTED, str(tmp_path / task["file_mounts"][MOUNTED]))
    run = run.replace("29500", str(get_free_port()))
    started = []
    try:
        for rank in ("0", "1"):
            environ = clean_environment(
                **task["envs"],
                # What SkyPilot sets on each machine.
                SKYPILOT_NUM_NODES="2",
                SKYPILOT_NODE_RANK=rank,
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                SKYPILOT_NUM_GPUS_PER_NODE="0",
                PATH=f"{programs}:{os.environ['PATH']}",
            )
            process = subprocess.Popen(
                ["bash", "-c", run],
                cwd=tmp_path,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            started.append(process)
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0, 0], said
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [2.0, ["--lr", "0.1"]]


@pytest.mark.skipif(not SKYPILOT.exists(), reason="skypilot is not installed: make skypilot")
@pytest.mark.parametrize(
    ("config", "options"), [(GPUS, ("--accelerator", "H100")), (CPUS, ())], ids=["gpus", "cpus"]
)
def test_skypilot_accepts_the_task(tmp_path: Path, config: str, options: tuple[str, ...]) -> None:
    done = convert(tmp_path, config, *options, "--output", "task.yaml")
    assert done.returncode == 0, done.stderr
    code = (
        "import sys, yaml, sky\nfrom sky.utils import common_utils, schemas\n"
        "read = common_utils.validate_schema\n"
        "task = yaml.safe_load(open('task.yaml'))\n"
        "read(task, schemas.get_task_schema(), 'task: ')\n"
        "read(task.get('resources', {}), schemas.get_resources_schema(), 'resources: ')\n"
        "print(sky.Task.from_yaml('task.yaml').num_nodes)\n"
        "try: read({**task, 'nodes': 2}, schemas.get_task_schema(), 'task: ')\n"
        "except ValueError: print('refused')\n"
    )
    environ = clean_environment(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1")
    done = subprocess.run(
        [SKYPILOT, "-c", code],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["2", "refused"], done.stdout + done.stderr
