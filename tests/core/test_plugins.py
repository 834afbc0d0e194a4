"""Discovery without imports, selection with reasons, and plugins that break the contract."""

from __future__ import annotations

from pathlib import Path

import dummies
import pytest

FAIL = """
def attempt(f):
    try:
        return ["fine", str(f())]
    except BaseException as error:
        return [type(error).__name__, str(error), list(getattr(error, "__notes__", []))]
"""


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install fifty plugins of all kinds. Importing one leaves a trace."""
    root = tmp_path_factory.mktemp("fifty")
    for index in range(20):
        triggers = (f"ACCELERATE_USE_DUMMY{index}",) if index % 2 else ()
        dummies.backend(root, f"backend{index}", triggers=triggers)
    for index in range(15):
        code = "from accelerate_tracking import GeneralTracker\nclass T(GeneralTracker): ..."
        dummies.distribution(root, f"tracker{index}", code, {"trackers": {f"tracker{index}": "T"}})
    for index in range(10):
        code = "from accelerate_core import Precision\nclass P(Precision):\n    name = 'p'"
        dummies.distribution(root, f"precision{index}", code, {"precisions": {f"p{index}": "P"}})
    for index in range(4):
        code = f"""
        from accelerate_core import Claim
        class E:
            api_version = (1, 0)
            @classmethod
            def detect(cls, request): return Claim(0, "extension{index}")
            def on_end(self, accelerator): pass
        """
        groups = {"extensions": {f"e{index}": "E"}, "triggers": {f"DUMMY_EXTENSION{index}": "E"}}
        dummies.distribution(root, f"extension{index}", code, groups)
    dummies.distribution(
        root,
        "broken",
        "raise RuntimeError('no library here')",
        {"backends": {"broken": "Plugin"}, "triggers": {"ACCELERATE_USE_BROKEN": "Plugin"}},
    )
    return root


IMPORTED = "sorted(m for m in sys.modules if m.startswith('dummy_'))"


def test_a_plugin_that_appears_after_an_error_is_found_by_the_next_scan(tmp_path: Path) -> None:
    dummies.distribution(tmp_path, "late", "class P: pass", {"extensions": {"late": "P"}})
    code = f"""
    from accelerate_core.errors import ConfigurationError
    from accelerate_core.plugins.discovery import installed
    before = installed()
    ConfigurationError("the first error of the process")
    sys.path.insert(0, {str(tmp_path)!r})
    installed.cache_clear()
    out([any(one.name == "late" for one in found.plugins) for found in (before, installed())])
    """
    assert dummies.run(tmp_path / "none", code) == [False, True]


def test_only_the_requested_plugin_of_fifty_is_imported(fifty: Path) -> None:
    code = f"""
    import accelerate_core
    from accelerate_core.plugins import discovery
    scanned_at_import = discovery.installed.cache_info().currsize
    from accelerate_core import Accelerator
    a = Accelerator()
    b = Accelerator(mixed_precision="bf16")
    seen = discovery.installed()
    out([scanned_at_import, discovery.installed.cache_info().misses,
         sum(r.distribution.startswith("dummy-") for r in seen.plugins), a.backend.name, {IMPORTED}])
    """
    scanned, scans, found, name, imported = dummies.run(fifty, code)
    assert (scanned, scans, found, name, imported) == (0, 1, 50, "single", [])


def test_trigger_imports_only_its_own_plugin(fifty: Path) -> None:
    code = f"""
    from accelerate_core import Accelerator
    a = Accelerator()
    out([a.backend.name, a.provenance["backend"].origin, {IMPORTED}])
    """
    env = {"ACCELERATE_USE_DUMMY3": "1", "DUMMY_EXTENSION2": "1"}
    name, reason, imported = dummies.run(fifty, code, env)
    assert (name, reason) == ("backend3", "backend3 wants it")
    assert imported == ["dummy_backend3", "dummy_extension2"]


def test_broken_plugin_is_listed_and_only_fails_when_requested(fifty: Path) -> None:
    code = (
        FAIL
        + f"""
from accelerate_core import Accelerator
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import rows
asked = attempt(Accelerator)
row = next(r for r in rows(planned_run(os.environ)) if r["name"] == "broken")
named = attempt(lambda: Accelerator(backend="broken"))
other = Accelerator(backend="single").backend.name
out([asked, row["state"], row["reason"], named, other, {IMPORTED}])
"""
    )
    env = {"ACCELERATE_USE_BROKEN": "1"}
    asked, state, reason, named, other, imported = dummies.run(fifty, code, env)
    assert (state, other) == ("broken", "single")
    assert "no library here" in reason
    for outcome in (asked, named):
        assert outcome[0] == "PluginError"
        assert "dummy-broken 1.0" in outcome[1]
    assert imported == []


def test_disabled_plugin_is_not_used(fifty: Path) -> None:
    code = (
        FAIL
        + """
