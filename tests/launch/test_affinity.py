"""`enable_cpu_affinity`: each process on the CPUs beside its accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import clean_environment

from accelerate_core.config.files import read_config
from accelerate_core.utils import set_numa_affinity
from accelerate_launch import make_plan
from accelerate_launch.affinity import parse_cpu_list

#: What the system tells about an accelerator is put in its place: there is none here.
BESIDE = """
import psutil
from accelerate_launch import affinity
affinity._cpus_beside = lambda index: [min(psutil.Process().cpu_affinity())]
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True)
print(len(psutil.Process().cpu_affinity()), accelerator.explain().count("cpu_affinity"))
"""


def bound(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BESIDE],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_launcher_sets_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_cpu: true\nenable_cpu_affinity: true\n")
    made = make_plan(__file__, [], {}, {}, read_config(file)).environment
    assert made["ACCELERATE_CPU_AFFINITY"] == "true"


@pytest.mark.parametrize(
    "variables", [{"ACCELERATE_CPU_AFFINITY": "true"}, {"ACCELERATE_PLUGINS": "cpu_affinity"}]
)
def test_processes_are_bound_where_that_is_asked_for(variables: dict[str, str]) -> None:
    done = bound(**variables)
    assert done.stdout.startswith("1 "), done.stderr
    assert not done.stdout.endswith(" 0\n"), "explain() names the plugin"


@pytest.mark.parametrize("variables", [{}, {"ACCELERATE_CPU_AFFINITY": "no"}])
def test_processes_are_left_alone_where_it_is_not(variables: dict[str, str]) -> None:
    done = bound(**variables)
    assert done.stdout == f"{len(psutil.Process().cpu_affinity())} 0\n", done.stderr


def test_a_word_that_is_neither_yes_nor_no_is_refused() -> None:
    done = bound(ACCELERATE_CPU_AFFINITY="perhaps")
    assert done.returncode == 1
    assert "ACCELERATE_CPU_AFFINITY='perhaps' is not a switch" in done.stderr


def test_the_kernels_lists_are_read() -> None:
    assert parse_cpu_list("0-2,8\n") == [0, 1, 2, 8]


def test_binding_never_adds_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        set_numa_affinity(0)
        assert os.sched_getaffinity(0) <= before
    finally:
        os.sched_setaffinity(0, before)
