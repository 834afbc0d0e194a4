"""The conformance suite for pytest: subclass the class for a kind and name the plugin."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest

from accelerate_core.plugin import ConfigurationError, did_you_mean
from accelerate_testing.checks import Check, check_options, checks_of
from accelerate_testing.progress import SAY_EVERY, Progress, Tail
from accelerate_testing.results import Result
from accelerate_testing.runner import choose_plugin, run_suite

_PREFIX = "test_"
_ATTRIBUTES = ("plugin", "environ", "options", "timeout", "num_processes", "prelude", "device")
_OWN_ATTRIBUTES = (*_ATTRIBUTES, "cannot")
_NEAR = 0.75  # stricter than elsewhere, because a suite may have its own attributes


class _Suite:
    """One test for each check of a kind. The checks that pytest selects run in few processes.

    Attributes:
        plugin: the plugin's name, as in its entry point.
        environ: variables for all processes of the checks, such as the plugin's settings.
        options: options of this kind's checks.
        timeout: seconds a collective may wait.
        num_processes: ranks of the checks on ranks.
        prelude: a module that every process imports before it uses the plugin, such as a stand-in
            for a device. Only the check `imports` runs before that.
        device: type of the device on which the checks must run, such as "cuda". By default they run
            on the CPU, unless the plugin does not.
        cannot: the checks that cannot apply to the plugin, and the reason for each. They are skipped.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str] = ""
    environ: ClassVar[Mapping[str, str]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    timeout: ClassVar[float] = 20.0
    num_processes: ClassVar[int] = 2
    prelude: ClassVar[str] = ""
    device: ClassVar[str] = ""
    cannot: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_misspelt(cls)
        if (
            cls.plugin
        ):  # the base classes have no tests, because pytest collects what a file imports
            check_options(cls.kind, cls.options, f"options of the suite {cls.__qualname__}")
            _refuse_unknown_checks(cls)
            for made in checks_of(cls.kind).values():
                if not hasattr(cls, _PREFIX + made.name):
                    setattr(cls, _PREFIX + made.name, _test_of(made))

    @pytest.fixture
    def results(self, request: pytest.FixtureRequest) -> Mapping[str, Result]:
        """Run all selected checks when the first test needs a result."""
        cls: Any = request.cls
        if "_found" not in vars(cls):
            items = [it for it in request.session.items if getattr(it, "cls", None) is cls]
            names = [str(getattr(it, "originalname", "")).removeprefix(_PREFIX) for it in items]
            choose_plugin(cls.plugin, cls.kind)
            checks = checks_of(cls.kind).keys() - cls.cannot.keys()
            only = [name for name in names if name in checks]
            how = {name: getattr(cls, name) for name in _ATTRIBUTES[1:]}
            with _progress(request.config, cls.__qualname__, len(only)) as told:
                how |= {"on_run": told.on_run, "on_result": told.on_result}
                found = run_suite(cls.kind, cls.plugin, only=only, **how)
            cls._found = {result.name: result for result in found}
        made: Mapping[str, Result] = cls._found
        return made


@contextmanager
def _progress(config: pytest.Config, suite: str, total: int) -> Iterator[Progress]:
    """Show the progress of a suite: after pytest's own output, or in separate lines without a terminal.

    Nothing is shown in a worker of pytest-xdist, which has no reporter, or in a log with `-q`.
    """
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    uncaptured = capture.global_and_fixture_disabled if capture else nullcontext
    if reporter is None:
        yield Progress(total, lambda text: None)
        return
    writer = config.get_terminal_writer()
    with uncaptured():
        terminal = writer._file.isatty()
        tail = Tail(writer._file, writer.fullwidth - writer.width_of_current_line - 1)

    def say(text: str) -> None:
        with uncaptured():
            if terminal:
                tail.show(text)
            elif config.get_verbosity() >= 0:
                reporter.write_line(f"{suite}: {text}")  # the reporter then starts a new line

    try:
        yield Progress(total, say, 0.0 if terminal else SAY_EVERY)
    finally:
        if terminal:
            say("")


def _refuse_misspelt(cls: type[_Suite]) -> None:
    """Refuse an attribute whose name is close to one of a suite, because it would have no effect."""
    for name, value in vars(cls).items():
        # Methods, fixtures, properties and nested classes belong to the author.
        if hasattr(_Suite, name) or name.startswith("_") or name == "kind":
            continue
        if name.startswith(_PREFIX) or callable(value) or hasattr(value, "__get__"):
            continue
        as_option = "environ" if name == "env" else ""  # what `plugins check` calls it
        near = difflib.get_close_matches(name.lower(), _OWN_ATTRIBUTES, n=1, cutoff=_NEAR)
        if as_option or near:
            raise ConfigurationError(
                f"The suite {cls.__qualname__} has an attribute {name!r}, which has no effect. "
                f"Did you mean {as_option or near[0]!r}?"
            )


def _refuse_unknown_checks(cls: type[_Suite]) -> None:
    """Refuse names in `cannot` that are not checks, because the check would run."""
    for name in cls.cannot:
        if name not in checks_of(cls.kind):
            raise ConfigurationError(
                f"The suite {cls.__qualname__} names {name!r} in `cannot`, which is not a check of a "
                f"{cls.kind}.{did_you_mean(name, checks_of(cls.kind))}"
            )


def _test_of(made: Check) -> Any:
    def test(self: _Suite, request: pytest.FixtureRequest) -> None:
        if made.name in self.cannot:
            pytest.skip(f"it cannot apply: {self.cannot[made.name]}")
        results: Mapping[str, Result] = request.getfixturevalue("results")
        result = results[made.name]
        if result.state == "skipped":
            pytest.skip(result.detail)
        if result.state == "failed":
            pytest.fail(f"{result.error}\n\n{result.trace}".strip(), pytrace=False)

    test.__name__ = f"test_{made.name}"
    test.__doc__ = made.doc
    return pytest.mark.timeout(600)(test)


class BackendSuite(_Suite):
    """The suite of a backend, on two processes of this machine.

    `options`:
        prints: True if it prints without being asked to.
    """

    kind = "backend"


class PrecisionSuite(_Suite):
    """The suite of a precision, in one process and on ranks with the installed backend.

    `options`:
        tolerance: how far a loss may differ from full precision, as a fraction; 0.2 by default.
        optimizer: the name of a class in `torch.optim`, if the precision does not accept every one.
        one_model: True if it can train only one model.
        prints: True if it prints without being asked to.
    """

    kind = "precision"


class TrackerSuite(_Suite):
    """The suite of a tracker.

    `options`:
        init: arguments of its constructor.
        read: a function `module:name` that takes a directory and returns what the tracker wrote
            there, `{key: [[step, value], ...]}` in order; the step is None if none was given.
        read_config: a function `module:name` that takes a directory and returns the config as a dict.
        elsewhere: True if nothing can read what it stores.
        overwrites: True if a run replaces an earlier one of the same name.
        resumes: False if it cannot resume where the checks run, as in an offline mode.
        prints: True if it prints without being asked to.
    """

    kind = "tracker"


class LauncherSuite(_Suite):
    """The suite of a launcher, which starts processes on this machine, as programs or functions.

    `options`:
        most_ranks: the largest number of processes that a check starts; 64 by default.
    """

    kind = "launcher"


class ExtensionSuite(_Suite):
    """The suite of an extension.

    `options`:
        changes_training: True if losses differ from those of a run without it.
        not_saved: the attributes that it serves and that are not part of the run's state.
        ranks_differ: True if the models of the ranks may differ.
        prints: True if it prints without being asked to.
    """

    kind = "extension"


class CheckpointerSuite(_Suite):
    """The suite of a checkpointer, in one process and on ranks with the installed backend.

    `options`:
        target: where a checkpoint goes: `{path}` is an unused path in a directory that all ranks
            share, `{name}` an unused name. "{path}" by default.
        one_process: True if only one process can write there.
        damage: a generator function `module:name` that takes a target, damages the checkpoint,
            yields a description such as "without model.bin", repairs it, and so on. By default each
            file below the target is removed, cut in half and changed.
        prints: True if it prints without being asked to.
    """

    kind = "checkpointer"


class LoadersSuite(_Suite):
    """The suite of a loader factory, in one process and on ranks with the installed backend.

    `options`:
        make: a function `module:name` of `(folder, samples, batch_size, shuffle, drop_last)` that
            returns what a script would pass to `prepare`. The samples are 0, 1, ... in this order;
            a batch is a mapping that has their numbers under "id" (int64, [batch]). It may write
            the data to `folder`, which all ranks share; the main process calls it first.
        prints: True if it prints without being asked to.
    """

    kind = "loaders"
