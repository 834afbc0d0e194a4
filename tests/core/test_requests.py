"""The request with the highest precedence selects the backend or fails. Other claims warn."""

from __future__ import annotations

from pathlib import Path

import pytest
from dummies import distribution, run

CODE = """
from accelerate_core import Backend, BackendSettings, Claim, settings

class Base(Backend):
    api_version = (1, 0)
    reduces_gradients = "never"

class Sound(Base):
    name = "sound"
    @classmethod
    def detect(cls, request):
        asked = request.env_flag("ACCELERATE_USE_SOUND") or "sound_plugin" in request.arguments
        in_file = request.config is not None and "sound_config" in request.config
        return Claim(40, "sound is asked for") if asked or in_file else None

class Other(Base):
    name = "other"
    @classmethod
    def detect(cls, request):
        return Claim(70, "other is asked for")

@settings
class Own(BackendSettings):
    chunk: int = 3

class Sectioned(Base):
    name = "sectioned"
    Settings = Own

class Second(Base):
    name = "second"

class Later(Base):
    name = "later"
    api_version = (2, 0)
"""
#: Adds names that request a planned package, as its release will.
TRY = """
import warnings
from accelerate_core import Accelerator
from accelerate_core.plugins import catalog
catalog.ARGUMENTS["warp_plugin"] = catalog.VARIABLES["ACCELERATE_USE_WARP"] = "warp"
catalog.SECTIONS["warp_config"] = catalog.NAMES["backend"]["warp"] = "warp"
catalog.DISTRIBUTED_TYPES["WARP"] = "warp"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        accelerator = Accelerator(cpu=True, **ARGUMENTS)
        result = [accelerator.backend.name, accelerator.provenance["backend"].origin]
    except Exception as error:
        result = [type(error).__name__, str(error)]
out([*result, " ".join(str(one.message) for one in caught)])
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("requests")
    names = ("Sound", "Other", "Sectioned", "Second", "Later")
    triggers = {"ACCELERATE_USE_SOUND": "Sound", "sound_plugin": "Sound", "sound_config": "Sound"}
    triggers |= {"ACCELERATE_USE_OTHER": "Other", "other_plugin": "Other"}
    triggers |= {"ACCELERATE_USE_LATER": "Later"}
    backends = {name.lower(): name for name in names}
    distribution(root, "asked", CODE, {"backends": backends, "triggers": triggers})
    triggers = dict.fromkeys(("ACCELERATE_USE_CRASHED", "crashed_plugin", "crashed_config"), "X")
    groups = {"backends": {"crashed": "X"}, "triggers": triggers}
    distribution(root, "crashed", "raise OSError('no libvendor.so')", groups)
    return root


def made(
    root: Path, tmp_path: Path, arguments: str = "{}", file: str = "", **environ: str
) -> list[str]:
    if file:
        (tmp_path / "config.yaml").write_text(file)
        environ["ACCELERATE_CONFIG_FILE"] = str(tmp_path / "config.yaml")
    result: list[str] = run(root, TRY.replace("**ARGUMENTS", f"**{arguments}"), environ)
    return result


VARIABLE = {"ACCELERATE_USE_CRASHED": "true"}


@pytest.mark.parametrize(
    ("arguments", "file", "environ"),
    [
        ("{'crashed_plugin': 1}", "", {}),
        ("{}", "", VARIABLE),
        ("{}", "crashed_config:\n  a: 1\n", {}),
        ("{}", "backend: ddp\n", VARIABLE),
        ("{}", "sound_config:\n  a: 1\n", VARIABLE),
        ("{}", "", {**VARIABLE, "ACCELERATE_USE_SOUND": "1"}),
    ],
)
def test_request_with_the_highest_precedence_fails_if_its_plugin_is_broken(
    root: Path, tmp_path: Path, arguments: str, file: str, environ: dict[str, str]
) -> None:
    kind, text, _ = made(root, tmp_path, arguments, file, **environ)
    assert kind == "PluginError", text
    assert "crashed (dummy-crashed 1.0)" in text
    assert "no libvendor.so" in text


@pytest.mark.parametrize(
    ("arguments", "file", "environ", "wanted"),
    [
        ("{'backend': 'ddp'}", "", VARIABLE, "ddp"),
        ("{'sound_plugin': 1}", "", VARIABLE, "sound"),
        ("{'sound_plugin': 1}", "", {"ACCELERATE_USE_OTHER": "1"}, "sound"),
        ("{}", "crashed_config:\n  a: 1\n", {"ACCELERATE_USE_SOUND": "1"}, "sound"),
        ("{}", "backend: ddp\n", {"ACCELERATE_USE_SOUND": "1"}, "sound"),
        ("{}", "backend: ddp\nsound_config:\n  a: 1\n", {}, "ddp"),
        ("{}", "crashed_config: {}\n", {}, "single"),
        ("{}", "crashed_config: false\n", {}, "single"),
        ("{}", "", {"ACCELERATE_USE_CRASHED": "no"}, "single"),
        ("{}", "", {"ACCELERATE_USE_CRASHED": "0"}, "single"),
        (
            "{}",
            "distributed_type: 'NO'\nfsdp_config:\n  fsdp_reshard_after_forward: true\n",
            {},
            "single",
        ),
    ],
)
def test_requests_with_lower_precedence_are_overridden(
    root: Path, tmp_path: Path, arguments: str, file: str, environ: dict[str, str], wanted: str
) -> None:
    name, text, _ = made(root, tmp_path, arguments, file, **environ)
    assert name == wanted, text


def test_requested_plugin_for_another_contract_version_is_an_error(
    root: Path, tmp_path: Path
) -> None:
    kind, text, _ = made(root, tmp_path, ACCELERATE_USE_LATER="1")
    assert kind == "PluginVersionError"
    assert "later (dummy-asked 1.0)" in text


@pytest.mark.parametrize(
    ("arguments", "file", "environ"),
    [
        ("{}", "", {"ACCELERATE_USE_WARP": "true"}),
        ("{}", "warp_config:\n  a: 2\n", {}),
        ("{}", "distributed_type: WARP\n", {}),
        ("{'warp_plugin': 1}", "", {}),
        ("{'warp_plugin': 1, 'backend': 'ddp'}", "", {}),
        ("{}", "backend: ddp\n", {"ACCELERATE_USE_WARP": "true"}),
    ],
)
def test_request_with_the_highest_precedence_fails_if_its_plugin_is_missing(
    root: Path, tmp_path: Path, arguments: str, file: str, environ: dict[str, str]
) -> None:
    kind, text, _ = made(root, tmp_path, arguments, file, **environ)
    assert kind == "MissingPluginError", text
    assert "accelerate-core[warp]" in text


def test_missing_plugin_with_an_overridden_request_is_ignored(root: Path, tmp_path: Path) -> None:
    environ = {"ACCELERATE_USE_WARP": "true"}
    assert made(root, tmp_path, "{'backend': 'ddp'}", **environ)[0] == "ddp"
    assert made(root, tmp_path, "{'sound_plugin': 1}", **environ)[0] == "sound"


def test_config_section_of_a_backend_requests_it(root: Path, tmp_path: Path) -> None:
    section = "sectioned_config:\n  chunk: 5\n"
    name, reason, _ = made(root, tmp_path, file=section)
    assert (name, reason) == ("sectioned", f"{tmp_path / 'config.yaml'} line 1")
    assert made(root, tmp_path, file=section, ACCELERATE_USE_SOUND="1")[0] == "sound"
    both = f"{section}second_config:\n  a: 1\n"
    kind, text, _ = made(root, tmp_path, file=both)
    assert kind == "PluginConflictError"
    assert "'second', 'sectioned'" in text
    assert made(root, tmp_path, file=f"{both}backend: second\n")[0] == "second"
    with_trigger = f"{section}sound_config:\n  a: 1\n"
    assert made(root, tmp_path, file=with_trigger)[0] == "PluginConflictError"


@pytest.mark.needs("torch>=2.11")  # fsdp2 does
def test_unrequested_plugin_loses_to_requested_ones_and_warns(root: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    code = """
    from accelerate_core import Backend, Claim
    class Greedy(Backend):
        name = "greedy"
        api_version = (1, 0)
        reduces_gradients = "never"
        @classmethod
        def detect(cls, request):
            return Claim(100000, "its hardware is there")
    """
    groups = {"backends": {"greedy": "Greedy"}, "triggers": {"always.greedy": "Greedy"}}
    distribution(site, "greedy", code, groups)
    name, _, warned = made(site, tmp_path)
    assert name == "greedy"
    assert "greedy (dummy-greedy 1.0)" in warned
    assert "its hardware is there" in warned
    assert "ACCELERATE_DISABLED_PLUGINS=greedy" in warned
    name, _, warned = made(site, tmp_path, ACCELERATE_USE_FSDP="true")
    assert (name, "greedy" in warned) == ("fsdp2", False)
    name, _, warned = made(site, tmp_path, ACCELERATE_DISABLED_PLUGINS="greedy")
    assert (name, "greedy" in warned) == ("single", False)


SLIPS = """
from accelerate_core import Backend, Claim, Precision
from accelerate_core.contract.hooks import hookimpl

