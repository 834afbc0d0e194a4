"""`enable_cpu_affinity` binds each process to the CPUs nearest to its accelerator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pool
import psutil
import pytest
from support import clean_environment

from accelerate_core.config.files import read_config
from accelerate_core.utils import set_numa_affinity
from accelerate_launch import make_plan
from accelerate_launch.affinity import parse_cpu_list

#: Replaces the lookup of the nearest CPUs, because this machine has no accelerator.
BIND = """
import psutil
from accelerate_launch import affinity
affinity._nearest_cpus = lambda index: [min(psutil.Process().cpu_affinity())]
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True)
print(len(psutil.Process().cpu_affinity()), accelerator.explain().count("cpu_affinity"))
"""


def bound(**variables: str) -> subprocess.CompletedProcess[str]:
    return pool.run(["-c", BIND], clean_environment(**variables), 120)


def test_enable_cpu_affinity_in_a_config_file_sets_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_cpu: true\nenable_cpu_affinity: true\n")
    made = make_plan(__file__, [], {}, {}, read_config(file)).environment
    assert made["ACCELERATE_CPU_AFFINITY"] == "true"


@pytest.mark.parametrize(
    "variables", [{"ACCELERATE_CPU_AFFINITY": "true"}, {"ACCELERATE_PLUGINS": "cpu_affinity"}]
)
def test_processes_are_bound_if_cpu_affinity_is_requested(variables: dict[str, str]) -> None:
    done = bound(**variables)
    assert done.stdout.startswith("1 "), done.stderr
    assert not done.stdout.endswith(" 0\n"), "explain() must name the plugin"


@pytest.mark.parametrize("variables", [{}, {"ACCELERATE_CPU_AFFINITY": "no"}])
def test_processes_are_not_bound_if_cpu_affinity_is_not_requested(
    variables: dict[str, str],
) -> None:
    done = bound(**variables)
    assert done.stdout == f"{len(psutil.Process().cpu_affinity())} 0\n", done.stderr


def test_non_boolean_cpu_affinity_is_refused() -> None:
    done = bound(ACCELERATE_CPU_AFFINITY="perhaps")
    assert done.returncode == 1
    assert "ACCELERATE_CPU_AFFINITY='perhaps' is not a boolean" in done.stderr


def test_cpu_lists_of_the_kernel_are_parsed() -> None:
    assert parse_cpu_list("0-2,8\n") == [0, 1, 2, 8]


def test_binding_never_adds_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        set_numa_affinity(0)
        assert os.sched_getaffinity(0) <= before
    finally:
        os.sched_setaffinity(0, before)
