"""The scales of priorities in docs/plugins.md equal what backends claim and what launchers declare."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from accelerate_core.config.files import ConfigFile
from accelerate_core.contract.topology import Topology
from accelerate_core.plugins.discovery import installed
from accelerate_core.plugins.selection import Request

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
CLAIMS = [
    (int(priority), backend, word, "section" in text)
    for priority, backends, text in re.findall(
        r"^\| (\d+) \| ([a-z0-9, ]+) \| (.+) \|$", PAGE, re.M
    )
    for backend in backends.split(", ")
    for word in re.findall(r"`(\w*(?:_plugins?|_config|ACCELERATE_\w+|PJRT_DEVICE))`", text)
    if len(backends.split(", ")) == 1 or word.startswith(backend)
]
LAUNCHERS = re.findall(r"^\| (\w+) \| (\d+) \| .+ \|$", PAGE, re.M)
#: Libraries without which the class of a backend can't be imported.
LIBRARIES = {"xla": "torch_xla", "deepspeed": "deepspeed", "megatron": "megatron"}


def plugin(kind: str, name: str):
    (record,) = [one for one in installed().of_kind(kind) if one.name == name]
    return record.load()


@pytest.mark.parametrize(("priority", "backend", "word", "section"), CLAIMS)
def test_backend_claims_with_the_documented_priority(priority, backend, word, section) -> None:
    if find_spec(LIBRARIES.get(backend, "torch")) is None:
        pytest.skip(f"{LIBRARIES[backend]} is not installed")
    arguments = {} if section or word.isupper() else {word: object()}
    environ = {word: "TPU" if word == "PJRT_DEVICE" else "1"} if word.isupper() else {}
    config = ConfigFile(Path("file.yaml"), {word: {"a": 1}}, {word: 7}) if section else None
    claim = plugin("backend", backend).detect(Request(arguments, environ, Topology(), config))
    assert claim.priority == priority
    assert ("file.yaml line 7" if section else word) in claim.reason


def test_ddp_claims_several_processes() -> None:
    claim = plugin("backend", "ddp").detect(Request({}, {}, Topology(0, 2, 0, 2, "a test")))
    assert f"| {claim.priority} | ddp | several processes |" in PAGE


def test_tables_are_complete() -> None:
    ours = {"ddp", "deepspeed", "fsdp2", "megatron", "xla"}
    assert {backend for _, backend, *_ in CLAIMS} | {"ddp"} == ours
    launchers = {one.name for one in installed().of_kind("launcher")}
    assert launchers <= {name for name, _ in LAUNCHERS}


@pytest.mark.parametrize(("name", "priority"), LAUNCHERS)
def test_launcher_declares_the_documented_priority(name: str, priority: str) -> None:
    if name not in {one.name for one in installed().of_kind("launcher")}:
        pytest.skip(f"the launcher {name} is not installed")
    assert getattr(plugin("launcher", name), "priority", 100) == int(priority)
