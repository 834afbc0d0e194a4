"""The checkpointer as a replaceable part: a custom one, none at all, and files of plugins."""

from __future__ import annotations

import ast
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pool
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accelerate_checkpoint
from accelerate_checkpoint import TrainingState
from accelerate_checkpoint.load import _read_ranks
from accelerate_core import Accelerator, Backend, KwargsHandler, hookimpl, settings
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_core.plugins import selection
from accelerate_core.plugins.discovery import PluginRecord, find
from accelerate_core.utils import ProjectConfiguration


def test_package_does_not_import_the_accelerator() -> None:
    seen = {
        (node.module, name.name)
        for path in Path(accelerate_checkpoint.__file__).parent.glob("*.py")
        if path.name not in ("commands.py", "progress.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and "accelerate" in node.module
        for name in node.names
    }
    outside = {one for one in seen if not one[0].startswith("accelerate_checkpoint")}
    from_core = {one for one in outside if one[0] != "accelerate_core.plugin"}
    assert from_core == {("accelerate_core", "OffloadedState")}  # another plugin exports it
    assert ("accelerate_core.plugin", "Accelerator") not in outside


# --- a custom checkpointer ------------------------------------------------------------------------


class InMemory:
    """Keeps checkpoints in a dictionary, using only `TrainingState`."""

    api_version = (1, 0)
    preemption_requested = False
    kept: dict[str, Any] = {}
    calls: list[str] = []

    def __init__(self, project: Any, signals: str | None) -> None:
        self.calls.append(f"made for {project.project_dir}, {signals}")

    def attach(self, run: Any) -> None:
        self.state = TrainingState(run)

    def save_state(self, target: Any = None, *args: Any, **how: Any) -> str:
        state = self.state
        state.update_scale()
        held = (
            [state.model_state(model) for model in state.models],
            [state.optimizer_state(optimizer) for optimizer in state.optimizers],
            [one.state_dict() for one in (*state.schedulers, *state.registered)],
            state.rank_state(),
            state.pending_gradients(),
            state.facts(),
        )
        self.kept[target] = copy.deepcopy(held)
        return str(target)

    def load_state(self, source: Any = None, *args: Any, **how: Any) -> str:
        state = self.state
        models, optimizers, others, rank, gradients, facts = copy.deepcopy(self.kept[source])
        for model, held in zip(state.models, models, strict=True):
            state.load_model_state(model, held, True)
        for optimizer, held in zip(state.optimizers, optimizers, strict=True):
            state.load_optimizer_state(optimizer, held)
        for one, held in zip((*state.schedulers, *state.registered), others, strict=True):
            one.load_state_dict(held)
        state.load_rank_state({0: rank}, facts["world_size"], [gradients])
        return str(source)

    def save_model(self, model: nn.Module, directory: Any, *how: Any) -> None:
        self.kept[directory] = self.state.whole_model_state(model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        self.kept[f] = obj

    def wait(self) -> None:
        self.calls.append("wait")

    def release(self) -> None:
        self.calls.append("release")

    def close(self, failed: bool) -> None:
        self.calls.append(f"close {failed}")


class Run:
    """Trains with dropout, shuffling, a scheduler and cycles of four micro-batches."""

    def __init__(self, **more: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, **more)
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        decay = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.9)
        data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.net = net
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, sgd, decay, loader
        )

    def train(self, batches: int, save_after: int | None = None) -> None:
        for count, (x, y) in enumerate(self.loader, 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(mse_loss(self.model(x), y))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if count == save_after:
                assert self.accelerator.save_state("here") == "here"
            if count == batches:
                break

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.net.parameters()])


