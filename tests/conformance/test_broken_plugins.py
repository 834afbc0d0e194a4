"""Broken plugins fail the right check, with their name, hook and version in the message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dummies
import forked_ranks
import pytest
from support import clean_environment

import accelerate_core.backend  # noqa: F401  # it declares the owner hooks
from accelerate_core.contract.hooks import HOOKS

HEAD = """
import torch, torch.distributed as dist
from accelerate_core import Backend, Claim
class Plugin(Backend):
    name = "{name}"
    api_version = {api}
    reduces_gradients = "backward"
    @classmethod
    def detect(cls, request):
        return Claim({priority}, "asked for")
    def prepare_model(self, accelerator, model, evaluation_mode):
        if accelerator.num_processes > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        return model
    def backward(self, accelerator, loss, kwargs):
        loss.backward(**kwargs)
        for parameter in accelerator.models[-1].parameters():
            if accelerator.num_processes > 1{condition}:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
{extra}
"""
MOMENTUM = """
    mean = None
    def optimizer_step(self, accelerator, optimizer, closure):
        for index, p in enumerate(optimizer.param_groups[0]["params"]):
            self.mean = self.mean or {}
            p.grad = self.mean[index] = 0.5 * (self.mean.get(index, 0.0) + p.grad)
        return super().optimizer_step(accelerator, optimizer, closure)
"""
LEAVING = """
    def on_start(self, accelerator):
        subprocess.Popen(["sleep", "543"])
"""
STAINING = """
    def on_end(self, accelerator):
        os.environ["STAINED"] = "1"
"""
HANGING = """
    def clip_grad(self, accelerator, parameters):
        answer_of_the_fabric()
def answer_of_the_fabric():
    time.sleep(543)
"""
FORGETTING = """
from accelerate_tracking import GeneralTracker
class Plugin(GeneralTracker):
    name = "void"
    api_version = (1, 0)
    requires_logging_directory = True
    def __init__(self, project_name, logging_dir="."):
        super().__init__()
    tracker = property(lambda self: self)
    def start(self): ...
    def store_init_configuration(self, values): ...
    def log(self, values, step=None, **kwargs): ...
"""


def write(
    root: Path,
    name: str,
    *,
    api: str = "(1, 0)",
    priority: int = 50,
    condition: str = "",
    extra: str = "",
    above: str = "",
    points: dict[str, str] | None = None,
    version: str = "4.2",
) -> None:
    code = above + HEAD.format(
        name=name, api=api, priority=priority, condition=condition, extra=extra
    )
    groups = {"backends": {name: "Plugin"}, "triggers": {f"USE_{name.upper()}": "Plugin"}}
    dummies.distribution(root, name, code, points if points is not None else groups, version)
    metadata = root / f"dummy_{name}-{version}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: accelerate-core\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("broken")
    wrong = "    def clip_grad(self, accelerator, parameters, maximum): ...\n"
    write(root, "wrongarg", extra=wrong)
    write(root, "misspelt", extra="    def backwards(self, accelerator, loss): ...\n")
    write(root, "forgetful", points={})
    write(root, "heavy", above="import yaml, xxhash, rich.table, matplotlib\n")
    write(root, "noisy", above="print('one more backend')\n")
    write(root, "staining", above="import os\n", extra=STAINING)
    write(root, "leaving", above="import subprocess\n", extra=LEAVING)
    write(root, "hanging", above="import time\n", extra=HANGING)
    dummies.distribution(root, "void", FORGETTING, {"trackers": {"void": "Plugin"}}, "4.2")
    metadata = root / "dummy_void-4.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: accelerate-core\n")
    write(root, "halving")
    write(root, "lopsided", condition=" and accelerator.process_index == 0")
    write(root, "amnesiac", extra=MOMENTUM)
    write(root, "future", api="(2, 0)")
    write(root, "unsaid", extra="del Plugin.api_version\n")
    for name in ("left", "right"):
        groups = {"backends": {name: "Plugin"}, "triggers": {"USE_BOTH": "Plugin"}}
        write(root, name, points=groups)
    for number in (1, 2):
        write(root, f"twin{number}", points={"backends": {"twin": "Plugin"}}, version=f"{number}.5")
    return root


GENERAL = ("imports", "metadata", "api_version", "hooks", "selection")
ON_RANKS = {
    "lopsided": ("hooks", "training"),
    "amnesiac": ("hooks", "resume"),
    "leaving": ("hooks", "error_on_one_rank"),
    "hanging": ("hooks", "clip_norm", "schedule"),
    # It changes something in the first check, and the second must still notice.
    "staining": ("hooks", "learning", "once_more"),
}
BROKEN = ("wrongarg", "misspelt", "heavy", "noisy", "future", "unsaid", "left")


CHECKING = """
import json, sys
from accelerate_testing import run_suite
from forked_ranks import fork_ranks
fork_ranks()
for name, only in json.loads(sys.argv[1]).items():
    kind = "tracker" if name == "void" else "backend"
    results = run_suite(kind, name, only=only, timeout=4.0)
    found = {one.name: {"state": one.state, "error": one.error} for one in results}
    print("SAID" + json.dumps([name, found]), flush=True)
