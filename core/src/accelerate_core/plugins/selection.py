"""Select the plugins of one Accelerator, and record why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from accelerate_core.booleans import parse_bool, require_bool
from accelerate_core.config.files import ConfigFile
from accelerate_core.config.provenance import SourcedValue, variable_origin
from accelerate_core.contract.topology import Topology
from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    MissingPluginError,
    Mistakes,
    PluginConflictError,
    PluginError,
    PluginVersionError,
    UnknownArgumentError,
    listing,
)
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import (
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
    installed,
    suggestion,
)


@dataclass(frozen=True)
class Claim:
    """A plugin's request to be active: the highest priority wins, and the reason is shown."""

    priority: int
    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int | float) or not math.isfinite(self.priority):
            raise TypeError(
                f"the priority of a Claim must be a finite number, not {self.priority!r}"
            )


@dataclass(frozen=True)
class Request:
    """The information that a plugin's `detect` gets."""

    arguments: Mapping[str, Any]
    environ: Mapping[str, str]
    topology: Topology
    config: ConfigFile | None = None
    cpu: bool = False

    def env_flag(self, name: str) -> bool:
        """Return whether an environment variable is set to a true value."""
        return bool(parse_bool(self.environ.get(name, "")))


#: No plugin is named.
NOTHING = SourcedValue(None, "default")


class Precedence(IntEnum):
    """How strongly a plugin is requested, by the source of the request; the strongest wins."""

    DETECTED, FILE, ENVIRONMENT, OPTION, ARGUMENT = range(5)

    @classmethod
    def of(cls, origin: str) -> Precedence:
        """Return the precedence of a value that came from `origin`."""
        first = origin.split(" ")[0]
        where = {"constructor": cls.ARGUMENT, "command": cls.OPTION, "environment": cls.ENVIRONMENT}
        return where.get(first, cls.FILE)


DETECTED = Precedence.DETECTED


class TriggerHit(NamedTuple):
    """What a trigger matched, and the precedence of that request."""

    reason: str
    precedence: Precedence = Precedence.DETECTED


@dataclass
class Candidate:
    """A plugin that was considered during selection, and the outcome.

    Attributes:
        state: active, available, passed over, refused, broken or disabled.
        reason: why it is in that state.
        claim: the plugin's own claim, if it made one.
        asked: the highest precedence at which it was requested.
        error: why it could not be asked for a claim.
        section: whether its own section of the config file requests it.
    """

    record: PluginRecord
    state: str
    reason: str
    claim: Claim | None = None
    asked: Precedence = Precedence.DETECTED
    error: AccelerateError | None = None
    section: bool = False


@dataclass(frozen=True)
class Rule:
    """How plugins of one kind are selected.

    Attributes:
        usual: the plugin that is active if no other is requested.
        claims: whether plugins whose triggers matched are imported and asked for a claim.
        several: whether all named or claiming plugins are active, rather than only the best.
        by_name: how users request a plugin by name, for errors. `{name}` is replaced by the name.
        ask: returns the claim of a plugin; default: call its class method `detect(request)`.
        hits: the triggers that matched; default: those of the request.
        skips_broken: whether a plugin that raises an error is skipped even if it was requested. The
            caller of `select` then reports the error.
    """

    usual: str = ""
    claims: bool = False
    several: bool = False
    by_name: str = "name {name!r}"
    ask: Callable[[PluginRecord], Claim | None] | None = None
    hits: Mapping[str, TriggerHit] | None = None
    skips_broken: bool = False


@dataclass
class Selection:
    """The selected plugins of one kind, and the steps of the selection.

    Attributes:
        wanted: the requested name with its source; its value is None if no name was requested.
        trigger_hits: the triggers that matched, each with the setting that matched.
        candidates: the plugins that were considered.
        error: why no plugin can be chosen.
        given: the plugin itself, if an object was passed instead of a name.
        rule: how the plugins of this kind are chosen.
    """

    kind: str
    wanted: SourcedValue = NOTHING
    trigger_hits: Mapping[str, TriggerHit] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    error: AccelerateError | None = None
    given: Any = None
    rule: Rule = Rule()

    def or_raise(self) -> Selection:
        """Return the selection, or raise its error."""
        if self.error is not None:
            raise self.error
        return self

    @property
    def active(self) -> list[Candidate]:
        """The plugins that were chosen, by name."""
        chosen = (one for one in self.candidates if one.state == "active")
        return sorted(chosen, key=lambda one: one.record.name)

    @property
    def record(self) -> PluginRecord:
        """The plugin that was chosen, for kinds that always have exactly one."""
        return self.active[0].record

    @property
    def reason(self) -> str:
        """Why this plugin was chosen."""
        return self.active[0].reason

    @property
    def plugin(self) -> Any:
        """The class of the plugin, which is imported if necessary, or the object that was passed."""
        return self.record.load() if self.given is None else self.given


