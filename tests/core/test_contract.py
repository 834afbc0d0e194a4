"""What a contract version guarantees: the snapshot, compatible versions and deprecations."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import dummies
import pytest
from click.testing import CliRunner
from contract_policy import differences
from support import clean_environment

from accelerate_core import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.contract.hooks import HOOKS, SINCE, HookSpecs, Kind, hookspec
from accelerate_core.plugins.discovery import PluginRecord
from accelerate_core.plugins.manager import ActivePlugins
from accelerate_launch.cli import cli
from accelerate_testing.contract import contract

SNAPSHOT = Path(__file__).with_name("contract.json")


def test_contract_matches_the_committed_snapshot() -> None:
    """For an intended change, raise API_VERSION as the policy requires, then update the snapshot:

    accelerate-core plugins hooks --json > tests/core/contract.json
    """
    was, now = json.loads(SNAPSHOT.read_text()), contract()
    assert not (wrong := "\n".join(differences(was, now))), wrong
    for made in (was, now):
        for hook in made["hooks"].values():
            hook.pop("doc")
    assert now == was


def test_contract_contains_the_classes_that_plugins_use() -> None:
    public = contract()["public"]
    assert public["Precision"]["scaler"] == {
        "kind": "method",
        "parameters": ["runtime", "options"],
        "types": {
            "runtime": "RuntimeView",
            "options": "dict[str, Any]",
            "return": "torch.amp.GradScaler | None",
        },
        "deprecated": {},
    }
    assert public["LaunchPlan"]["target"]["kind"] == "field"
    assert public["LaunchPlan"]["processes_per_machine"]["kind"] == "property"
    assert public["Backend"]["detect"]["kind"] == "classmethod"
    assert "prepare_model" not in public["Backend"]  # a hook
    assert public["GeneralTracker"]["main_process_only"]["kind"] == "attribute"
    assert public["Launcher"]["accepts"]["parameters"] == ["plan"]
    assert public["Target"]["__init__"]["parameters"] == ["name", "arguments=", "kind="]
    assert public["Target"]["kind"]["default"] == "'script'"
    whole = json.loads(CliRunner().invoke(cli, ["plugins", "hooks", "--json"]).stdout)
    assert whole == contract()


@pytest.mark.parametrize(
    ("place", "change", "expected"),
    [
        (("hooks", "barrier", "types"), {"scope": "int"}, "'scope' changed from 'Scope' to 'int'"),
        (
            ("public", "Target", "kind"),
            {"default": "'program'"},
            "Target.kind: the default changed",
        ),
        (
            ("public", "Target", "__init__"),
            {"parameters": ["arguments=", "name", "kind="]},
            "Target.__init__: its parameters have a different order",
        ),
    ],
)
def test_contract_records_types_defaults_and_field_order(
    place: tuple[str, ...], change: dict[str, Any], expected: str
) -> None:
    was = contract()
    now = copy.deepcopy(was)
    at = now
    for key in place:
        at = at[key]
    at.update(change)
    assert expected in "\n".join(differences(was, now))


#: Hooks that are called before the Accelerator is complete, and the name of their first argument.
BEFORE_COMPLETION = {
    "device": "setup",
    "init_process_group": "setup",
    "mesh": "runtime",
    "data_shard": "runtime",
    "loss_shard": "runtime",
}


@pytest.mark.parametrize("name", HOOKS)
def test_first_argument_of_a_hook_says_what_exists_and_has_no_default(name: str) -> None:
    spec = getattr(Backend, name, None) or getattr(HookSpecs, name)
    _, first, *more = inspect.signature(spec).parameters.values()
    assert first.name == BEFORE_COMPLETION.get(name, "accelerator")
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in more)
    assert all(one.default is one.empty for one in more)


def entry(since: tuple[int, int], on: str = "2026-01-15", gone_in: int = 2) -> dict[str, Any]:
    return {"since": list(since), "instead": "another", "gone_in": gone_in, "on": on}


def changed(
    base: dict[str, Any], version: tuple[int, int], changes: dict[str, Any]
) -> dict[str, Any]:
    """Change hooks by name, or public names by `Class.name`. None removes the name."""
    made = copy.deepcopy(base)
    made["version"] = list(version)
    for name, change in changes.items():
        owner, _, member = name.rpartition(".")
        part = made["public"][owner] if owner else made["hooks"]
        if change is None:
            del part[member]
        else:
            new = {"kind": "broadcast", "arguments": [], "since": list(version), "deprecated": {}}
            part.setdefault(member, {} if owner else new).update(change)
    return made


#: Deprecations from before version 1.3, which the changes start from.
OLD = {
    "barrier": {"deprecated": {"barrier": entry((1, 2))}},
    "zero_grad": {"deprecated": {"zero_grad(set_to_none)": entry((1, 2))}},
    "on_end": {"deprecated": {"on_end": entry((1, 3))}},
    "reduce": {"deprecated": {"reduce": entry((1, 2), gone_in=3)}},
    "gather": {"deprecated": {"gather": entry((1, 2), on="2026-09-15")}},
    "Precision.scaler": {"deprecated": {"Precision.scaler": entry((1, 2))}},
}
NO_ARGUMENT = {"arguments": ["accelerator", "optimizer"], "deprecated": {}}


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        ((1, 3), {"on_pause": {"since": [1, 4]}}, "raise the minor"),
        ((1, 4), {"on_pause": {}}, None),
        ((1, 4), {"on_pause": {"since": [1, 0]}}, "add since=(1, 4)"),
        ((1, 4), {"barrier": None}, "requires version 2.0"),
        ((2, 0), {"barrier": None}, None),
        ((2, 0), {"broadcast": None}, "was not deprecated"),
        ((2, 0), {"zero_grad": None}, "was not deprecated"),  # only one argument was deprecated
        ((2, 0), {"zero_grad": NO_ARGUMENT}, None),
        ((1, 4), {"zero_grad": NO_ARGUMENT}, "lost its argument 'set_to_none': this requires"),
        ((2, 0), {"scatter": {"arguments": ["accelerator"]}}, "was not deprecated"),
        ((2, 0), {"on_end": None}, "deprecated in 1.3, less than a minor version before"),
        ((2, 0), {"gather": None}, "less than six months after its deprecation on 2026-09-15"),
        ((2, 0), {"reduce": None}, "announced for 3.0"),
        ((1, 3), {"on_save": {"arguments": ["accelerator", "how"]}}, "raise the minor"),
        ((2, 0), {"on_end": {"kind": "owner"}}, "changed its kind from broadcast to owner"),
        ((1, 4), {"on_start": {"since": [1, 4]}}, "its `since` version cannot be changed"),
        ((1, 3), {"on_save": {"deprecated": {"on_save": entry((1, 3))}}}, "raise the minor"),
        ((1, 4), {"on_save": {"deprecated": {"on_save": entry((1, 4))}}}, None),
        ((1, 4), {"on_save": {"deprecated": {"on_save": entry((1, 2))}}}, "add since=(1, 4)"),
        ((1, 4), {"on_save": {"deprecated": {"on_save": entry((1, 4), "")}}}, "add the date"),
        (
            (1, 4),
            {"on_save": {"deprecated": {"on_save": entry((1, 4), gone_in=1)}}},
            "2.0 or later",
        ),
        ((1, 4), {"on_save": {"deprecated": {"on_save(x)": entry((1, 4))}}}, "no such name"),
        ((1, 4), {"barrier": {"deprecated": {"barrier": entry((1, 1))}}}, "cannot be changed"),
        ((1, 2), {}, "was lowered"),
        (
            (1, 4),
            {"LaunchPlan.target": None},
            "LaunchPlan.target is gone: this requires version 2.0",
        ),
        ((2, 0), {"LaunchPlan.target": None}, "was not deprecated"),
        ((2, 0), {"Precision.scaler": None}, None),
        ((1, 3), {"Target.shell": {"kind": "field"}}, "Target.shell is new: raise the minor"),
        ((1, 4), {"Target.shell": {"kind": "field"}}, None),
        ((1, 4), {"Backend.supports": {"kind": "property"}}, "from attribute to property"),
        (
            (1, 4),
            {"Precision.check": {"parameters": ["runtime", "how"]}},
            "new required parameter",
        ),
        ((1, 4), {"Precision.check": {"parameters": ["runtime", "how="]}}, None),
        ((1, 3), {"Precision.check": {"parameters": ["runtime", "how="]}}, "raise the minor"),
        ((1, 4), {"Precision.check": {"parameters": []}}, "lost its parameter 'runtime'"),
        (
            (1, 4),
            {"Precision.autocast": {"parameters": ["options", "model", "accelerator"]}},
            "a different order",
        ),
    ],
)
def test_policy_check_reports_each_violation(
    version: tuple[int, int], changes: dict[str, Any], expected: str | None
) -> None:
    old = changed(contract(), (1, 3), OLD)
    found = " ".join(differences(old, changed(old, version, changes), date(2026, 11, 1)))
    assert (expected in found) if expected else (found == "")


VERSIONS = {"older": (0, 9), "equal": (1, 0), "newer": (1, 7), "next": (2, 0)}
FUTURE = "    def of_the_future(self, accelerator): raise AssertionError\n"
MATRIX = """
import os, warnings
from accelerate_core import Accelerator
from accelerate_core.config.provenance import SourcedValue
from accelerate_launch import LaunchPlan, Target, choose_launcher
from accelerate_core.plugins.discovery import installed
from accelerate_launch.explain.planned_run import planned_run
from accelerate_launch.explain.report import rows
def attempt(f):
    try:
        return ["fine", str(f())]
    except Exception as error:
        return [type(error).__name__, str(error)]
