"""Run a plugin's checks: one process alone, then few launches of two ranks; collect the results."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    did_you_mean,
    listing,
)
from accelerate_core.plugins.discovery import PluginRecord, find, installed
from accelerate_testing.checks import (
    SUITE_KINDS,
    Check,
    about,
    check_options,
    checks_of,
    missing_capability,
)
from accelerate_testing.processes import Run, clean_environment, free_port, run_command
from accelerate_testing.results import Result

__all__ = ["choose_plugin", "run_suite"]

_LAUNCHES = 6  # after so many that were lost, the rest is not run
_HANGS = 2  # after so many that did not end by themselves, too: each costs all its time
_START_UP = 60.0  # seconds until the first check runs: imports, on a machine with other work

Watcher = Callable[[Result], None]


def choose_plugin(name: str, kind: str | None = None) -> PluginRecord:
    """Return the installed plugin of a name, whose kind may be left out if there is only one.

    Raises:
        MissingPluginError: there is none.
        PluginError: several distributions bring it, or it is disabled.
        ConfigurationError: plugins of several kinds have the name; there are no checks of `kind`.
    """
    if kind is not None and kind not in SUITE_KINDS:
        raise ConfigurationError(
            f"--kind {kind!r} is not one of {listing(SUITE_KINDS)}.{did_you_mean(kind, SUITE_KINDS)}"
        )
    kinds = [
        one.kind for one in installed().plugins if one.name == name and one.kind in SUITE_KINDS
    ]
    if kind is None and len(set(kinds)) > 1:
        raise ConfigurationError(
            f"There are plugins {name!r} of the kinds {listing(sorted(set(kinds)))}: say which "
            "with --kind."
        )
    if kind is None and not kinds:
        from accelerate_launch.explain.why import missing

        raise missing(name)
    return find(kind or kinds[0], name, because="the conformance suite", environ=os.environ)


def run_suite(
    kind: str,
    name: str,
    *,
    only: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 20.0,
    num_processes: int = 2,
    prelude: str = "",
    on_begin: Callable[[str], None] = lambda name: None,
    on_result: Watcher = lambda result: None,
) -> list[Result]:
    """Run the checks against an installed plugin.

    Args:
        only: names of checks; None for all of its kind.
        environ: variables for the processes of the checks, such as the plugin's settings.
        options: what checks of some kinds can be told (see the suites in `accelerate_testing`).
        timeout: seconds a collective may wait.
        num_processes: ranks of the checks on ranks.
        prelude: a module that the processes import before the plugin is used.
        on_begin: told the name of a check that begins, at best.
        on_result: told each result as soon as it is there.

    Raises:
        ConfigurationError: `only` names a check that does not exist, or `options` has a key that
            no check of this kind reads.
    """
    if num_processes < 2:
        raise ConfigurationError(f"The suite takes two processes or more, not {num_processes}.")
    if not timeout > 0:
        raise ConfigurationError(f"The timeout is a number of seconds above 0, not {timeout:g}.")
    every = checks_of(kind)
    check_options(kind, options or {}, "options")
    for one in only or ():
        if one not in every:
            raise ConfigurationError(
                f"There is no check {one!r} of a {kind}; there are {listing(every)}."
                f"{did_you_mean(one, every)}"
            )
    chosen = [made for made in every.values() if only is None or made.name in only]
    with tempfile.TemporaryDirectory(prefix="accelerate-check-") as folder:
        session = _Session(
            kind, name, Path(folder), dict(environ or {}), dict(options or {}), timeout,
            num_processes, prelude, on_begin, on_result,
        )  # fmt: skip
        return session.run(chosen)


class _Session:
    """The launches of one suite."""

    def __init__(
        self,
        kind: str,
        name: str,
        folder: Path,
        environ: dict[str, str],
        options: dict[str, Any],
        timeout: float,
        num_processes: int,
        prelude: str,
        on_begin: Callable[[str], None],
        on_result: Watcher,
    ) -> None:
        self.kind, self.name, self.folder, self.timeout = kind, name, folder, timeout
        self.environ = clean_environment(**environ)
        if kind == "extension":
            self.environ["ACCELERATE_PLUGINS"] = name
        self.options, self.num_processes, self.prelude = options, num_processes, prelude
        self.on_begin, self.on_result = on_begin, on_result
        self.results: dict[str, Result] = {}
        self._now, self._since = "", 0.0
        self._hung = 0

    def run(self, chosen: Sequence[Check]) -> list[Result]:
        alone = [made for made in chosen if made.place == "alone"]
        self._alone(alone)
        rest = [made for made in chosen if made.place != "alone"]
        stopped = self._cannot_start(rest)
        if stopped is None:
            self._distributed([made for made in rest if made.name not in self.results])
        return [self.results[made.name] for made in chosen if made.name in self.results]

    def _alone(self, checks: Sequence[Check]) -> None:
        """Run in one process; where a check takes it down, the others run in the next."""
        left = [made.name for made in checks]
        for _ in range(_LAUNCHES):
            if not left:
                return
            run = self._start(left, ranks=1)
            done = [name for name in left if name in self.results]
            if len(done) == len(left):
                return
            self._lost(left[len(done)], run)
            left = [name for name in left if name not in self.results]
            if self._hung >= _HANGS:
                break
        self._give_up(left)

    def _cannot_start(self, rest: Sequence[Check]) -> bool | None:
        """Without a plugin that loads, checks on ranks would all fail with the same words."""
        basics = [self.results.get(name) for name in ("imports", "metadata", "api_version")]
        broken = [result for result in basics if result is not None and result.state == "failed"]
        fatal = [one for one in broken if "Error" in one.error.split(":")[0]]
        if not fatal:
            return None
        for made in rest:
            self._add(Result(made.name, "skipped", f"not run: {fatal[0].name} failed"))
        return True

    def _distributed(self, checks: Sequence[Check]) -> None:
        self._skip_undeclared(checks)
        left = [made for made in checks if made.name not in self.results]
        ranks = [made.name for made in left if made.place == "ranks"]
        dying = [made.name for made in left if made.place == "kill"]
        ends = {made.name: made for made in left if made.place == "ends"}
        for _ in range(_LAUNCHES):
            if not ranks and not dying:
                break
            run = self._start([*ranks, *dying], dying=dying[0] if dying else "")
            ranks_left = [name for name in ranks if name not in self.results]
            if not ranks_left:
                if dying and not self._died(dying[0]):
                    self._lost(dying[0], run)
                    dying = []
                break
            self._lost(ranks_left[0], run)
            ranks = ranks_left[1:]
            if self._hung >= _HANGS:
                break
        if self._hung >= _HANGS or any(name not in self.results for name in ranks):
            self._give_up([made.name for made in left])
            return
        for name in dying:
            if name not in self.results:
                run = self._start([name])
                if name not in self.results:
                    self._lost(name, run)
        for name, made in ends.items():
            run = self._start([name], collect=False)
            wrong = made.judge(run) if made.judge is not None else ""
            story = run.story if wrong else ""
            self._add(Result(name, "failed" if wrong else "passed", "", wrong, story, run.seconds))

    def _died(self, name: str) -> bool:
        """Whether the ranks came to the end that was meant for them."""
        return (self.folder / "never_killed.pt").exists() and name not in self.results

    def _skip_undeclared(self, checks: Iterable[Check]) -> None:
        plugin = find(self.kind, self.name, because="the conformance suite").load()
        said = getattr(plugin, "supports", {})
        supports = said if isinstance(said, Mapping) else {}
        lacking = ""
        if self.kind in ("backend", "precision"):
            from accelerate_testing.devices import missing_device  # it imports torch

            lacking = missing_device(plugin)
        if self.options.get("one_process", False):
            lacking = "options say that it is for one process"
        for made in checks:
            why = missing_capability(made, supports, getattr(plugin, "owns", ())) or lacking
            if why:
                self._add(Result(made.name, "skipped", why))

    def _start(
        self,
        names: Sequence[str],
        *,
        ranks: int | None = None,
        dying: str = "",
        collect: bool = True,
    ) -> Run:
        ranks = self.num_processes if ranks is None else ranks
        for path in [*self.folder.glob("*.json"), self.folder / "now"]:
            path.unlink(missing_ok=True)
        self._now, self._since = "", time.monotonic() + _START_UP
        task = {
            "kind": self.kind, "name": self.name, "checks": list(names), "dying": dying,
            "folder": str(self.folder), "timeout": self.timeout, "options": self.options,
            "prelude": self.prelude,
        }  # fmt: skip
        file = self.folder / "task"
        file.write_text(json.dumps(task), encoding="utf-8")
        module = "accelerate_testing.worker"
        command = [sys.executable, "-m", module, str(file)]
        if ranks > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks)]
            command += ["--monitor_interval", "0.1", "--module", module, str(file)]
        limit = _START_UP + self._patience * len(names)
        watched = names if collect else ()
        # A backend may start a group for one process, too: not at the port everybody uses.
        environ = {**self.environ, "MASTER_PORT": str(free_port())} if ranks == 1 else self.environ
        return run_command(command, environ, limit, meanwhile=lambda: self._watch(watched, ranks))

    @property
    def _patience(self) -> float:
        """Seconds a check may take: a collective in it waits, and says so, before it is over.

        More where other work takes the cores.
        """
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return (2 * self.timeout + 10) * max(1.0, busy / (os.cpu_count() or 1))

    def _watch(self, names: Sequence[str], ranks: int) -> bool:
        """Collect what is there; tell whether the check that runs takes too long."""
        now = self.folder / "now"
        said = now.read_text(encoding="utf-8") if now.exists() else ""
        if said and said != self._now:
            self._now, self._since = said, time.monotonic()
            self.on_begin(said)
        self._collect(names, ranks)
        return time.monotonic() - self._since > self._patience

    def _collect(self, names: Sequence[str], ranks: int) -> None:
        for name in names:
            if name in self.results:
                continue
            paths = [self.folder / f"{name}.{rank}.json" for rank in range(ranks)]
            if all(path.exists() for path in paths):
                self._add(_joined(name, [json.loads(path.read_text()) for path in paths]))

    def _lost(self, name: str, run: Run) -> None:
        """Give a check the blame that took its processes down, or that one rank never ended."""
        lines = {
            int(path.suffixes[0][1:]): json.loads(path.read_text())
            for path in sorted(self.folder.glob(f"{name}.*.json"))
        }
        said = [f"rank {rank}: {line['error']}" for rank, line in lines.items() if line["error"]]
        self._hung += run.timed_out
        gone = "it did not end" if run.timed_out else f"the processes ended with {run.returncode}"
        error = "\n".join([*said, gone])
        self._add(Result(name, "failed", "", error, run.story, 0.0))

    def _blamed(self, name: str) -> str:
        """Return whose failure it is, and which of its hooks the check is about."""
        record = find(self.kind, self.name, because="the conformance suite")
        try:
            hooks = about(name, record.load(), self.kind)
        except AccelerateError:
            hooks = ""
        return f"{self.kind} {record.label}{f'; {hooks}' if hooks else ''}"

    def _give_up(self, names: Iterable[str]) -> None:
        """What is left is not run, and no failure of its own."""
        for name in names:
            self._add(Result(name, "skipped", "not run: too many processes were lost before"))

    def _add(self, result: Result) -> None:
        if result.name not in self.results:
            if result.state == "failed":
                result.error = f"{result.error}\n{self._blamed(result.name)}"
            self.results[result.name] = result
            self.on_result(result)


def _joined(name: str, lines: Sequence[Mapping[str, Any]]) -> Result:
    """Make one result of what the ranks said."""
    seconds = max(line["seconds"] for line in lines)
    failed = {rank: line for rank, line in enumerate(lines) if line["state"] == "failed"}
    if not failed:
        return Result(name, lines[0]["state"], lines[0]["detail"], seconds=seconds)
    texts: dict[str, list[int]] = {}
    for rank, line in failed.items():
        texts.setdefault(line["error"], []).append(rank)
    several = len(lines) > 1
    error = "\n".join(
        f"rank {', '.join(map(str, ranks))}: {text}" if several else text
        for text, ranks in texts.items()
    )
    trace = next(iter(failed.values()))["trace"]
    return Result(name, "failed", "", error, trace, seconds)
