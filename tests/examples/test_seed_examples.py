"""Every code example of the seed documents runs, and works as its document says.

The seeds are 000 (an old class reference), 001 (the class reference), 002 (the quicktour) and 003 (the
README). Their examples are in `seed_class_reference` and `seed_guides`. Examples that say "assuming two
processes" run on two, all in one launch, and those that need four run on four. Data, models and
checkpoints are local.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import seed_worker
from seed_parts import CASES
from support import run_workers

TIMEOUT = 240

#: Example -> mistakes in the seed's text, and what is run instead.
MISTAKES = {
    "001-accumulate": "`loss.backward()` inside `accumulate` is `accelerator.backward(loss)`; "
    "the example's last line and the next paragraph have run together",
    "001-set_trigger": "`accelerator.check_breakpoint()` does not exist: `check_trigger()`",
    "001-clip_grad_norm_": "two accumulation steps without `accumulate`: run as it stands, "
    "`backward` halves the loss, and every batch is a step",
    "001-clip_grad_value_": "as in clip_grad_norm_",
    "001-join_uneven_inputs": "`Accelerator(even_batches=True)` is deprecated, now in "
    "`DataLoaderConfiguration`; accepted with a warning",
    "001-maybe_context_parallel": "refers to an example that does not exist; one was written",
    "001-no_sync": "`no_sync()` without its required argument: all prepared models; "
    "the second `backward` uses the first loss again: `loss` is computed again; "
    "two calls of `next(iter(...))` return the same batch",
    "001-on_local_main_process": "prints 'on each server.', but the output shown does not",
    "001-profile with the custom handler": "`Accelerator(kwarg_handler=...)` is `kwargs_handlers`; "
    "`ProfileKwargs` imported once only",
    "001-profile and export to Chrome trace": "`Accelerator(kwarg_handler=...)` is "
    "`kwargs_handlers`",
    "001-trigger_sync_in_backward": "`no_sync()` without an argument, as in no_sync; "
    "`input_a` and `input_b` are not defined",
    "001-unwrap_model": "'two GPU processes' are two processes on any device; imports "
    "DistributedDataParallel without using it",
    "001-wait_for_everyone": "'two GPU processes', as in unwrap_model",
    "002-adapt training code": "`inputs =` and `targets =` have no right-hand side; "
    "`zero_grad` and both calls of `step` are missing",
    "002-prepare": "the closing bracket is missing",
    "002-load_checkpoint_and_dispatch": "the closing bracket is missing; a checkpoint must be a "
    "local file or folder, not a name on a hub; a small local model replaces Mixtral",
    "002-init_empty_weights": "a small local model replaces Mixtral",
    "003-five lines": "`model(source)`: a Transformer needs source and target; all on one line",
    "003-without device placement": "as in five lines",
    "003-save_pretrained": "one block with DeepSpeedPlugin, without a model",
    "003-launch": "`python -m torchrun` is not a module: `python -m torch.distributed.run`; "
    "`--cpu` replaces `--multi_gpu`",
    "002-launch": "the script's name is missing in `accelerate launch --args_for_the_script`",
}

#: Examples of the seeds that these tests do not run, and what tests them.
NOT_RUN = {
    "002-accelerate config, 003-accelerate config": "asks questions; it has separate tests",
    "003-mpirun": "needs an MPI installation; the launcher's tests read its variables",
    "003-pip install accelerate": "the packaging tests install the wheels",
    "003-notebook in Colab": "a link",
    "002-launch, 003-launch": "tests/launch starts one process and two, with arguments",
    "003-launch by torchrun": "tests/core/test_leaving.py trains under torchrun",
    "002-accelerate test": "tests/launch/test_cli.py runs the self-check",
    "003-notebook_launcher": "tests/launch/test_functions.py, and the example in its docstring",
    "003-DeepSpeedPlugin": "tests/backends/deepspeed: accumulation and fp16 with the plugin",
    "the import name accelerate": "tests/drop_in imports every name; tests/clients trains with it",
}

TESTED_ELSEWHERE = {"002-launch", "003-launch"}


def cases(processes: int) -> list[str]:
    return [name for name, case in CASES.items() if processes in case.processes]


class Report(NamedTuple):
    """The result of a group of processes: for each rank, its cases with their tracebacks."""

    ranks: list[dict[str, str]]
    output: str

    def check(self, name: str) -> None:
        broken = [case for case in CASES if any(rank.get(case) for rank in self.ranks)]
        if any(rank.get(name) for rank in self.ranks) and broken[0] == name:
            texts = [
                f"rank {i}:\n{rank[name]}" for i, rank in enumerate(self.ranks) if name in rank
            ]
            pytest.fail("\n".join(texts), pytrace=False)
        if not all(name in rank for rank in self.ranks) or (broken and name in broken):
            why = f"{broken[0]!r} failed before it" if broken else self.output[-3000:]
            pytest.fail(f"not reached: {why}", pytrace=False)


def launch(processes: int, folder: Path) -> Report:
    """Run the cases for this number of processes in one launch."""
    report = folder / "report"
    environ = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = run_workers(seed_worker.__file__, processes, [report], timeout=TIMEOUT, env=environ)
    files = [Path(f"{report}.{rank}") for rank in range(processes)]
    ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if not run.ok and all(text == "" for rank in ranks for text in rank.values()):
        ranks = [{} for _ in ranks]  # all cases passed, but the run failed
    return Report(ranks, run.story)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return launch(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", cases(1))
def test_example_runs_in_one_process(name: str, tmp_path: Path) -> None:
    CASES[name].run(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("name", cases(2))
def test_example_runs_in_two_processes(name: str, two: Report) -> None:
    two.check(name)


@pytest.mark.dist
@pytest.mark.parametrize("name", cases(4))
def test_example_runs_in_four_processes(name: str, four: Report) -> None:
    four.check(name)


def test_listed_mistakes_belong_to_existing_examples() -> None:
    assert set(MISTAKES) - TESTED_ELSEWHERE <= set(CASES)
