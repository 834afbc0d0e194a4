"""What every plugin keeps, told from its metadata and its import."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from typing import Any

from accelerate_core.contract.hooks import HOOKS
from accelerate_core.contract.parts import Checkpointer, LoaderMaker
from accelerate_core.errors import AccelerateError, did_you_mean, listing
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    check_api_version,
    find,
    installed,
)
from accelerate_testing.checks import changed, check
from accelerate_testing.lab import Lab

EVERY_KIND = ("backend", "precision", "tracker", "launcher", "extension", "checkpointer", "loaders")
#: What brings its own requirements into the process of a training script anyway.
_BROUGHT = ("accelerate-core", "torch", "numpy")
#: What a plugin's import may bring beside that, of what its distribution requires: seconds of the
#: processor, and modules. attrs has 19 in 0.02 s, matplotlib 70 in 0.1 s, its pyplot 160 in 0.4 s.
_SECONDS, _MODULES = 0.3, 50
#: Hooks that need a model made for them.
_UNTRIED = ("context_parallel", "run_schedule")


def record_of(lab: Lab) -> PluginRecord:
    """Return the plugin's record."""
    return find(lab.kind, lab.name, because="plugins check")


@check(*EVERY_KIND, place="alone")
def imports(lab: Lab) -> str | None:
    """Importing the plugin is cheap: it brings no library along and changes nothing."""
    record = record_of(lab)
    if lab.kind == "launcher":
        pass
    else:
        import accelerate_core.accelerator  # noqa: F401
    before, threads, environ = set(sys.modules), threading.active_count(), dict(os.environ)
    started, busy = time.perf_counter(), time.process_time()
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        record.load()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    own = record.target.split(":")[0].split(".")[0]
    allowed = {own, *sys.stdlib_module_names, *_packages_of(own), *_bases_of(record)}
    allowed |= {"accelerate_core"} if lab.kind == "launcher" else _packages(_BROUGHT)
    new = [(name.split(".")[0], name) for name in set(sys.modules) - before]
    foreign = [(top, name) for top, name in new if top not in allowed and top[0] != "_"]
    if foreign:
        declared = _packages([record.distribution])
        light = len(foreign) <= _MODULES and busy < _SECONDS
        heavy = {top for top, _ in foreign if not light or top not in declared}
        if heavy:
            raise AssertionError(
                f"importing {record.target} of {record.label} imports {listing(sorted(heavy))} too "
                f"({len(foreign)} modules, {busy:.2f} s); import it inside of the functions that "
                f"use it, unless it is a light one that {record.distribution} requires: below "
                f"{_SECONDS} s, and no more than {_MODULES} modules with what it brings along"
            )
    lab.equal(changed(os.environ, environ), [], "variables of the environment the import changes")
    lab.equal(threading.active_count(), threads, "threads after the import")
    lab.equal([str(one.message) for one in caught], [], "warnings of the import")
    lab.equal(printed.getvalue(), "", "what the import prints, where machines read `--json`")
    beside = ", ".join(sorted({top for top, _ in foreign}))
    return f"{seconds * 1000:.0f} ms{f', with {beside}' if beside else ''}"


def _packages_of(package: str) -> set[str]:
    """Return the top-level packages that come in the distributions of a package."""
    owners = importlib.metadata.packages_distributions()
    mine = set(owners.get(package, ()))
    return {name for name, dists in owners.items() if mine & set(dists)}


def _bases_of(record: PluginRecord) -> set[str]:
    """Return the packages of other plugins that its distribution requires, to build on them.

    Told from the entry points: of what is installed for editing, metadata names no packages.
    """
    wanted = set(required(record.distribution))
    return {
        one.target.split(":")[0].split(".")[0]
        for one in installed().plugins
        if _plain(one.distribution) in wanted
    }


def _packages(distributions: Iterable[str]) -> set[str]:
    """Return the packages of these distributions, and of all they require."""
    seen: set[str] = set()
    waiting = [_plain(name) for name in distributions]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += required(name)
    owners = importlib.metadata.packages_distributions()
    return {name for name, dists in owners.items() if seen & {_plain(dist) for dist in dists}}


