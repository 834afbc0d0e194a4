"""What is installed, read from package metadata alone: nothing here imports a plugin by itself."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.config.enums import LoggerType, PrecisionType
from accelerate_core.errors import (
    MissingPluginError,
    PluginError,
    PluginVersionError,
    did_you_mean,
    listing,
)
from accelerate_core.hookspecs import API_VERSION
from accelerate_core.plugins import catalog

KINDS = {
    "accelerate_core.backends": "backend",
    "accelerate_core.precisions": "precision",
    "accelerate_core.trackers": "tracker",
    "accelerate_core.launchers": "launcher",
    "accelerate_core.extensions": "extension",
    "accelerate_core.commands": "command",
    "accelerate_core.checkpointers": "checkpointer",
    "accelerate_core.loaders": "loaders",
    "accelerate_core.tracking": "tracking",
}
_EXPORTS = "accelerate_core.exports"
_TRIGGERS = "accelerate_core.triggers"
#: The distribution of the core and of what is built in.
OWN_DISTRIBUTION = "accelerate-core"


@dataclass(eq=False)
class PluginRecord:
    """One installed plugin: its entry point, its distribution and what triggers it."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    triggers: set[str] = field(default_factory=set)
    _loaded: Any = None
    _failure: BaseException | None = None

    @property
    def label(self) -> str:
        """`name (distribution version)`, as error texts and notes show it."""
        return f"{self.name} ({self.distribution} {self.version})".strip()

    @property
    def is_loaded(self) -> bool:
        """Whether the plugin's module has been imported through this record."""
        return self._loaded is not None

    @property
    def failure(self) -> BaseException | None:
        """The exception importing it raised, if it was tried and broke."""
        return self._failure

    def load(self) -> Any:
        """Import the plugin, once.

        Raises:
            PluginError: importing it failed; the cause is chained.
        """
        if self._loaded is None and self._failure is None:
            try:
                self._loaded = load_target(self.target)
            except (Exception, SystemExit) as error:  # vendors' stacks exit without hardware
                self._failure = error
        if self._failure is not None:
            raise PluginError(
                f"The {self.kind} plugin {self.label} is broken: importing {self.target} raised "
                f"{type(self._failure).__name__}: {self._failure}. Reinstall or upgrade "
                f"{self.distribution}, or keep it out with ACCELERATE_DISABLED_PLUGINS={self.name}."
            ) from self._failure
        return self._loaded


@dataclass(frozen=True)
class Installed:
    """Everything found in one scan."""

    plugins: tuple[PluginRecord, ...]
    exports: Mapping[str, tuple[str, str]]  # public name -> (target, distribution)
    triggers: Mapping[str, tuple[PluginRecord, ...]]

    def of_kind(self, kind: str) -> tuple[PluginRecord, ...]:
        """Return the plugins of one kind, by name."""
        return tuple(record for record in self.plugins if record.kind == kind)


_BUILT_IN = (
    ("backend", "single", "accelerate_core.backend:SingleProcess"),
    ("extension", "torch_compile", "accelerate_core.compilation:TorchCompiler"),
    ("precision", "no", "accelerate_core.precision:FullPrecision"),
    ("precision", "fp16", "accelerate_core.precision:Float16"),
    ("precision", "bf16", "accelerate_core.precision:BFloat16"),
    ("precision", "downcast_bf16", "accelerate_core.precision:DowncastBFloat16"),
)


def load_target(target: str) -> Any:
    """Import `package.module:attribute`."""
    module_name, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module_name)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


@functools.cache
def installed() -> Installed:
    """Scan the entry points of all installed distributions, once per process.

    `installed.cache_clear()` makes the next call scan again.
    """
    from accelerate_core import __version__

    records = [
        PluginRecord(kind, name, target, OWN_DISTRIBUTION, __version__)
        for kind, name, target in _BUILT_IN
    ]
    exports: dict[str, tuple[str, str]] = {}
    triggers: dict[str, list[str]] = {}
    found = importlib.metadata.entry_points()  # one scan; `select` only filters
    for point in (
        point for group in (*KINDS, _EXPORTS, _TRIGGERS) for point in found.select(group=group)
    ):
        dist = point.dist
        dist_name, version = (dist.name, dist.version) if dist is not None else ("unknown", "")
        if point.group in KINDS:
            records.append(
                PluginRecord(KINDS[point.group], point.name, point.value, dist_name, version)
            )
        elif point.group == _EXPORTS:
            exports.setdefault(point.name, (point.value, dist_name))
        elif point.group == _TRIGGERS:
            # A table of entry points has each name once: `always.this` and `always.that` are two.
            triggers.setdefault(point.name.partition(".")[0], []).append(point.value)
    PrecisionType.register(*(record.name for record in records if record.kind == "precision"))
    LoggerType.register(*(record.name for record in records if record.kind == "tracker"))
    by_trigger: dict[str, tuple[PluginRecord, ...]] = {}
    for trigger, targets in triggers.items():
        matched = tuple(record for record in records if record.target in targets)
        for record in matched:
            record.triggers.add(trigger)
        by_trigger[trigger] = matched
    return Installed(tuple(sorted(records, key=lambda r: (r.kind, r.name))), exports, by_trigger)


