"""What every plugin keeps, told from its metadata and its import."""

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

from accelerate_core.contract.parts import Checkpointer, LoaderFactory
from accelerate_core.errors import AccelerateError, listing
from accelerate_core.plugins.discovery import (
    OWN_DISTRIBUTION,
    PluginRecord,
    check_api_version,
    find,
    installed,
)
from accelerate_launch.start import Launcher
from accelerate_testing.checks import SUITE_KINDS, changed, check, own_classes, own_hooks
from accelerate_testing.import_time import check_import_time

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext

#: What brings its own requirements into the process of a training script anyway.
_BROUGHT = ("accelerate-core", "torch", "numpy")
#: What a plugin's import may bring beside that, of what its distribution requires: seconds of the
#: processor, and modules. attrs has 19 in 0.02 s, matplotlib 70 in 0.1 s, its pyplot 160 in 0.4 s.
_SECONDS, _MODULES = 0.3, 50
#: Hooks that need a model made for them.
_UNTRIED = ("context_parallel", "run_schedule")


def _record_of(ctx: CheckContext) -> PluginRecord:
    return find(ctx.kind, ctx.name, source="plugins check")


@check(*SUITE_KINDS, alone=True)
def imports(ctx: CheckContext) -> str:
    """Importing the plugin is cheap: it brings no library along and changes nothing."""
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
    # backports: parts of newer standard libraries, which libraries use where they find them.
    allowed = {own, "backports", *sys.stdlib_module_names}
    allowed |= {*_packages_beside(own), *_bases_of(record)}
    allowed |= {"accelerate_core"} if ctx.kind == "launcher" else _packages(_BROUGHT)
    new = [(name.split(".")[0], name) for name in set(sys.modules) - before]
    foreign = [top for top, _ in new if top not in allowed and top[0] != "_"]
    light = len(foreign) <= _MODULES and busy < _SECONDS
    heavy = {*foreign} - (_packages([record.distribution]) if foreign and light else set())
    assert not heavy, (
        f"importing {record.target} of {record.label} imports {listing(sorted(heavy))} too "
        f"({len(foreign)} modules, {busy:.2f} s); import it inside of the functions that "
        f"use it, unless it is a light one that {record.distribution} requires: below "
        f"{_SECONDS} s, and no more than {_MODULES} modules with what it brings along"
    )
    others = {top for top, _ in new if top[0] != "_"} - {own, *sys.stdlib_module_names}
    check_import_time(record.target, seconds, first, others)
    ctx.equal(changed(os.environ, environ), [], "variables of the environment the import changes")
    ctx.equal(threading.active_count(), threads, "threads after the import")
    ctx.equal([str(one.message) for one in caught], [], "warnings of the import")
    ctx.equal(printed.getvalue(), "", "what the import prints, where machines read `--json`")
    beside = ", ".join(sorted({*foreign}))
    return f"{seconds * 1000:.0f} ms{f', with {beside}' if beside else ''}"


def _package_of(record: PluginRecord) -> str:
    return record.target.split(":")[0].split(".")[0]


def _packages_beside(package: str) -> set[str]:
    """Return the top-level packages that come in the distributions of a package."""
    owners = importlib.metadata.packages_distributions()
    mine = set(owners.get(package, ()))
    return {name for name, dists in owners.items() if mine & set(dists)}


def _bases_of(record: PluginRecord) -> set[str]:
    """Return the packages of other plugins that its distribution requires, to build on them.

    Told from the entry points: of what is installed for editing, metadata names no packages.
    """
    wanted = {*_required(record.distribution)}
    plugins = installed().plugins
    return {_package_of(one) for one in plugins if canonicalize_name(one.distribution) in wanted}


def _packages(distributions: Iterable[str]) -> set[str]:
    """Return the packages of these distributions, and of all they require."""
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
    """Return the names of what a distribution requires, without its extras."""
    for found in importlib.metadata.distributions(name=distribution):
        lines = [line for line in found.requires or () if "extra ==" not in line]
        return [canonicalize_name(Requirement(line).name) for line in lines]
    return []


