"""Plugins that reduce gradients, that add or replace optimizers and schedulers, and roles."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import idea_plugins
import pytest
import torch
from support import case_names, check_case, run_workers
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, Backend
from accelerate_core.data.loader import LoaderOptions
from accelerate_core.data.prepare_loader import prepare_loader, reshare
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import DataLoaderConfiguration
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


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
def test_replicas_join_and_die_while_others_train(tmp_path, workers):
    env = {**idea_plugins.write(tmp_path), "ACCELERATE_PLUGINS": "changes"}
    script = WORKER.with_name("membership_worker.py")
    run = run_workers(script, 3, [workers, 3], timeout=150, env=env)
    assert run.returncode == 0, run.story
    (first, its, weights), (dead, before, _), (newcomer, later, same) = run.results
    assert (its, before, later) == ([3, 2], [3], [2])
    assert weights == same
    # Two replicas took 3 steps, three took 5, and the step in which one died was taken by none. Its
    # samples are lost. All others are trained once.
    assert [len(first), len(dead), len(newcomer)] == [3 + 5 + 12, 3 + 5, 5 + 12]
    seen = sorted(number for steps in (first, dead, newcomer) for step in steps for number in step)
    assert len(seen) == len(set(seen)) == 12 + 30 + 48


@pytest.mark.parametrize("elastic", [True, False])
def test_elastic_backend_defers_communication_although_it_has_one_process(elastic):
    entered = []

    class Alone(Backend):
        name = "alone"
        api_version = (1, 0)
        reduces_gradients = "backward"
        supports: ClassVar[Mapping[str, Any]] = {"elastic": elastic}

        def no_sync(self, accelerator, model):
            entered.append(accelerator.sync_gradients)
            return nullcontext()

    accelerator = Accelerator(cpu=True, backend=Alone, gradient_accumulation_steps=3)
    try:
        net = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert entered == ([False] * 4 if elastic else [])
        with accelerator.no_sync(model):
            assert len(entered) == (5 if elastic else 0)
    finally:
        accelerator.end_training()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3), (4, 3, 1, 2)])
def test_running_loaders_continue_in_order_on_another_number_of_ranks(counts, split):
    config = DataLoaderConfiguration(split_batches=split)
    whole = DataLoader(range(240), 12, collate_fn=list)
    options = LoaderOptions(config=config, num_processes=counts[0])
    loaders = [
        prepare_loader(whole, replace(options, process_index=index)) for index in range(counts[0])
    ]
    running = [iter(one) for one in loaders]
    seen = [number for _ in range(2) for one in running for number in next(one)]
    for count in counts[1:]:
        position = loaders[0].state_dict()
        for index in range(len(loaders), count):
            made = replace(options, num_processes=count, process_index=index)
            loaders.append(prepare_loader(whole, made))
            loaders[-1].load_state_dict(position)
            running.append(iter(loaders[-1]))
        del loaders[count:], running[count:]
        for index, one in enumerate(loaders):
            reshare(one, index, count)
        seen += [number for _ in range(2) for one in running for number in next(one)]
    rest = zip(*running, strict=True)
    seen += [number for step in rest for batch in step for number in batch]
    assert seen[:240] == list(range(240))
    assert len(seen) < 240 + 12 * counts[-1]  # the last step may be padded
    assert len(loaders[0]) == -(-20 // (1 if split else counts[-1]))


def test_stream_cannot_be_divided_over_another_number_of_ranks():
    stream = prepare_loader(iter([1, 2]), LoaderOptions())
    with pytest.raises(
        ConfigurationError, match="cannot be split across a different number of ranks"
    ):
        reshare(stream, 0, 2)
