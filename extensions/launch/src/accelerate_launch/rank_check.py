"""Check a configuration as its ranks would when they create an `Accelerator`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import click

from accelerate_core.plugin import (
    AccelerateError,
    ConfigFile,
    ConfigurationError,
    MissingPluginError,
    ParallelismConfig,
    Sources,
    Topology,
    resolve_settings,
)
from accelerate_launch.checks import FOLLOWS
from accelerate_launch.plan import LaunchPlan
from accelerate_launch.planning import draft_plan
from accelerate_launch.schemas import plugin_schemas
from accelerate_launch.starting import Launcher, choose_launcher


def check_plan(
    plan: LaunchPlan, environ: Mapping[str, str], launcher: Launcher | None = None
) -> list[str]:
    """Create everything that `Accelerator()` creates in a rank before it uses a device.

    Args:
        environ: the environment of the ranks.
        launcher: the launcher of the plan, if it is known.

    Returns:
        Warnings about what the ranks would ignore.

    Raises:
        AccelerateError: a rank would raise it.
    """
    from accelerate_core import Accelerator, ProjectConfiguration  # imports torch
    from accelerate_core.accelerator.construction import check, resolve

    processes, per_machine = plan.num_processes, plan.processes_per_machine
    world_size = getattr(launcher, "world_size", None)
    if world_size is not None:
        processes = per_machine = world_size(plan)
    origin = plan.provenance["num_processes"].origin
    parameters = inspect.signature(Accelerator.__init__).parameters.values()
    arguments = {one.name: one.default for one in parameters if one.default is not one.empty}
    # Only scripts can name this directory, so what needs it is not refused here.
    arguments["project_config"] = ProjectConfiguration(".", automatic_checkpoint_naming=True)
    with _environment(environ):
        setup = resolve(arguments, {}, Topology(0, processes, 0, per_machine, origin))
        check(setup)
        config = Sources.of(environ).config
    if config is None:
        return []
    return _ignored_sections(config, setup.backend_record.name, getattr(launcher, "name", None))


def check_file(config: ConfigFile, environ: Mapping[str, str]) -> list[str]:
    """Check a config file alone like `check_plan`, for as many processes as it needs.

    Args:
        environ: the environment, without settings.
    """
    plan = draft_plan({}, environ, config)
    processes = plan.provenance["num_processes"].origin
    mesh = config.get("parallelism_config")
    if mesh and not processes.startswith((str(config.path), FOLLOWS)):
        # The file does not say how many processes there are, so it does not contradict the mesh.
        sizes, _ = resolve_settings(ParallelismConfig, None, Sources(environ, config))
        plan = replace(plan, num_processes=sizes.total_size)
    launcher = None
    with suppress(AccelerateError):  # a launcher may only work on the machine of the run
        launcher = choose_launcher(plan)
    return check_plan(plan, {**environ, **plan.environment}, launcher)


def print_findings(check: Callable[[], list[str]]) -> None:
    """Print the warnings that a check returns. Errors of plugins are notes.

    Raises:
        ConfigurationError: the configuration is wrong.
        MissingPluginError: it needs a plugin that is not installed.
    """
    try:
        for warning in check():
            click.echo(f"warning: {warning}", err=True)
    except (ConfigurationError, MissingPluginError):
        raise
    except Exception as error:  # such as a library that only the machine of the run has
        text = next(iter(str(error).splitlines()), type(error).__name__)
        click.echo(f"note: a plugin failed on this machine: {text}", err=True)


def _ignored_sections(config: ConfigFile, backend: str, launcher: str | None) -> list[str]:
    """Return a sentence for each section of a file that belongs to another backend or launcher."""
    active = {"backend": backend, "launcher": launcher}
    owners: dict[str, set[tuple[str, str]]] = {}
    for schema in plugin_schemas():
        if schema.section:
            owners.setdefault(schema.section, set()).add((schema.kind, schema.name))
    ignored = []
    for section, plugins in owners.items():
        # Scripts choose other plugins. For a launcher that is not known, nothing is ignored.
        used = any(active.get(kind) in (name, None) for kind, name in plugins)
        if used or not config.get(section):
            continue
        kind, name = sorted(plugins)[0]
        ignored.append(
            f"{section} ({config.where(section)}) is ignored: it belongs to the {kind} {name!r}, but "
            f"the {kind} is {active[kind]!r}."
        )
    return ignored


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace the variables of this process, which plugins read."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
