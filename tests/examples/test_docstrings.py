"""Every example in a docstring runs as it is.

Examples may use the objects in `given`, prepared by an Accelerator, unless they create their own. They all
run in this process, each in a separate directory. Accelerators that they leave behind are released.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.distributed import process

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("core", "extensions/*", "backends/*", "trackers/*")
    for path in ROOT.glob(f"{folder}/src/*")
    if (path / "__init__.py").exists()
)

#: Members of the Accelerator, and exported functions, that must have an example.
MEMBERS = (
    "accumulate autocast backward clip_grad_norm_ clip_grad_value_ gather "
    "gather_for_metrics get_state_dict init_trackers join_uneven_inputs load_state log "
    "main_process_first no_sync on_main_process prepare profile reduce register_for_checkpointing "
    "save_model save_state split_between_processes unwrap_model"
)
FUNCTIONS = (
    "Accelerator LocalSGD debug_launcher find_executable_batch_size get_logger init_empty_weights "
    "load_checkpoint_and_dispatch notebook_launcher set_seed skip_first_batches tqdm"
)

#: Example -> the package that it needs.
NEEDS = {"accelerate_drop_in.quantization.load_and_quantize_model": "bitsandbytes"}

_SECTION = re.compile(r"(?m)^Example:\n((?: {4}.*\n|\n)+)")


class Example(NamedTuple):
    module: str
    name: str
    code: str


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the name and the docstring of each documented object in our packages."""
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            inside = path.relative_to(source.parent).with_suffix("")
            module = ".".join(inside.parts).removesuffix(".__init__")
            waiting: list[tuple[str, Any]] = [("", ast.parse(path.read_text(encoding="utf-8")))]
            for name, node in waiting:
                if text := ast.get_docstring(node):
                    yield module, name, text + "\n"
                waiting += [
                    (f"{name}.{one.name}".strip("."), one)
                    for one in node.body
                    if isinstance(one, ast.ClassDef | ast.FunctionDef)
                ]


EXAMPLES = [
    Example(module, name, textwrap.dedent(found[1]))
    for module, name, text in docstrings()
    if (found := _SECTION.search(text))
]


def given() -> dict[str, Any]:
    """Return the names that an example may use."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(20, 8), torch.randint(0, 2, (20,)))
    model = nn.Linear(8, 2)
    x, y = dataset[:4]
    return {
        "Accelerator": Accelerator,
        "DataLoader": DataLoader,
        "torch": torch,
        "nn": nn,
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=4),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_function": nn.functional.cross_entropy,
        "x": x,
        "y": y,
        "loss": torch.tensor(0.5),
        "vendor": SimpleNamespace(start=lambda tp: [tp], stop=lambda groups: None),
    }


@pytest.fixture(autouse=True)
def _release_accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # even if there are accelerators
    monkeypatch.chdir(tmp_path)
    yield
    importlib.import_module("accelerate_drop_in").uninstall()
    while (left := process.current_user()) is not None:
        process.release(left)
    process.release(None)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[f"{one.module}.{one.name}".strip(".") for one in EXAMPLES]
)
def test_example_runs(example: Example) -> None:
    where = f"{example.module}.{example.name}".strip(".")
    if where in NEEDS:
        pytest.importorskip(NEEDS[where])
    names = given()
    if "Accelerator(" not in example.code and "accelerator" in example.code:
        names["accelerator"] = accelerator = Accelerator(gradient_accumulation_steps=2)
        for one in ("model", "optimizer", "loader"):
            names[one] = accelerator.prepare(names[one])
    if own := example.name.partition(".")[0]:
        names[own] = pkgutil.resolve_name(f"{example.module}:{own}")
    exec(compile(example.code, where, "exec"), names)


def test_code_in_docstrings_is_under_a_heading_that_is_run() -> None:
    for module, name, text in docstrings():
        assert not re.search(r">>> |```", text), f"{module}.{name}: move the code under Example:"
        section = ""
        for before, line in zip(["", *text.splitlines()], text.splitlines()):
            section = line if line[:1].strip() else section
            loose = line.startswith("    ") and not before
            assert not loose or re.match(r"Example:|The .*:", section), f"{module}.{name}: {line}"


def test_most_used_names_have_an_example() -> None:
    shown = {one.name.rpartition(".")[2] for one in EXAMPLES}
    assert {*MEMBERS.split(), *FUNCTIONS.split()} <= shown
    assert {*MEMBERS.split()} <= {*dir(Accelerator)}
