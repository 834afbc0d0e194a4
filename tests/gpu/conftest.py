"""Tests that need an accelerator: skipped without one, and reported as a table.

`--gpu-report FILE` prints the table, and writes it after every test, so that a killed run leaves its
results so far. `--rehearse` runs on the CPU all tests that can run there, to try the tests themselves.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
NO_DEVICE = "torch finds no accelerator on this machine"

#: Test, outcome, seconds, and what was measured or why it was skipped.
rows: list[tuple[str, str, float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="write the table to this file")
    parser.addoption("--gpu-seconds", type=float, default=570, help="start no test after this time")
    parser.addoption("--rehearse", action="store_true", help="run on the CPU what can run there")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "device: needs a real device, even in a rehearsal")
    config.addinivalue_line("markers", "anywhere: tests the harness itself")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_one = torch.accelerator.is_available()
    rehearses = config.getoption("--rehearse", default=False)
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("anywhere"):
            continue
        if rehearses and item.get_closest_marker("device"):
            item.add_marker(pytest.mark.skip(reason="a rehearsal has no device"))
        elif not has_one and not rehearses:
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


@functools.cache
def begun() -> float:
    """Return when the first of these tests started; others may have run before."""
    return time.monotonic()


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest) -> None:
    limit = request.config.getoption("--gpu-seconds", default=None)
    if limit is not None and begun() + limit < time.monotonic():
        pytest.skip(f"{limit:.0f} seconds are over")


@pytest.fixture
def on_cpu(request: pytest.FixtureRequest) -> bool:
    """Whether this is a rehearsal."""
    return bool(request.config.getoption("--rehearse", default=False))


@pytest.fixture
def device(on_cpu: bool) -> torch.device:
    """The device that is tested."""
    kind = None if on_cpu else torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, 0)


@pytest.fixture(autouse=True)
def _release_accelerators() -> Iterator[None]:
    yield
    from accelerate_core.distributed import process

    while (left := process.current_user()) is not None:
        process.release(left)
    process.release(None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path, _, name = report.nodeid.partition("::")
    if HERE.name != Path(path).parent.name or (report.when != "call" and report.passed):
        return
    said = ", ".join(f"{key} {value}" for key, value in report.user_properties)
    if report.skipped and isinstance(report.longrepr, tuple):
        said = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        said = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
        said = said.strip().splitlines()[0][-160:]
    what = f"{Path(path).stem.removeprefix('test_gpu_')}: {name.removeprefix('test_')}"
    rows.append((what.replace("_", " "), report.outcome, report.duration, said))
    if _file is not None:
        _file.parent.mkdir(parents=True, exist_ok=True)
        _file.write_text(table(), encoding="utf-8")


_file: Path | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _file
    named = session.config.getoption("--gpu-report", default=None)
    _file = Path(named) if named else None


def table() -> str:
    """Return the results so far, as Markdown."""
    counts = {word: sum(row[1] == word for row in rows) for word in ("passed", "failed", "skipped")}
    lines = ["# Tests on an accelerator", "", machine(), ""]
    lines += [", ".join(f"{count} {word}" for word, count in counts.items()) + ".", ""]
    lines += ["| test | outcome | seconds | measurement, or reason |", "|---|---|---|---|"]
    for what, outcome, seconds, said in rows:
        cells = (what, outcome, f"{seconds:.1f}", said.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Describe the machine in one line."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    if not torch.accelerator.is_available():
        return f"{found}; {NO_DEVICE}."
    kind = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module()
    name = getattr(module, "get_device_name", lambda _: kind)(0)
    return f"{found}; {torch.accelerator.device_count()} x {name}, CUDA {torch.version.cuda}."


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _file is None or not rows:
        return
    terminalreporter.section("tests on an accelerator")
    terminalreporter.write_line(table())
    terminalreporter.write_line(f"The table was written to {_file}.")