def _bring(record: PluginRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every lookup of a checkpointer find this one."""

    def found(kind: str, name: str, **more: Any) -> PluginRecord:
        return record if kind == "checkpointer" else find(kind, name, **more)

    monkeypatch.setattr(selection, "find", found)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> type[InMemory]:
    record = PluginRecord("checkpointer", "in_memory", f"{__name__}:InMemory", "tests", "1.0")
    _bring(record, monkeypatch)
    monkeypatch.setenv("ACCELERATE_CHECKPOINTER", "in_memory")
    monkeypatch.setattr(InMemory, "kept", {})
    monkeypatch.setattr(InMemory, "calls", [])
    return InMemory


@pytest.mark.parametrize("saved_after", [4, 6], ids=["between cycles", "inside a cycle"])
def test_custom_checkpointer_resumes_bit_for_bit(
    in_memory: type[InMemory], saved_after: int
) -> None:
    straight = Run()
    straight.train(16, save_after=saved_after)
    resumed = Run()
    resumed.accelerator.load_state("here")
    resumed.train(16 - saved_after)
    assert torch.equal(resumed.weights(), straight.weights())
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


def test_accelerator_delegates_every_call_to_its_checkpointer(in_memory: type[InMemory]) -> None:
    run = Run()
    assert in_memory.calls == ["made for None, None"], "created at once because it was named"
    run.accelerator.wait_for_checkpoint()
    run.accelerator.save_model(run.model, "model")
    run.accelerator.save({"a": 1}, "object")
    assert in_memory.kept["model"].keys() == run.net.state_dict().keys()
    assert in_memory.kept["object"] == {"a": 1}
    run.accelerator.wait_for_checkpoint()
    run.accelerator.free_memory()
    run.accelerator.end_training()
    assert in_memory.calls == ["made for None, None", "wait", "wait", "release", "close False"]


class Refusing(InMemory):
    def __init__(self, project: Any, signals: str | None) -> None:
        raise ConfigurationError("no disk on this machine")


def test_named_checkpointer_is_created_with_the_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = PluginRecord("checkpointer", "refusing", f"{__name__}:Refusing", "tests", "1.0")
    _bring(record, monkeypatch)
    with pytest.raises(ConfigurationError, match="no disk") as caught:
        Accelerator(cpu=True, checkpointer="refusing")
    assert "plugin refusing (tests 1.0)" in caught.value.__notes__[0]


def test_checkpoint_settings_create_the_checkpointer_with_the_accelerator(
    in_memory: type[InMemory], tmp_path: Path
) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    assert not accelerator.preemption_requested
    with pytest.raises(KeyError), accelerator:
        raise KeyError
    assert in_memory.calls == [f"made for {tmp_path}, None", "close True"]


@settings
class Shelf(KwargsHandler):
    shelf: str = "lowest"


class OnAShelf(InMemory):
    Settings = Shelf

    def __init__(self, project: Any, signals: str | None, settings: Shelf) -> None:
        super().__init__(project, signals)
        self.calls.append(settings.shelf)


def test_checkpointer_gets_its_settings(
    in_memory: type[InMemory], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = PluginRecord("checkpointer", "shelves", f"{__name__}:OnAShelf", "tests", "1.0")
    _bring(record, monkeypatch)

    def shelf_of(**arguments: Any) -> tuple[str, str]:
        accelerator = Accelerator(cpu=True, **arguments)
        line = next(x for x in accelerator.explain().splitlines() if "shelves.shelf" in x)
        accelerator.end_training()
        return in_memory.calls[-2], line.partition("  ")[2]

    assert shelf_of() == ("lowest", "(default)")
    config = tmp_path / "config.yaml"
    config.write_text("shelves_config:\n  shelf: middle\n")
    monkeypatch.setenv("ACCELERATE_CONFIG_FILE", str(config))
    assert shelf_of() == ("middle", f"({config} line 2)")
    variable = "ACCELERATE_SHELVES_SHELF"
    monkeypatch.setenv(variable, "upper")
    assert shelf_of() == ("upper", f"(environment variable {variable})")
    monkeypatch.setattr(
        "accelerate_core.accelerator.arguments.refuse_unclaimed", lambda handlers, active: None
    )  # the class is not in the plugin's package
    found = shelf_of(kwargs_handlers=[Shelf("top")])
    assert found == ("top", "(constructor argument Shelf)")


# --- no checkpointer ------------------------------------------------------------------------------


HEAD = "import json, sys, warnings\nimport torch\n"


def run_without_a_checkpointer(code: str) -> Any:
    env = {**os.environ, "ACCELERATE_DISABLED_PLUGINS": "directory"}
    done = pool.run(["-c", HEAD + code], env, 120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TRAIN = """
from accelerate_core import Accelerator
texts = []
warnings.showwarning = lambda message, *rest: texts.append(str(message))
warnings.simplefilter("always")
accelerator = Accelerator(cpu=True)
def prepared():
    net = torch.nn.Linear(2, 1)
    return accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
for model, optimizer in (prepared(), prepared()):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
accelerator.wait_for_checkpoint()
requested = accelerator.preemption_requested
"""


def test_script_that_never_saves_does_not_import_the_package() -> None:
    code = (
        HEAD
        + TRAIN
        + (
            "accelerator.free_memory(); accelerator.end_training()\n"
            "names = [m for m in sys.modules if m.startswith('accelerate_checkpoint')]\n"
            "print(json.dumps([texts, requested, names]))"
        )
    )
    env = {**os.environ, "ACCELERATE_DISABLED_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], False, []]


def test_without_a_checkpointer_training_works_and_warns_once() -> None:
    code = TRAIN + (
        "asked = {'save_state': lambda: accelerator.save_state('x'),\n"
        "         'load_state': lambda: accelerator.load_state('x'),\n"
        "         'save_model': lambda: accelerator.save_model(model, 'x'),\n"
        "         'save': lambda: accelerator.save({}, 'x'),\n"
        "         'wait_for_checkpoint': accelerator.wait_for_checkpoint}\n"
        "refused = {}\n"
        "for name, ask in asked.items():\n"
        "    try: ask()\n"
        "    except Exception as error: refused[name] = [type(error).__name__, str(error)]\n"
        "accelerator.free_memory(); accelerator.end_training()\n"
        "print(json.dumps([texts, requested, refused]))"
    )
    texts, requested, refused = run_without_a_checkpointer(code)
    assert len(texts) == 1
    assert "ACCELERATE_DISABLED_PLUGINS disables 'directory'" in texts[0]
    assert requested is False
    assert list(refused) == [
        "save_state", "load_state", "save_model", "save", "wait_for_checkpoint",
    ]  # fmt: skip
    for name, (kind, text) in refused.items():
        assert kind == "MissingPluginError"
        assert text.startswith(f"{name}: ")
        assert "ACCELERATE_DISABLED_PLUGINS disables 'directory'" in text


def test_without_a_checkpointer_settings_that_need_one_are_refused() -> None:
    code = (
        "from accelerate_core import Accelerator\n"
        "from accelerate_core.utils import ProjectConfiguration as Project\n"
        "asked = [{'preemption_signals': 'TERM'},\n"
        "         {'project_config': Project('x', automatic_checkpoint_naming=True)},\n"
        "         {'project_config': Project('x', total_limit=2)}]\n"
        "texts = []\n"
        "for one in asked:\n"
        "    try: Accelerator(cpu=True, **one)\n"
        "    except Exception as error: texts.append([type(error).__name__, str(error)])\n"
        "Accelerator(cpu=True, project_dir='x').end_training()\n"
        "print(json.dumps(texts))"
    )
    texts = run_without_a_checkpointer(code)
    assert [kind for kind, _ in texts] == ["MissingPluginError"] * 3
    for (_, text), name in zip(texts, ("signals='TERM'", "naming)=True", "limit)=2"), strict=True):
        assert name in text
        assert "ACCELERATE_DISABLED_PLUGINS disables 'directory'" in text


# --- files of plugins -----------------------------------------------------------------------------


class Contributing(Backend):
    """Saves its own file in a checkpoint."""

    name = "contributing"
    api_version = (1, 0)
    reduces_gradients = "never"
    text, read, fails = "mine", "", ""

    @hookimpl
    def on_save(self, directory: Path) -> None:
        if self.fails == "save":
            raise OSError("no space")
        (directory / "own.txt").write_text(self.text)

    @hookimpl
    def on_load(self, directory: Path) -> None:
        if self.fails == "load":
            raise ValueError("not understood")
        self.read = (directory / "own.txt").read_text()


def test_plugin_saves_its_own_files_and_is_named_if_it_fails(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, backend=Contributing)
    plugin: Any = accelerator.backend
    where = accelerator.save_state(tmp_path / "one")
    assert (tmp_path / "one" / "backend_contributing" / "own.txt").read_text() == "mine"
    accelerator.load_state(where)
    assert plugin.read == "mine"
    plugin.fails = "save"
    with pytest.raises(
        CheckpointError, match=r"backend:contributing: OSError: no space"
    ) as failure:
        accelerator.save_state(tmp_path / "two")
    assert has_plugin_note(failure.value.__cause__, "on_save")
    plugin.fails = "load"
    with pytest.raises(ValueError, match="not understood") as refused:
        accelerator.load_state(where)
    assert has_plugin_note(refused.value, "on_load")
    accelerator.end_training()


def has_plugin_note(error: BaseException | None, hook: str) -> bool:
    notes = getattr(error, "__notes__", [])
    return any(f"hook '{hook}' of plugin" in note and "contributing" in note for note in notes)


@pytest.mark.parametrize(
    ("same", "counts", "expected"),
    [(True, True, [0, 2]), (False, False, [0, 2]), (False, True, [0, 1, 2, 3])],
)
def test_states_of_all_ranks_are_only_read_to_add_up_their_items(
    same: bool, counts: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate_checkpoint.load.check_rank_state", lambda path, state: None)
    opened: list[str] = []

    def read(name: str) -> dict[str, Any]:
        opened.append(name)
        return {"accelerate_core": {"cycle": {"items": {"open": counts, "local": 1}}}}

    state: Any = SimpleNamespace(
        has_layout=lambda ranks, mesh: same, process=SimpleNamespace(process_index=2)
    )
    source: Any = SimpleNamespace(
        saved_by=4, facts={}, read=read, has=lambda name: True, directory=Path("checkpoint")
    )
    assert sorted(_read_ranks(state, source)) == expected
    assert opened == [f"random_states_{rank}.pkl" for rank in expected]