class Base(Backend):
    api_version = (1, 0)
    reduces_gradients = "never"

class Method(Base):
    name = "method"
    def prepare_modle(self, accelerator, model): ...

class Detects(Base):
    name = "detects"
    @classmethod
    def detcet(cls, request): ...

class Compiles(Base):
    name = "compiles"
    compile_at = "befor"

class Meant(Base):
    name = "meant"
    not_hooks = ("prepare_modle",)
    def prepare_modle(self, accelerator, model): ...

class Newer(Base):
    name = "newer"
    api_version = (1, 9)
    supports = {"new_ability": True}
    def prepare_modle(self, accelerator, model): ...

class Key(Base):
    name = "key"
    supports = {"no_synk": True}

class Word(Base):
    name = "word"
    owns = frozenset({"acumulation"})

class Accepts(Base):
    name = "accepts"
    supports = {"accepts": ("autocasts",)}

class Inherits(Backend):
    name = "inherits"
    reduces_gradients = "never"

class AnotherName(Base):
    name = "another"

class Shard(Base):
    name = "shard"
    def data_shard(self, runtime):
        return 1

class Outside(Base):
    name = "outside"
    def data_shard(self, runtime):
        return 2, 2

class Covert(Precision):
    name = "covert"
    api_version = (1, 0)
    def covert(self, model): return model

