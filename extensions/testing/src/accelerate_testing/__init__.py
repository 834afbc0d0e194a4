"""The conformance suite: checks whether a plugin does what the contract requires.

Run it from pytest, with a class of two lines, or from the shell with `accelerate-core plugins check NAME`.

Example:
    from accelerate_testing import BackendSuite

    class TestRing(BackendSuite):
        plugin = "ring"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_testing import fake_device
    from accelerate_testing.checks import Check, checks_of
    from accelerate_testing.context import CheckContext
    from accelerate_testing.counting import Communication, count_communication
    from accelerate_testing.processes import CompletedRun, run_workers, write_result
    from accelerate_testing.results import Result, Skip
    from accelerate_testing.runner import run_suite
    from accelerate_testing.storage_suite import StorageSuite
    from accelerate_testing.suite import (
        BackendSuite,
        CheckpointerSuite,
        ExtensionSuite,
        LauncherSuite,
        LoadersSuite,
        PrecisionSuite,
        TrackerSuite,
    )

__all__ = [
    "Check", "checks_of", "CheckContext", "Communication", "count_communication", "CompletedRun",
    "run_workers", "write_result", "Result", "Skip", "run_suite", "BackendSuite", "CheckpointerSuite",
    "fake_device",
    "ExtensionSuite", "LauncherSuite", "LoadersSuite", "PrecisionSuite", "StorageSuite", "TrackerSuite",
]  # fmt: skip

_HOME = {
    "Check": "checks", "checks_of": "checks", "CheckContext": "context", "Communication": "counting",
    "count_communication": "counting", "CompletedRun": "processes", "run_workers": "processes",
    "write_result": "processes", "Result": "results", "Skip": "results", "run_suite": "runner",
    "StorageSuite": "storage_suite",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "fake_device":
        return importlib.import_module(f"{__name__}.fake_device")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'suite')}"), name)
