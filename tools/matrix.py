"""Run the tests on other Pythons, other versions of torch, and the lowest versions we declare.

    matrix.py [--only ROW]... [--folder build/matrix] [TESTS]...

Each row is an environment of its own, made by uv from the interpreters on this machine. A row whose
interpreter is not there is named and left out. Prints a table; exits with 1 if a row failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
#: Beside those of the core and of the row's backends.
TESTS = ("tests/checkpoint", "tests/tracking", "tests/launch", "tests/big_model")
#: Those that need nothing heavier than torch. The others, and those that need another torch, come without
#: their libraries: the core's tests ask for what they declare.
MEMBERS = ("core", "backends/ddp", "backends/fsdp2", "extensions/*")
#: What uv resolves: the tested versions, the highest there are, or the lowest that we declare.
TESTED = ("--constraints", str(ROOT / "constraints.txt"))
LOWEST = ("--resolution", "lowest-direct")


@dataclass(frozen=True)
class Row:
    """An environment: a Python, a torch (`oldest`: the core's lower bound) and uv's options."""

    python: str
    torch: str
    how: tuple[str, ...]


ROWS = {
    "python-3.11": Row("3.11", "tested", TESTED),
    "python-3.12": Row("3.12", "tested", TESTED),
    "python-3.13": Row("3.13", "tested", TESTED),
    "oldest-torch": Row("3.11", "oldest", ()),
    "newest": Row("3.13", "newest", ()),
    "lowest": Row("3.11", "oldest", LOWEST),
    "lowest-fsdp2": Row("3.11", "oldest of fsdp2", LOWEST),
}


def torch_bound(member: str) -> Requirement | None:
    """Return what a distribution asks of torch, None if it asks nothing."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = map(Requirement, project["project"]["dependencies"])
    return next((one for one in wanted if one.name == "torch"), None)


def oldest_torch(member: str) -> Version:
    bound = torch_bound(member)
    assert bound is not None, member
    return min(Version(part.version) for part in bound.specifier if part.operator == ">=")


def packages(row: Row) -> tuple[list[str], list[str]]:
    """Return the folders of our packages that take the row's torch, and the torch to ask for."""
    members = [str(p.relative_to(ROOT)) for one in MEMBERS for p in sorted(ROOT.glob(one))]
    if not row.torch.startswith("oldest"):
        return members, ["torch"]
    oldest = oldest_torch("backends/fsdp2" if "fsdp2" in row.torch else "core")
    bounds = {member: torch_bound(member) for member in members}
    fits = [m for m, bound in bounds.items() if bound is None or bound.specifier.contains(oldest)]
    return fits, [f"torch=={oldest}"]


def uv(*arguments: str | Path) -> str:
    """Run uv; return what it printed.

    Raises:
        click.ClickException: uv failed; with what it said.
    """
    program = shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if program is None:
        raise click.ClickException("uv is not installed: pip install uv")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def make(name: str, row: Row, folder: Path) -> Path:
    """Make a row's environment; return its interpreter. The tests' own tools keep to our versions."""
    made = folder / name
    python = made / "bin" / "python"
    uv("venv", "--quiet", "--clear", "--no-python-downloads", "--python", row.python, made)
    install = ("pip", "install", "--quiet", "--system-certs", "--python", python)
    members, torch = packages(row)
    edited = [word for member in members for word in ("--editable", f"./{member}")]
    uv(*install, *row.how, *torch, *edited)
    held = made / "held.txt"
    frozen = uv("pip", "freeze", "--python", python, "--exclude-editable")
    held.write_text(frozen, encoding="utf-8")
    uv(*install, "--constraints", held, "--group", "suite", "import-linter")
    ours = (
        one.parent for kind in ("backends", "trackers") for one in ROOT.glob(f"{kind}/*/*.toml")
    )
    left_out = [one for one in ours if str(one.relative_to(ROOT)) not in members]
    uv(*install, "--no-deps", *(word for one in left_out for word in ("--editable", one)))
    return python


def counts(report: Path) -> dict[str, int]:
    """Read pytest's JUnit report: how many passed, failed (with errors) and were skipped."""
    suites = ET.parse(report).getroot().iter("testsuite")
    found = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for key in found:
            found[key] += int(suite.get(key, 0))
    failed = found["failures"] + found["errors"]
    return {
        "passed": found["tests"] - failed - found["skipped"],
        "failed": failed,
        "skipped": found["skipped"],
    }


def has_python(version: str) -> bool:
    try:
        uv("python", "find", "--no-python-downloads", "--system", version)
    except click.ClickException as error:
        if "No interpreter found" not in error.message:
            raise
        return False
    return True


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--only", multiple=True, type=click.Choice(list(ROWS)), help="Rows; default: all.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("build/matrix"))
@click.option("--jobs", default=2, help="Test files that run at the same time.")
@click.argument("tests", nargs=-1)
def main(only: tuple[str, ...], folder: Path, jobs: int, tests: tuple[str, ...]) -> None:
    folder = folder.absolute()
    if pyenv := shutil.which("pyenv"):  # its shims answer for active versions only
        every = subprocess.check_output([pyenv, "versions", "--bare"], text=True).split()
        os.environ.setdefault("PYENV_VERSION", ":".join(reversed(every)))
    table = Table("row", "Python", "torch", "passed", "failed", "skipped")
    red = False
    for name in only or ROWS:
        row = ROWS[name]
        if not has_python(row.python):
            table.add_row(name, row.python, row.torch, "no such interpreter here")
            continue
        python = make(name, row, folder)
        ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
        versions = subprocess.check_output([python, "-c", ask], text=True).split()
        report = folder / f"{name}.xml"
        report.unlink(missing_ok=True)
        options = ["-n", str(jobs), "--dist", "loadfile", "-q", "-m", "not soak"]
        command = [str(python), "-m", "pytest", *options, f"--junit-xml={report}"]
        own = [f"tests/{one}" for one in packages(row)[0] if (ROOT / "tests" / one).is_dir()]
        done = subprocess.run([*command, *(tests or (*own, *TESTS))], cwd=ROOT)
        red |= done.returncode != 0
        found = counts(report) if report.exists() else {"": f"pytest ended with {done.returncode}"}
        table.add_row(name, *versions, *map(str, found.values()))
    Console().print(table)
    sys.exit(int(red))


if __name__ == "__main__":
    main()
