"""Choose a launcher for a plan, and replace this process by the launcher's command."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from accelerate_core.config.provenance import PROVENANCE_VARIABLE, decode
from accelerate_core.plugin import (
    Claim,
    ConfigurationError,
    PluginError,
    PluginRecord,
    Request,
    Rule,
    Selection,
    SourcedValue,
    Sources,
    Topology,
    TriggerHit,
    parse_bool,
    select,
)
from accelerate_core.plugins.selection import Precedence
from accelerate_launch.machine_0 import MachineZero, check_answers, check_hosts, check_resolves
from accelerate_launch.plan import LaunchPlan, counted

if TYPE_CHECKING:
    from accelerate_core.plugin import PluginFactory

logger = logging.getLogger(__name__)

#: The priority of a launcher that does not set one.
_PRIORITY = 100


class Launcher(Protocol):
    """Turns a plan into a command. A plugin of kind `launcher` is a class with these members.

    It must also have `api_version`, the version of the contract it was written for. It may have
    `launch_environment(plan)`, which returns environment variables for the processes. If it has
    `Settings`, a class decorated with `settings`, it is created with an instance of it.

    If several launchers accept a plan, those with a matching trigger come before those that are
    always candidates. Among equals, the one with the highest `priority` is used. The default is 100;
    the launchers of accelerate-launch have 10 (torchrun), 20 (simple), 30 (SLURM) and 40 (mpirun).
    `uses` names options that have no effect with other launchers: `main_training_function`,
    `same_network`.

    `elsewhere = True` says that the processes run on other machines. The script then need not exist
    on this one. `world_size(plan)` returns the number of ranks that form one world, if that is not
    the number of processes. `preview(plan)` returns what `launch --dry_run` prints instead of the command.

    A launcher that also starts functions, for `notebook_launcher`, is a `FunctionLauncher`.
    """

    name: str

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        ...

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this machine."""
        ...


class FunctionLauncher(Launcher, Protocol):
    """A launcher that also starts functions. `plan.target.kind` is `function` for them."""

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> list[Any] | None:
        """Run `function(*args)` in every process of the plan on this machine, until they all end.

        Returns the function's return values in the order of ranks, or None if the launcher does not
        collect them.

        Args:
            function: sets the plan's environment while it runs. The launcher must set the rank
                variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
                `MASTER_PORT`). The function can be pickled if `plan.start_method` is `spawn`.

        Raises:
            Exception: a rank failed; the text should name it.
        """
        ...


def choose_launcher(plan: LaunchPlan) -> Launcher:
    """Return the launcher that the plan names, or else the best one that accepts it.

    A launcher is a candidate if one of its triggers is `always` or a key of `plan.contributed`. The
    latter come first; among equals the highest `priority` wins. A launcher that is broken, was written
    for another major version of the contract, or was requested but does not accept the plan is
    skipped with a warning.

    Raises:
        PluginError: the named launcher is broken or has no `api_version`.
        PluginVersionError: the named launcher was written for another major version of the contract.
        PluginConflictError: two launchers of equal priority accept the plan.
        ConfigurationError: the named launcher does not accept the plan, or a setting is invalid.
    """
    return _choose(plan)[0]


def _choose(plan: LaunchPlan) -> tuple[Launcher, PluginRecord]:
    launcher, selection = consider_launchers(plan)
    for one in selection.candidates:
        if one.error is not None:
            _warn_once(f"{one.reason} The launch continues with {launcher.name!r}.")
        elif one.claim is None and one.state == "passed over":
            request = _explicit_request(one.record, plan)
            if request:
                _warn_once(
                    f"The launcher {one.record.label} was requested by {request}, but does not accept "
                    f"this launch ({_size(plan)}). The launch continues with {launcher.name!r}."
                )
    return launcher, selection.record


def _explicit_request(record: PluginRecord, plan: LaunchPlan) -> str:
    """Return what requests a launcher without further condition, "" if nothing does.

    A variable with another value, such as a list of hosts, only lets the launcher decide.
    """
    for name in sorted(record.triggers & plan.contributed.keys()):
        value = plan.contributed[name]
        if name.startswith("ACCELERATE_USE_") or parse_bool(str(value.value)):
            return value.origin
    return ""


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def consider_launchers(plan: LaunchPlan) -> tuple[Launcher, Selection]:
    """Return the launcher for `plan`, and the selection that chose it.

    Raises:
        AccelerateError: as for `choose_launcher`.
    """
    from accelerate_core.plugin import PluginFactory  # not needed for `launch --help`

    sources = Sources.of({**os.environ, **plan.environment})
    asking = _Asking(plan, PluginFactory(sources))
    # A trigger that matches comes before launchers that are always asked, whatever their priority.
    hits = {
        name: TriggerHit(value.origin, Precedence.FILE) for name, value in plan.contributed.items()
    }
    hits["always"] = TriggerHit("its trigger 'always'")
    by_name = "--launcher {name}"
    rule = Rule(claims=True, by_name=by_name, ask=asking.claim, hits=hits, skips_broken=True)
    request = Request({}, os.environ, Topology(), sources.config)
    selection = select("launcher", request, _named(plan), rule).or_raise()
    for one in selection.candidates:
        if isinstance(one.error, ConfigurationError):  # an invalid setting, which the user can fix
            raise one.error
    if not selection.active:
        raise PluginError("No installed launcher accepts this launch. Choose one with --launcher.")
    record = selection.record
    if record not in asking.accepting and asking.claim(record) is None:
        raise _refusal(record, plan)
    for one in selection.candidates:
        if one.claim is not None and one.state != "active":
            requested = selection.active[0].asked > one.asked
            why = "was requested" if requested else "has a higher priority"
            one.reason = f"{one.reason}; {record.name!r} {why}"
    return asking.accepting[record], selection


