"""Find installed plugins in package metadata, without importing them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accelerate_core import failures
from accelerate_core.config.enums import LoggerType, PrecisionType
from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    MissingPluginError,
    PluginError,
    PluginVersionError,
    did_you_mean,
    listing,
    nearest,
)
from accelerate_core.plugins import catalog

GROUPS = {
    "accelerate_core.backends": "backend",
    "accelerate_core.precisions": "precision",
    "accelerate_core.trackers": "tracker",
    "accelerate_core.launchers": "launcher",
    "accelerate_core.extensions": "extension",
    "accelerate_core.commands": "command",
    "accelerate_core.checkpointers": "checkpointer",
    "accelerate_core.loaders": "loaders",
    "accelerate_core.tracking": "tracking",
    "accelerate_core.devices": "device",
    "accelerate_core.schedulers": "scheduler",
}
#: Kinds that extensions host: the name of the kind -> the entry point group of its plugins.
_KINDS = "accelerate_core.kinds"
_EXPORTS = "accelerate_core.exports"
_TRIGGERS = "accelerate_core.triggers"
#: The distribution of the core and of the plugins that ship with it.
OWN_DISTRIBUTION = "accelerate-core"


@dataclass(eq=False)
class PluginRecord:
    """An installed plugin: its entry point, its distribution and its triggers."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    triggers: set[str] = field(default_factory=set)
    #: The exception that importing it raised.
    failure: BaseException | None = None
    #: The imported object; None before the import.
    loaded: Any = None

    @property
    def label(self) -> str:
        """`name (distribution version)`, as shown in errors and notes."""
        return f"{self.name} ({f'{self.distribution} {self.version}'.strip()})"

    @property
    def identity(self) -> dict[str, str]:
        """The kind, name, distribution and version, as a dictionary."""
        return {one: getattr(self, one) for one in ("kind", "name", "distribution", "version")}

    def load(self) -> Any:
        """Import the plugin, once.

        Raises:
            PluginError: importing it failed; the cause is chained.
        """
        if self.loaded is None and self.failure is None:
            try:
                self.loaded = pkgutil.resolve_name(self.target)
            except (Exception, SystemExit) as error:  # vendors' stacks exit without hardware
                self.failure = error
        if (failure := self.failure) is not None:
            raise self.broken(
                f"importing {self.target} raised {type(failure).__name__}: {failure}"
            ) from failure
        return self.loaded

    def load_checked(self) -> Any:
        """Import the plugin, and check the major version of its contract.

        Raises:
            PluginError: it is broken, or has no `api_version`.
            PluginVersionError: it was written for another major version.
        """
        plugin = self.load()
        check_api_version(self, plugin)
        return plugin

    @contextmanager
    def broken_if_raises(self, method: str) -> Iterator[None]:
        """Report an exception in the block as a broken plugin.

        An `AccelerateError` is not changed, because its message already says what is wrong.
        """
        try:
            yield
        except AccelerateError:
            raise
        except (Exception, SystemExit) as error:  # vendors' stacks exit without hardware
            raise self.broken(f"its {method}() raised {type(error).__name__}: {error}") from error

    def broken(self, how: str) -> PluginError:
        """Return the error for a plugin that does not do what its kind requires."""
        return PluginError(
            f"The {self.kind} plugin {self.label} is broken: {how}. Reinstall or upgrade "
            f"{self.distribution}, or disable it with ACCELERATE_DISABLED_PLUGINS={self.name}."
        )


@dataclass(frozen=True)
class Installed:
    """The result of one scan."""

    plugins: tuple[PluginRecord, ...]
    exports: Mapping[str, tuple[str, str]]  # public name -> (target, distribution)
    triggers: frozenset[str]
    #: Entry point group -> the kind of its plugins.
    groups: Mapping[str, str]

    def of_kind(self, kind: str) -> tuple[PluginRecord, ...]:
        """Return the plugins of one kind, sorted by name."""
        return tuple(record for record in self.plugins if record.kind == kind)


