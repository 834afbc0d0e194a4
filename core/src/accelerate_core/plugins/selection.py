"""Which plugins are active for one Accelerator, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_core.config.files import ConfigFile
from accelerate_core.config.truth import truth
from accelerate_core.contract.topology import Topology
from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    MissingPluginError,
    PluginConflictError,
    PluginError,
    PluginVersionError,
    did_you_mean,
    listing,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import (
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
    installed,
)


@dataclass(frozen=True)
class Claim:
    """A plugin's wish to be active: the highest priority wins, the reason is shown."""

    priority: int
    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int | float) or not math.isfinite(self.priority):
            raise TypeError(f"the priority of a Claim is a finite number, not {self.priority!r}")


@dataclass(frozen=True)
class Request:
    """What a plugin's `detect` may look at."""

    arguments: Mapping[str, Any]
    environ: Mapping[str, str]
    topology: Topology
    config: ConfigFile | None = None
    cpu: bool = False

    def flag(self, name: str) -> bool:
        """Tell whether an environment variable is set to a true value."""
        return bool(truth(self.environ.get(name, "")))


@dataclass
class Considered:
    """What became of one plugin during selection."""

    record: PluginRecord
    state: str
    because: str


@dataclass
class Selection:
    """The chosen backend class, why, and what was considered."""

    record: PluginRecord
    because: str
    considered: list[Considered] = field(default_factory=list)
    given: Any = None

    @property
    def plugin(self) -> Any:
        """The backend's class, imported now if it was not yet; or the object that was given."""
        return self.record.load() if self.given is None else self.given


def fired_triggers(request: Request) -> dict[str, str]:
    """Return the triggers that this request fires, each with what fired it.

    A trigger's name is a constructor argument, an environment variable, a key
    of the config file, `multi_process` (more than one process), or `always`.
    """
    fired: dict[str, str] = {}
    for name in installed().triggers:
        if name == "always":
            fired[name] = "it asks to be probed always"
        elif name == "multi_process":
            if request.topology.num_processes > 1:
                fired[name] = (
                    f"{request.topology.num_processes} processes ({request.topology.because})"
                )
        elif request.arguments.get(name) is not None:
            fired[name] = f"constructor argument {name}"
        elif request.environ.get(name, "") != "":
            fired[name] = f"environment variable {name}={request.environ[name]}"
        elif _asked_by_file(name, request.config):
            fired[name] = request.config.where(name) if request.config is not None else ""
    return fired


def _asked_by_file(name: str, config: ConfigFile | None) -> bool:
    """Tell whether a key of the config file asks for a plugin.

    A peer's file says by `distributed_type` which of its sections is meant.
    """
    if config is None or name not in config:
        return False
    kind, owner = config.get("distributed_type"), catalog.SECTIONS.get(name)
    if kind is None or owner not in catalog.DISTRIBUTED_TYPES.values():
        return True
    return catalog.DISTRIBUTED_TYPES.get(str(kind).upper()) == owner


def select_backend(wanted: Any, because: str, request: Request) -> Selection:
    """Choose the backend.

    Args:
        wanted: a name, a Backend class or instance, or None to detect.
        because: where `wanted` came from.

    Raises:
        MissingPluginError: what is asked for, or needed, is not installed.
        PluginConflictError: two plugins claim with equal priority.
    """
    if wanted is None and request.config is not None:
        kind = str(request.config.get("distributed_type", "")).upper()
        if kind in catalog.DISTRIBUTED_TYPES and not _asked_otherwise(request):
            wanted = catalog.DISTRIBUTED_TYPES[kind]
            because = request.config.where("distributed_type")
    if wanted is not None and not isinstance(wanted, str):
        return _selection_of_object(wanted, because)
    if wanted is not None:
        record = find("backend", wanted, because=because, environ=request.environ)
        plugin = record.load()
        check_api_version(record, plugin)
        return Selection(record, because, [Considered(record, "active", because)])
    return _detect(request)


def _asked_otherwise(request: Request) -> bool:
    """Tell whether an argument or a variable asks for a plugin: both are stronger than a file."""
    named = [name for name in installed().triggers if request.arguments.get(name) is not None]
    switches = [name for name in catalog.VARIABLES if name.startswith("ACCELERATE_USE_")]
    return bool(named) or any(request.flag(name) for name in switches)


