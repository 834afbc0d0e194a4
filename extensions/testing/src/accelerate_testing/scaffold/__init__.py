"""Write a complete repository for a new plugin, from the templates in this folder."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from accelerate_core.plugin import API_VERSION, ConfigurationError, did_you_mean, installed, listing
from accelerate_core.plugins import catalog

TEMPLATE_KINDS = ("backend", "precision", "tracker", "launcher", "extension")
#: Names with a meaning of their own, and words of the templates.
_RESERVED = ("core", "all", "auto", "none", *TEMPLATE_KINDS)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _words(name: str, kind: str) -> dict[str, str]:
    """Return the names of a plugin in code, packages and variables."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    return {
        "name": name,
        "kind": kind,
        "package": f"accelerate_{name}",
        "distribution": f"accelerate-{name.replace('_', '-')}",
        "class": f"{camel}{kind.capitalize()}",
        "settings": f"{camel}Settings",
        "camel": camel,
        "suite": f"{kind.capitalize()}Suite",
        "env": name.upper(),
        "group": f"accelerate_core.{kind}s",
        "api": str(API_VERSION),
    }


def write_repository(name: str, kind: str, directory: Path | None = None) -> list[Path]:
    """Write the repository and return its files.

    Args:
        name: the plugin's name: lower case letters, digits and underscores.
        kind: one of `TEMPLATE_KINDS`.
        directory: default: `accelerate-NAME` in the current directory.

    Raises:
        ConfigurationError: the name or kind is invalid, the name is taken, or the directory is not
            empty or cannot be written.
    """
    words = _words(name, kind)
    _check(name, kind, words["distribution"])
    target = directory if directory is not None else Path(words["distribution"])
    templates = files("accelerate_testing.scaffold") / "templates"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigurationError(
                f"The directory {target} is not empty. Choose another one with --directory."
            )
        # A kind may replace a common file.
        return sorted(
            {p for part in ("common", kind) for p in _copy(templates / part, target, words)}
        )
    except OSError as error:
        raise ConfigurationError(
            f"The repository in {target} cannot be written: {error.filename or target}: "
            f"{error.strerror or error}. Choose another directory with --directory."
        ) from error


def _check(name: str, kind: str, distribution: str) -> None:
    if kind not in TEMPLATE_KINDS:
        raise ConfigurationError(
            f"--kind {kind!r} is not one of {listing(TEMPLATE_KINDS)}.{did_you_mean(kind, TEMPLATE_KINDS)}"
        )
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{name!r} is not a valid plugin name. It must start with a letter and have only lower case "
            "letters, digits and single underscores between them, such as 'ring' or 'two_level'."
        )
    said = yaml.safe_load(name)
    if not isinstance(said, str):  # yes, off, null, ...
        raise ConfigurationError(
            f"{name!r} is not a valid plugin name, because YAML reads it as {said!r} in a config file. "
            "Choose another name."
        )
    if name in _RESERVED:
        raise ConfigurationError(
            f"{name!r} is a reserved name ({listing(_RESERVED)}). Choose another name."
        )
    owners = [record.label for record in installed().of_kind(kind) if record.name == name]
    if owners:
        raise ConfigurationError(
            f"A {kind} with this name is installed: {owners[0]}. Choose another name."
        )
    if name in catalog.known_names(kind):
        raise ConfigurationError(
            f"{name!r} is the name of a {kind} in accelerate-core[{catalog.extra_for(kind, name)}]. "
            "Choose another name."
        )
    extras = {extra for names in catalog.NAMES.values() for extra in names.values()}
    ours = {f"accelerate-{extra.replace('_', '-')}" for extra in extras}
    if distribution in ours or list(importlib.metadata.distributions(name=distribution)):
        raise ConfigurationError(
            f"The package would be called {distribution}, which already exists: installing one would "
            "replace the other. Choose another name."
        )


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> list[Path]:
    """Copy a tree, and replace `@word@` in file contents and `__word__` in paths."""
    made = []
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        name = entry.name.removesuffix(".in").replace("__package__", words["package"])
        name = name.replace("dot_", ".", 1) if name.startswith("dot_") else name
        # Named TEST_ so that packaging does not mistake them for tests of this repository.
        name = name.replace("TEST_", "test_", 1) if name.startswith("TEST_") else name
        path = target / name.replace("__name__", words["name"])
        if entry.is_dir():
            made += _copy(entry, path, words)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(
            r"@(\w+)@", lambda found: words[found.group(1)], entry.read_text(encoding="utf-8")
        )
        path.write_text(text, encoding="utf-8")
        made.append(path)
    return made
