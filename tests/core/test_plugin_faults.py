"""Faulty plugins are named with their distribution, and only affect runs that request them."""

from __future__ import annotations

import pytest
from dummies import distribution, run

CODE = """
import os
from contextlib import nullcontext
from accelerate_core import Backend, BackendSettings, Claim, Precision, settings

class Raises(Backend):
    name = "raises"
    api_version = (1, 0)
    reduces_gradients = "never"
    @classmethod
    def detect(cls, request):
        raise KeyError("boom")

class NoClaim(Raises):
    name = "noclaim"
    @classmethod
    def detect(cls, request):
        return True

class Leaves(Raises):
    name = "leaves"
    @classmethod
    def detect(cls, request):
        raise SystemExit("no licence")

class High(Raises):
    name = "high"
    @classmethod
    def detect(cls, request):
        return Claim("high", "a reason")

class NotANumber(Raises):
    name = "nan"
    @classmethod
    def detect(cls, request):
        return Claim(float("nan"), "reason")

class Faulty(Backend):
    name = "faulty"
    api_version = (1, 0)
    reduces_gradients = "never"
    at = ""
    @classmethod
    def detect(cls, request):
        return None
    def __getattribute__(self, name):
        if name == Faulty.at:
            return self._raises
        return super().__getattribute__(name)
    def _raises(self, *arguments):
        raise ArithmeticError("boom")

class Nearly(Precision):
    name = "nearly"
    api_version = (1, 0)
    needs = frozenset({"autocast", "loss_scaling"})
    entered = 0
    def autocast(self, accelerator, model, options):
        Nearly.entered += 1
        if os.environ.get("NEARLY") == "autocast":
            raise ArithmeticError("boom")
        return nullcontext()
    def check(self, runtime):
        if os.environ.get("NEARLY") == "check":
            raise ArithmeticError("boom")
    def scaler(self, runtime, options):
        if os.environ.get("NEARLY") == "scaler":
            raise ArithmeticError("boom")

class Init(Backend):
    name = "init"
    api_version = (1, 0)
    reduces_gradients = "never"
    def __init__(self, *arguments):
        raise ValueError("boom")

class Nothing:
    name = "nothing"
    api_version = (1, 0)

class Mine(Backend):
    name = "mine"
    api_version = (1, 0)
    reduces_gradients = "never"
    @settings
    class Settings(BackendSettings):
        chunk_mb: int = 25
    @classmethod
    def detect(cls, request):
        return Claim(60, "mine_plugin given")

class Extension:
    name = "extra"
    api_version = (1, 0)
    def on_end(self, accelerator):
        pass
"""

