"""Run a plugin's checks: one process alone, then few launches of two ranks; collect the results."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_core.errors import AccelerateError, ConfigurationError, did_you_mean, listing
from accelerate_core.plugins.discovery import PluginRecord, find, installed
from accelerate_testing.checks import (
    SUITE_KINDS,
    Check,
    about,
    check_options,
    checks_of,
    missing_capability,
)
from accelerate_testing.processes import (
    CompletedRun,
    clean_environment,
    processor_seconds,
    run_command,
)
from accelerate_testing.results import Result
from accelerate_testing.stack_dump import DUMP_SIGNAL, call_site, frames_of, stack_dump_file

_LAUNCHES = 6  # after so many that were lost, the rest is not run
_HANGS = 3  # after so many that hung, too
_START_UP = 60.0  # seconds until the first check runs: imports, on a machine with other work
#: As much of one core and less per rank is no work: who waits for the others looks for their files.
_IDLE = 0.03
_DUMP = 5.0  # seconds in which a process writes where it stands


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
    if kind is None:
        kinds = {one.kind for one in installed().plugins if one.name == name} & {*SUITE_KINDS}
        if not kinds:
            from accelerate_launch.explain.why import missing

            raise missing(name)
        if len(kinds) > 1:
            raise ConfigurationError(
                f"There are plugins {name!r} of the kinds {listing(sorted(kinds))}: say which "
                "with --kind."
            )
        (kind,) = kinds
    return find(kind, name, source="the conformance suite", environ=os.environ)


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
    on_run: Callable[[str], None] = lambda name: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the checks against an installed plugin.

    Args:
        only: names of checks; None for all of its kind.
        environ: variables for the processes of the checks, such as the plugin's settings.
        options: what checks of some kinds can be told (see the suites in `accelerate_testing`).
        timeout: seconds a collective may wait.
        num_processes: ranks of the checks on ranks.
        prelude: a module that the processes import before the plugin is used.
        on_run: told several times a second the name of the check that runs, "" before the first.
        on_result: told each result as soon as it is there.

    Raises:
        ConfigurationError: `only` names a check that does not exist, or `options` has a key that
            no check of this kind reads.
    """
    if num_processes < 1:
        raise ConfigurationError(f"The suite takes one process or more, not {num_processes}.")
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
    named = {"ACCELERATE_PLUGINS": name} if kind == "extension" else {}
    variables = clean_environment(**{**(environ or {}), **named})
    with tempfile.TemporaryDirectory(prefix="accelerate-check-") as folder:
        session = _Session(
            kind, name, Path(folder), variables, dict(options or {}), timeout, num_processes,
            prelude, on_run, on_result,
        )  # fmt: skip
        return session.run(chosen)