def _named(plan: LaunchPlan) -> SourcedValue:
    default = SourcedValue(plan.launcher, "the launch plan")
    return default if plan.launcher is None else plan.provenance.get("launcher", default)


@dataclass
class _Asking:
    """Asks launchers whether they accept a plan."""

    plan: LaunchPlan
    factory: PluginFactory
    #: The launchers that accept it.
    accepting: dict[PluginRecord, Launcher] = field(default_factory=dict)

    def claim(self, record: PluginRecord) -> Claim | None:
        """Return a launcher's claim to start the plan, None if it does not accept the plan."""
        plan = self.plan
        with record.broken_if_raises("__init__"):
            launcher: Launcher = self.factory.create(record)
        if not _takes(launcher, plan):
            return None
        with record.broken_if_raises("accepts"):
            if not launcher.accepts(plan):
                return None
            self.accepting[record] = launcher
            hits = sorted(record.triggers & plan.contributed.keys())
            reason = f"accepts {_size(plan)}"
            if hits:
                reason = f"requested by {plan.contributed[hits[0]].origin}"
            return Claim(getattr(launcher, "priority", _PRIORITY), reason)


def _size(plan: LaunchPlan) -> str:
    processes = counted(plan.num_processes, "process")
    return f"{processes} on {counted(plan.num_machines, 'machine')}"


def _refusal(record: PluginRecord, plan: LaunchPlan) -> ConfigurationError:
    """Return the error for a launcher that was named but does not accept the plan."""
    asked = f"The launcher {record.label} (requested by {_named(plan).origin})"
    if _takes(record.load(), plan):
        return ConfigurationError(f"{asked} does not accept this launch of {_size(plan)}.")
    return ConfigurationError(
        f"{asked} cannot start functions, because it has no launch_function. Put the code into a "
        f"script for accelerate-core launch --launcher {record.name}, or choose another launcher."
    )


def _takes(launcher: Any, plan: LaunchPlan) -> bool:
    """Return whether a launcher supports the target.

    Every launcher can start programs, only some can start functions.
    """
    return plan.target.kind != "function" or hasattr(launcher, "launch_function")


def command_of(plan: LaunchPlan) -> list[str]:
    """Return the command that starts `plan`.

    Raises:
        PluginError: the launcher plugin raised.
    """
    launcher, record = _choose(plan)
    with record.broken_if_raises("launch_command"):
        return list(launcher.launch_command(plan))


def preview_of(plan: LaunchPlan) -> str | None:
    """Return what the launcher would submit, for `--dry_run`; None if it has no `preview`.

    Raises:
        PluginError: the launcher plugin raised.
    """
    launcher, record = _choose(plan)
    preview = getattr(launcher, "preview", None)
    if preview is None:
        return None
    with record.broken_if_raises("preview"):
        return str(preview(plan))


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the processes. `environ` is not changed.

    Raises:
        PluginError: the launcher plugin raised.
    """
    launcher, record = _choose(plan)
    its: Mapping[str, str] = {}
    ask = getattr(launcher, "launch_environment", None)
    if ask is not None:
        with record.broken_if_raises("launch_environment"):
            its = ask(plan)
    environment = {**environ, **plan.environment, **its}
    settings = [name for name in its if name.startswith("ACCELERATE_")]
    if settings:
        # Otherwise, options of the same command that imply another backend would take precedence.
        origins = dict.fromkeys(settings, f"command line (launcher {record.name})")
        origins |= decode(plan.environment)
        environment[PROVENANCE_VARIABLE] = json.dumps(origins, sort_keys=True)
    return environment


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the plan's command, so that it receives signals directly.

    Raises:
        ConfigurationError: this process is a rank of a scheduler, and rank 0's address is wrong.
    """
    command = command_of(plan)
    environment = child_environment(plan, environ)
    _check_rank_address(plan)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # exec on Windows detaches from the console
        sys.exit(subprocess.call(command, env=environment))
    os.execvpe(command[0], command, environment)


def _check_rank_address(plan: LaunchPlan) -> None:
    """Check rank 0's address for ranks of a scheduler, which would otherwise wait for it silently."""
    host = plan.environment.get("MASTER_ADDR")
    if host is None:
        return
    port = int(plan.environment["MASTER_PORT"])
    source = f"MASTER_ADDR from {plan.provenance['num_processes'].origin}"
    check_resolves(host, port, source)
    machine = MachineZero(host, port, source, "static", {})
    if plan.environment["RANK"] == "0":
        check_hosts(machine)
    else:
        check_answers(machine)
