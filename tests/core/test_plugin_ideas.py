"""Plugins that reduce gradients, that add or replace optimizers and schedulers, and roles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import idea_plugins
import pytest
from support import case_names, check_case, run_workers

from accelerate_launch.devices import get_free_port as free_port

WORKER = Path(__file__).with_name("idea_worker.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_workers(
        WORKER, 2, timeout=200, env=idea_plugins.write(tmp_path_factory.mktemp("ideas"))
    )


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)


@pytest.mark.dist
def test_roles_are_worlds_that_an_extension_connects(tmp_path):
    env = idea_plugins.write(tmp_path)
    env |= {"ACCELERATE_PLUGINS": "roles", "ROLES_BRIDGE": f"127.0.0.1:{free_port()}"}
    env["ROLES_SIZE"] = "3"
    script = WORKER.with_name("roles_worker.py")
    with ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(run_workers, script, count, [role], timeout=100, env=env)
            for role, count in (("train", 2), ("evaluate", 1))
        ]
        trainers, evaluator = (one.result() for one in begun)
    assert trainers.returncode == 0, trainers.story
    assert evaluator.returncode == 0, evaluator.story
    (_, _, losses), other = trainers.results
    assert trainers.results == [[2, "no", losses], other] == [other, other]
    assert evaluator.results == [[1, "bf16", losses]]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@pytest.mark.dist
def test_other_settings_must_not_differ_between_ranks(tmp_path):
    env = {**idea_plugins.write(tmp_path), "ACCELERATE_PLUGINS": "roles"}
    run = run_workers(WORKER.with_name("differing_worker.py"), 2, timeout=100, env=env)
    assert run.results == [["extension roles.size"]] * 2, run.story