class Unable(Precision):
    name = "unable"
    api_version = (1, 0)
    supports = {"complie": False}

class Empty:
    name = "empty"
    api_version = (1, 0)

class Slips:
    name = "slips"
    api_version = (1, 0)
    def on_strat(self, accelerator): ...

class Unmarked:
    name = "unmarked"
    api_version = (1, 0)
    def on_start(self, accelerator):
        accelerator.backend.started = True
"""


@pytest.fixture(scope="module")
def slips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slips")
    names = [
        "Method",
        "Detects",
        "Compiles",
        "Meant",
        "Newer",
        "Key",
        "Word",
        "Accepts",
        "Inherits",
        "Shard",
        "Outside",
    ]
    backends = {**{name.lower(): name for name in names}, "renamed": "AnotherName"}
    extensions = {name.lower(): name for name in ("Empty", "Slips", "Unmarked")}
    groups = {
        "backends": backends,
        "precisions": {"covert": "Covert", "unable": "Unable"},
        "extensions": extensions,
    }
    distribution(root, "slips", SLIPS, groups)
    return root


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ("{'backend': 'method'}", {}, ["'prepare_modle'", "'prepare_model'", "not_hooks"]),
        ("{'backend': 'detects'}", {}, ["'detcet'", "'detect'"]),
        ("{'backend': 'compiles'}", {}, ["compile_at", "'befor'", "Did you mean 'before'?"]),
        ("{'backend': 'key'}", {}, ["supports", "'no_synk'", "Did you mean 'no_sync'?"]),
        ("{'backend': 'word'}", {}, ["owns", "'acumulation'", "Did you mean 'accumulation'?"]),
        ("{'backend': 'accepts'}", {}, ["accepts", "'autocasts'", "Did you mean 'autocast'?"]),
        ("{'backend': 'inherits'}", {}, ["has no api_version"]),
        ("{'backend': 'renamed'}", {}, ["'renamed'", "'another'"]),
        ("{'backend': 'shard'}", {}, ["data_shard", "'shard'", "returned 1", "(index, count)"]),
        ("{'backend': 'outside'}", {}, ["data_shard", "(2, 2)"]),
        ("{'mixed_precision': 'covert'}", {}, ["'covert'", "'convert'"]),
        ("{'mixed_precision': 'unable'}", {}, ["supports", "'complie'", "'compile'"]),
        ("{}", {"ACCELERATE_PLUGINS": "empty"}, ["empty (dummy-slips 1.0)", "no hook"]),
        ("{}", {"ACCELERATE_PLUGINS": "slips"}, ["'on_strat'", "'on_start'"]),
    ],
)
def test_misspelt_hooks_of_a_plugin_are_refused(
    slips: Path, tmp_path: Path, arguments: str, environ: dict[str, str], expected: list[str]
) -> None:
    kind, text, _ = made(slips, tmp_path, arguments, **environ)
    assert kind == "PluginError", text
    assert [word for word in expected if word not in text] == []


def test_plugins_with_intended_or_newer_names_run(slips: Path, tmp_path: Path) -> None:
    assert made(slips, tmp_path, "{'backend': 'meant'}")[0] == "meant"
    name, _, warned = made(slips, tmp_path, "{'backend': 'newer'}")
    assert name == "newer"
    assert "'new_ability'" in warned


def test_extension_method_named_like_a_hook_runs_as_a_hook(slips: Path) -> None:
    code = """
    from accelerate_core import Accelerator
    out(getattr(Accelerator(cpu=True).backend, "started", False))
    """
    assert run(slips, code, {"ACCELERATE_PLUGINS": "unmarked"}) is True


GRID = """
from accelerate_core import Backend, KwargsHandler, Precision, option, settings

