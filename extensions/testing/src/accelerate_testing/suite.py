"""The suite for pytest: subclass one class, name the plugin."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest

from accelerate_core.errors import ConfigurationError
from accelerate_testing.checks import Check, check_options, checks_of
from accelerate_testing.progress import SAY_EVERY, Progress, Tail
from accelerate_testing.results import Result
from accelerate_testing.runner import choose_plugin, run_suite

_PREFIX = "test_"
_ATTRIBUTES = ("plugin", "environ", "options", "timeout", "num_processes", "prelude")
_NEAR = 0.75  # stricter than elsewhere: a suite may have attributes of its own


class _Suite:
    """One test per check of a kind. The checks that pytest selected run in few processes.

    Attributes:
        plugin: the plugin's name, as its entry point has it.
        environ: variables for all processes of the checks, such as the plugin's settings.
        options: what some checks can be told.
        timeout: seconds a collective may wait.
        num_processes: ranks of the checks on ranks.
        prelude: a module that every process of the checks imports before the plugin is used (only
            `imports` runs before): what makes this machine fit, such as a stand-in for a device.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str] = ""
    environ: ClassVar[Mapping[str, str]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    timeout: ClassVar[float] = 20.0
    num_processes: ClassVar[int] = 2
    prelude: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_misspelt(cls)
        if cls.plugin:  # the kinds' own classes have no tests: pytest would collect an import
            check_options(cls.kind, cls.options, f"options of the suite {cls.__qualname__}")
            for made in checks_of(cls.kind).values():
                if not hasattr(cls, _PREFIX + made.name):
                    setattr(cls, _PREFIX + made.name, _test_of(made))

    @pytest.fixture
    def results(self, request: pytest.FixtureRequest) -> Mapping[str, Result]:
        """Run the checks that were selected, all together, for the first test that asks."""
        cls: Any = request.cls
        if "_found" not in vars(cls):
            items = [it for it in request.session.items if getattr(it, "cls", None) is cls]
            names = [str(getattr(it, "originalname", "")).removeprefix(_PREFIX) for it in items]
            choose_plugin(cls.plugin, cls.kind)
            only = [name for name in names if name in checks_of(cls.kind)]
            how = {name: getattr(cls, name) for name in _ATTRIBUTES[1:]}
            with _progress(request.config, cls.__qualname__, len(only)) as told:
                how |= {"on_run": told.on_run, "on_result": told.on_result}
                found = run_suite(cls.kind, cls.plugin, only=only, **how)
            cls._found = {result.name: result for result in found}
        made: Mapping[str, Result] = cls._found
        return made


@contextmanager
def _progress(config: pytest.Config, suite: str, total: int) -> Iterator[Progress]:
    """Tell how far a suite is: behind what pytest has written, and in lines of their own off a terminal.

    Nothing is told in a process of pytest-xdist, which has no reporter, nor in a log with `-q`.
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
                reporter.write_line(f"{suite}: {text}")  # which begins its own line anew after it

    try:
        yield Progress(total, say, 0.0 if terminal else SAY_EVERY)
    finally:
        if terminal:
            say("")


def _refuse_misspelt(cls: type[_Suite]) -> None:
    """Refuse an attribute that is nearly one of a suite's: nobody would read it."""
    for name, value in vars(cls).items():
        # Methods, fixtures, properties and nested classes are the author's own.
        if hasattr(_Suite, name) or name.startswith("_") or name == "kind":
            continue
        if name.startswith(_PREFIX) or callable(value) or hasattr(value, "__get__"):
            continue
        as_option = "environ" if name == "env" else ""  # what `plugins check` calls it
        near = difflib.get_close_matches(name.lower(), _ATTRIBUTES, n=1, cutoff=_NEAR)
        if as_option or near:
            raise ConfigurationError(
                f"The suite {cls.__qualname__} has an attribute {name!r}, which nobody reads. "
                f"Did you mean {as_option or near[0]!r}?"
            )


def _test_of(made: Check) -> Any:
    def test(self: _Suite, results: Mapping[str, Result]) -> None:
        result = results[made.name]
        if result.state == "skipped":
            pytest.skip(result.detail)
        if result.state == "failed":
            pytest.fail(f"{result.error}\n\n{result.trace}".strip(), pytrace=False)

    test.__name__ = f"test_{made.name}"
    test.__doc__ = made.doc
    return pytest.mark.timeout(600)(test)


class BackendSuite(_Suite):
    """The suite of a backend; two processes on this machine.

    `options`: `prints`, True if it prints without being asked to.
    """

    kind = "backend"


class PrecisionSuite(_Suite):
    """The suite of a precision, in one process and over the installed backend for several.

    `options`: `tolerance`, by how much of it a loss may differ from that of full precision;
    `optimizer`, the name of one in `torch.optim`, if it does not take every one; `one_model`, True if
    it trains one model and no more; `prints`, True if it prints without being asked to.
    """

    kind = "precision"


class TrackerSuite(_Suite):
    """The suite of a tracker.

    `options`: `init`, arguments of its constructor; `read` and `read_config`, functions
    `module:name` of a directory that read what it wrote there: `{key: [[step, value], ...]}` in
    order (the step None where there was none), and the config as a dict; `elsewhere`, True if nobody
    can read what it keeps; `overwrites`, True if a run replaces one of the same name, as in a library
    that keeps its history elsewhere; `resumes`, False if it cannot resume where the checks run;
    `prints`, True if it prints without being asked to.
    """

    kind = "tracker"


class LauncherSuite(_Suite):
    """The suite of a launcher, which starts two processes of this machine, programs or functions."""

    kind = "launcher"


class ExtensionSuite(_Suite):
    """The suite of an extension.

    `options`: `changes_training`, True if losses are not those of a run without it; `not_saved`,
    the attributes it serves that are no state of the run; `ranks_differ`, True if the ranks' models
    may be apart; `prints`, True if it prints without being asked to.
    """

    kind = "extension"


class CheckpointerSuite(_Suite):
    """The suite of a checkpointer, in one process and over the installed backend for several.

    `options`: `target`, where a checkpoint goes, with `{path}` for a path that is free, below a
    directory all ranks share, and `{name}` for a name (default: "{path}"); `one_process`, True if
    only one process can write there; `damage`, a generator function `module:name` of a target: it
    damages the checkpoint, yields a text such as "without model.bin", repairs it, and so on
    (default: each file below the target is taken away, cut off, changed); `prints`, True if it prints
    without being asked to.
    """

    kind = "checkpointer"


class LoadersSuite(_Suite):
    """The suite of a loader factory, in one process and over the installed backend for several.

    `options`: `make`, a function `module:name` of `(folder, samples, batch_size, shuffle,
    drop_last)`; it returns what a script would give to `prepare`, over the samples 0, 1, ... in that
    order, in batches that are mappings with their numbers under "id" (int64, [batch]). The data may
    be written to `folder`, which all ranks share and the main process sees first. `prints`, True if it
    prints without being asked to.
    """

    kind = "loaders"
