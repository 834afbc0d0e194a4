"""All exceptions of the core, helpers for error messages, and warnings at the user's line.

An error says what was wrong, where the value came from, what is allowed, and what to do next.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from accelerate_core import failures

#: Passwords in URLs, and signatures in their queries or in headers that a library may print.
_PASSWORD = re.compile(r"(://)[^/@\s:]*:[^@\s]+@")
_SIGNATURE = re.compile(
    r"(?i)\b((?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|awsaccesskeyid)="
    r"|authorization[\"']?[:=] *)[^&\s,}]+(?: [^&\s,}]+)?"
)

#: Replaces a credential.
HIDDEN = "***"


def without_credentials(text: str) -> str:
    """Return a text with the passwords and signatures of URLs hidden.

    All of our errors and warnings do this with their messages. Do it before you log an address.
    """
    if "://" not in text and "=" not in text and "uthorization" not in text:
        return text
    return _PASSWORD.sub(rf"\1{HIDDEN}@", _SIGNATURE.sub(rf"\1{HIDDEN}", text))


class AccelerateError(Exception):
    """Base class of all errors that this package raises on purpose.

    Cause: see the subclass. Catch this class to distinguish our errors from those of torch or your code.
    Fix: read the end of the message, which says what is allowed or what to do.
    """

    def __init__(self, *args: object, **named: Any) -> None:
        shown = [without_credentials(arg) if isinstance(arg, str) else arg for arg in args]
        super().__init__(*shown, **named)
        failures.report_uncaught()


class ConfigurationError(AccelerateError, ValueError):
    """A setting is invalid, or two settings contradict each other.

    Cause: an argument, option, variable or key of a config file, which the message names.
    Fix: use one of the values that the message lists. `accelerator.explain()` and `accelerate-core launch
    --explain` show every value and its source.
    """

    #: The message of each mistake, if several are reported together.
    mistakes: tuple[str, ...] = ()


class UnknownArgumentError(AccelerateError, TypeError):
    """`Accelerator` was called with an argument that neither the core nor a plugin has.

    Cause: a misspelled name, or an argument of a plugin that isn't installed.
    Fix: use the name that the message suggests, or install the package that it names.
    """


class UnknownNameError(AccelerateError, AttributeError):
    """An attribute was read that neither the core nor an active plugin has.

    Cause: a misspelled name, or a name of a plugin that isn't installed or active.
    Fix: use the name that the message suggests, or run its pip command.
    """

    def __init__(self, text: str, name: str) -> None:
        # With `obj`, Python would add a second suggestion to the message.
        super().__init__(text, name=name, obj=None)


class AssignmentError(ConfigurationError, AttributeError):
    """An attribute of an Accelerator or a state cannot be assigned after construction.

    Cause: a script or a library assigns to it.
    Fix: follow the message. Usually, you have to pass an argument to `Accelerator` instead.
    """


class PluginError(AccelerateError):
    """A plugin is broken or violates the contract.

    Cause: its module cannot be imported, its entry point doesn't exist, or a hook returned an invalid
    value. The message has its distribution and version.
    Fix: `accelerate-core plugins why NAME` shows each step. Upgrade the plugin, report the problem to its
    author (with `accelerate-core plugins check NAME`), or disable it: `ACCELERATE_DISABLED_PLUGINS=NAME`.
    """


class PluginVersionError(PluginError):
    """A plugin was written for another major version of the contract.

    Cause: plugin and core were released for different major versions.
    Fix: upgrade the one that the message names.
    """


class PluginConflictError(PluginError, ConfigurationError):
    """Two plugins are requested with the same precedence.

    Cause: for example, two backends are requested by sources of the same precedence.
    Fix: name the one you want, such as `Accelerator(backend="NAME")`. The message lists all ways.
    """


class MissingPluginError(AccelerateError, ImportError):
    """Something was requested that no installed package provides.

    Cause: a misspelled name, or a name, argument or command of a plugin that isn't installed.
    Fix: if the message has a pip command, run it on every machine of the run. Otherwise use one of the
    names that it lists.
    """


class RuntimeConflictError(AccelerateError, RuntimeError):
    """The process already has a process group or device that conflicts with the request.

    Cause: an earlier Accelerator, the script or a notebook created a group or used a device that conflicts
    with the new request, or not every rank creates an Accelerator.
    Fix: end the earlier one with `end_training()`, or request the same settings. In a notebook, restart the
    kernel. Create the Accelerator on every rank.
    """


class PrepareError(AccelerateError, RuntimeError):
    """`prepare` would have returned a model that doesn't train as requested.

    Cause: a model with a device map is used on several ranks; the backend changes weights, and the model or
    the optimizer was prepared separately, was already wrapped, or has other parameters; or a plugin's hook
    returned something else. With other backends, an optimizer with other parameters is only a warning.
    Fix: pass the unwrapped model and the optimizer of its parameters to one call of `prepare`.
    """


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint cannot be written or read.

    Cause: a file is missing or damaged, or the checkpoint contains objects that are not registered.
    Fix: `accelerate-core checkpoints verify DIR` names the file. Load an earlier checkpoint, or prepare and
    register the same objects in the same order.
    """


