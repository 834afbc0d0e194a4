"""Every code example of the seed documents runs, and does what its document says.

Seeds: 000 the class reference of old, 001 the class reference, 002 the quicktour, 003 the README.
The examples stand in `seed_class_reference` and `seed_guides`. Those that say "assuming two
processes" run on two, in one launch for all of them; those that need four, on four. Data, models
and checkpoints are local ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import seed_worker
from launched import run_cli
from seed_parts import CASES
from support import clean_environment, run_workers

TIMEOUT = 240

#: What is wrong in a seed's own text, and what was run instead.
SLIPS = {
    "001-accumulate": "`loss.backward()` inside `accumulate` is `accelerator.backward(loss)`; "
    "the example's last line and the next paragraph have run together",
    "001-set_trigger": "`accelerator.check_breakpoint()` does not exist: `check_trigger()`",
    "001-clip_grad_norm_": "two accumulation steps without `accumulate`: run as it stands, "
    "`backward` halves the loss and every batch is a step",
    "001-clip_grad_value_": "as in clip_grad_norm_",
    "001-join_uneven_inputs": "`Accelerator(even_batches=True)` is an older name, now in "
    "`DataLoaderConfiguration`; taken, with a warning",
    "001-maybe_context_parallel": "speaks of an example below that is not there; one was written",
    "001-no_sync": "`no_sync()` without the argument its signature asks for: all prepared models; "
    "the second `backward` uses the first loss again: `loss` is computed anew; "
    "two `next(iter(...))` give the same batch",
    "001-on_local_main_process": "prints 'on each server.', the output shown leaves it out",
    "001-profile with the custom handler": "`Accelerator(kwarg_handler=...)` is `kwargs_handlers`; "
    "`ProfileKwargs` imported once only",
    "001-profile and export to Chrome trace": "`Accelerator(kwarg_handler=...)` is "
    "`kwargs_handlers`",
    "001-trigger_sync_in_backward": "`no_sync()` without an argument, as in no_sync; "
    "`input_a` and `input_b` are not defined",
    "001-unwrap_model": "'two GPU processes' are two processes on any device; imports "
    "DistributedDataParallel without using it",
    "001-wait_for_everyone": "'two GPU processes', as in unwrap_model",
    "002-adapt training code": "`inputs =` and `targets =` have lost what was to be deleted; "
    "`zero_grad` and the two `step`s are missing",
    "002-prepare": "the closing bracket is missing",
    "002-load_checkpoint_and_dispatch": "the closing bracket is missing; a checkpoint has to be a "
    "local file or folder, not a name on a hub; a small local model for Mixtral",
    "002-init_empty_weights": "a small local model for Mixtral",
    "003-five lines": "`model(source)`: a Transformer needs source and target; all on one line",
    "003-without device placement": "as in five lines",
    "003-save_pretrained": "one block with DeepSpeedPlugin, with no model in it",
    "003-launch": "`python -m torchrun` is no module: `python -m torch.distributed.run`; "
    "`--multi_gpu` is `--cpu` here",
    "002-launch": "`accelerate launch --args_for_the_script` has lost the script's name",
}

#: What the seeds show and these tests leave to others.
NOT_RUN = {
    "002-accelerate config, 003-accelerate config": "asks questions; has tests of its own",
    "003-mpirun": "needs an MPI installation; the launcher's tests read its variables",
    "003-pip install accelerate": "the packaging tests install the wheels",
    "003-notebook in Colab": "a link",
}

TOLD_ELSEWHERE = {"002-launch", "003-launch"}  # tests of this file that are no cases


def cases(processes: int) -> list[str]:
    return [name for name, case in CASES.items() if processes in case.processes]


class Report(NamedTuple):
    """What happened in a group of processes: for each rank the cases that ran, with tracebacks."""

    ranks: list[dict[str, str]]
    output: str

    def check(self, name: str) -> None:
        broken = [case for case in CASES if any(rank.get(case) for rank in self.ranks)]
        if any(rank.get(name) for rank in self.ranks) and broken[0] == name:
            told = (f"rank {i}:\n{rank[name]}" for i, rank in enumerate(self.ranks) if name in rank)
            pytest.fail("\n".join(told), pytrace=False)
        if not all(name in rank for rank in self.ranks) or (broken and name in broken):
            why = f"{broken[0]!r} failed before it" if broken else self.output[-3000:]
            pytest.fail(f"not reached: {why}", pytrace=False)


def launch(processes: int, folder: Path) -> Report:
    """Run the cases for this many processes in one group of processes."""
    report = folder / "report"
    environ = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = run_workers(seed_worker.__file__, processes, [report], timeout=TIMEOUT, env=environ)
    files = [Path(f"{report}.{rank}") for rank in range(processes)]
    ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if not run.ok and all(text == "" for rank in ranks for text in rank.values()):
        ranks = [{} for _ in ranks]  # all cases held, and yet it ended badly
    return Report(ranks, run.story)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return launch(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", cases(1))
def test_in_one_process(name: str, tmp_path: Path) -> None:
    CASES[name].run(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("name", cases(2))
def test_among_two_processes(name: str, two: Report) -> None:
    two.check(name)


@pytest.mark.dist
@pytest.mark.parametrize("name", cases(4))
def test_among_four_processes(name: str, four: Report) -> None:
    four.check(name)


def test_the_slips_name_examples_that_exist() -> None:
    assert set(SLIPS) - TOLD_ELSEWHERE <= set(CASES)


MY_SCRIPT = """
import json, sys
import torch
from {package} import Accelerator