"""


@pytest.fixture(scope="module")
def said(root: Path) -> dict[str, Any]:
    """The results of the checks of each plugin."""
    alone = {"void": ("values", "kept"), **dict.fromkeys(BROKEN, GENERAL)}
    env = clean_environment(OMP_NUM_THREADS="1", **forked_ranks.environment(root))
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", CHECKING, json.dumps(wanted)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for wanted in (ON_RANKS, alone)
    ]  # fmt: skip
    texts = [process.communicate(timeout=280)[0] for process in begun]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("SAID")]
    assert len(lines) == len(ON_RANKS) + len(alone), texts
    return dict(json.loads(line.removeprefix("SAID")) for line in lines)


def check(
    root: Path, name: str, *only: str, more: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any], str]:
    """Return status, checks and stderr of `plugins check`."""
    env = clean_environment(OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = f"{root}:{env['PYTHONPATH']}"
    names = [word for one in only for word in ("--only", one)]
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", name, "--json"]
    done = subprocess.run(
        [*command, "--timeout", "4", *names, *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    found = json.loads(done.stdout)["checks"] if done.stdout else []
    return done.returncode, {one["name"]: one for one in found}, done.stderr


@pytest.mark.parametrize(
    ("name", "caught_by", "words"),
    [
        ("wrongarg", "hooks", ["clip_grad", "maximum"]),
        ("misspelt", "hooks", ["'backwards', which is never called", "Did you mean 'backward'?"]),
        ("heavy", "imports", ["matplotlib", "inside the functions"]),
        ("noisy", "imports", ["one more backend", "output of the import"]),
        ("void", "kept", ["no trace of", '{"elsewhere": true}']),
        ("future", "api_version", ["2.0", "has 1.0", "Upgrade accelerate-core"]),
        ("unsaid", "api_version", ["does not state an api_version"]),
        ("left", "selection", ["right (dummy-right 4.2)", "equal priority 50", "USE_BOTH"]),
    ],
)
def test_broken_plugin_fails_the_right_check(
    said: dict[str, Any], name: str, caught_by: str, words: list[str]
) -> None:
    found = said[name]
    assert found[caught_by]["state"] == "failed"
    others = {one for one, made in found.items() if made["state"] == "failed"} - {caught_by}
    allowed = {"hooks", "selection"} if name in ("future", "unsaid") else set()
    assert others <= allowed, found
    for word in [f"{name} (dummy-{name} 4.2)", *words]:
        assert word in found[caught_by]["error"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "caught_by", "words"),
    [
        ("lopsided", "training", "backward"),
        ("amnesiac", "resume", "save_state"),
        ("leaving", "error_on_one_rank", "still run: sleep 543"),
        ("staining", "once_more", "STAINED"),
    ],
)
def test_broken_plugin_fails_the_right_check_on_ranks(
    said: dict[str, Any], name: str, caught_by: str, words: str
) -> None:
    found = said[name]
    assert found["hooks"]["state"] == "passed"
    assert found[caught_by]["state"] == "failed"
    assert f"backend {name} (dummy-{name} 4.2)" in found[caught_by]["error"]
    assert words in found[caught_by]["error"]


@pytest.mark.dist
def test_hanging_check_ends_in_seconds_and_shows_where_each_rank_was(
    said: dict[str, Any],
) -> None:
    found = said["hanging"]
    assert (found["clip_norm"]["state"], found["schedule"]["state"]) == ("failed", "passed")
    error = found["clip_norm"]["error"]
    assert "it did not end: its processes did nothing for 2 s" in error
    for rank in range(2):
        assert f"rank {rank} was in answer_of_the_fabric (dummy_hanging/__init__.py:" in error
    assert error.count(", called by clip_grad (dummy_hanging/__init__.py:") == 2
    assert "called by clip_norm (suites/stepping.py:" in error
    assert "hooks to look at: clip_grad" in error


@pytest.mark.dist
def test_backend_for_two_ranks_only_fails_on_three(root: Path) -> None:
    said = [check(root, "halving", "training", more=("--num_processes", n)) for n in ("2", "3")]
    assert [status for status, *_ in said] == [0, 1]
    assert [found["training"]["state"] for _, found, _ in said] == ["passed", "failed"]


def test_plugin_without_an_entry_point_gets_the_lines_to_add(root: Path) -> None:
    status, _, said = check(root, "forgetful")
    assert status == 2
    assert "dummy-forgetful 4.2 is installed, but declares no plugin" in said
    assert 'project.entry-points."accelerate_core.backends"' in said


def test_two_plugins_of_one_name_are_named_with_their_distributions(root: Path) -> None:
    status, _, said = check(root, "twin")
    assert status == 2
    assert "'twin': dummy-twin1 1.5 and dummy-twin2 2.5" in said


RAISING = """
import inspect
import torch
from accelerate_core import Accelerator, Backend, hookimpl
from accelerate_core.contract.hooks import HOOKS, HookSpecs
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins import discovery
import dummy_raiser