TRY = """
from accelerate_core import Accelerator
try:
    accelerator = Accelerator(cpu=True, **{arguments})
except Exception as error:
    out([type(error).__name__, str(error) + " ".join(getattr(error, "__notes__", ()))])
else:
    out(["", accelerator.backend.name])
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("faulty")
    names = {"raises": "Raises", "noclaim": "NoClaim", "init": "Init", "nothing": "Nothing"}
    names |= {"leaves": "Leaves", "high": "High", "nan": "NotANumber", "faulty": "Faulty"}
    groups = {
        "backends": {**names, "mine": "Mine"},
        "precisions": {"nearly": "Nearly"},
        "triggers": {
            "TRY_RAISES": "Raises",
            "TRY_NOCLAIM": "NoClaim",
            "TRY_LEAVES": "Leaves",
            "TRY_HIGH": "High",
            "TRY_NAN": "NotANumber",
            "mine_plugin": "Mine",
        },
        "extensions": {"extra": "Extension"},
        "exports": {"LentAndGone": "Gone"},
    }
    distribution(root, "faulty", CODE, groups)
    exits = {"backends": {"exits": "X"}, "triggers": {"TRY_EXITS": "X"}}
    distribution(root, "exits", "raise SystemExit('no such hardware')", exits)
    return root


@pytest.mark.parametrize(
    "variable", ["TRY_RAISES", "TRY_NOCLAIM", "TRY_EXITS", "TRY_LEAVES", "TRY_HIGH", "TRY_NAN"]
)
def test_plugin_whose_detection_fails_is_named_and_listed_as_broken(root, variable):
    kind, text = run(root, TRY.format(arguments={}), {variable: "1"})
    assert kind == "PluginError"
    assert "(dummy-" in text
    assert run(root, TRY.format(arguments={"backend": "single"}), {variable: "1"}) == ["", "single"]
    listed = run(
        root,
        """
        from accelerate_launch.explain.planned_run import planned_run
        from accelerate_launch.explain.report import rows
        out([[row["name"], row["state"], row["reason"]] for row in rows(planned_run(os.environ))])
        """,
        {variable: "1"},
    )
    name = variable.removeprefix("TRY_").lower()
    state, reason = next((s, b) for n, s, b in listed if n == name)
    assert state == "broken"
    words = ("boom", "returned True", "no such hardware", "no licence", "not 'high'", "not nan")
    assert any(word in reason for word in words)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("init", "ValueError", "hook '__init__'"),
        ("nothing", "PluginError", "not a subclass of"),
    ],
)
def test_error_in_a_plugin_requested_by_name_names_it(root, name, kind, words):
    got, text = run(root, TRY.format(arguments={"backend": name}))
    assert got == kind
    assert "dummy-faulty" in text
    assert words in text


def test_error_in_a_method_that_is_not_a_hook_names_the_plugin(root):
    code = """
    from accelerate_core import Accelerator
    from dummy_faulty import Faulty
    notes_of = {}
    for Faulty.at in ("check", "core_defaults", "distributed_type"):
        try:
            Accelerator(cpu=True, backend="faulty").distributed_type
        except ArithmeticError as error:
            notes_of[Faulty.at] = error.__notes__
    out(notes_of)
    """
    notes_of = run(root, code)
    assert len(notes_of) == 3
    for method, notes in notes_of.items():
        assert notes == [f"accelerate-core: hook {method!r} of plugin faulty (dummy-faulty 1.0)"]


def test_error_in_a_precisions_autocast_names_it(root):
    code = """
    import os, torch
    from accelerate_core import Accelerator
    from dummy_faulty import Nearly
    notes_of = {}
    for method in ("", "check", "scaler", "autocast"):
        os.environ["NEARLY"] = method
        try:
            accelerator = Accelerator(cpu=True, mixed_precision="nearly")
            accelerator.prepare(torch.nn.Linear(1, 1))(torch.ones(1, 1))
        except ArithmeticError as error:
            notes_of[method] = error.__notes__
        else:
            notes_of[method] = Nearly.entered
    out(notes_of)
    """
    notes_of = run(root, code)
    assert notes_of.pop("") == 1
    assert len(notes_of) == 3
    for method, notes in notes_of.items():
        assert notes == [f"accelerate-core: hook {method!r} of plugin nearly (dummy-faulty 1.0)"]


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ("backend='single', ", {}, "not active"),
        ("", {"ACCELERATE_DISABLED_PLUGINS": "mine"}, "disables the backend plugin 'mine'"),
    ],
)
def test_settings_that_no_plugin_reads_are_refused(root, arguments, environment, expected):
    code = f"""
    from accelerate_core import Accelerator
    from dummy_faulty import Mine
    try:
        Accelerator(cpu=True, {arguments}mine_plugin=Mine.Settings(1))
    except Exception as error:
        out([type(error).__name__, str(error)])
    """
    kind, text = run(root, code, environment)
    assert kind == ("PluginError" if environment else "ConfigurationError")
    assert "mine_plugin" in text
    assert expected in text


def test_misspelt_variables_and_plugin_names_are_warned_about(root):
    code = """
    import warnings
    from accelerate_core import Accelerator
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator(cpu=True, backend="mine")
    out(" ".join(str(one.message) for one in caught))
    """
    warned = run(
        root, code, {"ACCELERATE_DISABLED_PLUGINS": "extrra", "ACCELERATE_MINE_CHUNK_MBS": "3"}
    )
    assert "'extrra'" in warned
    assert "Did you mean 'extra'?" in warned
    assert "Did you mean 'ACCELERATE_MINE_CHUNK_MB'?" in warned


def test_error_in_an_exported_name_names_its_plugin(root):
    code = """
    import accelerate_core
    try:
        accelerate_core.LentAndGone
    except Exception as error:
        raised = [type(error).__name__, str(error)]
    accelerator = accelerate_core.Accelerator(cpu=True)
    out(raised)
    """
    kind, text = run(root, code, {"ACCELERATE_PLUGINS": "extra,extra"})
    assert kind == "PluginError"
    assert "dummy-faulty" in text


def test_missing_entry_point_of_a_backend_is_reported_despite_a_similar_name(root):
    bare = root / "accelerate_singel-0.3.dist-info"
    bare.mkdir()
    (bare / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate-singel\nVersion: 0.3\n")
    code = """
    from accelerate_core import Accelerator
    try:
        Accelerator(cpu=True, backend="singel")
    except Exception as error:
        out([type(error).__name__, str(error)])
    """
    kind, text = run(root, code)
    assert kind == "MissingPluginError"
    assert "accelerate-singel 0.3 is installed, but declares no plugin" in text
    assert '[project.entry-points."accelerate_core.backends"] singel = ' in text
