"""Options and attributes of a suite that have no effect are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forked_ranks import fork_ranks

import accelerate_testing
from accelerate_core.errors import ConfigurationError
from accelerate_launch.cli import cli
from accelerate_testing import (
    BackendSuite,
    CheckpointerSuite,
    ExtensionSuite,
    LauncherSuite,
    LoadersSuite,
    PrecisionSuite,
    TrackerSuite,
    run_suite,
)
from accelerate_testing.checks import OPTIONS, SUITE_KINDS

SUITES = {
    "backend": (BackendSuite, "single"),
    "precision": (PrecisionSuite, "bf16"),
    "tracker": (TrackerSuite, "jsonl"),
    "launcher": (LauncherSuite, "simple"),
    "extension": (ExtensionSuite, "any"),
    "checkpointer": (CheckpointerSuite, "directory"),
    "loaders": (LoadersSuite, "any"),
}


def suite(kind: str, **attributes: Any) -> type:
    base, plugin = SUITES[kind]
    return type("Mine", (base,), {"plugin": plugin, **attributes})


def test_the_options_that_are_known_are_those_that_checks_read() -> None:
    folder = Path(accelerate_testing.__file__).parent
    read = re.compile(r"""\boptions(?:\.get\(|\[)\s*["'](\w+)["']""")
    found = {key for path in folder.rglob("*.py") for key in read.findall(path.read_text())}
    found -= {"options"}
    assert found == {key for keys in OPTIONS.values() for key in keys}
    assert set(OPTIONS) == set(SUITE_KINDS) == set(SUITES)


@pytest.mark.parametrize(
    ("kind", "key", "right"),
    [
        ("backend", "print", "prints"),
        ("precision", "tolerence", "tolerance"),
        ("tracker", "red", "read"),
        ("tracker", "read_conf", "read_config"),
        ("extension", "not_save", "not_saved"),
        ("checkpointer", "targets", "target"),
        ("loaders", "makes", "make"),
    ],
)
def test_misspelt_option_is_refused_with_a_suggestion(kind: str, key: str, right: str) -> None:
    said = f"has '{key}', which no check of a {kind} reads.* Did you mean '{right}'"
    with pytest.raises(ConfigurationError, match=said):
        suite(kind, options={key: "x"})
    with pytest.raises(ConfigurationError, match=said):
        run_suite(kind, SUITES[kind][1], options={key: "x"})


def test_option_of_another_kind_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no check of a launcher reads\. It reads 'most_ranks'"
    ):
        suite("launcher", options={"prints": True})


def test_plugins_check_refuses_misspelt_option() -> None:
    made = CliRunner().invoke(cli, ["plugins", "check", "jsonl", "--options", '{"red": "a:b"}'])
    assert made.exit_code == 2
    assert "Did you mean 'read'?" in made.output


@pytest.mark.parametrize("kind", SUITE_KINDS)
def test_existing_options_are_accepted(kind: str) -> None:
    assert suite(kind, options=dict.fromkeys(OPTIONS[kind], True))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("enviorn", "environ"),
        ("environment", "environ"),
        ("env", "environ"),
        ("option", "options"),
        ("Options", "options"),
        ("time_out", "timeout"),
        ("num_procesess", "num_processes"),
        ("plugins", "plugin"),
        ("preludes", "prelude"),
    ],
)
def test_misspelt_attribute_is_refused_with_a_suggestion(name: str, right: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}', which has no effect. .*'{right}'"):
        suite("tracker", **{name: {}})


def test_other_attributes_are_accepted() -> None:
    class Base(TrackerSuite):
        folder = "x"
        environ = {"A": "b"}
        _option = 1

    class Mine(Base):
        plugin = "jsonl"
        pytestmark = [pytest.mark.dist]

        @pytest.fixture
        def option(self) -> int:
            return 1

        @property
        def plugins(self) -> int:
            return 2

        def test_options(self) -> None: ...

    assert Mine.environ == {"A": "b"}
    assert hasattr(Mine, "test_metadata")


LACKS = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: False
"""


@pytest.mark.dist
def test_precision_that_the_machine_refuses_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    fork_ranks(monkeypatch)
    (tmp_path / "cpu_lacks_fp16.py").write_text(LACKS)
    results = run_suite(
        "backend",
        "deepspeed",
        only=["imports", "precisions", "overflow"],
        environ={"PYTHONPATH": str(tmp_path)},
        timeout=40.0,
        prelude="cpu_lacks_fp16",
    )
    told = {result.name: (result.state, result.detail) for result in results}
    assert told["imports"][0] == "passed", told  # the prelude is imported after it
    for name, begins in (("precisions", "bf16 passed; fp16 refused: "), ("overflow", "fp16 is ")):
        state, detail = told[name]
        assert (state, detail[: len(begins)]) == ("skipped", begins), told
        assert "is not supported by DeepSpeed on this cpu" in detail


@pytest.mark.parametrize(
    ("name", "kind", "instead"),
    [
        ("cuda", "device", "'accelerate-core plugins check ddp --device cuda'"),
        ("slurm", "scheduler", ""),
        ("checkpoints", "command", ""),
    ],
)
def test_kind_without_checks_is_named(name: str, kind: str, instead: str) -> None:
    done = CliRunner().invoke(cli, ["plugins", "check", name])
    assert done.exit_code == 2
    said = f"{name!r} is a {kind}, and there are no checks for this kind. There are checks for 'backend'"
    assert said in done.output
    assert instead in done.output
    assert "not installed" not in done.output


def test_unknown_device_is_refused_with_the_way_to_load_it() -> None:
    done = CliRunner().invoke(cli, ["plugins", "check", "ddp", "--device", "hostdev"])
    assert done.exit_code == 2
    assert "device='hostdev' is not a device of this machine, which has 'cpu'" in done.output
    assert "name the module that registers it with --prelude" in done.output
