"""Known packages outside the core: the one place that turns a missing plugin into a pip command.

Most tables are generated into `known_packages.json` (`make docs`) from what our packages declare, and
from `docs/planned.toml`, which also lists names from Hugging Face Accelerate.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: What several processes need when nothing more is asked for.
SEVERAL_PROCESSES = "ddp"

# Tables that are read when the first one is used. Each maps a name to an extra of the core.

#: Per kind: name of a plugin.
NAMES: dict[str, dict[str, str]]
#: Constructor arguments that belong to a plugin.
ARGUMENTS: dict[str, str]
#: Environment variables that ask for a plugin; those of backends begin with ACCELERATE_USE_.
VARIABLES: dict[str, str]
#: Sections of Accelerate's config file that belong to a plugin.
SECTIONS: dict[str, str]
#: Keys of Accelerate's config file, besides sections, that belong to a plugin.
KEYS: dict[str, str]
#: Options of `launch` that ask for a backend.
SWITCHES: dict[str, str]
#: How other options of a plugin begin.
PREFIXES: dict[str, str]
#: Options of a plugin that begin otherwise.
OPTIONS: dict[str, str]
#: Public names that a plugin exports, or that Accelerate has and our packages don't export yet.
EXPORTS: dict[str, str]
#: `is_…_available` -> the library it asks for.
PROBES: dict[str, str]
#: Command -> its line in the help.
SUMMARIES: dict[str, str]
#: `distributed_type` of Accelerate's config file -> the backend it asks for.
DISTRIBUTED_TYPES: dict[str, str]
#: Attributes of an Accelerator or its state while no active plugin serves them.
ABSENT_ATTRIBUTES: dict[str, object]
#: Methods of Accelerate's Accelerator that only make sense with a plugin.
METHODS: dict[str, str]
#: Extra -> our packages that it brings, and their folders in a clone.
FOLDERS: dict[str, dict[str, str]]


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    file = resources.files(__package__).joinpath("known_packages.json")
    made: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return made


def __getattr__(name: str) -> Any:
    if name in __annotations__:
        return _tables()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def distributions() -> frozenset[str]:
    """Return the names of the distributions that are released together with the core."""
    return frozenset(name for folders in _tables()["FOLDERS"].values() for name in folders)


def extra_for(kind: str, name: str) -> str | None:
    """Return the extra that installs a plugin; None for an unknown plugin."""
    return known_names(kind).get(name)


def known_names(kind: str) -> Mapping[str, str]:
    """Return the plugins of one kind whose package this catalog knows."""
    names: Mapping[str, str] = _tables()["NAMES"].get(kind, {})
    return names


def pip_command(extra: str) -> str:
    """Return the pip command that installs an extra; from the clone, if the core was installed from one."""
    own = next(iter(metadata.distributions(name="accelerate-core")), None)
    said = json.loads((own and own.read_text("direct_url.json")) or "{}")
    clone = Path(unquote(urlsplit(said.get("url", "")).path)).parent
    needed = _tables()["FOLDERS"].get(extra, {}).items()
    missing = [clone / path for name, path in needed if not any(metadata.distributions(name=name))]
    if "dir_info" in said and missing and all(map(Path.is_dir, missing)):
        how = "-e " if said["dir_info"].get("editable") else ""
        return " ".join(["pip install", *(how + shlex.quote(str(one)) for one in missing)])
    return f'pip install "accelerate-core[{extra}]"'
