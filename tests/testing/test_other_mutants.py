"""Every mutant of the other kinds of plugins fails the check that is registered for it."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dummies
import pytest
from support import clean_environment, run_workers

from accelerate_core.plugins.discovery import installed
from accelerate_testing import run_suite
from accelerate_testing.checks import about
from accelerate_testing.processes import run_command
from accelerate_testing.scaffold import write_repository

SCRIPT = Path(__file__).with_name("other_mutants.py")
RECORDS = Path(__file__).parents[2] / "examples" / "third_party" / "accelerate-records"
SOURCE = SCRIPT.read_text()
WRITTEN = re.findall(
    r"^@(caught_by|passes|_register)\(\"(\w+)\", (.+)\)\nclass (\w+)", SOURCE, re.M
)
WRITTEN += [
    ("caught_by", kind, f'"{check}"', name)
    for kind, check, name in re.findall(
        r"^(?:also|keeps|starts)\(\"(\w+)\", \"(\w+)\", \"(\w+)\"", SOURCE, re.M
    )
]
WANTED = {"caught_by": "failed", "passes": "passed", "_register": "skipped"}
CASES = [
    (name, check, WANTED[how])
    for how, _, checks, name in WRITTEN
    for check in re.findall(r"\"(\w+)\"", checks)
    if check != "skipped"
]
SOURCES = {"grid": "precision", "tally": "extension", "diary": "tracker", "starter": "launcher"}

Said = dict[tuple[str, str], list[tuple[str, str]]]


def written(folder: Path) -> dict[str, str]:
    """Write the plugins to a folder; return an environment in which they are installed."""
    paths = [str(folder), str(SCRIPT.parent)]
    paths += [str(RECORDS / "src"), str(RECORDS / "tests")]
    for name, kind in SOURCES.items():
        write_repository(name, kind, folder / name)
        paths += [str(folder / name / "src"), str(folder / name / "tests")]
    info = folder / "other_mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-mutants\nVersion: 1.0\n")
    lines = [
        f"[accelerate_core.{kind.removesuffix('s')}s]\n{name.lower()} = other_mutants:{name}\n"
        for _, kind, _, name in sorted(WRITTEN, key=lambda one: one[1])
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    environ = clean_environment(OMP_NUM_THREADS="1")
    environ["PYTHONPATH"] = ":".join([*paths, environ["PYTHONPATH"]])
    environ["HOME"] = environ["TMPDIR"] = str(folder)
    return environ


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """(plugin, check) -> state and error of each rank."""
    folder = tmp_path_factory.mktemp("other")
    environ = written(folder)
    alone = [sys.executable, str(SCRIPT), "alone", str(folder)]
    with ThreadPoolExecutor(2) as pool:  # they wait, most of the time
        begun = [
            pool.submit(run_command, alone, environ, 300),
            pool.submit(run_workers, SCRIPT, 2, ["ranks", folder], timeout=300, env=environ),
        ]
        runs = [one.result() for one in begun]
    found: Said = {}
    for path in sorted(folder.glob("*.said")):
        for name, check, state, error in json.loads(path.read_text()):
            found.setdefault((name, check), []).append((state, error))
    assert len(list(folder.glob("*.said"))) == 3, "\n".join(run.story for run in runs)
    return found


def table() -> str:
    """Return the table of the README: which check catches which mutants."""
    rows: dict[tuple[str, str], list[str]] = {}
    for how, kind, checks, name in WRITTEN:
        for check in re.findall(r"\"(\w+)\"", checks) if how == "caught_by" else ():
            rows.setdefault((kind, check), []).append(name)
    lines = ["| kind | check | mutants that it catches |", "|---|---|---|"]
    lines += [
        f"| {kind} | `{check}` | {', '.join(names)} |"
        for (kind, check), names in sorted(rows.items())
    ]
    return "\n".join(lines)


def test_readme_has_the_table_of_all_mutants() -> None:
    readme = Path(__file__).with_name("mutants") / "README.md"
    assert table() in readme.read_text()


def test_table_covers_most_checks() -> None:
    caught = [check for _, check, state in CASES if state == "failed"]
    assert len(caught) >= 30
    assert len(set(caught)) >= 12


@pytest.mark.dist
@pytest.mark.parametrize(("name", "check", "state"), CASES)
def test_plugin_has_the_expected_result(said: Said, name: str, check: str, state: str) -> None:
    found = said[name.lower(), check]
    assert {one for one, _ in found} <= {state, "passed"}, found
    assert state in {one for one, _ in found}, found
    # The check itself must fail, not something before it.
    other = [error for _, error in found if re.match(r"\w+Error: ", error)]
    assert not other or name.startswith("Raises"), found


@pytest.mark.soak
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_ranks_with_a_run_each_succeed_a_hundred_times(tmp_path: Path) -> None:
    arguments = ["ranks", tmp_path, "hasarunperrank.two_processes", "100"]
    run = run_workers(SCRIPT, 2, arguments, timeout=1100, env=written(tmp_path))
    assert run.returncode == 0, run.story
    for rank in range(2):
        told = json.loads((tmp_path / f"ranks.{rank}.said").read_text())
        assert len(told) == 100
        assert [line for line in told if line[2] != "passed"] == []


def test_hooks_to_look_at_belong_to_the_kind() -> None:
    class Plugin:
        def on_end(self, accelerator): ...

    assert about("once_more", Plugin, "extension") == "hooks to look at: on_end"
    assert about("settings", Plugin, "extension") == ""
    assert about("one_process", object, "precision") == ""
    assert about("ranks", Plugin, "launcher") == ""


DERIVED = """
from accelerate_ddp import DDPBackend
class Plugin(DDPBackend):
    name = "derived"
    api_version = (1, 0)
