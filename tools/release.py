"""Build and release distributions.

`cut NAME VERSION` writes the version, dates the changelog, builds, checks, commits and tags
`NAME-vVERSION`. A release of the core also updates CITATION.cff and the page that shows it. `build TAG`
builds the distribution that a tag names, and `wheels` builds all of them from the working tree. With the
tools in constraints.txt, each produces the same bytes wherever it runs. Links in a README are relative in
the repository and absolute in what is built (see addresses.py).
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import tomlkit
from addresses import addresses
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from workspace import member_folders

ROOT = Path(__file__).parents[1]
#: The distribution whose version CITATION.cff has.
CITED = "accelerate-core"
_HEADING = re.compile(r"^## (?P<title>.+)$", re.MULTILINE)
_UNRELEASED = re.compile(r"(\S+ \()?unreleased\)?", re.IGNORECASE)


@dataclass(frozen=True)
class Distribution:
    """A folder with a `pyproject.toml` and a `CHANGELOG.md`."""

    name: str
    version: Version
    folder: Path
    requirements: tuple[Requirement, ...]

    @property
    def project(self) -> Path:
        return self.folder / "pyproject.toml"

    @property
    def changelog(self) -> Path:
        return self.folder / "CHANGELOG.md"

    def tag(self, version: Version) -> str:
        return f"{self.name}-v{version}"


def git(*arguments: str, **environ: str) -> str:
    """Run git in the workspace and return its output.

    Raises:
        click.ClickException: git failed. The message has its error output.
    """
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def distributions() -> dict[str, Distribution]:
    """Return the workspace's distributions by name."""
    found = {}
    for member in member_folders(ROOT):
        text = (ROOT / member / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        needs = tuple(map(Requirement, project["dependencies"]))
        version = Version(project["version"])
        found[project["name"]] = Distribution(project["name"], version, ROOT / member, needs)
    return found


def find(name: str) -> Distribution:
    """Return the distribution with this name.

    Raises:
        click.ClickException: there is none. The message has the most similar name.
    """
    found = distributions()
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise click.ClickException(
        f"There is no distribution {name!r}.{hint} The distributions are {', '.join(found)}."
    )


def newer(distribution: Distribution, given: str) -> Version:
    """Return the requested version, after checking that it is newer than all released ones."""
    try:
        version = Version(given)
    except InvalidVersion:
        raise click.ClickException(
            f"{given!r} is not a version (PEP 440). Write one such as 0.2.0."
        ) from None
    if str(version) != given or version.local:
        raise click.ClickException(f"{given!r} cannot be published. Write {version.public}.")
    start = f"{distribution.name}-v"
    released = git("tag", "--list", f"{start}*").split()
    if distribution.tag(version) in released:
        raise click.ClickException(f"The tag {distribution.tag(version)} already exists.")
    latest = max((Version(tag.removeprefix(start)) for tag in released), default=None)
    if latest is not None and version <= latest:
        raise click.ClickException(f"{version} is not newer than {latest}, the last release.")
    if version < distribution.version:
        path = distribution.project.relative_to(ROOT)
        raise click.ClickException(f"{version} is older than {distribution.version} in {path}.")
    return version


def dated(distribution: Distribution, version: Version, day: str) -> tuple[str, str]:
    """Return the changelog with the first section dated, and that section's text."""
    text = distribution.changelog.read_text(encoding="utf-8")
    path = distribution.changelog.relative_to(ROOT)
    headings = list(_HEADING.finditer(text))
    if not headings or not _UNRELEASED.fullmatch(headings[0]["title"]):
        actual = f"starts with {headings[0][0]!r}" if headings else "has no sections"
        raise click.ClickException(f"{path} must start with '## Unreleased', but {actual}.")
    planned = re.match(r"\d\S*", headings[0]["title"])
    if planned and Version(planned[0]) > version:
        raise click.ClickException(
            f"{path} starts with {headings[0][0]!r}, which is newer than {version}."
        )
    first = headings[0]
    end = headings[1].start() if headings[1:] else len(text)
    section = text[first.end() : end].strip()
    if not re.sub(r"^#.*$", "", section, flags=re.MULTILINE).strip():
        raise click.ClickException(f"The section {first[0]!r} in {path} is empty.")
    return f"{text[: first.start()]}## {version} ({day}){text[first.end() :]}", section


def with_version(text: str, version: Version) -> str:
    project = tomlkit.parse(text)
    project["project"]["version"] = str(version)
    return tomlkit.dumps(project)


def modules(distribution: Distribution, version: Version) -> dict[Path, str]:
    """Return the modules that define `__version__`, with the new version."""
    state = re.compile(r'^__version__ = ".*"$', re.MULTILINE)
    found = {}
    for path in sorted((distribution.folder / "src").glob("*/__init__.py")):
        text = path.read_text(encoding="utf-8")
        if (changed := state.sub(f'__version__ = "{version}"', text)) != text:
            found[path] = changed
    return found


def citation(distribution: Distribution, version: Version, day: str) -> dict[Path, str]:
    """Return CITATION.cff and docs/citation.md with the new version of the core and its date."""
    if distribution.name != CITED:
        return {}
    entry, page = ROOT / "CITATION.cff", ROOT / "docs" / "citation.md"
    fields = re.sub(
        r"^date-released: .*\n", "", entry.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    shown = page.read_text(encoding="utf-8")
    return {
        entry: _replaced(
            fields, entry, {r"^version: .*$": f"version: {version}\ndate-released: {day}"}
        ),
        page: _replaced(
            shown,
            page,
            {
                r"^  year = \{.*\}": f"  year = {{{day[:4]}}}",
                r"^  note = \{Version .*\}": f"  note = {{Version {version}}}",
                r"Version [^\s{}]+,\s+\d{4}\.\*": f"Version {version},\n{day[:4]}.*",
            },
        ),
    }


def _replaced(text: str, path: Path, values: dict[str, str]) -> str:
    """Return a text in which each pattern, which must match once, has a new value."""
    for pattern, value in values.items():
        text, found = re.subn(pattern, value, text, flags=re.MULTILINE)
        if found != 1:
            raise click.ClickException(
                f"{path.relative_to(ROOT)} must have one line that matches {pattern!r}, but has {found}."
            )
    return text


def left_behind(distribution: Distribution, version: Version) -> Iterator[str]:
    """Yield a line for each other distribution whose requirements exclude the new version."""
    for other in distributions().values():
        for needed in other.requirements:
            same = canonicalize_name(needed.name) == canonicalize_name(distribution.name)
            if same and not needed.specifier.contains(version, prereleases=True):
                yield f"{other.name} requires {needed}, which excludes {version}"


@contextmanager
def staged(distribution: Distribution) -> Iterator[Path]:
    """Yield a copy of the files that git tracks, with absolute links in the README."""
    source = distribution.folder
    listed = git("ls-files", "-z", "--", str(source)).split("\0")
    paths = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / source.name
        for path in paths:
            target = copy / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        readme = copy / "README.md"
        if readme.exists():  # if it is missing, hatchling's error says so
            text = readme.read_text(encoding="utf-8")
            folder = source.relative_to(ROOT).as_posix()
            readme.write_text(addresses(ROOT).absolute(text, folder, ROOT), encoding="utf-8")
        yield copy


def build(distribution: Distribution, version: Version, out: Path, epoch: int) -> list[Path]:
    """Build the sdist, and the wheel from it, and check both with twine.

    Args:
        epoch: The time stamp of every file within, in seconds since 1970 (UTC).

    Raises:
        click.ClickException: a step failed, or git does not track a file that belongs to the package.
    """
    # Files that .gitignore names are left out. A file that only git's own settings exclude may be missing.
    others = ("ls-files", "--others", "--exclude-per-directory=.gitignore", "--")
    if untracked := git(*others, str(distribution.folder)):
        raise click.ClickException(f"git does not track these files:\n{untracked}")
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    stem = f"{canonicalize_name(distribution.name).replace('-', '_')}-{version}"
    made = [out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"]
    with staged(distribution) as folder:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out.absolute())]
        steps = [
            [*command, str(folder)],
            [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)],
        ]
        for step in steps:
            done = subprocess.run(step, env=environ, capture_output=True, text=True)
            if done.returncode:
                raise click.ClickException(f"{' '.join(step[1:])}\n{done.stdout}{done.stderr}")
    return made