accelerator = Accelerator()
ones = accelerator.reduce(torch.ones(1, device=accelerator.device))
said = {{"processes": accelerator.num_processes, "sum": ones.item(), "args": sys.argv[1:]}}
accelerator.print(json.dumps(said))
accelerator.end_training()
"""


@pytest.fixture
def my_script(tmp_path: Path) -> Path:
    script = tmp_path / "my_script.py"
    script.write_text(MY_SCRIPT.format(package="accelerate_core"))
    return script


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=clean_environment(ACCELERATE_USE_CPU="true"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def said_once(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


ARGS = "--args_to_my_script"
ALONE = {"processes": 1, "sum": 1.0, "args": [ARGS]}
TOGETHER = {"processes": 2, "sum": 2.0, "args": [ARGS]}


def test_002_003_launch(my_script: Path) -> None:
    assert said_once(run_cli("launch", "--cpu", "--num_processes", "1", my_script, ARGS)) == ALONE


@pytest.mark.dist
def test_003_launch_on_two(my_script: Path) -> None:
    done = run_cli("launch", "--cpu", "--num_processes", "2", my_script, ARGS)
    assert said_once(done) == TOGETHER


def test_003_plain_python(my_script: Path) -> None:
    assert said_once(python(my_script, ARGS)) == ALONE


@pytest.mark.dist
def test_003_torchrun(my_script: Path) -> None:
    torchrun = "-m", "torch.distributed.run", "--nproc_per_node", "2"
    assert said_once(python(*torchrun, my_script, ARGS)) == TOGETHER


@pytest.mark.dist
def test_002_accelerate_test() -> None:
    done = run_cli("test")
    assert done.returncode == 0, done.stdout + done.stderr


def test_003_notebook_launcher(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(
        "def training_function():\n"
        "    from accelerate_core import Accelerator\n"
        "    accelerator = Accelerator()\n"
        "    accelerator.print('trained by', accelerator.num_processes)\n"
        "\n"
        "if __name__ == '__main__':\n"
        "    from accelerate_core import notebook_launcher\n"
        "    notebook_launcher(training_function)\n"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"trained by \d+", done.stdout)) == 1


def test_003_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(
        "from accelerate_core import Accelerator, DeepSpeedPlugin\n"
        "# deepspeed needs to know your gradient accumulation steps beforehand\n"
        "deepspeed_plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)\n"
        "try:\n"
        "    accelerator = Accelerator(mixed_precision='fp16', deepspeed_plugin=deepspeed_plugin)\n"
        "except ValueError as error:  # CPUs without it\n"
        "    assert 'fp16' in str(error)\n"
        "else:\n"
        "    assert accelerator.gradient_accumulation_steps == 2\n"
        "    assert accelerator.deepspeed_plugin.get_value('fp16.enabled') is True\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr


def test_the_seeds_own_import_name_is_served_when_asked(tmp_path: Path) -> None:
    script = tmp_path / "unchanged.py"
    serve = "import accelerate_drop_in as served; served.install()\n"
    script.write_text(serve + MY_SCRIPT.format(package="accelerate"))
    assert said_once(python(script, ARGS)) == ALONE