def _selection_of_object(wanted: Any, because: str) -> Selection:
    cls = wanted if isinstance(wanted, type) else type(wanted)
    name = getattr(cls, "name", None)
    if not name or not hasattr(cls, "detect"):
        raise ConfigurationError(f"backend={wanted!r} is neither a name nor a Backend.")
    record = PluginRecord(
        "backend", name, f"{cls.__module__}:{cls.__qualname__}", cls.__module__, ""
    )
    check_api_version(record, cls)
    return Selection(record, because, [Considered(record, "active", because)], wanted)


def _detect(request: Request) -> Selection:
    fired = fired_triggers(request)
    disabled = disabled_names(request.environ)
    claims: list[tuple[Claim, PluginRecord]] = []
    considered: list[Considered] = []
    for record in installed().of_kind("backend"):
        hits = [fired[trigger] for trigger in sorted(record.triggers) if trigger in fired]
        if record.name in disabled:
            considered.append(Considered(record, "disabled", "ACCELERATE_DISABLED_PLUGINS"))
        elif record.name == "single":
            continue
        elif not hits:
            considered.append(Considered(record, "available", "nothing asks for it"))
        else:
            claim = _ask(record, hits, request, considered)
            if claim is not None:
                claims.append((claim, record))
    _missing_by_catalog(request, {record.name for _, record in claims})
    if claims:
        return _strongest(claims, considered)
    single = find("backend", "single", because="default")
    if request.topology.num_processes > 1:
        passed = "; ".join(
            f"{c.record.name}: {c.because}" for c in considered if c.state != "available"
        )
        raise MissingPluginError(
            f"{request.topology.num_processes} processes were started "
            f"({request.topology.because}), but no installed backend takes them"
            f"{f' ({passed})' if passed else ''}. Install one with: "
            f"{catalog.pip_command(catalog.SEVERAL_PROCESSES)}"
        )
    considered.append(Considered(single, "active", "one process, nothing else asked for"))
    return Selection(single, "one process, nothing else asked for", considered)


def _ask(
    record: PluginRecord, hits: list[str], request: Request, considered: list[Considered]
) -> Claim | None:
    """Import one triggered plugin and ask for its claim; what it cannot answer is recorded."""
    asked_by_name = any("constructor argument" in hit for hit in hits)
    try:
        plugin = record.load()
        check_api_version(record, plugin)
        claim = _claim(record, plugin, request)
    except AccelerateError as error:
        if asked_by_name:
            raise
        version = isinstance(error, PluginVersionError)
        state = "broken" if isinstance(error, PluginError) and not version else "refused"
        considered.append(Considered(record, state, str(error)))
        return None
    if claim is None:
        considered.append(
            Considered(record, "passed over", f"asked because of {hits[0]}; made no claim")
        )
    else:
        considered.append(
            Considered(record, "passed over", f"{claim.reason}, priority {claim.priority}")
        )
    return claim


def _claim(record: PluginRecord, plugin: Any, request: Request) -> Claim | None:
    try:
        claim = plugin.detect(request)
    except AccelerateError:
        raise
    except (Exception, SystemExit) as error:  # vendors' stacks exit without hardware
        raise PluginError(
            f"The {record.kind} plugin {record.label} is broken: its detect() raised "
            f"{type(error).__name__}: {error}. Keep it out with "
            f"ACCELERATE_DISABLED_PLUGINS={record.name}."
        ) from error
    if claim is not None and not isinstance(claim, Claim):
        raise PluginError(
            f"The {record.kind} plugin {record.label} is broken: its detect() returned {claim!r}, "
            "which is neither a Claim nor None."
        )
    return claim


