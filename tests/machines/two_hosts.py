"""Two machines, simulated by two network namespaces joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from following import kill
from support import clean_environment

HOSTS = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"acc{os.getpid()}t"
    made = ip("netns", "add", name)
    if made.returncode == 0:
        ip("netns", "del", name)
    return made.stderr.strip()


WHY_NOT = _why_not()
needs_two_hosts = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces here: {WHY_NOT}"),
]


@contextlib.contextmanager
def started(
    names: list[str],
    script: Path,
    *arguments: str,
    launch: Sequence[str] = (),
    processes: int = 4,
    environ: Sequence[Mapping[str, str]] = ({}, {}),
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the same launch on both hosts, and kill what is left of it at the end.

    Args:
        names: the namespaces.
        script: what every host runs, with `arguments`.
        launch: options of the launch.
        processes: the number of ranks on both hosts together.
        environ: variables of each host.
    """
    runs = []
    for rank, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "accelerate_core.cli"]
        command += ["launch", "--cpu", "--num_machines", "2", "--num_processes", str(processes)]
        command += ["--main_process_ip", HOSTS[0], "--machine_rank", str(rank), *launch]
        runs.append(
            subprocess.Popen(
                [*command, str(script), *arguments],
                env=clean_environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **environ[rank]),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        yield runs
    finally:
        for run in runs:
            kill(run)
