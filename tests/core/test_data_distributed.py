"""Two processes over gloo: what ranks have to agree on. The cases are in `data_worker.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("data_worker.py")
CASES = re.findall(r"^def (case_\w+)", WORKER.read_text(), re.MULTILINE)
CASES += [f"{case}_ahead" for case in CASES if "_dispatch_" in case]
WORLD = 2


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(WORKER)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(WORLD), f"{folder}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        try:
            outputs = [process.communicate(timeout=180) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_two_processes(results, case):
    for rank, result in enumerate(results):
        assert result[case] == "ok", f"rank {rank}:\n{result[case]}"
