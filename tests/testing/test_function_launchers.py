"""The suite notices: launchers damaged in how they start functions, and one that brings torch along."""

from __future__ import annotations

from pathlib import Path

import dummies
import pytest
from support import clean_environment

from accelerate_core.plugins.discovery import installed
from accelerate_testing import Result, run_suite

SOURCE = """
import multiprocessing, os, socket
from accelerate_launch import target_command

class Sound:
    api_version = (1, 0)
    first, named = 0, True

    def accepts(self, plan):
        return plan.num_machines == 1

    def launch_command(self, plan):
        return target_command(plan.target)

    def variables(self, rank, plan):
        size = str(plan.num_processes)
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}

    def launch_function(self, function, args, plan):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        context = multiprocessing.get_context(plan.start_method)
        ranks = [
            context.Process(target=run, args=({**rendezvous, **self.variables(rank, plan)}, function, args))
            for rank in range(self.first, plan.num_processes)
        ]
        for one in ranks:
            one.start()
        self.wait(ranks)

    def wait(self, ranks):
        for one in ranks:
            one.join()
        failed = [rank for rank, one in enumerate(ranks) if one.exitcode]
        if failed:
            raise RuntimeError(f"failed on the ranks {failed}" if self.named else "a process failed")

def run(variables, function, args):
    os.environ.update(variables)
    function(*args)

class ForksByItself(Sound):
    name = "forksbyitself"

class StartsProgramsOnly:
    name = "startsprogramsonly"
    api_version = (1, 0)
    accepts, launch_command = Sound.accepts, Sound.launch_command

class CallsItHere(Sound):
    name = "callsithere"
    def launch_function(self, function, args, plan):
        function(*args)

class LeavesOneOut(Sound):
    name = "leavesoneout"
    first = 1

class HasNoLocalRanks(Sound):
    name = "hasnolocalranks"
    def variables(self, rank, plan):
        made = super().variables(rank, plan)
        return {**made, "LOCAL_RANK": "0"}

class WaitsForNobody(Sound):
    name = "waitsfornobody"
    def wait(self, ranks):
        pass

class TakesAFailureForAnEnd(Sound):
    name = "takesafailureforanend"
    def wait(self, ranks):
        for one in ranks:
            one.join()

class NamesNoRank(Sound):
    name = "namesnorank"
    named = False

class LeavesVariables(Sound):
    name = "leavesvariables"
    def launch_function(self, function, args, plan):
        os.environ["LAUNCHED"] = "yes"
        super().launch_function(function, args, plan)

class ReturnsValues(Sound):
    name = "returnsvalues"
    def launch_function(self, function, args, plan):
        super().launch_function(function, args, plan)
        return [str(rank) for rank in range(plan.num_processes)]

class ReturnsValuesOutOfOrder(ReturnsValues):
    name = "returnsvaluesoutoforder"
    def launch_function(self, function, args, plan):
        return super().launch_function(function, args, plan)[::-1]
"""


def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: str, code: str, only: str
) -> Result:
    name = "launching" if code is SOURCE else "torches"
    dummies.distribution(tmp_path, name, code, {"launchers": {cls.lower(): cls}})
    path = f"{tmp_path}:{clean_environment()['PYTHONPATH']}"
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    (result,) = run_suite("launcher", cls.lower(), only=[only], environ={"PYTHONPATH": path})
    installed.cache_clear()
    return result


@pytest.mark.dist
@pytest.mark.parametrize(
    ("cls", "state", "said"),
    [
        ("ForksByItself", "passed", "2 by fork, 2 by spawn"),
        ("StartsProgramsOnly", "skipped", "it has no launch_function"),
        ("CallsItHere", "failed", "ranks that called the function, by fork: [None] instead of"),
        ("LeavesOneOut", "failed", "ranks that called the function, by fork: ['1'] instead of"),
        ("HasNoLocalRanks", "failed", "LOCAL_RANK of rank 1 of 2, by fork: '0' instead of '1'"),
        ("WaitsForNobody", "failed", "by fork"),
        ("TakesAFailureForAnEnd", "failed", "raised on rank 1, but the launch by fork succeeded"),
        ("NamesNoRank", "failed", "does not name rank 1, which failed: RuntimeError: a process"),
        ("ReturnsValues", "passed", "2 by fork, 2 by spawn"),
        ("ReturnsValuesOutOfOrder", "failed", "what launch_function returns, by fork: ['1', '0']"),
        ("LeavesVariables", "failed", "variables that have changed after the launch, by fork"),
    ],
)
def test_how_it_starts_functions_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: str, state: str, said: str
) -> None:
    result = check(tmp_path, monkeypatch, cls, SOURCE, "functions")
    assert result.state == state, result.error
    assert said in (result.error or result.detail)
    if state == "failed":
        assert f"launcher {cls.lower()} (dummy-launching 1.0)" in result.error


TORCH = """
import torch
class Heavy:
    name = "heavy"
    api_version = (1, 0)
    def accepts(self, plan): return True
    def launch_command(self, plan): return ["true"]
"""


def test_a_launcher_that_brings_torch_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(tmp_path, monkeypatch, "Heavy", TORCH, "imports")
    assert result.state == "failed"
    assert "'torch'" in result.error