@check(*SUITE_KINDS, alone=True)
def metadata(ctx: CheckContext) -> str:
    """The entry point leads to a class of its kind and name; its distribution says what it needs."""
    record = _record_of(ctx)
    plugin = record.load()
    said = getattr(plugin, "name", None)
    ctx.equal(said, ctx.name, f"name of {record.target}, which the entry point calls {ctx.name!r}")
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
        f"the triggers {listing(mine)} of {record.distribution} name what no plugin is: their "
        f"value has to be that of the plugin's own entry point, {record.target!r}"
    )
    return f"{record.distribution} {record.version}, {record.target}"


def _check_form(kind: str, plugin: Any, record: PluginRecord) -> None:
    """A plugin is a class: of some kinds a subclass, of others of the form of a Protocol."""
    assert isinstance(plugin, type), f"{record.target} is {plugin!r}, and no class"
    forms = {"launcher": Launcher, "checkpointer": Checkpointer, "loaders": LoaderFactory}
    if kind in forms:
        for method in vars(forms[kind]):
            needed = not method.startswith("_")
            assert not needed or hasattr(plugin, method), f"{record.target} has no {method!r}"
        return
    from accelerate_core.backend import Backend
    from accelerate_core.backend.precision import Precision
    from accelerate_tracking import GeneralTracker

    base = {"backend": Backend, "precision": Precision, "tracker": GeneralTracker}.get(kind, object)
    assert issubclass(plugin, base), f"{record.target} is no subclass of {base.__name__}"


@check(*SUITE_KINDS, alone=True)
def api_version(ctx: CheckContext) -> str | None:
    """The class itself states the version of the contract it was written for, and this core speaks it."""
    record = _record_of(ctx)
    plugin = record.load()
    states = any("api_version" in vars(cls) for cls in own_classes(plugin) or [plugin])
    assert states or record.distribution == OWN_DISTRIBUTION, (
        f"{record.label} states no api_version of its own: write api_version = (1, 0) into "
        "the class; what it inherits is that of whichever core is installed"
    )
    if getattr(plugin, "api_version", None) is None:
        return None
    check_api_version(record, plugin)
    return "version " + ".".join(map(str, plugin.api_version))


@check("backend", "precision", "extension", alone=True)
def hooks(ctx: CheckContext) -> str:
    """Its hooks are hooks of the contract, with arguments those have."""
    from accelerate_core.backend import Backend
    from accelerate_core.backend.precision import Precision
    from accelerate_core.plugins.manager import ActivePlugins

    record = _record_of(ctx)
    plugin = record.load()
    active = ActivePlugins({"backend": Backend, "precision": Precision})
    try:
        made = plugin()
    except Exception as error:
        error.add_note(f"making one: {record.label}, no arguments")
        raise
    active.add(made, record, "plugins check")
    if ctx.kind == "backend":
        active.owner_methods(made, record, Backend)
    own = own_hooks(plugin)
    untried = [name for name in own if name in _UNTRIED]
    more = f"; no check calls {' and '.join(untried)}" if untried else ""
    return f"implements {', '.join(own) or 'none'}{more}"


@check("backend", "extension", alone=True)
def selection(ctx: CheckContext) -> str | None:
    """It is chosen by name and by its triggers, without a tie, and stays out where they are false."""
    from accelerate_core.config.provenance import SourcedValue
    from accelerate_core.contract.topology import Topology
    from accelerate_core.plugins.selection import Request, select, trigger_hits

    record = _record_of(ctx)
    one = Topology()
    chosen = select(
        ctx.kind, Request({}, {}, one), SourcedValue(ctx.name, "plugins check")
    ).or_raise()
    ctx.equal([its.record.name for its in chosen.active], [ctx.name], "what its name chooses")
    if not record.triggers:
        return "by name only: it has no triggers"
    found = []
    for trigger in sorted(record.triggers):
        topology = Topology(0, 2, 0, 2, "as checked") if trigger == "multi_process" else one
        environ = {trigger: "1"} if trigger == trigger.upper() else {}
        request = Request({}, environ, topology)
        if trigger not in trigger_hits(request):
            continue  # a constructor argument or a key of a file: it takes a value of its own
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
