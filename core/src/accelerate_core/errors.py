"""Every exception of the core, helpers for error texts, and the user's line in warnings and tracebacks.

An error says what was wrong, where the value came from, what is allowed, and what to do next.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any


class AccelerateError(Exception):
    """Base class of all errors that this package raises on purpose.

    Cause: catch it to tell what we refuse from what torch or your code raises.
    Mend: read the text: it ends with what is allowed or what to do.
    """

    def __init__(self, *args: object, **named: Any) -> None:
        super().__init__(*args, **named)
        shorten_uncaught()


class ConfigurationError(AccelerateError, ValueError):
    """A setting is invalid, or two settings contradict each other.

    Cause: an argument, option, variable or key of a config file; the text names which.
    Mend: give one of the values the text lists. `accelerator.explain()` and `accelerate-core launch
    --explain` show every value and where it came from.
    """

    #: The text of each mistake where several are reported together.
    mistakes: tuple[str, ...] = ()


class UnknownArgumentError(AccelerateError, TypeError):
    """`Accelerator` was called with an argument that neither the core nor a plugin knows.

    Cause: a misspelt name, or an argument of a plugin that is not installed.
    Mend: take the name the text offers, or install the package it names.
    """


class UnknownNameError(AccelerateError, AttributeError):
    """An attribute was read that neither the core nor an active plugin has.

    Cause: a misspelt name, or a name of a plugin that is not installed or not active.
    Mend: take the name the text offers, or run the pip command it has.
    """

    def __init__(self, text: str, name: str) -> None:
        # With `obj`, Python would append a suggestion of its own to the one in the text.
        super().__init__(text, name=name, obj=None)


class AssignmentError(ConfigurationError, AttributeError):
    """An attribute of an Accelerator or a state cannot be replaced after it was made.

    Cause: a script or a library assigns to it.
    Mend: what the text says, which is nearly always an argument of `Accelerator`.
    """


class PluginError(AccelerateError):
    """A plugin is broken or violates the contract.

    Cause: its module cannot be imported, its entry point names nothing, or a hook answers what no hook
    may; the text has its distribution and version.
    Mend: `accelerate-core plugins why NAME` shows each step. Upgrade the plugin, tell its author
    (`accelerate-core plugins check NAME`), or leave it out: `ACCELERATE_DISABLED_PLUGINS=NAME`.
    """


class PluginVersionError(PluginError):
    """A plugin was written for another major version of the contract.

    Cause: plugin and core were released for different major versions.
    Mend: upgrade the one the text names.
    """


class PluginConflictError(PluginError, ConfigurationError):
    """Two plugins claim the same thing with equal right.

    Cause: two backends, say, are asked for by sources of the same strength.
    Mend: name the one you want, such as `Accelerator(backend="NAME")`; the text has the ways.
    """


class MissingPluginError(AccelerateError, ImportError):
    """Something was requested that no installed package provides.

    Cause: a name, argument or command of a plugin that this environment does not have, or a misspelt one.
    Mend: where the text has a pip command, run it in the environment of every machine of the run; else
    take one of the names it lists.
    """


class RuntimeConflictError(AccelerateError, RuntimeError):
    """The process already has a process group or device that conflicts with the request.

    Cause: an earlier Accelerator, the script or a notebook made a group or used a device that the
    new request does not fit; or not every rank makes its Accelerator.
    Mend: end the earlier one with `end_training()`, or ask for the same; in a notebook restart the
    kernel. Make the Accelerator on every rank.
    """


class PrepareError(AccelerateError, RuntimeError):
    """`prepare` would have returned a model that doesn't train as requested.

    Cause: on several ranks a model is spread by a device map; a backend that changes weights finds the
    optimizer or the model prepared apart, wrapped already or of other parameters; or a plugin's hook gives
    back something else. Without such a backend an optimizer of other parameters is a warning.
    Mend: pass the plain model and the optimizer of its parameters to one call of `prepare`.
    """


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint cannot be written or read.

    Cause: a file is missing or damaged, or the checkpoint is of other objects than those registered.
    Mend: `accelerate-core checkpoints verify DIR` says which file; load the one before, or prepare and
    register the same objects in the same order.
    """


class TrackerError(AccelerateError, RuntimeError):
    """Tracking methods were called in the wrong order.

    Cause: `init_trackers` was called twice, a plugin offers something that is no tracker, or a
    directory has no run.
    Mend: call `init_trackers` once, before the first value; else as the text says.
    """


class DistributedOperationException(AccelerateError, RuntimeError):
    """Ranks called a collective with incompatible data.

    Cause: shapes, dtypes or structures differ between ranks. The first call of each collective compares
    them, and every call with `launch --debug` or `ACCELERATE_DEBUG_MODE=1`.
    Mend: the text has what each rank brought. Pad first (`pad_across_processes`), or use
    `gather_for_metrics`, which cuts what was added to fill the last batch.
    """