@contextmanager
def written(changes: dict[Path, str]) -> Iterator[None]:
    """Write files. If the block fails, restore the previous content."""
    before = {path: path.read_bytes() for path in changes}
    try:
        for path, text in changes.items():
            path.write_text(text, encoding="utf-8")
        yield
    except BaseException:
        for path, content in before.items():
            path.write_bytes(content)
        raise


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("name")
@click.argument("version")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Where to build."
)
def cut(name: str, version: str, dry_run: bool, out: Path) -> None:
    """Bump, date, build, check, commit and tag one distribution."""
    distribution = find(name)
    if dirty := git("status", "--porcelain"):
        raise click.ClickException(f"The working tree has changes. Commit them first:\n{dirty}")
    new = newer(distribution, version)
    now = int(time.time())
    day = time.strftime("%Y-%m-%d", time.gmtime(now))
    changelog, section = dated(distribution, new, day)
    changes = {
        distribution.project: with_version(distribution.project.read_text(encoding="utf-8"), new),
        distribution.changelog: changelog,
        **modules(distribution, new),
        **citation(distribution, new, day),
    }
    tag = distribution.tag(new)
    for line in left_behind(distribution, new):
        click.echo(f"note: {line}")
    if dry_run:
        for path, text in changes.items():
            old = path.read_text(encoding="utf-8").splitlines()
            where = str(path.relative_to(ROOT))
            lines = difflib.unified_diff(old, text.splitlines(), where, where, lineterm="", n=0)
            click.echo("\n".join(lines))
        click.echo(
            f"Would build into {out}, check with twine, commit, and tag {tag} with:\n{section}"
        )
        return
    with written(changes):
        made = build(distribution, new, out, now)
        stamp = f"@{now} +0000"
        paths = map(str, changes)
        how = ("--message", f"Release {tag}", f"--date={stamp}")
        git("commit", *how, "--", *paths, GIT_COMMITTER_DATE=stamp)
        message = f"{name} {new}\n\n{section}"
        try:
            git("tag", "--annotate", "--cleanup=verbatim", tag, "--message", message)
        except BaseException:
            git("reset", "--quiet", "HEAD~1")
            raise
    for path in made:
        click.echo(path)
    click.echo(f"Tagged {tag}. To publish, run: git push origin HEAD {tag}")


@main.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Where to build."
)
def wheels(out: Path) -> None:
    """Build every distribution from the working tree.

    Files get the time stamp of the last commit, or SOURCE_DATE_EPOCH if it is set.
    """
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    for distribution in distributions().values():
        for path in build(distribution, distribution.version, out, epoch):
            click.echo(path)


@main.command("build")
@click.argument("tag")
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Where to build."
)
def build_command(tag: str, out: Path) -> None:
    """Build the distribution that a tag names. The working tree must be at this tag."""
    name, _, version = tag.rpartition("-v")
    distribution = find(name)
    commit = git("rev-parse", f"{tag}^{{commit}}")
    if git("rev-parse", "HEAD") != commit or git("status", "--porcelain"):
        raise click.ClickException(
            f"The working tree is not at {tag}, or has changes. Run: git checkout {tag}"
        )
    if str(distribution.version) != version:
        path = distribution.project.relative_to(ROOT)
        raise click.ClickException(
            f"{tag} does not match the version in {path}, which is {distribution.version}."
        )
    epoch = int(git("log", "-1", "--format=%ct", commit))
    for path in build(distribution, distribution.version, out, epoch):
        click.echo(path)


if __name__ == "__main__":
    main()