def _missing_by_catalog(request: Request, claimed: set[str]) -> None:
    """Refuse to ignore a known argument or variable whose plugin is not installed."""
    have = {record.name for record in installed().plugins}
    for name, extra in catalog.ARGUMENTS.items():
        if request.arguments.get(name) is not None and name not in installed().triggers:
            raise MissingPluginError(
                f"The argument {name} of Accelerator belongs to a plugin that is not installed. "
                f"Install it with: {catalog.pip_command(extra)}"
            )
    for name, extra in catalog.VARIABLES.items():
        if request.flag(name) and extra not in have and name not in installed().triggers:
            raise MissingPluginError(
                f"Environment variable {name} asks for a plugin that is not installed. "
                f"Install it with: {catalog.pip_command(extra)}"
            )


def _strongest(claims: list[tuple[Claim, PluginRecord]], considered: list[Considered]) -> Selection:
    top = max(claim.priority for claim, _ in claims)
    best = [entry for entry in claims if entry[0].priority == top]
    if len(best) > 1:
        names = [record.name for _, record in best]
        reasons = "; ".join(f"{record.label}: {claim.reason}" for claim, record in best)
        raise PluginConflictError(
            f"The backends {listing(names)} claim this run with equal priority {top} ({reasons}). "
            f"Choose one: Accelerator(backend={names[0]!r}), ACCELERATE_BACKEND={names[0]}, "
            f"or keep one out with ACCELERATE_DISABLED_PLUGINS={names[-1]}."
        )
    claim, record = best[0]
    for entry in considered:
        if entry.record is record:
            entry.state, entry.because = "active", claim.reason
    return Selection(record, claim.reason, considered)


def select_extensions(request: Request) -> list[tuple[PluginRecord, Any, str]]:
    """Return the extensions to activate: named in `ACCELERATE_PLUGINS`, or triggered and claiming.

    Each comes with its loaded class and the reason.
    """
    text = request.environ.get("ACCELERATE_PLUGINS", "")
    named = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    chosen: list[tuple[PluginRecord, Any, str]] = []
    for name in named:
        record = find("extension", name, because="ACCELERATE_PLUGINS", environ=request.environ)
        plugin = record.load()
        check_api_version(record, plugin)
        chosen.append((record, plugin, "named in ACCELERATE_PLUGINS"))
    fired = fired_triggers(request)
    disabled = disabled_names(request.environ)
    considered: list[Considered] = []
    for record in installed().of_kind("extension"):
        hits = [fired[trigger] for trigger in sorted(record.triggers) if trigger in fired]
        if hits and record.name not in disabled and record.name not in named:
            claim = _ask(record, hits, request, considered)
            if claim is not None:
                chosen.append((record, record.load(), claim.reason))
    return sorted(chosen, key=lambda entry: entry[0].name)


def plugin_arguments() -> set[str]:
    """Return the triggers that are constructor arguments: lower case, and no reserved word."""
    reserved = {"always", "multi_process"}
    return {n for n in installed().triggers if n.isidentifier() and n == n.lower()} - reserved


def check_owners(arguments: Mapping[str, Any], selection: Selection, active: set[str]) -> None:
    """Refuse constructor arguments whose plugins are installed and not active: nobody reads them.

    Args:
        arguments: those that were passed.
        selection: the chosen backend.
        active: names of the active plugins.
    """
    for name in plugin_arguments() & {key for key, value in arguments.items() if value is not None}:
        owners = installed().triggers[name]
        if not any(record.name in active for record in owners):
            states = {c.record.name: f"{c.state}: {c.because}" for c in selection.considered}
            owner = owners[0]
            why = states.get(owner.name, f"the backend is {selection.record.name!r}")
            raise ConfigurationError(
                f"Accelerator({name}=...) belongs to the plugin {owner.label}, which is not active "
                f"({why}; {selection.record.name!r} was chosen because of {selection.because}). "
                f"Leave the argument out, or let the plugin be active."
            )


def check_arguments(arguments: Mapping[str, Any], core_names: Mapping[str, Any]) -> None:
    """Refuse constructor arguments that neither the core, a plugin nor the catalog knows."""
    from accelerate_core.errors import UnknownArgumentError

    known = {*core_names, *plugin_arguments(), *catalog.ARGUMENTS}
    for name in arguments:
        if name not in known:
            raise UnknownArgumentError(
                f"Accelerator() has no argument {name!r}, and no installed plugin takes it."
                f"{did_you_mean(name, known)}"
            )