class TrackerError(AccelerateError, RuntimeError):
    """Tracking methods were called in the wrong order.

    Cause: `init_trackers` was called twice, a plugin provides something that isn't a tracker, or a directory
    contains no run.
    Fix: call `init_trackers` once, before you log values. In other cases, follow the message.
    """


class DistributedOperationException(AccelerateError, RuntimeError):
    """Ranks called a collective with incompatible data.

    Cause: shapes, dtypes or structures differ between ranks. Every call compares them. On an accelerator,
    the error may come a few calls later, unless you use `launch --debug` or `ACCELERATE_DEBUG_MODE=1`.
    Fix: the message shows the data of each rank. Pad it first (`pad_across_processes`), or use
    `gather_for_metrics`, which drops samples that were repeated to fill the last batch.
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
        # Errors of other subclasses are not about a wrong name or value.
        collected = (ConfigurationError, MissingPluginError, UnknownArgumentError)
        if not isinstance(error, AccelerateError) or type(error) not in collected:
            return False
        self.found.append(error)
        return True

    def report(self) -> None:
        """Raise the collected errors: a single one unchanged, several as one error with a line for each.

        Raises:
            ConfigurationError: there is at least one mistake.
            MissingPluginError: the only mistake is a plugin that isn't installed.
            UnknownArgumentError: the only mistake is an unknown argument.
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
        options: the values. For no values, the result is "(none)".
    """
    return ", ".join(repr(str(option)) for option in options) or "(none)"


_OURS = re.compile(r"accelerate(_\w+)?(\.|$)")

#: Libraries whose frames may be between the user's code and ours.
_BETWEEN = re.compile(r"(click|pluggy|torch)(\.|$)")


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to the core or to one of our packages."""
    return _OURS.match(frame.f_globals.get("__name__", "")) is not None


def of_the_user(frame: FrameType) -> bool:
    """Return whether a frame belongs to the user's code rather than to us or a library in between."""
    module = frame.f_globals.get("__name__", "")
    if is_ours(frame) or _BETWEEN.match(module):
        return False
    return module.partition(".")[0] not in sys.stdlib_module_names


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line in the user's script that led here.

    Args:
        text: the problem, and what to do.
        category: the class of the warning.
    """
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    # Our own threads have no line of the user, so warn at the current line.
    level = next((at for at, frame in enumerate(stack) if of_the_user(frame)), 0)
    warnings.warn(without_credentials(text), category, stacklevel=level + 2)


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
    """Call all functions in order, even if some raise, and then raise the last exception.

    Its `__context__` has the earlier exceptions.
    """
    try:
        first()
    finally:
        if rest:
            call_all(*rest)
