"""From an empty directory: `plugins new`, `pip install .`, `plugins check`, and its own tests."""

from __future__ import annotations

import json
import os
import resource
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import forked_ranks
import pytest
from support import clean_environment, run_workers

from accelerate_core.errors import ConfigurationError
from accelerate_testing.scaffold import TEMPLATE_KINDS, write_repository


def empty_environment(folder: Path) -> Path:
    """Make an environment of its own that sees what is installed here; return its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    here = site.getsitepackages()
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    (packages / "here.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def run(
    *command: object, cwd: Path, timeout: float = 500, more: dict[str, str] | None = None
) -> str:
    # What these processes start is started by `sys.executable`, too.
    env = clean_environment(OMP_NUM_THREADS="1")
    env.pop("PYTHONPATH")
    env |= more or {}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(python: Path, cwd: Path) -> None:
    quiet = ["-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    run(python, "-m", "pip", "install", *quiet, ".", cwd=cwd)


def seconds_of_children() -> float:
    """Return the processor time of ended children, which other tests beside this one do not slow."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_new_backend_is_green_within_two_minutes(tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    began = seconds_of_children()
    core = (python, "-m", "accelerate_core", "plugins")
    said = run(*core, "new", "two_level", "--kind", "backend", cwd=tmp_path)
    assert "accelerate-core plugins check two_level" in said
    repository = tmp_path / "accelerate-two-level"
    install(python, repository)
    report = tmp_path / "report.xml"
    made = json.loads(run(*core, "check", "two_level", "--json", "--junit", report, cwd=repository))
    seconds = seconds_of_children() - began
    assert made["passed"]
    states = {one["name"]: one["state"] for one in made["checks"]}
    assert {name for name, state in states.items() if state == "skipped"} == {"join"}
    assert len(states) > 35
    assert 'tests="' + str(len(states)) in report.read_text()
    assert seconds < 2 * 120  # of two cores
    lines = sum(len(p.read_text().splitlines()) for p in (repository / "src").rglob("*.py"))
    assert lines <= 120
    assert len((repository / "tests/test_conformance.py").read_text().strip().splitlines()) == 5


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", TEMPLATE_KINDS)
def test_a_new_repository_passes_its_own_tests(tmp_path: Path, kind: str) -> None:
    python = empty_environment(tmp_path / "venv")
    write_repository("fresh", kind, tmp_path / "fresh")
    install(python, tmp_path / "fresh")
    # All of a backend's suite is run above, by the command.
    some = ["-k", "declarations or gradients_meet or resume"] if kind == "backend" else []
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some]
    more = {}
    if kind != "tracker":  # whose suite replaces PYTHONPATH
        (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        more = forked_ranks.environment(packages)
        command += ["-p", "forked_ranks"]
    out = run(*command, cwd=tmp_path / "fresh", more=more)
    assert " passed" in out
    assert "failed" not in out


@pytest.mark.dist
def test_a_new_backend_averages_what_only_some_ranks_use(tmp_path: Path) -> None:
    write_repository("fresh", "backend", tmp_path / "fresh")
    worker = Path(__file__).with_name("branches_worker.py")
    done = run_workers(worker, 2, [tmp_path / "fresh" / "src"], timeout=120)
    assert done.ok, done.story
    for (calls, first), (again, second) in done.results:
        assert calls == again == 1
        assert first == [[0.5] * 4, [1.0] * 4, [1.0] * 4, None]
        assert second == [[1.0] * 4, [2.0] * 4, [2.0] * 4, None]


@pytest.mark.parametrize("kind", TEMPLATE_KINDS)
def test_what_is_written_is_complete_and_tidy(tmp_path: Path, kind: str) -> None:
    made = write_repository("fresh", kind, tmp_path / "fresh")
    names = {path.relative_to(tmp_path / "fresh").as_posix() for path in made}
    assert {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        "LICENSE",
        ".github/workflows/test.yml",
        "src/accelerate_fresh/py.typed",
        "tests/test_conformance.py",
    } <= names
    for path in made:
        text = path.read_text()
        assert not any(f"@{word}@" in text for word in ("name", "class", "package", "env"))
    config = ["--isolated", "--line-length", "100", "--select", "E,F,W,B,UP"]
    ruff = [sys.executable, "-m", "ruff"]
    run(*ruff, "check", *config, ".", cwd=tmp_path / "fresh")
    run(
        *ruff,
        "format",
        "--check",
        "--isolated",
        "--line-length",
        "100",
        ".",
        cwd=tmp_path / "fresh",
    )


def test_what_is_written_is_clean_for_its_own_linters(tmp_path: Path) -> None:
    for kind in TEMPLATE_KINDS:
        write_repository(f"fresh_{kind}", kind, tmp_path / kind)
        project = tomllib.loads((tmp_path / kind / "pyproject.toml").read_text())
        assert project["project"]["license"] == "Apache-2.0"
        readme = (tmp_path / kind / "README.md").read_text()
        distribution = f"accelerate-fresh-{kind}"
        urls = project["project"]["urls"]
        assert urls["Source"] == f"https://github.com/YOUR-NAME/{distribution}"
        assert urls["Issues"] == f"https://github.com/YOUR-NAME/{distribution}/issues"
        assert "replace `YOUR-NAME` in `pyproject.toml`" in readme
        lint = project["project"]["optional-dependencies"]["lint"]
        assert {one.partition(">")[0] for one in lint} == {"ruff", "mypy"}
        assert "[test,lint]" in readme
        assert "ruff check . && ruff format --check . && mypy" in readme
        assert project["tool"]["mypy"]["strict"] is True
    # Each repository has its rules in its own pyproject.toml.
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=tmp_path)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".", cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("Ring", "backend", "lower case"),
        ("two__level", "backend", "lower case"),
        ("class", "backend", "not a valid plugin name"),
        ("yes", "backend", "YAML reads it as True"),
        ("true", "tracker", "YAML reads it as True"),
        ("on", "launcher", "YAML reads it as True"),
        ("no", "precision", "YAML reads it as False"),
        ("off", "extension", "YAML reads it as False"),
        ("null", "backend", "YAML reads it as None"),
        ("none", "backend", "is a reserved name"),
        ("ring", "bakend", "Did you mean 'backend'?"),
        ("ddp", "backend", "installed: ddp (accelerate-ddp"),
        ("megatron_lm", "backend", "accelerate-core[megatron]"),
        ("core", "extension", "is a reserved name"),
        ("all", "tracker", "is a reserved name"),
        ("ddp", "extension", "called accelerate-ddp, which already exists"),
        ("megatron", "precision", "called accelerate-megatron"),
    ],
)
def test_invalid_name_is_refused(tmp_path: Path, name: str, kind: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        write_repository(name, kind, tmp_path / "made")
    assert said in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_directory_that_is_not_empty_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="not empty"):
        write_repository("ring", "backend", tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
