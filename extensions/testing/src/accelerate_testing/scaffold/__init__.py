"""Write a complete repository for a new plugin, from the templates beside this file."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import installed

TEMPLATE_KINDS = ("backend", "precision", "tracker", "launcher", "extension")
#: Words that mean something where a plugin is named, and those the templates are made of.
_RESERVED = ("core", "all", "auto", "none", *TEMPLATE_KINDS)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _words(name: str, kind: str) -> dict[str, str]:
    """Return how one plugin is called in its various places."""
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
    """Write the repository; return its files.

    Args:
        name: what users will say: lower case letters, digits, underscores.
        kind: one of `TEMPLATE_KINDS`.
        directory: where; default `accelerate-NAME` in the current directory.

    Raises:
        ConfigurationError: the name or kind is none, or is taken; the directory is not empty, or
            cannot be written.
    """
    words = _words(name, kind)
    _check(name, kind, words["distribution"])
    target = directory if directory is not None else Path(words["distribution"])
    templates = files("accelerate_testing.scaffold") / "templates"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigurationError(
                f"{target} is there already and not empty: choose another with --directory."
            )
        # A kind may have its own of what is common.
        return sorted(
            {p for part in ("common", kind) for p in _copy(templates / part, target, words)}
        )
    except OSError as error:
        raise ConfigurationError(
            f"The repository in {target} cannot be written: {error.filename or target}: "
            f"{error.strerror or error}. Choose another place with --directory."
        ) from error


def _check(name: str, kind: str, distribution: str) -> None:
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
    extras = {extra for names in catalog.NAMES.values() for extra in names.values()}
    ours = {f"accelerate-{extra.replace('_', '-')}" for extra in extras}
    if distribution in ours or list(importlib.metadata.distributions(name=distribution)):
        raise ConfigurationError(
            f"The repository would be that of {distribution}, which is a package already: installing "
            "the one would remove the other. Choose another name."
        )


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> list[Path]:
    """Copy a tree; `@word@` in texts and `WORD` names like `package` in paths are filled in."""
    made = []
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        name = entry.name.removesuffix(".in").replace("__package__", words["package"])
        name = name.replace("dot_", ".", 1) if name.startswith("dot_") else name
        # Tests of ours are not part of a wheel; these are spelt so that nobody takes them for some.
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