@functools.cache
def _owner(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    """Return the name and version of a distribution. Reading them parses all of its metadata."""
    metadata = dist.metadata if dist else {"Name": "unknown", "Version": ""}
    return metadata["Name"], metadata["Version"]


@functools.cache
def installed() -> Installed:
    """Scan the entry points of all installed distributions, once per process.

    `installed.cache_clear()` makes the next call scan again.
    """
    records: list[PluginRecord] = []
    exports: dict[str, tuple[str, str]] = {}
    triggers: dict[str, list[str]] = {}
    found = importlib.metadata.entry_points()
    failures.report_uncaught(found.select(group=failures.AT_START))
    groups = GROUPS | {point.value: point.name for point in found.select(group=_KINDS)}
    for group in (*groups, _EXPORTS, _TRIGGERS):
        for point in found.select(group=group):
            owner = _owner(point.dist)
            if group == _EXPORTS:
                exports.setdefault(point.name, (point.value, owner[0]))
            elif group == _TRIGGERS:
                # Names are unique in a table of entry points: `always.this` and `always.that` are distinct.
                triggers.setdefault(point.name.partition(".")[0], []).append(point.value)
            else:
                records.append(PluginRecord(groups[group], point.name, point.value, *owner))
    PrecisionType.register(*(record.name for record in records if record.kind == "precision"))
    LoggerType.register(*(record.name for record in records if record.kind == "tracker"))
    for record in records:
        record.triggers = {name for name, its in triggers.items() if record.target in its}
    records.sort(key=lambda record: (record.kind, record.name))
    return Installed(tuple(records), exports, frozenset(triggers), groups)


def disabled_names(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the names of the plugins that `ACCELERATE_DISABLED_PLUGINS` disables."""
    variables = os.environ if environ is None else environ
    text = variables.get("ACCELERATE_DISABLED_PLUGINS", "")
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def find(
    kind: str, name: str, *, source: str, environ: Mapping[str, str] | None = None
) -> PluginRecord:
    """Return the installed plugin with a name.

    Args:
        kind: `backend`, `tracker`, `precision`, `launcher` or another kind.
        name: the name of the plugin.
        source: what requests it; shown in errors.
        environ: the environment variables; default: `os.environ`.

    Raises:
        MissingPluginError: it is not installed. The message has the pip command or the nearest name.
        ConfigurationError: no precision has this name.
        PluginError: it is disabled, or two distributions provide a plugin of this name.
    """
    name = name.strip()
    records = [r for r in installed().of_kind(kind) if r.name == name]
    if name in disabled_names(environ):
        raise PluginError(
            f"ACCELERATE_DISABLED_PLUGINS disables the {kind} plugin {name!r}, requested by {source}."
        )
    if len(records) > 1:
        owners = " and ".join(f"{r.distribution} {r.version}" for r in records)
        raise PluginError(
            f"{len(records)} distributions provide the {kind} plugin {name!r}: {owners}. Uninstall one, "
            f"for example with: pip uninstall {records[-1].distribution}"
        )
    if records:
        return records[0]
    extra = catalog.extra_for(kind, name)
    if extra is not None and not any(one.name == extra for one in installed().plugins):
        raise MissingPluginError(
            f"The {kind} plugin {name!r} (requested by {source}) is not installed. "
            f"Install it with: {catalog.pip_command(extra)}",
            name=name,
        )
    here = [record.name for record in installed().of_kind(kind)]
    near = suggestion(name, here, catalog.known_names(kind))
    hint = without_entry_point(name, kind, near=near)
    # A precision is one of a few words rather than a package.
    error = ConfigurationError if kind == "precision" else MissingPluginError
    raise error(
        f"No {kind} plugin is named {name!r} (requested by {source}). Installed: {listing(here)}.{hint}"
    )


def suggestion(name: str, here: Iterable[str], installable: Mapping[str, str]) -> str:
    """Return the hint for a misspelt name: the nearest name, and how to install it if it is missing.

    Args:
        name: the misspelt name.
        here: the names available in this environment.
        installable: other names, each with the extra that installs it.
    """
    here = set(here)
    near = nearest(name, sorted(here | installable.keys() - {name}))
    if near is None or near in here:
        return did_you_mean(name, [] if near is None else [near])
    extra = installable[near]
    if extra in here:  # `near` is another name of it
        return f" Did you mean {extra!r}?"
    return f" Did you mean {near!r}? It is not installed; install it with: {catalog.pip_command(extra)}"


def why_without(kind: str, extra: str = "standard") -> str:
    """Explain why a run has no part of a kind that most installations have, and how to install one."""
    if off := disabled_names() & {record.name for record in installed().of_kind(kind)}:
        return f"ACCELERATE_DISABLED_PLUGINS disables {listing(sorted(off))}"
    return f"no {kind} plugin is installed: {catalog.pip_command(extra)}"


def without_entry_point(name: str, kind: str = "", *, near: str = "") -> str:
    """Return a hint about a distribution that seems to be the plugin but declares no entry point.

    An unrelated library of the same name is ignored.

    Args:
        name: the name of the plugin.
        kind: its kind; "" if unknown.
        near: the hint to return if there is no such distribution.
    """
    wanted = name.lower().replace("_", "-")
    groups = installed().groups
    declared = {*groups, _EXPORTS}
    group = next(group for group, its in groups.items() if its == (kind or "backend"))
    for dist in importlib.metadata.distributions():
        # Parsing the metadata of all distributions takes a quarter of a second.
        text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        if "accelerate" not in text or any(one.group in declared for one in dist.entry_points):
            continue
        own = (dist.metadata["Name"] or "").lower().replace("_", "-")
        needs = [line.replace("_", "-").lower() for line in dist.requires or ()]
        is_plugin = any(one.startswith(OWN_DISTRIBUTION) for one in needs)
        if own == f"accelerate-{wanted}" or (is_plugin and wanted in (own, *own.split("-"))):
            return (
                f" {dist.metadata['Name']} {dist.version} is installed, but declares no plugin. It needs "
                f'an entry point [project.entry-points."{group}"] {name} = "package.module:Class" in '
                "its pyproject.toml."
            )
    return near


def check_api_version(record: PluginRecord, plugin: Any) -> None:
    """Refuse a plugin that was written for another major version of the contract.

    Raises:
        PluginError: it has no `api_version`, or its name differs from its entry point.
        PluginVersionError: the major versions differ.
    """
    version = getattr(plugin, "api_version", None)
    if (said := getattr(plugin, "name", record.name)) != record.name:
        raise PluginError(
            f"The {record.kind} plugin {record.label} has the name {said!r} in its class and "
            f"{record.name!r} in its entry point. Use the same name in both."
        )
    try:
        major, minor = version  # type: ignore[misc]
    except (TypeError, ValueError):
        raise PluginError(
            f"The {record.kind} plugin {record.label} has no api_version. "
            f"It needs a class attribute such as api_version = {API_VERSION}."
        ) from None
    if major != API_VERSION[0]:
        older = major < API_VERSION[0]
        side = "an older" if older else "a newer"
        raise PluginVersionError(
            f"The {record.kind} plugin {record.label} was written for {side} contract, version "
            f"{major}.{minor}, and this accelerate-core has {API_VERSION[0]}.{API_VERSION[1]}. "
            f"Upgrade {record.distribution if older else OWN_DISTRIBUTION}."
        )


# --- public names that plugins export to `accelerate_core`, resolved on first use ---------------


def exported(name: str) -> Any:
    """Return the object that an installed plugin exports under `name`.

    Raises:
        MissingPluginError: the plugin that exports it, or a library that it needs, is not installed.
            The message has the pip command.
        PluginError: the plugin that exports it is broken.
        AttributeError: the name is unknown, or an installed plugin does not export it.
    """
    found = installed().exports.get(name)
    if found is not None and found[1] not in disabled_names():
        target, distribution = found
        try:
            return pkgutil.resolve_name(target)
        except MissingPluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{name} is exported by {distribution}, which is broken: loading {target} raised "
                f"{type(error).__name__}: {error}. Reinstall or upgrade {distribution}."
            ) from error
    if name in catalog.EXPORTS:
        extra = catalog.EXPORTS[name]
        mine = [record for record in installed().plugins if record.name == extra]
        if mine:
            raise AttributeError(
                f"{name} exists in Hugging Face Accelerate, but {mine[0].label} does not provide it."
            )
        raise MissingPluginError(
            f"{name} comes with a plugin that is not installed. "
            f"Install it with: {catalog.pip_command(extra)}",
            name=name,
        )
    if name in catalog.PROBES:
        return _probe(name, catalog.PROBES[name])
    raise AttributeError(name)


def exported_names() -> list[str]:
    """Return the names that installed plugins export, and the probes."""
    return sorted({*installed().exports, *catalog.PROBES})


def _probe(name: str, library: str) -> Callable[..., bool]:
    def probe(*_: bool, **__: bool) -> bool:
        # Some probes of Accelerate take arguments that narrow them; without the library all are False.
        try:
            if (spec := importlib.util.find_spec(library)) is None or spec.origin is not None:
                return spec is not None
            # Either a folder of that name on the path, or the namespace of a distribution.
            return library in importlib.metadata.packages_distributions()
        except Exception:  # it imports the packages above
            return False

    probe.__name__ = name
    probe.__doc__ = f"Tell whether the library {library} is installed; never raises."
    return probe