def disabled_names(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the plugins `ACCELERATE_DISABLED_PLUGINS` keeps out."""
    text = (os.environ if environ is None else environ).get("ACCELERATE_DISABLED_PLUGINS", "")
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def find(
    kind: str, name: str, *, because: str, environ: Mapping[str, str] | None = None
) -> PluginRecord:
    """Return the plugin of that name.

    Raises:
        MissingPluginError: it is not installed; the text has the pip command or the nearest name.
        PluginError: it is disabled, or two distributions bring one of that name.
    """
    name = name.strip()
    records = [r for r in installed().of_kind(kind) if r.name == name]
    if name in disabled_names(environ):
        raise PluginError(
            f"The {kind} {name!r} was asked for by {because}, but ACCELERATE_DISABLED_PLUGINS keeps it out."
        )
    if len(records) > 1:
        owners = " and ".join(f"{r.distribution} {r.version}" for r in records)
        raise PluginError(
            f"{len(records)} distributions bring a {kind} named {name!r}: {owners}. Uninstall one, "
            f"such as with: pip uninstall {records[-1].distribution}"
        )
    if records:
        return records[0]
    extra = catalog.extra_for(kind, name)
    if extra is not None:
        raise MissingPluginError(
            f"The {kind} {name!r} (asked for by {because}) is not installed. "
            f"Install it with: {catalog.pip_command(extra)}",
            name=name,
        )
    here = [record.name for record in installed().of_kind(kind)]
    options: Iterable[str] = [*here, *catalog.known_names(kind)]
    hint = without_entry_point(name, kind, near=did_you_mean(name, options))
    raise MissingPluginError(
        f"There is no {kind} named {name!r} (asked for by {because}). Installed: {listing(here)}."
        f"{hint}",
        name=name,
    )


def without_entry_point(name: str, kind: str = "", *, near: str = "") -> str:
    """Name the distribution that seems to be the plugin and declares no entry point, if any.

    Args:
        kind: of the plugin; "" if that is not known.
        near: the hint to return where there is none, or only a library of that very name,
            which has nothing to do with this package.
    """
    wanted = name.lower().replace("_", "-")
    library = ""
    for dist in importlib.metadata.distributions():
        own = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if own == OWN_DISTRIBUTION:  # what it brings is built in
            continue
        if wanted not in own.split("-") and wanted not in (own, own.removeprefix("accelerate-")):
            continue
        if any(point.group in (*KINDS, _EXPORTS) for point in dist.entry_points):
            continue
        said = f" {dist.metadata['Name']} {dist.version} is installed, but declares no plugin: "
        said += _lines_needed(name, kind)
        if own == f"accelerate-{wanted}" or any(
            (line.replace("_", "-").lower()).startswith(OWN_DISTRIBUTION)
            for line in dist.requires or ()
        ):
            return said
        library = said if own == wanted else library
    return near or library


def _lines_needed(name: str, kind: str) -> str:
    groups = [f'"{group}"' for group, its in KINDS.items() if its == (kind or "backend")]
    more = [] if kind else [group for group, its in KINDS.items() if its != "backend"]
    return (
        f"it needs an entry point [project.entry-points.{groups[0]}] {name} = "
        '"package.module:Class" in its pyproject.toml'
        f"{f' (or, by its kind, in {listing(more)})' if more else ''}."
    )


def check_api_version(record: PluginRecord, plugin: Any) -> None:
    """Refuse a plugin of another major version of the contract.

    Raises:
        PluginVersionError: with both versions and what to do.
    """
    version = getattr(plugin, "api_version", None)
    try:
        major, minor = version  # type: ignore[misc]
    except (TypeError, ValueError):
        raise PluginError(
            f"The {record.kind} plugin {record.label} states no api_version; "
            f"it needs a class attribute such as api_version = {API_VERSION}."
        ) from None
    if major != API_VERSION[0]:
        side = "an older" if major < API_VERSION[0] else "a newer"
        fix = (
            f"upgrade {record.distribution}"
            if major < API_VERSION[0]
            else "upgrade accelerate-core"
        )
        raise PluginVersionError(
            f"The {record.kind} plugin {record.label} was written for {side} contract, version "
            f"{major}.{minor}; this accelerate-core speaks {API_VERSION[0]}.{API_VERSION[1]}: {fix}."
        )
