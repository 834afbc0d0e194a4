"""The conformance suite: what a plugin must keep, run as its author and its users run it.

From pytest, with one class; from the shell, `accelerate-core plugins check NAME`.

    from accelerate_testing import BackendSuite


    class TestRing(BackendSuite):
        plugin = "ring"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_testing.checks import Check as Check
    from accelerate_testing.checks import Skip as Skip
    from accelerate_testing.checks import checks_of as checks_of
    from accelerate_testing.counting import Communication as Communication
    from accelerate_testing.counting import count_communication as count_communication
    from accelerate_testing.lab import Lab as Lab
    from accelerate_testing.processes import Run as Run
    from accelerate_testing.processes import run_workers as run_workers
    from accelerate_testing.processes import write_result as write_result
    from accelerate_testing.results import Result as Result
    from accelerate_testing.runner import run_suite as run_suite
    from accelerate_testing.suite import BackendSuite as BackendSuite
    from accelerate_testing.suite import CheckpointerSuite as CheckpointerSuite
    from accelerate_testing.suite import ExtensionSuite as ExtensionSuite
    from accelerate_testing.suite import LauncherSuite as LauncherSuite
    from accelerate_testing.suite import LoadersSuite as LoadersSuite
    from accelerate_testing.suite import PrecisionSuite as PrecisionSuite
    from accelerate_testing.suite import TrackerSuite as TrackerSuite

_SUITES = (
    "BackendSuite", "CheckpointerSuite", "ExtensionSuite", "LauncherSuite", "LoadersSuite",
    "PrecisionSuite", "TrackerSuite",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(("Check", "Skip", "checks_of"), "checks"),
    **dict.fromkeys(("Communication", "count_communication"), "counting"),
    "Lab": "lab",
    **dict.fromkeys(("Run", "run_workers", "write_result"), "processes"),
    "Result": "results",
    "run_suite": "runner",
    **dict.fromkeys(_SUITES, "suite"),
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    module = importlib.import_module(f"accelerate_testing.{_HOMES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
