"""Run a plugin's checks in one process and then on ranks, in few launches, and collect the results."""

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

from accelerate_core.plugin import (
    AccelerateError,
    ConfigurationError,
    PluginRecord,
    did_you_mean,
    find,
    installed,
    listing,
    warn,
)
from accelerate_testing import fake_device
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
    torchrun,
)
from accelerate_testing.results import Result, prevents_others
from accelerate_testing.stack_dump import DUMP_SIGNAL, call_site, frames_of, stack_dump_file

#: Launches of which the processes may be lost, and hang; after that, the other checks are not run.
_LAUNCHES, _HANGS = 6, 3
#: Seconds until the first check runs, for imports on a machine with other work.
_START_UP = 60.0
#: Share of one core that a rank uses at most while it only looks for the files of other ranks.
_IDLE = 0.03
#: Seconds in which a process writes its stacks.
_DUMP = 5.0


def choose_plugin(name: str, kind: str | None = None) -> PluginRecord:
    """Return the installed plugin with this name; `kind` is only needed if several kinds have it.

    Raises:
        MissingPluginError: it is not installed.
        PluginError: several distributions provide it, or it is disabled.
        ConfigurationError: plugins of several kinds have the name, or there are no checks for `kind`.
    """
    if kind is not None and kind not in SUITE_KINDS:
        raise ConfigurationError(
            f"--kind {kind!r} is not one of {listing(SUITE_KINDS)}.{did_you_mean(kind, SUITE_KINDS)}"
        )
    if kind is None:
        kinds = {one.kind for one in installed().plugins if one.name == name} & {*SUITE_KINDS}
        if not kinds:
            raise _no_suite(name)
        if len(kinds) > 1:
            raise ConfigurationError(
                f"There are plugins named {name!r} of the kinds {listing(sorted(kinds))}. Choose one "
                "with --kind."
            )
        (kind,) = kinds
    return find(kind, name, source="the conformance suite", environ=os.environ)


def _no_suite(name: str) -> AccelerateError:
    """Return the error for a plugin that isn't installed, or of a kind without checks."""
    from accelerate_launch.explain.why import missing

    others = sorted({one.kind for one in installed().plugins if one.name == name})
    if not others:
        return missing(name)
    instead = ""
    if "device" in others:
        instead = (
            f" To test a backend on it, run 'accelerate-core plugins check ddp --device {name}'."
        )
    return ConfigurationError(
        f"{name!r} is a {' and a '.join(others)}, and there are no checks for this kind. There are "
        f"checks for {listing(SUITE_KINDS)}.{instead}"
    )


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
    device: str = "",
    on_run: Callable[[str], None] = lambda name: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the checks against an installed plugin.

    Args:
        only: names of checks; None for all checks of this kind.
        environ: variables for the processes of the checks, such as the plugin's settings.
        options: options of the suite for this kind (see the suites in `accelerate_testing`).
        timeout: seconds a collective may wait.
        num_processes: ranks of the checks on ranks.
        prelude: a module that the processes import before the plugin is used.
        device: type of the device on which the checks must run, such as "cuda"; by default the CPU,
            unless the plugin does not run there. "fake" is `accelerate_testing.fake_device`. If the
            machine has fewer devices than `num_processes`, a warning is logged, and the checks on ranks
            are skipped.
        on_run: called several times a second with the name of the running check, "" before the first.
        on_result: called with each result as soon as it is known.

    Raises:
        ConfigurationError: `only` names a check that does not exist, `options` has a key that no
            check of this kind reads, or this machine has no such device.
    """
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes} must be at least 1.")
    if not timeout > 0:
        raise ConfigurationError(f"timeout={timeout:g} must be a number of seconds above 0.")
    if device:
        _check_device(device, kind, prelude)
    every = checks_of(kind)
    check_options(kind, options or {}, "options")
    for one in only or ():
        if one not in every:
            raise ConfigurationError(
                f"There is no check {one!r} for a {kind}. The checks are {listing(every)}."
                f"{did_you_mean(one, every)}"
            )
    chosen = [made for made in every.values() if only is None or made.name in only]
    named = {"ACCELERATE_PLUGINS": name} if kind == "extension" else {}
    if device == fake_device.NAME:
        from accelerate_testing.fake_device import build

        build.compiled()  # before a time limit starts
        named[fake_device.DEVICES] = os.environ.get(fake_device.DEVICES, str(num_processes))
    variables = clean_environment(**{**named, **(environ or {})})
    few = _too_few(device, num_processes, prelude, variables)
    if few:
        warn(f"The checks on ranks are skipped: {few}.")
    with tempfile.TemporaryDirectory(prefix="accelerate-check-") as folder:
        session = _Session(
            kind, name, Path(folder), variables, dict(options or {}), timeout, num_processes,
            prelude, device, few, on_run, on_result,
        )  # fmt: skip
        return session.run(chosen)


def _check_device(device: str, kind: str, prelude: str) -> None:
    """Refuse a device that this machine does not have."""
    import torch

    if kind not in ("backend", "precision", "extension"):
        raise ConfigurationError(
            f"The checks of a {kind} run on the CPU; leave device={device!r} out."
        )
    if prelude or device == fake_device.NAME:  # the processes of the checks install it
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu", *([here.type] if here is not None else [])]
    if device not in there:
        raise ConfigurationError(
            f"device={device!r} is not a device of this machine, which has {listing(there)}."
            f"{did_you_mean(device, there)} If importing torch doesn't load the device, name the module "
            "that registers it with --prelude."
        )


def _too_few(device: str, num_processes: int, prelude: str, environ: Mapping[str, str]) -> str:
    """Return why the checks on ranks can't run, "" if there is a device for each rank."""
    if device in ("", "cpu"):
        return ""
    count = _device_count(device, prelude, environ)
    if count is None or count >= num_processes:
        return ""
    return (
        f"num_processes={num_processes} needs as many {device} devices, and there are only {count}"
    )