class Mistakes:
    """Collects configuration errors, so that all of them can be reported at once.

    Example:
        from accelerate_core.errors import ConfigurationError, Mistakes

        mistakes = Mistakes()
        for steps in (1, 0, -1):
            with mistakes:  # continues after the error
                if steps < 1:
                    raise ConfigurationError(f"steps={steps} must be at least 1.")
        try:
            mistakes.report()
        except ConfigurationError as error:
            assert len(error.mistakes) == 2
    """

    def __init__(self) -> None:
        self.found: list[AccelerateError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        # An error of another subclass says something else than that a name or a value is wrong.
        if not isinstance(error, AccelerateError):
            return False
        if type(error) not in (ConfigurationError, MissingPluginError, UnknownArgumentError):
            return False
        self.found.append(error)
        return True

    def report(self) -> None:
        """Raise what was collected: one error as it is, several as one with a line for each.

        Raises:
            ConfigurationError: there was a mistake, or several.
            MissingPluginError: the only mistake is a plugin that is not installed.
            UnknownArgumentError: the only mistake is an argument that nothing takes.
        """
        texts: list[str] = []
        for error in self.found:
            texts += getattr(error, "mistakes", ()) or (str(error),)
        texts = list(dict.fromkeys(texts))
        if not texts:
            return
        if len(texts) == 1:
            raise self.found[0]
        lines = "".join(f"\n- {text}" for text in texts)
        together = ConfigurationError(f"There are {len(texts)} mistakes in the settings:{lines}")
        together.mistakes = tuple(texts)
        raise together


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option that is nearest to `name`, or None if none is similar."""
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the option nearest to `name`, else the empty string."""
    near = nearest(name, options)
    return f" Did you mean {near!r}?" if near is not None else ""


def listing(options: Iterable[object]) -> str:
    """Join allowed values for an error message: `'a', 'b', 'c'`.

    Args:
        options: the values; of none it is "(none)".
    """
    return ", ".join(repr(str(option)) for option in options) or "(none)"


_OURS = re.compile(r"accelerate(_\w+)?(\.|$)")

#: Libraries that call a script's code, or are called by it, on the way to ours.
_BETWEEN = re.compile(r"(click|pluggy|torch)(\.|$)")


def _is_ours(frame: FrameType) -> bool:
    return _OURS.match(frame.f_globals.get("__name__", "")) is not None


def of_the_user(frame: FrameType) -> bool:
    """Return whether a frame belongs to the user's code, not to us or to a library between."""
    module = frame.f_globals.get("__name__", "")
    if _is_ours(frame) or _BETWEEN.match(module):
        return False
    return module.partition(".")[0] not in sys.stdlib_module_names


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line in the user's script that led here.

    Args:
        text: what is warned of, and what to do.
        category: the class of the warning.
    """
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    # A thread of ours has no such line: it is said where we are.
    level = next((at for at, frame in enumerate(stack) if of_the_user(frame)), 0)
    warnings.warn(text, category, stacklevel=level + 2)


# --- tracebacks of uncaught errors ------------------------------------------------------------

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
#: The hook that showed uncaught errors before ours was installed.
_previous_hook: _Hook | None = None


class WarnOnce:
    """Warns once per text, on the main process.

    Args:
        main: whether this is the main process.
    """

    def __init__(self, main: bool) -> None:
        self._main = main
        self._warned: set[str] = set()

    def __call__(self, text: str, *, every_rank: bool = False) -> None:
        if text not in self._warned and (every_rank or self._main):
            self._warned.add(text)
            warn(text)


def call_all(first: Callable[[], object], *rest: Callable[[], object]) -> None:
    """Call each in turn, whatever the ones before raised; then raise the last exception.

    Its `__context__` leads to the exceptions before it.
    """
    try:
        first()
    finally:
        if rest:
            call_all(*rest)


def shorten_uncaught() -> None:
    """Shorten tracebacks of uncaught errors from now on. Calling this again has no effect."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _show_shortened


def _show_shortened(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    shorten(error)
    if _previous_hook is not None:
        _previous_hook(kind, error, trace)


def prints_only(hook: _Hook) -> bool:
    """Tell whether a hook only prints the traceback, as Python's own does."""
    if hook is _show_shortened and _previous_hook is not None:
        hook = _previous_hook
    return hook is sys.__excepthook__


def shorten(error: BaseException) -> None:
    """Remove our frames from a traceback, so that the last line shown is the user's.

    An error of ours ends at the line that called us. An error raised in code of the user's, such as a
    dataset that we read, looks as it does without us. Any other error may be a fault of ours and keeps
    its frames. Debug mode (`ACCELERATE_DEBUG_MODE`, `launch --debug`) changes nothing.
    """
    if os.environ.get("ACCELERATE_DEBUG_MODE", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        return
    entries = _entries(error)
    users = [at for at, entry in enumerate(entries) if of_the_user(entry.tb_frame)]
    if not users:
        return
    if isinstance(error, AccelerateError):
        del entries[users[-1] + 1 :]
        _drop_internal_cause(error)
    elif users[-1] != len(entries) - 1:
        return
    kept = [entry for entry in entries if not _is_ours(entry.tb_frame)]
    for entry, following in pairwise(kept):
        entry.tb_next = following
    kept[-1].tb_next = None
    error.__traceback__ = kept[0]


def _entries(error: BaseException) -> list[TracebackType]:
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _drop_internal_cause(error: AccelerateError) -> None:
    """Hide the exception that we turned into this one, unless the user's or a plugin's code raised it."""
    cause = error.__cause__ or error.__context__
    if cause is None or isinstance(error, PluginError):
        return
    entries = _entries(cause)
    caught_by_us = not entries or _is_ours(entries[0].tb_frame)
    if caught_by_us and not (entries and of_the_user(entries[-1].tb_frame)):
        error.__cause__ = None  # this hides the context, too
    else:
        shorten(cause)