result = {}
for name in HOOKS:
    dummy_raiser.BROKEN = name
    try:
        plugins = {"backend": "raiser"} if HOOKS.get(name) == "owner" else {}
        accelerator = Accelerator(cpu=True, **plugins)
        if HOOKS.get(name) == "owner":
            # Without `self`, and without what the hook is bound to.
            count = len(inspect.signature(getattr(Backend, name)).parameters) - 2
            getattr(accelerator.hooks, name)(*[None] * count)
        else:
            with accelerator:
                model = torch.nn.Linear(1, 1)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                model, optimizer = accelerator.prepare(model, optimizer)
                if name == "reduce_gradients":  # prepare calls it on several ranks only
                    (found,) = accelerator._shared_hooks.implementations(name)
                    accelerator._shared_hooks.call(found, model=model)
                # An elastic backend causes the first, and accumulation the second.
                if name in ("on_membership_change", "on_first_micro_batch"):
                    accelerator._shared_hooks.call_each(name)
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                accelerator.seen_by_nobody_but_plugins if name == "state_attributes" else None
                path = accelerator.save_state("here")
                accelerator.load_state(path)
                accelerator.explain()
                accelerator.free_memory()
                if name == "on_error":
                    raise KeyError
        result[name] = ["nothing was raised", "", []]
    except Exception as error:
        result[name] = [type(error).__name__, str(error), list(getattr(error, "__notes__", []))]
out(result)
"""
RAISER = """
from accelerate_core import Backend, Claim, hookimpl
BROKEN = ""
class Trouble(ArithmeticError): ...
class Raiser(Backend):
    name = "raiser"
    api_version = (1, 0)
    reduces_gradients = "never"
class Extension:
    name = "meddler"
    api_version = (1, 0)
def make(hook, arguments, owner):
    names = ", ".join(arguments)
    scope = {}
    body = (f"def {hook}(self, {names}):\\n    if BROKEN == {hook!r}: raise Trouble('no')\\n    return "
        + (f"super(Raiser, self).{hook}({names})" if owner else
           "model" if "model" in arguments else "None"))
    exec(body, globals(), scope)
    return hookimpl(scope[hook])
import inspect
from accelerate_core import Backend
from accelerate_core.contract.hooks import HOOKS, HookSpecs
for name in HOOKS:
    spec = getattr(Backend, name, None) or getattr(HookSpecs, name)
    arguments = list(inspect.signature(spec).parameters)[1:]
    owner = HOOKS.get(name) == "owner"
    setattr(Raiser if owner else Extension, name, make(name, arguments, owner))
Extension.state_attributes = hookimpl(lambda self: {} if BROKEN != "state_attributes" else 1 / 0)
"""


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("raising")
    groups = {"backends": {"raiser": "Raiser"}, "extensions": {"meddler": "Extension"}}
    dummies.distribution(root, "raiser", RAISER, groups, "7.1")
    code = f"import os; os.chdir({str(root)!r})\n" + RAISING
    return dummies.run(root, code, {"ACCELERATE_PLUGINS": "meddler"})


@pytest.mark.parametrize("hook", HOOKS)
def test_plugin_that_raises_in_a_hook_is_named_with_hook_and_version(
    raised: dict[str, Any], hook: str
) -> None:
    kind, text, notes = raised[hook]
    plugin = "raiser" if HOOKS.get(hook) == "owner" else "meddler"
    label = f"{plugin} (dummy-raiser 7.1)"
    if kind == "CheckpointError":  # one error for all ranks, which names the rank that failed
        assert hook in text or plugin in text
        assert "Trouble: no" in text
    else:
        assert kind in ("Trouble", "ZeroDivisionError")
        assert f"accelerate-core: hook {hook!r} of plugin {label}" in notes
