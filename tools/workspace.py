"""List the distributions of this workspace, and write what follows from the list and from mkdocs.yml.

    workspace.py [--check]

A distribution is `core` or a folder in `backends`, `trackers` or `extensions` that has a pyproject.toml.
ruff and mypy find its sources by pattern. import-linter takes no patterns, so this script writes its
lists from each member's own metadata. It also writes the project's addresses (see addresses.py) into
every distribution and into the config templates. `--check` writes nothing and fails if a file is out of
date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from addresses import Addresses, addresses

ROOT = Path(__file__).parents[1]
KINDS = ("backends", "extensions", "trackers")
START = "# workspace: written by tools/workspace.py (make format); do not edit.\n"
END = "# workspace: end.\n"


@dataclass(frozen=True)
class Member:
    """One distribution: its folder relative to the root, its name, and the members that it requires."""

    folder: str
    name: str
    module: str
    requires: tuple[str, ...]

    @property
    def is_plugin(self) -> bool:
        """Whether no other distribution may import it, unless that one is built on it."""
        return self.folder.startswith(("backends/", "trackers/"))


def member_folders(root: Path = ROOT) -> list[str]:
    """Return the folders of all distributions relative to the root, the core first."""
    projects = [path for kind in KINDS for path in sorted(root.glob(f"{kind}/*/pyproject.toml"))]
    return ["core", *(path.parent.relative_to(root).as_posix() for path in projects)]


def members(root: Path = ROOT) -> list[Member]:
    """Return all distributions.

    Raises:
        SystemExit: A folder has no package in `src`, or more than one.
    """
    found = []
    for folder in member_folders(root):
        content = tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))
        packages = sorted(path.parent.name for path in (root / folder).glob("src/*/__init__.py"))
        if len(packages) != 1:
            listed = ", ".join(packages) or "none"
            raise SystemExit(f"{folder}/src must contain exactly one package; found: {listed}")
        requirements = content["project"].get("dependencies", [])
        found.append(Member(folder, content["project"]["name"], packages[0], tuple(requirements)))
    names = {member.name for member in found}
    return [
        Member(
            member.folder,
            member.name,
            member.module,
            tuple(name for name in map(requirement_name, member.requires) if name in names),
        )
        for member in found
    ]


def requirement_name(requirement: str) -> str:
    """Return the project's name in a requirement such as `accelerate-core>=0.1,<1`."""
    end = next((at for at, char in enumerate(requirement) if char in " [<>=!~;@("), None)
    return requirement[:end].replace("_", "-").lower()


def layers(found: list[Member]) -> list[str]:
    """Return import-linter's layers, highest first. A member is above everything it requires.

    Members of one layer may not import each other.

    Raises:
        SystemExit: Members require each other in a circle.
    """
    requires = {member.name: member.requires for member in found}
    depth: dict[str, int] = {}
    while len(depth) < len(requires):
        ready = [
            name
            for name, needed in requires.items()
            if name not in depth and all(one in depth for one in needed)
        ]
        if not ready:
            left = ", ".join(sorted(requires.keys() - depth))
            raise SystemExit(f"these distributions require each other in a circle: {left}")
        level = 1 + max(depth.values(), default=-1)
        depth.update(dict.fromkeys(ready, level))
    return [
        " | ".join(member.module for member in found if depth[member.name] == level)
        for level in sorted(set(depth.values()), reverse=True)
    ]


def toml_list(key: str, values: list[str]) -> str:
    return "\n".join([f"{key} = [", *(f'  "{value}",' for value in values), "]"])


def import_contracts(found: list[Member]) -> str:
    """Return the part of pyproject.toml that names every distribution."""
    names = {member.name for member in found if member.is_plugin}
    # A plugin that requires others, such as accelerate-torchft, may import them.
    plugins = [m.module for m in found if m.is_plugin and not names & set(m.requires)]
    return "\n".join(
        [
            "[tool.importlinter]",
            toml_list("root_packages", [member.module for member in found]),
            "",
            "[[tool.importlinter.contracts]]",
            'name = "Distributions only import what they declare as requirements"',
            'type = "layers"',
            toml_list("layers", layers(found)),
            "",
            "[[tool.importlinter.contracts]]",
            'name = "No plugin imports another"',
            'type = "independence"',
            toml_list("modules", plugins),
            "",
        ]
    )


def with_contracts(text: str, found: list[Member]) -> str:
    """Return pyproject.toml with the generated part replaced.

    Raises:
        SystemExit: The lines that mark the generated part are missing.
    """
    head, start, rest = text.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"pyproject.toml needs the lines {START.strip()!r} and {END.strip()!r}")
    return f"{head}{START}{import_contracts(found)}{END}{tail}"


def with_urls(text: str, urls: dict[str, str]) -> str:
    """Return a distribution's pyproject.toml with the table `[project.urls]`, after `[project]`."""
    table = "\n".join(
        ["[project.urls]", *(f'{key} = "{url}"' for key, url in urls.items()), "", ""]
    )
    text = re.sub(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n*", "", text, flags=re.MULTILINE)
    project = text.index("[project]\n")
    following = re.compile(r"^\[", re.MULTILINE).search(text, project + 1)
    if following is None:
        return f"{text.rstrip()}\n\n{table}".rstrip() + "\n"
    return f"{text[: following.start()]}{table}{text[following.start() :]}"


def with_schema(text: str, found: Addresses) -> str:
    """Return a config template that begins with the address of its JSON schema, for editors."""
    first = f"# yaml-language-server: $schema={found.site}/config_schema.json\n"
    return first + re.sub(r"\A# yaml-language-server: .*\n", "", text)


def generated(root: Path) -> Iterator[tuple[Path, str]]:
    """Return the files that this script maintains, with what they should contain."""
    found = addresses(root)
    listed = members(root)
    project = root / "pyproject.toml"
    yield project, with_contracts(project.read_text(encoding="utf-8"), listed)
    for member in listed:
        path = root / member.folder / "pyproject.toml"
        yield path, with_urls(path.read_text(encoding="utf-8"), found.project_urls(member.folder))
    for path in sorted(root.glob("examples/third_party/*/pyproject.toml")):
        urls = found.project_urls(path.parent.relative_to(root).as_posix())
        del urls["Changelog"]  # these examples have none
        yield path, with_urls(path.read_text(encoding="utf-8"), urls)
    for path in sorted(root.glob("examples/config_templates/*.yaml")):
        yield path, with_schema(path.read_text(encoding="utf-8"), found)
    # The distribution `accelerate` of the drop-in, and what Python reports when it is only served.
    page = found.page("drop_in.md#installed-in-place-of-huggingface-accelerate")
    drop_in = root / "extensions" / "drop_in"
    for pattern in ("accelerate/pyproject.toml", "src/*/served/*.dist-info/METADATA"):
        for path in drop_in.glob(pattern):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r'^(Homepage = ")[^"]*', rf"\g<1>{page}", text, flags=re.MULTILINE)
            yield path, re.sub(r"^(Home-page: ).*", rf"\g<1>{page}", text, flags=re.MULTILINE)


def main(arguments: list[str], root: Path = ROOT) -> None:
    stale = [
        (path, wanted)
        for path, wanted in generated(root)
        if path.read_text(encoding="utf-8") != wanted
    ]
    if stale and "--check" in arguments:
        listed = ", ".join(path.relative_to(root).as_posix() for path, _ in stale)
        raise SystemExit(
            "These files do not match the distributions that exist, or the addresses in mkdocs.yml: "
            f"{listed}. Run: make format"
        )
    for path, wanted in stale:
        path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