_BACKEND_BY_NAME = "Accelerator(backend={name!r}), ACCELERATE_BACKEND={name}"

RULES = {
    "backend": Rule("single", claims=True, by_name=_BACKEND_BY_NAME),
    "precision": Rule("no"),
    "checkpointer": Rule("directory", claims=True),
    "tracking": Rule("queued"),
    "loaders": Rule(),
    "extension": Rule(claims=True, several=True),
}


def select(
    kind: str, request: Request, wanted: SourcedValue = NOTHING, rule: Rule | None = None
) -> Selection:
    """Select a plugin of one kind. If this fails, `error` of the result contains the reason.

    The request with the highest precedence succeeds or is an error. At equal precedence, a name comes before
    a claim, and a claim before the usual plugin. Only plugins that may claim are imported here; the others
    are imported when they are created.

    Args:
        kind: `backend`, `precision`, or another kind of plugin.
        wanted: the setting that names a plugin. Its value is a name (for extensions, several names
            separated by commas), or a Backend class or instance.
        rule: how a plugin is chosen. Required for a kind that an extension hosts.
    """
    rule = RULES[kind] if rule is None else rule
    named = wanted if wanted.value is not None else _named_elsewhere(kind, request)
    made = Selection(kind, named, rule=rule)
    try:
        if made.wanted.value is not None and not isinstance(made.wanted.value, str):
            _take_object(made)
        else:
            _choose(made, request)
    except AccelerateError as error:
        made.error = error
    return made


def _choose(made: Selection, request: Request) -> None:
    rule = made.rule
    if rule.claims:
        made.trigger_hits = trigger_hits(request) if rule.hits is None else rule.hits
    if made.kind == "backend" and made.wanted.value is not None:
        least = Precedence.of(made.wanted.origin)
        _refuse_missing(request, least + 1)
        mine = {name for record in installed().of_kind(made.kind) for name in record.triggers}
        if any(hit.precedence > least for name, hit in made.trigger_hits.items() if name in mine):
            made.wanted = NOTHING
    text = made.wanted.value or ""
    names = [one.strip() for one in text.split(",")] if rule.several else [text]
    for name in dict.fromkeys(filter(None, names)):
        record = find(made.kind, name, source=made.wanted.origin, environ=request.environ)
        if rule.claims:
            record.load_checked()
        made.candidates.append(Candidate(record, "active", made.wanted.origin))
    if rule.claims and (rule.several or not made.candidates):
        _ask_for_claims(made, request)
    if rule.usual and not made.active:
        _take_usual(made, rule.usual, request)


def _take_object(made: Selection) -> None:
    made.given = made.wanted.value
    cls = made.given if isinstance(made.given, type) else type(made.given)
    name = getattr(cls, "name", None)
    if not name or not hasattr(cls, "detect"):
        raise ConfigurationError(f"backend={made.given!r} is neither a name nor a Backend.")
    target = f"{cls.__module__}:{cls.__qualname__}"
    record = PluginRecord(made.kind, name, target, cls.__module__, "")
    check_api_version(record, cls)
    made.candidates.append(Candidate(record, "active", made.wanted.origin))


def _take_usual(made: Selection, usual: str, request: Request) -> None:
    there = {record.name for record in installed().of_kind(made.kind)}
    reason = "default"
    if made.kind == "backend":  # the one kind of which there must be one
        reason = "one process, no other backend requested"
        if request.topology.num_processes > 1:
            asked = [one for one in made.candidates if one.state != "available"]
            passed = "; ".join(f"{one.record.name}: {one.reason}" for one in asked)
            raise MissingPluginError(
                f"{request.topology.num_processes} processes were started "
                f"({request.topology.source}), but no installed backend claims them"
                f"{f' ({passed})' if passed else ''}. Install one with: "
                f"{catalog.pip_command(catalog.SEVERAL_PROCESSES)}"
            )
    elif usual not in there - disabled_names(request.environ):
        return
    record = find(made.kind, usual, source="default", environ=request.environ)
    made.candidates.append(Candidate(record, "active", reason))