def tracked(name):
    known = os.environ["ACCELERATE_DISABLED_PLUGINS"] = ",".join(
        r.name for r in installed().of_kind("tracker") if r.name != "t" + name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a = Accelerator(log_with="all")
        a.init_trackers("x")
    names = [tracker.name for tracker in a.trackers]
    a.end_training()
    return [names, [str(w.message) for w in caught if "'t" + name in str(w.message)]]
def extensions(a):
    names = [r.name for r, _, _ in a._setup.plugins.plugins if r.kind == "extension"]
    return [name for name in names if name != "loop_checks"]
result = {}
for name in ("older", "equal", "newer", "next"):
    os.environ.clear(); os.environ.update(KEPT)
    result["backend", name, "named"] = attempt(lambda: Accelerator(backend=name).backend.name)
    os.environ["USE_" + name.upper()] = "1"
    result["backend", name, "automatic"] = attempt(lambda: Accelerator().backend.name)
    os.environ.clear(); os.environ.update(KEPT)
    os.environ["ACCELERATE_PLUGINS"] = "e" + name
    result["extension", name, "named"] = attempt(lambda: extensions(Accelerator()))
    os.environ.clear(); os.environ.update(KEPT)
    os.environ["EXTEND_" + name.upper()] = "1"
    result["extension", name, "automatic"] = attempt(lambda: extensions(Accelerator()))
    os.environ.clear(); os.environ.update(KEPT)
    result["precision", name, "named"] = attempt(
        lambda: Accelerator(mixed_precision="p" + name).mixed_precision)
    result["tracker", name, "named"] = attempt(
        lambda: Accelerator(log_with="t" + name, project_dir=".").init_trackers("x"))
    result["tracker", name, "automatic"] = attempt(lambda: tracked(name))
    result["launcher", name, "named"] = attempt(
        lambda: choose_launcher(LaunchPlan(Target("x"), launcher="l" + name)).name)
    wanted = {"START_" + name.upper(): SourcedValue("1", "the test")}
    result["launcher", name, "automatic"] = attempt(
        lambda: choose_launcher(LaunchPlan(Target("x"), contributed=wanted)).name)
result["rows"] = {row["name"]: [row["state"], row["api_version"]] for row in rows(planned_run(os.environ))}
out([[list(key) if isinstance(key, tuple) else key, value] for key, value in result.items()])
"""
OTHERS = """
from accelerate_core import Claim, Precision, hookimpl
from accelerate_tracking import GeneralTracker
class E:
    api_version = {api}
    @classmethod
    def detect(cls, request): return Claim(0, "wanted")
    @hookimpl
    def on_start(self, accelerator): accelerator.seen = True
    {future}
class P(Precision):
    name = "p{name}"
    api_version = {api}
class T(GeneralTracker):
    name = "t{name}"
    api_version = {api}
    requires_logging_directory = False
    tracker = None
    def store_init_configuration(self, values): ...
    def log(self, values, step=None, **kwargs): ...
class L:
    name = "l{name}"
    api_version = {api}
    def accepts(self, plan): return True
    def launch_command(self, plan): return ["{name}"]
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("matrix")
    for name, api in VERSIONS.items():
        future = "@hookimpl\n    def on_dream(self, accelerator): raise AssertionError"
        dummies.backend(root, name, triggers=(f"USE_{name.upper()}",), api=str(api), extra=FUTURE)
        code = OTHERS.format(api=api, name=name, future=future if api == (1, 7) else "")
        groups = {
            "extensions": {f"e{name}": "E"},
            "precisions": {f"p{name}": "P"},
            "trackers": {f"t{name}": "T"},
            "launchers": {f"l{name}": "L"},
            "triggers": {f"EXTEND_{name.upper()}": "E", f"START_{name.upper()}": "L"},
        }
        dummies.distribution(root, f"o{name}", code, groups)
    code = "import os; KEPT = dict(os.environ)\n" + MATRIX
    pairs = dummies.run(root, code)
    return {tuple(key) if isinstance(key, list) else key: value for key, value in pairs}


KINDS = ["backend", "extension", "precision", "tracker", "launcher"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["older", "next"])
def test_plugin_for_another_major_version_is_refused_by_name(
    matrix: dict[Any, Any], kind: str, name: str
) -> None:
    error, text = matrix[kind, name, "named"]
    assert error == "PluginVersionError"
    owner = "dummy-" + (name if kind == "backend" else f"o{name}")
    theirs = ".".join(map(str, VERSIONS[name]))
    way_out = "accelerate-core" if name == "next" else owner
    assert f"({owner} 1.0)" in text
    assert f"version {theirs}" in text
    assert "has 1.0" in text
    assert f"Upgrade {way_out}" in text


@pytest.mark.parametrize("name", ["older", "next"])
def test_plugin_for_another_major_version_is_refused_when_a_variable_requests_it(
    matrix: dict[Any, Any], name: str
) -> None:
    for kind in ("backend", "extension"):
        assert matrix[kind, name, "automatic"] == matrix[kind, name, "named"]
    assert matrix["launcher", name, "automatic"] == ["fine", "simple"]
    how, result = matrix["tracker", name, "automatic"]
    assert (how, result[:4]) == ("fine", "[[],")
    assert f"version {'.'.join(map(str, VERSIONS[name]))}" in result


@pytest.mark.parametrize("name", ["equal", "newer"])
def test_plugins_for_the_same_or_a_newer_minor_version_work(
    matrix: dict[Any, Any], name: str
) -> None:
    for how in ("named", "automatic"):
        assert matrix["backend", name, how] == ["fine", name]
        assert matrix["extension", name, how] == ["fine", f"['e{name}']"]
        assert matrix["launcher", name, how] == ["fine", f"l{name}"]
    assert matrix["precision", name, "named"] == ["fine", f"p{name}"]
    assert matrix["tracker", name, "named"] == ["fine", "None"]
    assert matrix["tracker", name, "automatic"] == ["fine", f"[['t{name}'], []]"]


def test_table_shows_contract_versions(matrix: dict[Any, Any]) -> None:
    rows = matrix["rows"]
    assert {name: rows[name] for name in VERSIONS} == {
        "older": ["refused", "0.9"],
        "equal": ["available", "1.0"],
        "newer": ["available", "1.7"],
        "next": ["refused", "2.0"],
    }


LAUNCHER = """
class L:
    name = "{name}"
    {stated}
    def accepts(self, plan): return True
    def launch_command(self, plan): return ["echo", "started by {name}"]
"""


@pytest.mark.parametrize(
    ("stated", "refused"),
    [
        ("", "has no api_version"),
        ("api_version = (2, 0)", "a newer contract, version 2.0"),
        ("api_version = (1, 0); __init__ = lambda self: 1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_incompatible_launcher_is_skipped_unless_it_is_requested_by_name(
    tmp_path: Path, stated: str, refused: str
) -> None:
    groups = {"launchers": {"odd": "L"}, "triggers": {"ODD": "L"}}
    dummies.distribution(tmp_path, "odd", LAUNCHER.format(name="odd", stated=stated), groups)
    groups = {"launchers": {"sound": "L"}, "triggers": {"SOUND": "L"}}
    stated = "api_version = (1, 0)"
    dummies.distribution(tmp_path, "sound", LAUNCHER.format(name="sound", stated=stated), groups)
    script = tmp_path / "script.py"
    script.write_text("print('started by the core')")

    def launch(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = clean_environment(**environ)
        env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
        command = [sys.executable, "-m", "accelerate_core", "launch", *options, str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    for environ, by in ({"ODD": "1"}, "the core"), ({"ODD": "1", "SOUND": "1"}, "sound"):
        done = launch(**environ)
        assert (done.returncode, done.stdout.strip()) == (0, f"started by {by}")
        assert refused in done.stderr
        assert done.stderr.count("The launch continues with") == 1
        assert "odd (dummy-odd 1.0)" in done.stderr
    named = launch("--launcher", "odd")
    assert named.returncode == 2
    assert refused in named.stderr
    kept_out = launch(ODD="1", ACCELERATE_DISABLED_PLUGINS="odd")
    assert (kept_out.stdout.strip(), kept_out.stderr) == ("started by the core", "")


def test_launcher_with_a_matching_trigger_wins_with_any_priority(tmp_path: Path) -> None:
    stated = "api_version = (1, 0); priority = 1"
    groups = {"launchers": {"low": "L"}, "triggers": {"ACCELERATE_USE_LOW": "L"}}
    code = LAUNCHER.format(name="low", stated=stated).replace(
        "return True", "return not plan.log_dir"
    )
    dummies.distribution(tmp_path, "low", code, groups)
    script = tmp_path / "script.py"
    script.write_text("print('started by the core')")
    env = clean_environment(ACCELERATE_USE_LOW="1")
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate_core", "launch"]
    seen = []
    for options in ([], ["--log_dir", str(tmp_path / "logs")]):
        done = subprocess.run(
            [*command, *options, str(script)], env=env, capture_output=True, text=True, timeout=60
        )
        seen.append((done.stdout.strip().endswith("started by low"), done.stderr))
    assert seen[0] == (True, "")
    assert not seen[1][0]
    assert (
        "low (dummy-low 1.0) was requested by environment variable ACCELERATE_USE_LOW" in seen[1][1]
    )


@pytest.mark.parametrize("method", ["launch_command", "launch_environment"])
def test_launcher_that_raises_is_named(tmp_path: Path, method: str) -> None:
    code = LAUNCHER.format(name="odd", stated="api_version = (1, 0)")
    code += f"    def {method}(self, plan): raise KeyError('no such thing')\n"
    dummies.distribution(tmp_path, "odd", code, {"launchers": {"odd": "L"}})
    (tmp_path / "script.py").touch()
    env = clean_environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate_core", "launch", "--launcher", "odd", "script.py"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert f"odd (dummy-odd 1.0) is broken: its {method}() raised KeyError" in done.stderr
    assert "Traceback" not in done.stderr


def test_plugin_for_an_older_minor_version_works_with_a_deprecation_warning(tmp_path: Path) -> None:
    extra = (
        "    def on_step_end(self, accelerator, optimizer): ...\n"
        "    def zero_grad(self, accelerator, optimizer, set_to_none): ...\n"
    )
    dummies.backend(tmp_path, "aged", api="(1, 1)", extra=extra)
    code = """
    import warnings
    from accelerate_core.contract import hooks as hookspecs
    from accelerate_core.plugins import discovery, manager
    for module in (hookspecs, discovery, manager):
        module.API_VERSION = (1, 3)
    hookspecs.DEPRECATED["on_step_end"] = hookspecs.Deprecation((1, 2), "implement on_end", 2)
    hookspecs.DEPRECATED["zero_grad(set_to_none)"] = hookspecs.Deprecation(
        (1, 3), "gradients are always dropped", 2)
    from accelerate_core import Accelerator
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = Accelerator(backend="aged").backend.name
    out([name, [str(one.message) for one in caught if one.category is FutureWarning]])
    """
    name, warned = dummies.run(tmp_path, code)
    assert name == "aged"
    assert warned == [
        "aged (dummy-aged 1.0) uses 'on_step_end', which version 1.2 of the contract deprecated "
        "and 2.0 will remove: implement on_end.",
        "aged (dummy-aged 1.0) uses 'zero_grad(set_to_none)', which version 1.3 of the contract "
        "deprecated and 2.0 will remove: gradients are always dropped.",
    ]


def test_error_for_a_newer_hook_argument_says_what_to_upgrade(tmp_path: Path) -> None:
    extra = "    def prepare_model(self, accelerator, model, dreams): return model\n"
    dummies.backend(tmp_path, "ahead", api="(1, 7)", extra=extra)
    code = """
    from accelerate_core import Accelerator
    try:
        Accelerator(backend="ahead")
    except Exception as error:
        out([type(error).__name__, str(error)])
    """
    kind, text = dummies.run(tmp_path, code)
    assert kind == "PluginError"
    for part in (
        "ahead (dummy-ahead 1.0)",
        "dreams",
        "prepare_model",
        "1.7",
        "Upgrade accelerate-core",
    ):
        assert part in text


@pytest.fixture
def two_more_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add two hooks to the contract in version 1.1."""

    def before_step(self: Any, accelerator: Any, optimizer: Any) -> None:
        pass

    def merge_gradients(self: Any, accelerator: Any, models: Any) -> str:
        return "the core's default"

    added: list[tuple[type, Kind, Any]] = [
        (HookSpecs, "broadcast", before_step),
        (Backend, "owner", merge_gradients),
    ]
    for holder, kind, function in added:
        name = function.__name__
        monkeypatch.setattr(holder, name, hookspec(function), raising=False)
        monkeypatch.setitem(HOOKS, name, kind)
        monkeypatch.setitem(SINCE, name, (1, 1))


def registered(backend: Backend) -> tuple[list[Any], Any]:
    """Register a backend. Return who implements `before_step`, and the result of `merge_gradients`."""
    record = PluginRecord("backend", backend.name, "package:Class", "package", "1.0")
    plugins = ActivePlugins({"backend": Backend, "precision": Precision})
    plugins.add(backend, record, "the test")
    answer = plugins.owner_methods(backend, record, Backend)["merge_gradients"].function
    return plugins.implementations("before_step"), answer(None, [])


@pytest.mark.usefixtures("two_more_hooks")
def test_older_plugins_method_with_a_newer_hooks_name_is_not_called() -> None:
    class Older(Backend):
        name = "older"
        api_version = (1, 0)

        def before_step(self, folder: str) -> str:
            return folder

        def merge_gradients(self, models: Any) -> str:  # type: ignore[override,unused-ignore]
            return "not a hook"

        def before_steps(self) -> None:
            """Resembles the newer hook, but must not break a plugin that worked before."""

    with pytest.warns(UserWarning, match="since version 1.1") as caught:
        implementations, answer = registered(Older())
    assert implementations == []
    assert answer == "the core's default"
    assert sorted(str(one.message).split("'")[1] for one in caught) == [
        "before_step",
        "merge_gradients",
    ]


@pytest.mark.usefixtures("two_more_hooks")
def test_newer_hook_is_called_only_in_plugins_written_for_its_version() -> None:
    class Newer(Backend):
        name = "newer"
        api_version = (1, 1)

        def before_step(self, accelerator: Any, optimizer: Any) -> None:
            pass

        def merge_gradients(self, models: Any) -> str:
            return "the backend's own"

    class OlderOverNewer(Newer):
        name = "older_over_newer"
        api_version = (1, 0)

    for backend in (Newer(), OlderOverNewer()):
        implementations, answer = registered(backend)
        assert [one.record.name for one in implementations] == [backend.name]
        assert answer == "the backend's own"
