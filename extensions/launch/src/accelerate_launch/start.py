"""Turn a plan into a running program; the launcher's process becomes that program."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    PluginError,
    PluginVersionError,
)
from accelerate_core.plugins.discovery import (
    PluginRecord,
    check_api_version,
    disabled_names,
    find,
    installed,
)
from accelerate_core.plugins.selection import Candidate, Selection, TriggerHit
from accelerate_launch.machine_0 import MachineZero, check_answers, check_hosts, check_resolves
from accelerate_launch.plan import LaunchPlan, counted

logger = logging.getLogger(__name__)

#: Of a launcher that states none.
_PRIORITY = 100


class Launcher(Protocol):
    """Turns plans into commands; a plugin of kind `launcher` is a class of this form.

    It may also have `launch_environment(plan)`, a mapping of variables for the children, and
    states `api_version`, the version of the contract it was written for. One with `Settings`, a
    class made with `settings`, is made with an instance of them.

    `priority` (default 100) decides where several accept a plan; those that come with
    accelerate-launch, which are always asked, have 10 to 40. `uses` names options that others
    leave without an effect: `main_training_function`, `same_network`.

    One that starts functions too, for `notebook_launcher`, is a `FunctionLauncher`.
    """

    name: str

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        ...

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this machine."""
        ...


class FunctionLauncher(Launcher, Protocol):
    """A launcher that also starts functions: `plan.target.kind` is then `function`."""

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> None:
        """Run `function(*args)` in every process of the plan on this machine; return at their end.

        Args:
            function: sets the plan's environment while it runs. The variables of ranks (`RANK`,
                `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) are
                the launcher's to set. It can be pickled if `plan.start_method` is `spawn`.

        Raises:
            Exception: a rank failed; the text names it.
        """
        ...


def choose_launcher(plan: LaunchPlan) -> Launcher:
    """Return the launcher that starts `plan`: the one it names, else the first that accepts it.

    A launcher is asked if one of its triggers is `always` or among what the plan says to plugins;
    of those that accept the plan the one of the highest `priority` starts it. One that is broken, or
    speaks another major version of the contract, is passed over, with a warning.

    Raises:
        PluginError: the one that is named is broken or has no `api_version`.
        PluginVersionError: the one that is named speaks another major version of the contract.
        ConfigurationError: the one that is named does not take this launch.
    """
    launcher, selection = consider_launchers(plan)
    for one in selection.candidates:
        if one.state in ("refused", "broken"):
            _warn_once(f"{one.reason} The launch goes on with {launcher.name!r}.")
    return launcher


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def consider_launchers(plan: LaunchPlan) -> tuple[Launcher, Selection]:
    """Return the launcher that starts `plan`, and how it was chosen among those installed.

    Raises:
        PluginError, PluginVersionError, ConfigurationError: as `choose_launcher`.
    """
    made = Selection("launcher")
    records = installed().of_kind("launcher")
    if plan.launcher is not None:
        made.wanted = plan.provenance.get(
            "launcher", SourcedValue(plan.launcher, "the launch plan")
        )
        origin = made.wanted.origin
        launcher = _named(plan.launcher, origin, plan)
        others = f"{plan.launcher!r} is asked for by {origin}"
        made.candidates = [
            Candidate(record, "active", origin)
            if record.name == plan.launcher
            else Candidate(record, "available", others)
            for record in records
        ]
        return launcher, made
    made.trigger_hits = {"always": TriggerHit("it asks to be probed always")}
    made.trigger_hits |= {name: TriggerHit(one.origin) for name, one in plan.contributed.items()}
    asked = [_triggered(record, plan) for record in records]
    made.candidates = [one for _, one in asked]
    accepting = [(launcher, one) for launcher, one in asked if launcher is not None]
    if not accepting:
        raise PluginError("No installed launcher takes this launch; name one with --launcher.")
    launcher, chosen = max(accepting, key=lambda pair: getattr(pair[0], "priority", _PRIORITY))
    for _, one in accepting:
        one.reason = f"{chosen.record.name!r} accepts the plan and goes before it"
    what = f"{counted(plan.num_processes, 'process')} on {counted(plan.num_machines, 'machine')}"
    chosen.state = "active"
    chosen.reason = _why_asked(chosen.record, plan) or f"the first that accepts {what}"
    return launcher, made