def _ask_for_claims(made: Selection, request: Request) -> None:
    """Import the plugins whose triggers were set off, and ask for their claims."""
    rule = made.rule
    disabled = disabled_names(request.environ)
    kept_out: list[tuple[Precedence, str, str]] = []
    named = [one.record for one in made.candidates]
    for record in installed().of_kind(made.kind):
        hits = [
            made.trigger_hits[name] for name in sorted(record.triggers) if name in made.trigger_hits
        ]
        own = _own_section(record, request.config) if made.kind == "backend" else ""
        if own:
            hits.append(TriggerHit(own, Precedence.FILE))
        if record.name in disabled:
            one = Candidate(record, "disabled", "ACCELERATE_DISABLED_PLUGINS")
            kept_out += [(hit.precedence, record.name, hit.reason) for hit in hits]
        elif record.name == rule.usual or record in named:
            continue
        elif not hits:
            one = Candidate(record, "available", "not requested")
        else:
            one = _asked(record, hits, own, request, rule)
        made.candidates.append(one)
    counts_errors = not rule.skips_broken
    answers = [one for one in made.candidates if one.claim or (one.error and counts_errors)]
    if not rule.several:
        top = max((one.asked for one in answers), default=Precedence.DETECTED)
        if made.kind == "backend":
            _refuse_missing(request, top)
        asked, name, reason = max(kept_out, default=(top, "", ""))
        if asked > top and counts_errors:  # refused, as by name
            find(made.kind, name, source=reason, environ=request.environ)
        answers = [one for one in answers if one.asked == top]
    for one in answers:
        if one.error is not None and one.asked > Precedence.DETECTED:
            raise one.error
    claims = [(one.claim, one) for one in answers if one.claim is not None]
    for claim, one in claims if rule.several else _strongest(claims, made):
        one.state = "active"
        one.reason = claim.reason


def _asked(
    record: PluginRecord, hits: list[TriggerHit], own: str, request: Request, rule: Rule
) -> Candidate:
    """Import a triggered plugin and ask for its claim. Errors are recorded in the candidate.

    Args:
        own: where its own section of the config file is, which requests it by name; "" without one.
    """
    asked = max(hit.precedence for hit in hits)
    try:
        claim = rule.ask(record) if rule.ask is not None else _detect(record, request)
        if own:
            claim = Claim(claim.priority if claim else 0, own)
    except AccelerateError as error:
        version = isinstance(error, PluginVersionError)
        state = "broken" if isinstance(error, PluginError) and not version else "refused"
        return Candidate(record, state, str(error), asked=asked, error=error)
    told = f"asked because of {hits[0].reason}; it does not claim this run"
    if claim is not None:
        told = f"{claim.reason}, priority {claim.priority}"
    return Candidate(record, "passed over", told, claim, asked, section=bool(own))


def _own_section(record: PluginRecord, config: ConfigFile | None) -> str:
    """Return where the backend's own section of the config file is; "" without one."""
    names = (f"{record.name}_config", *(n for n, o in catalog.SECTIONS.items() if o == record.name))
    found = [name for name in names if config is not None and _asked_by_file(name, config)]
    return config.where(found[0]) if config is not None and found else ""


def _detect(record: PluginRecord, request: Request) -> Claim | None:
    """Call `detect` of a plugin class."""
    plugin = record.load_checked()
    with record.broken_if_raises("detect"):
        claim = plugin.detect(request)
    if claim is None or isinstance(claim, Claim):
        return claim
    raise record.broken(f"its detect() returned {claim!r}, which is neither a Claim nor None")


def _strongest(
    claims: list[tuple[Claim, Candidate]], made: Selection
) -> list[tuple[Claim, Candidate]]:
    """Return the claim with the highest priority, if there is one.

    Raises:
        PluginConflictError: two claims have equal priority, or two plugins have sections in the file.
    """
    top = max((claim.priority for claim, _ in claims), default=None)
    best = [(claim, one) for claim, one in claims if claim.priority == top]
    sections = [(claim, one) for claim, one in claims if one.section]
    best = sections if len(sections) > 1 else best
    if len(best) > 1:
        names = [one.record.name for _, one in best]
        reasons = "; ".join(f"{one.record.label}: {claim.reason}" for claim, one in best)
        equal = "with their own sections" if best is sections else f"with equal priority {top}"
        raise PluginConflictError(
            f"The {made.kind}s {listing(names)} claim this run {equal} ({reasons}). "
            f"Choose one: {made.rule.by_name.format(name=names[0])}, "
            f"or disable one with ACCELERATE_DISABLED_PLUGINS={names[-1]}."
        )
    return best


# --- triggers and names -----------------------------------------------------------------------


