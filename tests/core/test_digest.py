"""Differences between the ranks' configurations are an immediate error on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dummies import distribution, run
from support import run_workers

from accelerate_core.distributed.process import _differences

WORKER = Path(__file__).with_name("digest_worker.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", ""),
        (
            "ACCELERATE_MIXED_PRECISION=bf16",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4",
            "precision is 'bf16 (accelerate-core 0.1.0)' on rank 0, 'no (accelerate-core 0.1.0)' on rank 1",
        ),
        (
            "ACCELERATE_DDP_BUCKET_CAP_MB=3",
            "",
            "backend ddp.bucket_cap_mb is 3 on rank 0, 25 on rank 1",
        ),
    ],
)
def test_ranks_with_different_configurations_are_refused(
    first: str, second: str, expected: str
) -> None:
    done = run_workers(WORKER, 2, timeout=90, env={"ONLY_0": first, "ONLY_1": second}).checked()
    for kind, text, seconds in done.results:
        assert kind == ("ConfigurationError" if expected else "fine")
        assert expected in text
        assert seconds < 20


SIZED = """
from accelerate_core import KwargsHandler, settings

@settings
class Own(KwargsHandler):
    size: int = 1

class Sized:
    name = "sized"
    api_version = (1, 0)
    Settings = Own
    def __init__(self, settings): ...
    def make_loader(self, accelerator, loader): ...
"""


@pytest.mark.dist
def test_settings_of_loader_factories_are_compared(tmp_path: Path) -> None:
    distribution(tmp_path, "sized", SIZED, {"loaders": {"sized": "Sized"}})
    path = os.pathsep.join([str(tmp_path), str(WORKER.parents[1])])
    env = {"PYTHONPATH": path, "ACCELERATE_LOADERS": "sized", "ONLY_1": ""}
    env["ONLY_0"] = "ACCELERATE_SIZED_SIZE=3"
    for kind, text, _ in run_workers(WORKER, 2, timeout=90, env=env).checked().results:
        assert kind == "ConfigurationError", text
        assert "loaders sized.size is 3 on rank 0, 1 on rank 1" in text


TWINS = """
from accelerate_core import Backend, KwargsHandler, settings

@settings
class OfBackend(KwargsHandler):
    depth: int = 1

@settings
class OfExtension(KwargsHandler):
    depth: int = 2

class Twin(Backend):
    name = "twin"
    api_version = (1, 0)
    reduces_gradients = "never"
    Settings = OfBackend

class Other:
    name = "twin"
    api_version = (1, 0)
    Settings = OfExtension
    def __init__(self, settings): ...
    def on_start(self): ...
"""


def test_settings_of_two_plugins_with_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    groups = {"backends": {"twin": "Twin"}, "extensions": {"twin": "Other"}}
    distribution(tmp_path, "twin", TWINS, groups)
    code = """
    from accelerate_core import Accelerator
    made = Accelerator(cpu=True, backend="twin")
    facts = {key: value for key, value in made._setup.facts().items() if "twin." in key}
    out([facts, [line for line in made.explain().splitlines() if "twin." in line]])
    """
    facts, lines = run(tmp_path, code, {"ACCELERATE_PLUGINS": "twin"})
    assert facts == {"backend twin.depth": 1, "extension twin.depth": 2}
    assert sorted(lines) == [
        "backend twin.depth = 1  (default)",
        "extension twin.depth = 2  (default)",
    ]


def test_many_differences_are_counted_not_listed() -> None:
    reference = {f"k{i}": i for i in range(9)}
    text = _differences([reference, {}])
    assert text.count("on rank 1") == 5
    assert text.endswith("and 4 more.")