from accelerate_core import Accelerator
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import rows
row = next(r for r in rows(planned_run(os.environ)) if r["name"] == "backend3")
asked, named = attempt(Accelerator), attempt(lambda: Accelerator(backend="backend3"))
stronger = Accelerator(backend="single").backend.name
del os.environ["ACCELERATE_USE_DUMMY3"]
out([Accelerator().backend.name, stronger, row["state"], asked, named])
"""
    )
    env = {"ACCELERATE_USE_DUMMY3": "1", "ACCELERATE_DISABLED_PLUGINS": "other, backend3"}
    *names, state, asked, named = dummies.run(fifty, code, env)
    assert (names, state) == (["single", "single"], "disabled")
    assert asked[0] == named[0] == "PluginError"
    assert "ACCELERATE_DISABLED_PLUGINS disables the backend plugin 'backend3'" in asked[1]
    assert "requested by environment variable ACCELERATE_USE_DUMMY3" in asked[1]


def test_every_kind_of_trigger_selects_its_plugin(tmp_path: Path) -> None:
    for name, trigger in (
        ("byenv", "RING_VARIABLE"),
        ("byargument", "ring_plugin"),
        ("byyaml", "ring_config"),
        ("byranks", "multi_process"),
        ("byprobe", "always"),
    ):
        code = f"""
        from accelerate_core import Backend, Claim
        class Plugin(Backend):
            name = "{name}"
            api_version = (1, 0)
            reduces_gradients = "never"
            @classmethod
            def detect(cls, request):
                import sys
                sys.asked = getattr(sys, "asked", []) + ["{name}"]
                return None
        """
        groups = {"backends": {name: "Plugin"}, "triggers": {trigger: "Plugin"}}
        dummies.distribution(tmp_path, name, code, groups)
    config = tmp_path / "config.yaml"
    config.write_text("ring_config:\n  chunk: 3\n")
    code = """
    import os, sys
    from accelerate_core import Accelerator, DistributedType
    from accelerate_core.plugins.selection import Request, select
    from accelerate_core.contract.topology import Topology
    from accelerate_core.config.files import read_config
    def asked(request):
        sys.asked = []
        select("backend", request)
        return sys.asked
    one, two = Topology(), Topology(0, 2)
    out([asked(Request({}, {}, one)),
         asked(Request({}, {"RING_VARIABLE": "x"}, one)),
         asked(Request({"ring_plugin": 1}, {}, one)),
         asked(Request({}, {}, one, read_config(os.environ["FILE"]))),
         asked(Request({}, {}, two))])
    """
    env = {"FILE": str(config), "ACCELERATE_DISABLED_PLUGINS": "ddp"}
    nothing, by_env, by_argument, by_yaml, by_ranks = dummies.run(tmp_path, code, env)
    assert nothing == ["byprobe"]
    assert by_env == ["byenv", "byprobe"]
    assert by_argument == ["byargument", "byprobe"]
    assert by_yaml == ["byprobe", "byyaml"]
    assert by_ranks == ["byprobe", "byranks"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Request several invalid plugins in one process, and return the outcome of each."""
    root = tmp_path_factory.mktemp("outcomes")
    dummies.backend(root, "left", triggers=("LEFT",), priority=70)
    dummies.backend(root, "right", triggers=("RIGHT",), priority=70)
    dummies.backend(root, "older", api="(0, 9)")
    dummies.backend(root, "newer", api="(1, 7)")
    dummies.backend(root, "next", api="(2, 0)", triggers=("NEXT",))
    dummies.backend(root, "unversioned", api="None")
    misspelt = "    from accelerate_core import hookimpl\n    @hookimpl\n    def backwards(self, loss): ...\n"
    dummies.backend(root, "misspelt", extra=misspelt)
    for name, body in {
        "wrongarg": "def prepare_model(self, accelerator, modle): return modle",
        "raiser": "def backward(self, loss): raise OverflowError('too much')",
        "swapped": "def prepare_model(self, model, accelerator):"
        " model.seen = accelerator.backend.name; return model",
        "none": "def backward(self, loss): return None",
    }.items():
        dummies.backend(root, name, extra=f"    {body}\n")
    code = (
        FAIL
        + """
import os
import torch
from accelerate_core import Accelerator
result = {}
def make(name): return attempt(lambda: Accelerator(backend=name).backend.name)
for name in ("older", "newer", "next", "unversioned", "misspelt", "wrongarg"):
    result[name] = make(name)
a = Accelerator(backend="raiser")
result["raiser"] = attempt(lambda: a.backward(torch.ones((), requires_grad=True)))
b = Accelerator(backend="swapped")
result["swapped"] = [b.prepare(torch.nn.Linear(1, 1)).seen]
c = Accelerator(backend="none")
leaf = torch.ones((), requires_grad=True)
c.backward(leaf * 2)
result["none"] = [str(leaf.grad)]
os.environ["NEXT"] = "1"
result["next triggered"] = attempt(Accelerator)
os.environ["NEXT"] = "no"
result["next not wanted"] = [Accelerator().backend.name]
os.environ["LEFT"] = os.environ["RIGHT"] = "1"
result["tie"] = attempt(Accelerator)
result["named"] = make("right")
os.environ["ACCELERATE_BACKEND"] = "left"
result["named by environment"] = attempt(lambda: Accelerator().provenance["backend"])
out(result)
"""
    )
    return dummies.run(root, code)


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("older", "PluginVersionError", ["older (dummy-older 1.0)", "0.9", "Upgrade dummy-older"]),
        ("next", "PluginVersionError", ["next (dummy-next 1.0)", "2.0", "Upgrade accelerate-core"]),
        ("next triggered", "PluginVersionError", ["next (dummy-next 1.0)", "2.0"]),
        ("unversioned", "PluginError", ["has no api_version"]),
        ("misspelt", "PluginError", ["backwards"]),
        ("wrongarg", "PluginError", ["modle"]),
        (
            "tie",
            "PluginConflictError",
            ["'left', 'right'", "priority 70", "ACCELERATE_BACKEND=left"],
        ),
    ],
)
def test_plugin_that_breaks_the_contract_is_named(
    outcomes: dict[str, list[str]], name: str, kind: str, parts: list[str]
) -> None:
    assert outcomes[name][0] == kind
    for part in parts:
        assert part in outcomes[name][1]