def _device_count(device: str, prelude: str, environ: Mapping[str, str]) -> int | None:
    """Return how many devices the processes of the checks have, None if they fail to start."""
    if device == fake_device.NAME:
        text = environ[fake_device.DEVICES]
        return int(text) if text.isdigit() else None
    if not prelude:
        import torch

        return torch.accelerator.device_count()
    # Only a process that has imported the module has its devices.
    script = f"import torch, {prelude}; print(torch.accelerator.device_count())"
    run = run_command([sys.executable, "-c", script], dict(environ), timeout=_START_UP)
    count = run.stdout.split()[-1:]
    return int(count[0]) if run.returncode == 0 and count and count[0].isdigit() else None


@dataclass
class _Session:
    """The launches of one suite. The first fields are the arguments of `run_suite`."""

    kind: str
    name: str
    folder: Path
    environ: dict[str, str]
    options: dict[str, Any]
    timeout: float
    num_processes: int
    prelude: str
    device: str
    #: Why the checks on ranks can't run on this machine, "" if they can.
    few: str
    on_run: Callable[[str], None]
    on_result: Callable[[Result], None]
    results: dict[str, Result] = field(default_factory=dict)
    #: The check that runs now, and the time at which it started.
    now: str = ""
    since: float = 0.0
    #: The ranks' processes; when they last used the processor, when that was last measured, and how
    #: many seconds they had used by then.
    pids: list[int] = field(default_factory=list)
    active: float = 0.0
    looked: float = 0.0
    used: float = 0.0
    #: Launches that were ended because a check hung, and the reason for the last.
    hung: int = 0
    stuck: str = ""
    #: What was still running after the checks of a launch had ended; None before the first launch ends.
    still_running: list[str] | None = None

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
        if self.still_running is None:
            return Result(name, "skipped", "not run: no launch of the other checks ended normally")
        if self.still_running:
            what = "; ".join(self.still_running)
            return Result(name, "failed", "", f"still running after the checks had ended: {what}")
        return Result(name, "passed")

    def _left(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.results]

    def _launch(self, names: Sequence[str], ranks: int, dying: str = "") -> CompletedRun | None:
        """Run checks, then the part of the check `dying` that kills its processes.

        If the processes of a check are lost, the others run in another launch.
        """
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
        """Skip the checks that don't apply, or all of them if the plugin cannot be loaded."""
        for one in list(self.results.values()):
            if prevents_others(one.name, one.state, one.error):
                for made in checks:
                    self._add(Result(made.name, "skipped", f"not run: {one.name} failed"))
                return
        plugin = find(self.kind, self.name, source="the conformance suite").load()
        said = getattr(plugin, "supports", {})
        lacking = ""
        if self.kind in ("backend", "precision"):
            from accelerate_testing.devices import placement_of  # it imports torch

            brought = bool(self.prelude) or self.device == fake_device.NAME
            _, lacking = placement_of(plugin, self.device, brought)
        lacking = lacking or self.few
        if self.options.get("one_process", False):
            lacking = "the option one_process is set"
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
            if (self.folder / "never_killed.pt").exists():  # they were killed where they should be
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
            "prelude": self.prelude, "device": self.device,
        }  # fmt: skip
        file = self.folder / "task"
        file.write_text(json.dumps(task), encoding="utf-8")
        module = "accelerate_testing.worker"
        if ranks > 1:
            command = [*torchrun(ranks), "--module", module, str(file)]
        else:
            command = [sys.executable, "-m", module, str(file)]
        limit = _START_UP + self._patience * len(names)
        watched = names if collect else ()
        # A backend may start a group for one process, too: let it use any free port.
        environ = {**self.environ, "MASTER_PORT": "0"} if ranks == 1 else self.environ
        watch = partial(self._watch, watched, ranks)
        run = run_command(command, environ, limit, meanwhile=watch)
        self._collect(watched, ranks)
        self._note_end(run, self._left(watched))
        return run

    def _note_end(self, run: CompletedRun, lost: Sequence[str]) -> None:
        """Record what still runs after a launch has ended, with the check that left it."""
        paths = sorted(self.folder.glob("end.*.json"))
        if not paths or lost:
            return
        still_running = self.still_running or []
        self.still_running = still_running
        after = dict[str, str]()
        for path in paths:
            left = json.loads(path.read_text())
            still_running += [f"{what} (left by {name})" for what, name in left["threads"].items()]
            after |= left["processes"]
        for words in run.left:
            whose = f" (left by {after[words]})" if words in after else ""
            still_running.append(f"process {words}{whose}")
        if run.timed_out:
            still_running.append("a process that did not end")

    @property
    def _patience(self) -> float:
        """Seconds a check may take: longer than a collective waits, so that its error is seen.

        It is longer if other work uses the cores, and for launchers, whose checks have time limits
        themselves.
        """
        own = 2 if self.kind == "launcher" else 1
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return (own * self.timeout + 10) * max(1.0, busy / (os.cpu_count() or 1))

    def _collect(self, names: Sequence[str], ranks: int) -> None:
        """Read the ranks' files: which check runs now, and the results of those before it."""
        paths = [self.folder / f"now.{rank}" for rank in range(ranks)]
        begun = [
            path.read_text(encoding="utf-8").split() if path.exists() else [] for path in paths
        ]
        # A check is timed from the moment when all ranks have begun it.
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
        """Collect results. If a check hangs, let its ranks write their stacks, and return True."""
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
        """Return whether all ranks have written their stacks."""
        paths = [stack_dump_file(self.folder, rank) for rank in range(len(self.pids))]
        return all(
            path.exists() and "run_check" in path.read_text(errors="replace") for path in paths
        )

    def _hangs(self) -> str:
        """Return the reason why the check is considered to hang, "" if it is not."""
        now = time.monotonic()
        if self.pids and now - self.looked >= 1.0:
            used = processor_seconds(self.pids)
            if abs(used - self.used) > _IDLE * len(self.pids) * (now - self.looked):
                self.active = now
            self.looked = now
            self.used = used
        # If a rank has failed, the others may wait for it in a collective until that times out.
        alone = not any(self.folder.glob(f"{self.now}.*.json"))
        if self.pids and alone and self.kind != "launcher" and now - self.active > self.timeout / 2:
            return f"its processes did nothing for {self.timeout / 2:g} s"
        if now - self.since > self._patience:
            return f"it took {now - self.since:.0f} s"
        return ""

    def _lost(self, name: str, run: CompletedRun) -> None:
        """Record a failure for a check whose processes were lost, or which one rank never ended."""
        said = []
        for path in sorted(self.folder.glob(f"{name}.*.json")):
            if error := json.loads(path.read_text())["error"]:
                said.append(f"rank {path.suffixes[0][1:]}: {error}")
        self.hung += run.timed_out
        frames = [
            frames_of(path.read_text(errors="replace"))
            for path in sorted(self.folder.glob("stacks.*"))
        ]
        said += [f"rank {rank} was in {call_site(its)}" for rank, its in enumerate(frames) if its]
        gone = f"the processes ended with status {run.returncode}"
        if run.timed_out:
            gone = (
                f"it did not end: {self.stuck or f'it was still running after {run.seconds:.0f} s'}"
            )
        seconds = max(0.0, time.monotonic() - self.since)
        result = Result(name, "failed", "", "\n".join([gone, *said]), run.story, seconds)
        self._add(result, [function for its in frames for _, _, function in its])

    def _not_run(self, names: Iterable[str]) -> None:
        for name in self._left(names):
            self._add(Result(name, "skipped", "not run: too many processes were lost before"))

    def _add(self, result: Result, meant: Sequence[str] = ()) -> None:
        """Store and report a result; a failure names the plugin.

        Args:
            meant: names of functions from the failure, among them perhaps hooks.
        """
        if result.state == "failed":
            result.error = f"{result.error}\n{self._attribution(result.name, meant)}"
        self.results[result.name] = result
        self.on_result(result)

    def _attribution(self, name: str, meant: Sequence[str]) -> str:
        """Return the plugin with its distribution and version, and the hooks to look at."""
        record = find(self.kind, self.name, source="the conformance suite")
        try:
            hooks = about(name, record.load(), self.kind, meant)
        except AccelerateError:
            hooks = ""
        return f"{self.kind} {record.label}{f'; {hooks}' if hooks else ''}"


def _joined(name: str, lines: Sequence[Mapping[str, Any]]) -> Result:
    """Combine the ranks' results of one check."""
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