@settings
class GridKwargs(KwargsHandler):
    bits: int = option(default=8, help="how many bits")

class Grid(Precision):
    name = "grid_of_tests"
    api_version = (1, 0)
    handlers = (GridKwargs,)

class Beside(Backend):
    name = "beside"
    api_version = (1, 0)
    reduces_gradients = "never"
"""


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("way", ["file", "handler"])
def test_settings_of_an_unrequested_precision_are_refused(
    tmp_path: Path, way: str, asked: bool
) -> None:
    distribution(tmp_path, "grid", GRID, {"precisions": {"grid_of_tests": "Grid"}})
    arguments = "'mixed_precision': 'grid_of_tests'," if asked else ""
    file = "grid_of_tests_config:\n  bits: 4\n" if way == "file" else ""
    if not file:
        arguments += "'kwargs_handlers': [__import__('dummy_grid').GridKwargs(bits=4)],"
    found, text, _ = made(tmp_path, tmp_path, "{" + arguments + "}", file)
    if asked:
        assert found == "single", text
    else:
        assert found == "ConfigurationError"
        assert ("grid_of_tests_config" if file else "GridKwargs") in text
        assert not file or "'grid_of_tests', which is not active" in text


def test_handler_from_a_package_with_a_backend_and_a_precision_is_accepted(tmp_path: Path) -> None:
    groups = {"precisions": {"grid_of_tests": "Grid"}, "backends": {"beside": "Beside"}}
    distribution(tmp_path, "grid", GRID, groups)
    given = "{'kwargs_handlers': [__import__('dummy_grid').GridKwargs(bits=4)]}"
    assert made(tmp_path, tmp_path, given)[0] == "single"


GREEDY = """
from accelerate_core import Backend, Claim

class Greedy(Backend):
    name = "greedy"
    api_version = (1, 0)
    reduces_gradients = "never"

    @classmethod
    def detect(cls, request):
        return Claim(100000, "it is here")

class Looks:
    name = "looks"
    api_version = (1, 0)

    def on_start(self, accelerator): ...
"""


@pytest.mark.needs("torch>=2.11")  # fsdp2 does
@pytest.mark.parametrize("trigger", ["HOME", "num_processes", "always"])
def test_claim_without_a_request_loses_to_requests_and_warns(tmp_path: Path, trigger: str) -> None:
    groups = {"backends": {"greedy": "Greedy"}, "triggers": {trigger: "Greedy"}}
    distribution(tmp_path, "greedy", GREEDY, groups)
    asked = "num_processes: 1\nfsdp_config:\n  fsdp_version: 2\n"
    assert made(tmp_path, tmp_path, "{}", asked, HOME=str(tmp_path))[0] == "fsdp2"
    found, _, warned = made(tmp_path, tmp_path, "{}", "num_processes: 1\n", HOME=str(tmp_path))
    assert found == "greedy"
    assert "although it was not requested" in warned


def test_config_section_of_an_unrequested_extension_is_refused(tmp_path: Path) -> None:
    distribution(tmp_path, "looks", GREEDY, {"extensions": {"looks": "Looks"}})
    file = "looks_config:\n  keep: head\n"
    found, text, _ = made(tmp_path, tmp_path, "{}", file)
    assert found == "ConfigurationError"
    assert "'looks', which is not active. Name it in ACCELERATE_PLUGINS" in text
    assert made(tmp_path, tmp_path, "{}", file, ACCELERATE_PLUGINS="looks")[0] == "single"


def test_request_that_is_not_a_boolean_is_an_error(tmp_path: Path) -> None:
    found, text, _ = made(tmp_path, tmp_path, ACCELERATE_USE_FSDP="maybe")
    assert found == "ConfigurationError"
    assert "ACCELERATE_USE_FSDP='maybe' is not a boolean" in text
