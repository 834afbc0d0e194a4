"""Write a complete repository for a new plugin, from the templates beside this file."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import installed

__all__ = ["TEMPLATE_KINDS", "write_repository"]

TEMPLATE_KINDS = ("backend", "precision", "tracker", "launcher", "extension")
_GROUPS = {kind: f"accelerate_core.{kind}s" for kind in TEMPLATE_KINDS}
#: Words that mean something where a plugin is named, and those the templates are made of.
_RESERVED = ("core", "all", "auto", "none", *TEMPLATE_KINDS)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class _Names:
    """How one plugin is called in its various places."""

    name: str
    kind: str

    @property
    def values(self) -> dict[str, str]:
        words = self.name.split("_")
        camel = "".join(word.capitalize() for word in words)
        return {
            "name": self.name,
            "kind": self.kind,
            "package": f"accelerate_{self.name}",
            "distribution": f"accelerate-{self.name.replace('_', '-')}",
            "class": f"{camel}{self.kind.capitalize()}",
            "settings": f"{camel}Settings",
            "camel": camel,
            "suite": f"{self.kind.capitalize()}Suite",
            "env": self.name.upper(),
            "group": _GROUPS[self.kind],
            "api": f"({API_VERSION[0]}, {API_VERSION[1]})",
        }


def write_repository(name: str, kind: str, directory: Path | None = None) -> list[Path]:
    """Write the repository; return its files.

    Args:
        name: what users will say: lower case letters, digits, underscores.
        kind: one of `TEMPLATE_KINDS`.
        directory: where; default `accelerate-NAME` in the current directory.

    Raises:
        ConfigurationError: the name or kind is none, or is taken; the directory is not empty, or
            cannot be written.
    """
    _check(name, kind)
    names = _Names(name, kind)
    target = directory if directory is not None else Path(names.values["distribution"])
    try:
        return _write(target, names)
    except OSError as error:
        raise ConfigurationError(
            f"The repository in {target} cannot be written: {error.filename or target}: "
            f"{error.strerror or error}. Choose another place with --directory."
        ) from error


def _write(target: Path, names: _Names) -> list[Path]:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(
            f"{target} is there already and not empty: choose another with --directory."
        )
    root = files("accelerate_testing.scaffold") / "templates"
    made = []
    for part in ("common", names.kind):
        made += _copy(root / part, target, names.values)
    return sorted(set(made))  # a kind may have its own of what is common


def _check(name: str, kind: str) -> None:
    if kind not in TEMPLATE_KINDS:
        raise ConfigurationError(
            f"--kind {kind!r} is not one of {listing(TEMPLATE_KINDS)}.{did_you_mean(kind, TEMPLATE_KINDS)}"
        )
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{name!r} is no name for a plugin: it has lower case letters, digits and single "
            "underscores between them, and begins with a letter, such as 'ring' or 'two_level'."
        )
    said = yaml.safe_load(name)
    if not isinstance(said, str):  # yes, off, null, ...
        raise ConfigurationError(
            f"{name!r} is no name for a plugin: in a config file YAML reads it as {said!r}, and not as "
            "text; choose another."
        )
    if name in _RESERVED:
        raise ConfigurationError(
            f"{name!r} is a word of accelerate-core itself ({listing(_RESERVED)}); choose another."
        )
    owners = [record.label for record in installed().of_kind(kind) if record.name == name]
    if owners:
        raise ConfigurationError(f"There is a {kind} of that name already: {owners[0]}.")
    if name in catalog.known_names(kind):
        raise ConfigurationError(
            f"{name!r} is the name of a {kind} that accelerate-core[{catalog.extra_for(kind, name)}] "
            "brings; choose another."
        )
    distribution = _Names(name, kind).values["distribution"]
    extras = {extra for names in catalog.NAMES.values() for extra in names.values()}
    ours = {f"accelerate-{extra.replace('_', '-')}" for extra in extras}
    if distribution in ours or _is_installed(distribution):
        raise ConfigurationError(
            f"The repository would be that of {distribution}, which is a package already: installing "
            "the one would remove the other. Choose another name."
        )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _copy(source: Traversable, target: Path, values: dict[str, str]) -> list[Path]:
    """Copy a tree; `@word@` in texts and `WORD` names like `package` in paths are filled in."""
    made = []
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        name = entry.name.removesuffix(".in").replace("__package__", values["package"])
        name = name.replace("dot_", ".", 1) if name.startswith("dot_") else name
        # Tests of ours are not part of a wheel; these are spelt so that nobody takes them for some.
        name = name.replace("TEST_", "test_", 1) if name.startswith("TEST_") else name
        path = target / name.replace("__name__", values["name"])
        if entry.is_dir():
            made += _copy(entry, path, values)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(
            r"@(\w+)@", lambda found: values[found.group(1)], entry.read_text(encoding="utf-8")
        )
        path.write_text(text, encoding="utf-8")
        made.append(path)
    return made