"""


@pytest.mark.dist
def test_plugin_may_extend_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dummies.distribution(tmp_path, "derived", DERIVED, {"backends": {"derived": "Plugin"}})
    metadata = tmp_path / "dummy_derived-1.0.dist-info" / "METADATA"
    needs = "Requires-Dist: accelerate-core\nRequires-Dist: accelerate-ddp>=0.1\n"
    metadata.write_text(metadata.read_text() + needs)
    path = f"{tmp_path}:{clean_environment()['PYTHONPATH']}"
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    results = run_suite("backend", "derived", only=["imports"], environ={"PYTHONPATH": path})
    installed.cache_clear()
    assert [result.state for result in results] == ["passed"], results


PLUGIN = """
import {library}
class Plugin:
    name = "{name}"
    api_version = (1, 0)
"""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "modules", "required", "said"),
    [
        ("light", 3, True, ""),
        ("unsaid", 3, False, "imports 'lib_unsaid' too"),
        ("heavy", 60, True, "imports 'lib_heavy' too"),
    ],
)
def test_import_may_bring_light_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, modules: int, required: bool,
    said: str,
) -> None:  # fmt: skip
    library = f"lib_{name}"
    code = PLUGIN.format(library=library, name=name)
    dummies.distribution(tmp_path, name, code, {"extensions": {name: "Plugin"}})
    metadata = tmp_path / f"dummy_{name}-1.0.dist-info" / "METADATA"
    lines = f"Requires-Dist: accelerate-core\n{f'Requires-Dist: {library}>=1' * required}\n"
    metadata.write_text(metadata.read_text() + lines)
    (tmp_path / library).mkdir()
    for number in range(modules):
        (tmp_path / library / f"part{number}.py").touch()
    imports = [f"import {library}.part{number}\n" for number in range(modules)]
    (tmp_path / library / "__init__.py").write_text("".join(imports))
    info = tmp_path / f"{library}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{library}\n")
    environ = clean_environment()
    path = f"{tmp_path}:{environ['PYTHONPATH']}"
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    (result,) = run_suite("extension", name, only=["imports"], environ={"PYTHONPATH": path})
    installed.cache_clear()
    assert result.state == ("failed" if said else "passed"), result.error
    assert said in result.error


LINGERS = """
import threading, time
from subprocess import Popen
from accelerate_tracking import GeneralTracker
time.sleep(1.7)
class Plugin(GeneralTracker):
    name = "lingers"
    api_version = (1, 0)
    requires_logging_directory = False
    tracker = property(lambda self: self)
    held = None
    def __init__(self, project_name): super().__init__()
    def start(self):
        if Plugin.held is None:
            Plugin.held = Popen(["sleep", "543"]), threading.Thread(target=self.pump, name="pump")
            Plugin.held[1].start()
    def pump(self): time.sleep(600)
    def store_init_configuration(self, values): ...
    def log(self, values, step=None, **kwargs): ...
"""


@pytest.mark.dist
def test_slow_import_and_leftovers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dummies.distribution(tmp_path, "lingers", LINGERS, {"trackers": {"lingers": "Plugin"}})
    metadata = tmp_path / "dummy_lingers-1.0.dist-info" / "METADATA"
    metadata.write_text(
        metadata.read_text()
        + "Requires-Dist: accelerate-core\nRequires-Dist: accelerate-tracking\n"
    )
    path = f"{tmp_path}:{clean_environment()['PYTHONPATH']}"
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    began = time.monotonic()
    only = ["imports", "values", "exits"]
    results = run_suite("tracker", "lingers", only=only, environ={"PYTHONPATH": path})
    installed.cache_clear()
    assert time.monotonic() - began < 60  # nothing waits for the thread
    told = {result.name: result for result in results}
    assert [told[name].state for name in only] == ["failed", "passed", "failed"], results
    assert re.search(r"importing dummy_lingers takes 1\.[789] s", told["imports"].error)
    assert (
        "at most 1.5 s are allowed. Import heavy libraries in the functions that use them"
        in told["imports"].error
    )
    for words in (
        "thread 'pump' of dummy_lingers, which is not a daemon (left by values)",
        "process sleep 543 (left by values)",
        "tracker lingers (dummy-lingers 1.0)",
    ):
        assert words in told["exits"].error