def trigger_hits(request: Request) -> dict[str, TriggerHit]:
    """Return the triggers that match this request, each with its cause.

    A trigger has the name of a constructor argument, an environment variable or a key of the config
    file, or it is `multi_process` (more than one process) or `always`. Two kinds of hits do not
    request the plugin, but let its `detect` decide: variables without the prefix `ACCELERATE_` that
    have no true value, and keys whose value is neither true nor a section.

    Raises:
        ConfigurationError: a variable `ACCELERATE_USE_...` is not a boolean.
    """
    hits: dict[str, TriggerHit] = {}
    for name in installed().triggers:
        text = request.environ.get(name, "")
        if name == "always":
            hits[name] = TriggerHit("its trigger 'always'")
        elif name == "multi_process":
            if request.topology.num_processes > 1:
                source = request.topology.source
                hits[name] = TriggerHit(f"{request.topology.num_processes} processes ({source})")
        elif request.arguments.get(name) is not None:
            hits[name] = TriggerHit(f"constructor argument {name}", Precedence.ARGUMENT)
        elif text != "" and parse_bool(text) is not False:
            origin = variable_origin(name, request.environ)
            if name.startswith("ACCELERATE_USE_"):
                require_bool(text, f"{origin[0].upper()}{origin[1:]}={text!r}")
            asks = name.startswith("ACCELERATE_") or parse_bool(text)
            hits[name] = TriggerHit(f"{origin}={text}", Precedence.of(origin) if asks else DETECTED)
        elif request.config is not None and _asked_by_file(name, request.config):
            asks = request.config[name] is True or isinstance(request.config[name], dict)
            hits[name] = TriggerHit(
                request.config.where(name), Precedence.FILE if asks else DETECTED
            )
    return hits


def _asked_by_file(name: str, config: ConfigFile) -> bool:
    """Return whether a key of the config file requests a plugin.

    In a file of Accelerate, `distributed_type` says which section applies.
    """
    kind, owner = config.get("distributed_type"), catalog.SECTIONS.get(name)
    if not config.get(name) or kind is None or owner not in catalog.DISTRIBUTED_TYPES.values():
        return bool(config.get(name))
    return catalog.DISTRIBUTED_TYPES.get(str(kind).upper()) == owner


def _named_elsewhere(kind: str, request: Request) -> SourcedValue:
    """Return a plugin name that comes from outside the settings, if there is one.

    `ACCELERATE_PLUGINS` names extensions, and `distributed_type` in a file names a backend.
    """
    if kind == "extension":
        text = request.environ.get("ACCELERATE_PLUGINS")
        return SourcedValue(text, "environment variable ACCELERATE_PLUGINS") if text else NOTHING
    if kind != "backend" or request.config is None:
        return NOTHING
    said = str(request.config.get("distributed_type", "")).upper()
    if said not in catalog.DISTRIBUTED_TYPES:
        return NOTHING
    return SourcedValue(catalog.DISTRIBUTED_TYPES[said], request.config.where("distributed_type"))


def _refuse_missing(request: Request, least: int) -> None:
    """Raise an error for a request of at least this precedence whose plugin is not installed."""
    have, config = {record.name for record in installed().plugins}, request.config
    sections = {n: o for n, o in catalog.SECTIONS.items() if o in catalog.NAMES["backend"].values()}
    for name, extra in {**catalog.ARGUMENTS, **catalog.VARIABLES, **sections}.items():
        origin = variable_origin(name, request.environ)
        if name in installed().triggers or extra in have:
            continue
        if request.arguments.get(name) is not None:
            said = f"The argument {name} of Accelerator belongs to"
        elif request.env_flag(name) and Precedence.of(origin) >= least:
            said = f"{origin[0].upper()}{origin[1:]} asks for"
        elif config is not None and least <= Precedence.FILE and _asked_by_file(name, config):
            said = f"The section {name} ({config.where(name)}) asks for"
        else:
            continue
        raise MissingPluginError(
            f"{said} a plugin that is not installed. Install it with: {catalog.pip_command(extra)}"
        )


def plugin_arguments() -> set[str]:
    """Return the triggers that are constructor arguments: lower case, and no reserved word."""
    reserved = {"always", "multi_process"}
    return {n for n in installed().triggers if n.isidentifier() and n == n.lower()} - reserved


def check_arguments(arguments: Mapping[str, Any], core_names: Mapping[str, Any]) -> None:
    """Refuse constructor arguments that neither the core, a plugin nor the catalog knows."""
    here = {*core_names, *plugin_arguments()}
    mistakes = Mistakes()
    for name in arguments:
        with mistakes:
            if name not in here and name not in catalog.ARGUMENTS:
                raise UnknownArgumentError(
                    f"Accelerator() has no argument {name!r}, and no installed plugin takes it."
                    f"{suggestion(name, here, catalog.ARGUMENTS)}"
                )
    mistakes.report()
