"""Runs `on_the_device.py` in a process that has the fake device, because torch keeps a device for good."""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import support
import torch

from accelerate_testing.fake_device import build
from accelerate_testing.processes import run_command

CASES = Path(__file__).with_name("on_the_device.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]

pytestmark = pytest.mark.needs("torch>=2.13")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[list[str], list[str]]]:
    """For each case, the failures and the reasons why it was skipped."""
    build.compiled()  # before the time limit starts
    report = tmp_path_factory.mktemp("device") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "accelerate_testing.fake_device.auto", f"--junit-xml={report}", str(CASES)]
    run = run_command(command, support.clean_environment(OMP_NUM_THREADS="1"), timeout=300)
    assert report.exists(), run.story
    found: dict[str, tuple[list[str], list[str]]] = {}
    for case in ET.parse(report).iter("testcase"):
        wrong = [*case.iter("failure"), *case.iter("error")]
        failures, skips = found.setdefault(case.get("name").partition("[")[0], ([], []))
        failures += [one.text or "" for one in wrong]
        skips += [one.get("message", "") for one in case.iter("skipped")]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name: str, outcomes: dict[str, tuple[list[str], list[str]]]) -> None:
    assert name in outcomes
    failures, skips = outcomes[name]
    assert failures == []
    if skips:
        assert all(reason.startswith("torch's ") for reason in skips), "name torch's limit"
        pytest.skip("\n".join(skips))


def test_the_device_is_not_installed_by_importing_it() -> None:
    here = torch.accelerator.current_accelerator()
    assert here is None or here.type != "fake"


def test_missing_compiler_is_an_error_that_names_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Exception, match="no C\\+\\+ compiler 'no-such-compiler'"):
        build.compiled()