@dataclass
class _Session:
    """The launches of one suite; what it is given are the arguments of `run_suite`."""

    kind: str
    name: str
    folder: Path
    environ: dict[str, str]
    options: dict[str, Any]
    timeout: float
    num_processes: int
    prelude: str
    on_run: Callable[[str], None]
    on_result: Callable[[Result], None]
    results: dict[str, Result] = field(default_factory=dict)
    #: The check that runs now, and since when.
    now: str = ""
    since: float = 0.0
    #: The ranks' processes; when they were last seen at work, when that was looked at, and what they
    #: had used of the processor by then.
    pids: list[int] = field(default_factory=list)
    active: float = 0.0
    looked: float = 0.0
    used: float = 0.0
    #: Launches that were ended since a check hung, and what is said of the last.
    hung: int = 0
    stuck: str = ""
    #: What went on when the checks of a launch had ended; None as long as none have.
    going_on: list[str] | None = None

    def run(self, chosen: Sequence[Check]) -> list[Result]:
        alone = [made.name for made in chosen if made.alone and not made.after]
        self._launch(alone, 1)
        self._not_run(alone)
        if rest := [made for made in chosen if not (made.alone or made.after)]:
            self._skip(rest)
            self._distributed([made for made in rest if made.name not in self.results])
        for made in chosen:
            if made.after:
                self._add(self._exits(made.name))
        return [self.results[made.name] for made in chosen if made.name in self.results]

    def _exits(self, name: str) -> Result:
        if self.going_on is None:
            return Result(name, "skipped", "not run: no other check came to its end")
        if self.going_on:
            told = "; ".join(self.going_on)
            return Result(name, "failed", "", f"when the checks had ended, there was still: {told}")
        return Result(name, "passed")

    def _left(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.results]

    def _launch(self, names: Sequence[str], ranks: int, dying: str = "") -> CompletedRun | None:
        """Run checks, and last what `dying` does before it; where one is lost, go on in another launch."""
        run = None
        for _ in range(_LAUNCHES):
            left = self._left(names)
            if not left and not dying:
                break
            run = self._start([name for name in (*left, dying) if name], ranks, dying=dying)
            left = self._left(names)
            if not left:
                break
            self._lost(left[0], run)
            if self.hung >= _HANGS:
                break
        return run

    def _skip(self, checks: Sequence[Check]) -> None:
        """Skip what does not apply, and all where the plugin does not load: it would fail alike."""
        for name in ("imports", "metadata", "api_version"):
            basic = self.results.get(name, Result(name, "passed"))
            if basic.state == "failed" and "Error" in basic.error.split(":")[0]:
                for made in checks:
                    self._add(Result(made.name, "skipped", f"not run: {name} failed"))
                return
        plugin = find(self.kind, self.name, source="the conformance suite").load()
        said = getattr(plugin, "supports", {})
        lacking = ""
        if self.kind in ("backend", "precision"):
            from accelerate_testing.devices import device_of  # it imports torch

            _, lacking = device_of(plugin)
        if self.options.get("one_process", False):
            lacking = "options say that it is for one process"
        for made in checks:
            supports = said if isinstance(said, Mapping) else {}
            owns = getattr(plugin, "owns", ())
            if why := missing_capability(made, supports, owns) or lacking:
                self._add(Result(made.name, "skipped", why))

    def _distributed(self, checks: Sequence[Check]) -> None:
        ranks = [made.name for made in checks if not made.before and not made.judge]
        dying = "".join(made.name for made in checks if made.before)  # there is one
        run = self._launch(ranks, self.num_processes, dying)
        if self.hung >= _HANGS or self._left(ranks):
            self._not_run(made.name for made in checks)
            return
        if run is not None and dying and dying not in self.results:
            if (self.folder / "never_killed.pt").exists():  # they came to the end meant for them
                run = self._start([dying], self.num_processes)
            if dying not in self.results:
                self._lost(dying, run)
        for made in checks:
            if made.judge is not None:
                run = self._start([made.name], self.num_processes, collect=False)
                result = Result(made.name, "passed", seconds=run.seconds)
                wrong = made.judge(run)
                if wrong:
                    result.state = "failed"
                    result.error = wrong
                    result.trace = run.story
                self._add(result)

    def _start(
        self, names: Sequence[str], ranks: int, *, dying: str = "", collect: bool = True
    ) -> CompletedRun:
        for pattern in ("*.json", "now.*", "stacks.*"):
            for path in self.folder.glob(pattern):
                path.unlink()
        self.now = ""
        self.pids = []
        self.stuck = ""
        self.since = time.monotonic() + _START_UP
        self.active = self.since
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
        environ = {**self.environ, "MASTER_PORT": "0"} if ranks == 1 else self.environ  # any
        watch = partial(self._watch, watched, ranks)
        run = run_command(command, environ, limit, meanwhile=watch)
        self._collect(watched, ranks)
        self._note_end(run, self._left(watched))
        return run

    def _note_end(self, run: CompletedRun, lost: Sequence[str]) -> None:
        """Keep what goes on although a launch came to its end: each with the check that left it."""
        paths = sorted(self.folder.glob("end.*.json"))
        if not paths or lost:
            return
        going_on = self.going_on or []
        self.going_on = going_on
        after = dict[str, str]()
        for path in paths:
            left = json.loads(path.read_text())
            going_on += [f"{what} (left by {name})" for what, name in left["threads"].items()]
            after |= left["processes"]
        for words in run.left:
            whose = f" (left by {after[words]})" if words in after else ""
            going_on.append(f"process {words}{whose}")
        if run.timed_out:
            going_on.append("a process that did not end")

    @property
    def _patience(self) -> float:
        """Seconds a check may take: a collective in it waits, and says so, before it is over.

        More where other work takes the cores, and where the check itself times what it starts.
        """
        own = 2 if self.kind == "launcher" else 1
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return (own * self.timeout + 10) * max(1.0, busy / (os.cpu_count() or 1))

    def _collect(self, names: Sequence[str], ranks: int) -> None:
        """Take what the ranks have told: which check runs, and what became of those before it."""
        paths = [self.folder / f"now.{rank}" for rank in range(ranks)]
        begun = [
            path.read_text(encoding="utf-8").split() if path.exists() else [] for path in paths
        ]
        # It is timed from when all of them have begun it.
        if all(one[2:] for one in begun) and {one[0] for one in begun} == {begun[0][0]} != {
            self.now
        }:
            self.now = begun[0][0]
            self.since = time.monotonic()
            self.pids = [int(one[1]) for one in begun]
            self.active = self.since
            self.looked = self.since
            self.used = processor_seconds(self.pids)
        for name in self._left(names):
            paths = [self.folder / f"{name}.{rank}.json" for rank in range(ranks)]
            if all(path.exists() for path in paths):
                lines = [json.loads(path.read_text()) for path in paths]
                meant = next((line["hooks"] for line in lines if line["hooks"]), "")
                self._add(_joined(name, lines), meant.split())

    def _watch(self, names: Sequence[str], ranks: int) -> bool:
        """Collect what is there; let the ranks of a check that hangs tell where they stand."""
        self._collect(names, ranks)
        self.on_run(self.now)
        self.stuck = self._hangs()
        if self.stuck and self.pids:
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, DUMP_SIGNAL)
            until = time.monotonic() + _DUMP
            while not self._dumped() and time.monotonic() < until:
                time.sleep(0.1)
        return bool(self.stuck)

    def _dumped(self) -> bool:
        """Whether all ranks have told where they stand."""
        paths = [stack_dump_file(self.folder, rank) for rank in range(len(self.pids))]
        return all(
            path.exists() and "run_check" in path.read_text(errors="replace") for path in paths
        )

    def _hangs(self) -> str:
        """Return how it is seen that the check does not end, "" as long as it may."""
        now = time.monotonic()
        if self.pids and now - self.looked >= 1.0:
            used = processor_seconds(self.pids)
            if abs(used - self.used) > _IDLE * len(self.pids) * (now - self.looked):
                self.active = now
            self.looked = now
            self.used = used
        # Where a rank has failed the others may wait for it in a collective, which says so in the end.
        alone = not any(self.folder.glob(f"{self.now}.*.json"))
        if self.pids and alone and self.kind != "launcher" and now - self.active > self.timeout / 2:
            return f"its processes did nothing for {self.timeout / 2:g} s"
        if now - self.since > self._patience:
            return f"it has taken {now - self.since:.0f} s"
        return ""

    def _lost(self, name: str, run: CompletedRun) -> None:
        """Give a check the blame that took its processes down, or that one rank never ended."""
        said = []
        for path in sorted(self.folder.glob(f"{name}.*.json")):
            if error := json.loads(path.read_text())["error"]:
                said.append(f"rank {path.suffixes[0][1:]}: {error}")
        self.hung += run.timed_out
        frames = [
            frames_of(path.read_text(errors="replace"))
            for path in sorted(self.folder.glob("stacks.*"))
        ]
        said += [f"rank {rank} stood in {call_site(its)}" for rank, its in enumerate(frames) if its]
        gone = f"the processes ended with {run.returncode}"
        if run.timed_out:
            gone = f"it did not end: {self.stuck or f'after {run.seconds:.0f} s it was not over'}"
        seconds = max(0.0, time.monotonic() - self.since)
        result = Result(name, "failed", "", "\n".join([gone, *said]), run.story, seconds)
        self._add(result, [function for its in frames for _, _, function in its])

    def _not_run(self, names: Iterable[str]) -> None:
        for name in self._left(names):
            self._add(Result(name, "skipped", "not run: too many processes were lost before"))

    def _add(self, result: Result, meant: Sequence[str] = ()) -> None:
        """Keep and tell a result; a failure with whose it is.

        Args:
            meant: hooks it is seen to be about, among other names.
        """
        if result.state == "failed":
            result.error = f"{result.error}\n{self._blamed(result.name, meant)}"
        self.results[result.name] = result
        self.on_result(result)

    def _blamed(self, name: str, meant: Sequence[str]) -> str:
        """Return whose failure it is, and which of its hooks to look at."""
        record = find(self.kind, self.name, source="the conformance suite")
        try:
            hooks = about(name, record.load(), self.kind, meant)
        except AccelerateError:
            hooks = ""
        return f"{self.kind} {record.label}{f'; {hooks}' if hooks else ''}"


def _joined(name: str, lines: Sequence[Mapping[str, Any]]) -> Result:
    """Make one result of what the ranks said."""
    seconds = max(line["seconds"] for line in lines)
    failed = {rank: line for rank, line in enumerate(lines) if line["state"] == "failed"}
    if not failed:
        return Result(name, lines[0]["state"], lines[0]["detail"], seconds=seconds)
    texts: dict[str, list[str]] = {}
    for rank, line in failed.items():
        texts.setdefault(line["error"], []).append(str(rank))
    several = len(lines) > 1
    error = "\n".join(
        f"rank {', '.join(ranks)}: {text}" if several else text for text, ranks in texts.items()
    )
    trace = next(iter(failed.values()))["trace"]
    return Result(name, "failed", "", error, trace, seconds)
