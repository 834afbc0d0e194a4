"""Checks of every plugin: its import, its metadata and its hooks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from accelerate_core.plugin import AccelerateError, Checkpointer, LoaderFactory, listing
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    check_api_version,
    find,
    installed,
)
from accelerate_launch.starting import Launcher
from accelerate_testing.checks import SUITE_KINDS, changed, check, own_classes, own_hooks
from accelerate_testing.import_time import check_import_time

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext

#: Packages that a training script imports anyway, with everything that they require.
_BROUGHT = ("accelerate-core", "torch", "numpy")
#: Processor seconds and modules of other required packages that importing a plugin may take.
#: attrs has 19 modules in 0.02 s, matplotlib 70 in 0.1 s, its pyplot 160 in 0.4 s.
_SECONDS, _MODULES = 0.3, 50
#: Hooks that no check calls, because they need a special model.
_UNTRIED = ("context_parallel", "run_schedule")


def _record_of(ctx: CheckContext) -> PluginRecord:
    return find(ctx.kind, ctx.name, source="plugins check")


@check(*SUITE_KINDS, alone=True)
def imports(ctx: CheckContext) -> str:
    """Importing the plugin is cheap, imports no heavy library and changes nothing."""
    record = _record_of(ctx)
    first = "accelerate_core" if ctx.kind == "launcher" else "accelerate_core.accelerator"
    importlib.import_module(first)
    before = set(sys.modules)
    threads = threading.active_count()
    environ = dict(os.environ)
    started = time.perf_counter()
    busy = time.process_time()
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        record.load()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    own = _package_of(record)
    # backports: parts of newer standard libraries, which libraries use if they are installed.
    allowed = {own, "backports", *sys.stdlib_module_names}
    allowed |= {*_packages_beside(own), *_bases_of(record)}
    allowed |= {"accelerate_core"} if ctx.kind == "launcher" else _packages(_BROUGHT)
    new = [(name.split(".")[0], name) for name in set(sys.modules) - before]
    foreign = [top for top, _ in new if top not in allowed and top[0] != "_"]
    light = len(foreign) <= _MODULES and busy < _SECONDS
    heavy = {*foreign} - (_packages([record.distribution]) if foreign and light else set())
    assert not heavy, (
        f"importing {record.target} of {record.label} imports {listing(sorted(heavy))} too "
        f"({len(foreign)} modules, {busy:.2f} s). Import it inside the functions that use it. Only "
        f"light packages that {record.distribution} requires may be imported, so a base class from "
        "accelerate_tracking or accelerate_launch needs that package in `dependencies`: together at most "
        f"{_SECONDS} s and {_MODULES} modules"
    )
    others = {top for top, _ in new if top[0] != "_"} - {own, *sys.stdlib_module_names}
    check_import_time(record.target, seconds, first, others)
    ctx.equal(changed(os.environ, environ), [], "environment variables that the import changes")
    ctx.equal(threading.active_count(), threads, "threads after the import")
    ctx.equal([str(one.message) for one in caught], [], "warnings of the import")
    ctx.equal(printed.getvalue(), "", "output of the import, which would break `--json`")
    beside = ", ".join(sorted({*foreign}))
    return f"{seconds * 1000:.0f} ms{f', with {beside}' if beside else ''}"


def _package_of(record: PluginRecord) -> str:
    return record.target.split(":")[0].split(".")[0]


def _packages_beside(package: str) -> set[str]:
    """Return the top-level packages in the distributions of a package."""
    owners = importlib.metadata.packages_distributions()
    mine = set(owners.get(package, ()))
    return {name for name, dists in owners.items() if mine & set(dists)}


def _bases_of(record: PluginRecord) -> set[str]:
    """Return the packages of other plugins that its distribution requires, to build on them.

    They come from entry points, because the metadata of an editable installation has no packages.
    """
    wanted = {*_required(record.distribution)}
    plugins = installed().plugins
    return {_package_of(one) for one in plugins if canonicalize_name(one.distribution) in wanted}


def _packages(distributions: Iterable[str]) -> set[str]:
    """Return the packages of these distributions and of everything they require."""
    seen: set[str] = set()
    waiting: list[str] = [canonicalize_name(name) for name in distributions]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += _required(name)
    owners = importlib.metadata.packages_distributions()
    return {name for name, its in owners.items() if seen & {canonicalize_name(one) for one in its}}


def _required(distribution: str) -> list[str]:
    """Return the distributions that a distribution requires, without its extras."""
    for found in importlib.metadata.distributions(name=distribution):
        lines = [line for line in found.requires or () if "extra ==" not in line]
        return [canonicalize_name(Requirement(line).name) for line in lines]
    return []


@check(*SUITE_KINDS, alone=True)
def metadata(ctx: CheckContext) -> str:
    """The entry point is a class of its kind and name, and its distribution requires accelerate-core."""
    record = _record_of(ctx)
    plugin = record.load()
    said = getattr(plugin, "name", None)
    ctx.equal(said, ctx.name, f"name of {record.target}, whose entry point is {ctx.name!r}")
    _check_form(ctx.kind, plugin, record)
    foreign = record.distribution not in ("unknown", OWN_DISTRIBUTION)
    assert not foreign or OWN_DISTRIBUTION in _required(record.distribution), (
        f"{record.distribution} {record.version} does not require {OWN_DISTRIBUTION}: put "
        f'"{OWN_DISTRIBUTION}>=0.1,<1" into its dependencies'
    )
    targets = {plugin.target for plugin in installed().plugins}
    points = importlib.metadata.entry_points(group="accelerate_core.triggers")
    named = [one for one in points if one.dist and one.dist.name == record.distribution]
    mine = [one.name for one in named if one.value not in targets]
    assert not mine, (
        f"the triggers {listing(mine)} of {record.distribution} do not point to a plugin: their value "
        f"must be that of the plugin's entry point, {record.target!r}"
    )
    return f"{record.distribution} {record.version}, {record.target}"


def _check_form(kind: str, plugin: Any, record: PluginRecord) -> None:
    """Fail unless a plugin is a class with the base class or the methods for its kind."""
    assert isinstance(plugin, type), f"{record.target} is {plugin!r}, not a class"
    forms = {"launcher": Launcher, "checkpointer": Checkpointer, "loaders": LoaderFactory}
    if kind in forms:
        for method in vars(forms[kind]):
            needed = not method.startswith("_")
            assert not needed or hasattr(plugin, method), (
                f"{record.target} has no method {method!r}"
            )
        return
    from accelerate_core.plugin import Backend, Precision
    from accelerate_tracking import GeneralTracker

    base = {"backend": Backend, "precision": Precision, "tracker": GeneralTracker}.get(kind, object)
    assert issubclass(plugin, base), f"{record.target} is not a subclass of {base.__name__}"


@check(*SUITE_KINDS, alone=True)
def api_version(ctx: CheckContext) -> str | None:
    """The class states the version of the contract that it was written for, and this core supports it."""
    record = _record_of(ctx)
    plugin = record.load()
    states = any("api_version" in vars(cls) for cls in own_classes(plugin) or [plugin])
    assert states or record.distribution == OWN_DISTRIBUTION, (
        f"{record.label} does not state an api_version: add api_version = (1, 0) to the class. An "
        "inherited one would change with the installed core"
    )
    if getattr(plugin, "api_version", None) is None:
        return None
    check_api_version(record, plugin)
    return "version " + ".".join(map(str, plugin.api_version))


@check("backend", "precision", "extension", alone=True)
def hooks(ctx: CheckContext) -> str:
    """Its hooks exist in the contract, with the arguments that they have there."""
    from accelerate_core.plugin import Backend, Precision
    from accelerate_core.plugins.manager import ActivePlugins

    record = _record_of(ctx)
    active = ActivePlugins({"backend": Backend, "precision": Precision})
    made = ctx.create()
    active.add(made, record, "plugins check")
    if ctx.kind == "backend":
        active.owner_methods(made, record, Backend)
    own = own_hooks(record.load())
    untried = [name for name in own if name in _UNTRIED]
    more = f"; no check calls {' and '.join(untried)}" if untried else ""
    return f"implements {', '.join(own) or 'none'}{more}"


@check("backend", "precision", "extension", alone=True, hooks="state_attributes")
def attributes(ctx: CheckContext) -> str:
    """It serves no attribute that the Accelerator or its state already has."""
    accelerator = ctx.accelerator()
    own = {*dir(type(accelerator)), *dir(type(accelerator.state)), *vars(accelerator)}
    served: list[str] = []
    for one in accelerator._shared_hooks.implementations("state_attributes"):
        if one.key == f"{ctx.kind}:{ctx.name}":
            answer: Any = accelerator._shared_hooks.call(one)
            served += answer or {}
    hidden = sorted({*served} & own)
    assert not hidden, (
        f"it serves {listing(hidden)}, which the Accelerator has itself, so scripts never get the "
        "plugin's: choose another name"
    )
    return ", ".join(served) or "it serves none"


@check("backend", "extension", alone=True)
def selection(ctx: CheckContext) -> str | None:
    """Its name and its triggers select it, without a tie, and false triggers don't."""
    from accelerate_core.config.provenance import SourcedValue
    from accelerate_core.plugin import Topology
    from accelerate_core.plugins.selection import Request, select, trigger_hits

    record = _record_of(ctx)
    one = Topology()
    chosen = select(
        ctx.kind, Request({}, {}, one), SourcedValue(ctx.name, "plugins check")
    ).or_raise()
    active = [its.record for its in chosen.active]
    named = [its.name for its in active if its is record or "always" not in its.triggers]
    ctx.equal(named, [ctx.name], "plugins selected by its name")
    if not record.triggers:
        return "by name only: it has no triggers"
    found = []
    for trigger in sorted(record.triggers):
        topology = Topology(0, 2, 0, 2, "as checked") if trigger == "multi_process" else one
        environ = {trigger: "1"} if trigger == trigger.upper() else {}
        request = Request({}, environ, topology)
        if trigger not in trigger_hits(request):
            continue  # a constructor argument or a key of the config file, with its own values
        claim = record.load().detect(request)
        found.append(f"{trigger}: {claim.priority if claim else 'no claim'}")
        if ctx.kind == "backend" and claim is not None:
            try:
                select("backend", request).or_raise()
            except AccelerateError as error:
                error.add_note(f"while {trigger} is set")
                raise
    for trigger in record.triggers:
        off = Request({}, {trigger: "false"}, one)
        claims = trigger.startswith("ACCELERATE_USE_") and record.load().detect(off) is not None
        assert not claims, f"{record.label} claims a run with {trigger}=false"
    return ", ".join(found) or None
