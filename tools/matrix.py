"""Run the tests on other Pythons, other versions of torch, and the lowest versions we declare.

    matrix.py [--only ROW]... [--folder build/matrix] [TESTS]...

Each row is a separate environment, which uv creates from the interpreters on this machine. Rows without
an interpreter are listed but not run. Prints a table, and exits with 1 if a row failed.
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
#: Tests to run in addition to those of the core and of the row's backends.
TESTS = ("tests/checkpoint", "tests/tracking", "tests/launch", "tests/big_model")
#: Distributions that need no large library except torch. All others, and those that need another version
#: of torch, are installed without their libraries, because tests of the core read their metadata.
MEMBERS = ("core", "backends/ddp", "backends/fsdp2", "extensions/*")
#: Options of uv for the tested versions, and for the lowest versions that we declare.
TESTED = ("--constraints", str(ROOT / "constraints.txt"))
LOWEST = ("--resolution", "lowest-direct")


@dataclass(frozen=True)
class Row:
    """An environment: version of Python, version of torch, and options of uv.

    A torch of `oldest` is the lower bound that the core declares.
    """

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
    """Return the torch requirement of a distribution, or None if it has none."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = map(Requirement, project["project"]["dependencies"])
    return next((one for one in wanted if one.name == "torch"), None)


def oldest_torch(member: str) -> Version:
    bound = torch_bound(member)
    assert bound is not None, member
    return min(Version(part.version) for part in bound.specifier if part.operator == ">=")


def packages(row: Row) -> tuple[list[str], list[str]]:
    """Return the folders of our packages that support the row's torch, and the torch requirement."""
    members = [str(p.relative_to(ROOT)) for one in MEMBERS for p in sorted(ROOT.glob(one))]
    if not row.torch.startswith("oldest"):
        return members, ["torch"]
    oldest = oldest_torch("backends/fsdp2" if "fsdp2" in row.torch else "core")
    bounds = {member: torch_bound(member) for member in members}
    fits = [m for m, bound in bounds.items() if bound is None or bound.specifier.contains(oldest)]
    return fits, [f"torch=={oldest}"]


def uv(*arguments: str | Path) -> str:
    """Run uv and return its output.

    Raises:
        click.ClickException: uv failed. The message has its error output.
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
    """Create the environment of a row, and return its interpreter.

    Tools for the tests are installed afterwards, without changing the versions of the row.
    """
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
    """Return how many tests passed, failed (including errors) and were skipped, from a JUnit report."""
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
@click.option("--only", multiple=True, type=click.Choice(list(ROWS)), help="Run only this row.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("build/matrix"))
@click.option("--jobs", default=2, help="Number of test files that run at the same time.")
@click.argument("tests", nargs=-1)
def main(only: tuple[str, ...], folder: Path, jobs: int, tests: tuple[str, ...]) -> None:
    folder = folder.absolute()
    if pyenv := shutil.which("pyenv"):  # its shims only find active versions
        every = subprocess.check_output([pyenv, "versions", "--bare"], text=True).split()
        os.environ.setdefault("PYENV_VERSION", ":".join(reversed(every)))
    table = Table("row", "Python", "torch", "passed", "failed", "skipped")
    red = False
    for name in only or ROWS:
        row = ROWS[name]
        if not has_python(row.python):
            table.add_row(name, row.python, row.torch, "not installed")
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
        found = counts(report) if report.exists() else {"": f"pytest exited with {done.returncode}"}
        table.add_row(name, *versions, *map(str, found.values()))
    Console().print(table)
    sys.exit(int(red))


if __name__ == "__main__":
    main()