def test_plugin_for_a_newer_minor_version_works(outcomes: dict[str, list[str]]) -> None:
    assert outcomes["newer"] == ["fine", "newer"]


def test_incompatible_plugin_only_fails_when_requested(
    outcomes: dict[str, list[str]],
) -> None:
    assert outcomes["next not wanted"] == ["single"]


def test_tie_is_resolved_by_naming_a_plugin(outcomes: dict[str, list[str]]) -> None:
    assert outcomes["named"] == ["fine", "right"]
    assert outcomes["named by environment"][1] == "'left' (environment variable ACCELERATE_BACKEND)"


def test_exception_keeps_its_type_and_gets_a_note_that_names_the_plugin(
    outcomes: dict[str, list[str]],
) -> None:
    kind, text, notes = outcomes["raiser"]
    assert (kind, text) == ("OverflowError", "too much")
    assert notes == ["accelerate-core: hook 'backward' of plugin raiser (dummy-raiser 1.0)"]


def test_hook_implementations_can_take_arguments_in_any_order(
    outcomes: dict[str, list[str]],
) -> None:
    assert outcomes["swapped"] == ["swapped"]


def test_hook_that_returns_none_replaces_the_default(
    outcomes: dict[str, list[str]],
) -> None:
    assert outcomes["none"] == ["None"]


def test_extension_cannot_implement_a_backends_hook(tmp_path: Path) -> None:
    code = """
    from accelerate_core import Claim, hookimpl
    class E:
        api_version = (1, 0)
        @classmethod
        def detect(cls, request): return Claim(0, "")
        @hookimpl
        def backward(self, loss): ...
    class W:
        api_version = (1, 0)
        @classmethod
        def detect(cls, request): return Claim(0, "")
        @hookimpl(wrapper=True)
        def on_start(self, accelerator): yield
    """
    groups = {
        "extensions": {"thief": "E", "wrapper": "W"},
        "triggers": {"THIEF": "E", "WRAPPER": "W"},
    }
    dummies.distribution(tmp_path, "thief", code, groups)
    script = (
        FAIL
        + """
import os
from accelerate_core import Accelerator
os.environ["THIEF"] = "1"
first = attempt(Accelerator)
del os.environ["THIEF"]; os.environ["WRAPPER"] = "1"
out([first, attempt(Accelerator)])
"""
    )
    owner, wrapper = dummies.run(tmp_path, script)
    assert owner[0] == wrapper[0] == "PluginError"
    assert "'backward', which only the active backend may implement" in owner[1]
    assert "does not allow wrappers" in wrapper[1]


def test_signature_shows_the_arguments_of_installed_plugins(tmp_path: Path) -> None:
    dummies.backend(tmp_path, "vendor", triggers=("vendor_plugin", "ACCELERATE_USE_VENDOR"))
    code = """
    import inspect
    from accelerate_core import Accelerator
    out(list(inspect.signature(Accelerator).parameters))
    """
    names = dummies.run(tmp_path, code)
    assert names[:3] == ["device_placement", "split_batches", "mixed_precision"]
    assert {"log_with", "kwargs_handlers", "backend"} < set(names)
    assert "vendor_plugin" in names[names.index("backend") :]  # after the core's arguments