def required(distribution: str) -> list[str]:
    """Return the names of what a distribution requires, without its extras."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [_plain(re.split(r"[ <>=!~;\[(]", line)[0]) for line in lines if "extra ==" not in line]


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


@check(*EVERY_KIND, place="alone")
def metadata(lab: Lab) -> str | None:
    """The entry point leads to a class of its kind and name; its distribution says what it needs."""
    record = record_of(lab)
    plugin = record.load()
    said = getattr(plugin, "name", None)
    lab.equal(said, lab.name, f"name of {record.target}, which the entry point calls {lab.name!r}")
    _check_base(lab.kind, plugin, record)
    foreign = record.distribution not in ("unknown", OWN_DISTRIBUTION)
    if foreign and OWN_DISTRIBUTION not in required(record.distribution):
        raise AssertionError(
            f"{record.distribution} {record.version} does not require {OWN_DISTRIBUTION}: put "
            f'"{OWN_DISTRIBUTION}>=0.1,<1" into its dependencies'
        )
    targets = {plugin.target for plugin in installed().plugins}
    triggers = _triggers_of(record.distribution)
    mine = [name for name, target in triggers.items() if target not in targets]
    if mine:
        raise AssertionError(
            f"the triggers {listing(mine)} of {record.distribution} name what no plugin is: their "
            f"value has to be that of the plugin's own entry point, {record.target!r}"
        )
    return f"{record.distribution} {record.version}, {record.target}"


def _triggers_of(distribution: str) -> dict[str, str]:
    try:
        points = importlib.metadata.distribution(distribution).entry_points
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {
        point.name: point.value for point in points if point.group == "accelerate_core.triggers"
    }


def _check_base(kind: str, plugin: Any, record: PluginRecord) -> None:
    from accelerate_core.backend import Backend
    from accelerate_core.backend.precision import Precision
    from accelerate_tracking import GeneralTracker

    bases: dict[str, type] = {
        "backend": Backend,
        "precision": Precision,
        "tracker": GeneralTracker,
    }
    if not isinstance(plugin, type):
        raise AssertionError(f"{record.target} is {plugin!r}, and no class")
    if kind in bases and not issubclass(plugin, bases[kind]):
        raise AssertionError(f"{record.target} is no subclass of {bases[kind].__name__}")
    needed: tuple[str, ...] = ("accepts", "launch_command") if kind == "launcher" else ()
    protocol = {"checkpointer": Checkpointer, "loaders": LoaderMaker}.get(kind)
    if protocol is not None:
        needed = tuple(name for name in vars(protocol) if not name.startswith("_"))
    for method in needed:
        if not hasattr(plugin, method):
            raise AssertionError(f"{record.target} has no {method!r}")


@check(*EVERY_KIND, place="alone")
def api_version(lab: Lab) -> str | None:
    """The class itself states the version of the contract it was written for, and this core speaks it."""
    record = record_of(lab)
    plugin = record.load()
    own = [cls for cls in plugin.__mro__ if not cls.__module__.startswith("accelerate_core.")] or [
        plugin
    ]
    if record.distribution != OWN_DISTRIBUTION and not any("api_version" in vars(c) for c in own):
        raise AssertionError(
            f"{record.label} states no api_version of its own: write api_version = (1, 0) into "
            "the class; what it inherits is that of whichever core is installed"
        )
    if getattr(plugin, "api_version", None) is not None:
        check_api_version(record, plugin)
        return "version " + ".".join(map(str, plugin.api_version))
    return None


@check("backend", "precision", "extension", place="alone")
def hooks(lab: Lab) -> str | None:
    """Its hooks are hooks of the contract, with arguments those have."""
    from accelerate_core.plugins.manager import ActivePlugins

    record = record_of(lab)
    plugin = record.load()
    _near_misses(plugin, record)
    from accelerate_core import Backend

    active = ActivePlugins(Backend)
    try:
        made = plugin()
    except Exception as error:
        error.add_note(f"making one: {record.label}, no arguments")
        raise
    active.add(made, record, "plugins check")
    if lab.kind == "backend":
        from accelerate_core.backend import Backend

        active.bind_owner(made, record, Backend)
    own = [name for name in HOOKS if any(name in vars(cls) for cls in _own(plugin))]
    untried = [name for name in own if name in _UNTRIED]
    more = f"; no check calls {' and '.join(untried)}" if untried else ""
    return f"implements {', '.join(own)}{more}" if own else "implements none"


def _own(plugin: type) -> list[type]:
    return [cls for cls in plugin.__mro__ if not cls.__module__.startswith("accelerate_core.")]


def _near_misses(plugin: type, record: PluginRecord) -> None:
    """Refuse methods that look like hooks and are none: they would never be called."""
    known = {name for cls in plugin.__mro__ for name in vars(cls)} - {
        name for cls in _own(plugin) for name in vars(cls)
    }
    for cls in _own(plugin):
        for name, value in vars(cls).items():
            if name.startswith("_") or name in HOOKS or name in known or not callable(value):
                continue
            hint = did_you_mean(name, HOOKS) if _close(name) else ""
            if hint:
                raise AssertionError(
                    f"{record.label}: {name!r} is no hook of the contract and is never called.{hint}"
                )


def _close(name: str) -> bool:
    import difflib

    return bool(difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.9))


@check("backend", "extension", place="alone")
def selection(lab: Lab) -> str | None:
    """It is chosen by name and by its triggers, without a tie, and stays out where they are false."""
    from accelerate_core.config.provenance import Because
    from accelerate_core.contract.topology import Topology
    from accelerate_core.plugins.selection import (
        Request,
        fired_triggers,
        select,
    )

    record, one = record_of(lab), Topology()
    chosen = select(lab.kind, Request({}, {}, one), Because(lab.name, "plugins check")).settled()
    lab.equal([its.record.name for its in chosen.active], [lab.name], "what its name chooses")
    if not record.triggers:
        return "by name only: it has no triggers"
    found = []
    for trigger in sorted(record.triggers):
        topology = Topology(0, 2, 0, 2, "as checked") if trigger == "multi_process" else one
        environ = {trigger: "1"} if trigger == trigger.upper() else {}
        request = Request({}, environ, topology)
        if trigger not in fired_triggers(request):
            continue  # a constructor argument or a key of a file: it takes a value of its own
        claim = record.load().detect(request)
        found.append(f"{trigger}: {claim.priority if claim else 'no claim'}")
        if lab.kind == "backend" and claim is not None:
            try:
                select("backend", request).settled()
            except AccelerateError as error:
                error.add_note(f"while {trigger} is set")
                raise
    for trigger in record.triggers:
        off = Request({}, {trigger: "false"}, one)
        if trigger.startswith("ACCELERATE_USE_") and record.load().detect(off) is not None:
            raise AssertionError(f"{record.label} claims a run with {trigger}=false")
    return ", ".join(found) or None