def _why_asked(record: PluginRecord, plan: LaunchPlan) -> str:
    hits = sorted(record.triggers & plan.contributed.keys())
    return f"asked because of {plan.contributed[hits[0]].origin}" if hits else ""


def _named(name: str, origin: str, plan: LaunchPlan) -> Launcher:
    record = find("launcher", name, source=origin)
    launcher = _asked(record, plan)
    if launcher is not None:
        return launcher
    if not _takes(record.load(), plan):
        raise ConfigurationError(
            f"The launcher {record.label} (asked for by {origin}) starts programs, and no "
            "functions: it has no launch_function. Write what is to run into a script for "
            f"accelerate-core launch --launcher {record.name}, or name another launcher."
        )
    raise ConfigurationError(
        f"The launcher {record.label} (asked for by {origin}) does not take this launch: "
        f"{counted(plan.num_processes, 'process')} on {counted(plan.num_machines, 'machine')}."
    )


def _triggered(record: PluginRecord, plan: LaunchPlan) -> tuple[Launcher | None, Candidate]:
    """Ask a plugin's launcher whether it takes a plan, if one of its triggers is set."""
    if record.name in disabled_names():
        return None, Candidate(record, "disabled", "ACCELERATE_DISABLED_PLUGINS")
    if not record.triggers & {"always", *plan.contributed}:
        return None, Candidate(record, "available", "not asked for")
    try:
        launcher = _asked(record, plan)
    except PluginError as error:
        state = "refused" if isinstance(error, PluginVersionError) else "broken"
        return None, Candidate(record, state, str(error))
    why = "; ".join(filter(None, [_why_asked(record, plan), "it does not take this launch"]))
    return launcher, Candidate(record, "passed over", why)


def _asked(record: PluginRecord, plan: LaunchPlan) -> Launcher | None:
    """Return a launcher of a plugin, None if it does not take the plan.

    Raises:
        PluginError: it cannot be imported or made, states no version of the contract, or raised.
        PluginVersionError: it speaks another major version of the contract.
        ConfigurationError: a value of its settings is wrong.
    """
    cls = record.load()
    check_api_version(record, cls)
    settings: list[Any] = []
    if getattr(cls, "Settings", None) is not None:
        sources = Sources.of({**os.environ, **plan.environment})
        settings.append(resolve_settings(cls.Settings, None, sources, owner=record.name)[0])
    try:
        launcher: Launcher = cls(*settings)
        return launcher if _takes(cls, plan) and launcher.accepts(plan) else None
    except AccelerateError:
        raise
    except Exception as error:
        raise record.broken(
            f"asking it whether it accepts the plan raised {type(error).__name__}: {error}"
        ) from error


def _takes(launcher: Any, plan: LaunchPlan) -> bool:
    """Tell whether a launcher starts what the plan has: anyone a program, some a function."""
    return plan.target.kind != "function" or hasattr(launcher, "launch_function")


def command_of(plan: LaunchPlan) -> list[str]:
    """Return the command that starts `plan`.

    Raises:
        PluginError: the launcher of a plugin raised.
    """
    return list(_answer(choose_launcher(plan), "launch_command", plan))


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the children; `environ` is left as it is.

    Raises:
        PluginError: the launcher of a plugin raised.
    """
    launcher = choose_launcher(plan)
    more = hasattr(launcher, "launch_environment")
    its = _answer(launcher, "launch_environment", plan) if more else {}
    return {**environ, **plan.environment, **its}


def _answer(launcher: Any, method: str, plan: LaunchPlan) -> Any:
    try:
        return getattr(launcher, method)(plan)
    except AccelerateError:
        raise
    except Exception as error:
        record = find("launcher", launcher.name, source="this launch")
        raise record.broken(f"its {method}() raised {type(error).__name__}: {error}") from error


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the plan's command, so that signals reach it directly.

    Raises:
        ConfigurationError: this process is a rank, and the address of rank 0 is wrong.
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
    """Check the address that a scheduler's ranks meet at: they would wait for it without a word."""
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
