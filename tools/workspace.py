"""List the distributions of this workspace; keep the lists in pyproject.toml that no tool can find itself.

    workspace.py [--check]

A distribution is `core` or a folder in `backends`, `trackers` or `extensions` that has a pyproject.toml.
ruff and mypy find its sources by pattern. import-linter takes no patterns, so this script writes its
lists from each member's own metadata. `--check` writes nothing and fails if they are out of date.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

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
        """Whether no other distribution may import it."""
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
    """Return import-linter's layers, highest first: a member stands above everything it requires.

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
    plugins = [member.module for member in found if member.is_plugin]
    return "\n".join(
        [
            "[tool.importlinter]",
            toml_list("root_packages", [member.module for member in found]),
            "",
            "[[tool.importlinter.contracts]]",
            'name = "Distributions import only those beneath them, by the requirements they declare"',
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


def main(arguments: list[str], root: Path = ROOT) -> None:
    path = root / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    wanted = with_contracts(text, members(root))
    if wanted == text:
        return
    if "--check" in arguments:
        raise SystemExit(
            "pyproject.toml does not list the distributions that are there. Run: make format"
        )
    path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
