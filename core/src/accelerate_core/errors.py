"""Every exception of the core, the helper that error texts share, and warnings at the user's line.

An error says what was wrong, where the value came from, what is allowed, and what to do next.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import FrameType

__all__ = [
    "AccelerateError",
    "CheckpointError",
    "ConfigurationError",
    "DistributedOperationException",
    "MissingPluginError",
    "PluginConflictError",
    "PluginError",
    "PluginVersionError",
    "PrepareError",
    "RuntimeConflictError",
    "TrackerError",
    "UnknownArgumentError",
    "did_you_mean",
    "listing",
    "of_the_user",
    "warn",
]


class AccelerateError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(AccelerateError, ValueError):
    """A value that was given is wrong, or two values contradict each other."""


class UnknownArgumentError(AccelerateError, TypeError):
    """`Accelerator` was called with an argument that neither the core nor a plugin knows."""


class PluginError(AccelerateError):
    """A plugin is broken or does not keep the contract."""


class PluginVersionError(PluginError):
    """A plugin was written for a major version of the contract this core does not speak."""


class PluginConflictError(PluginError, ConfigurationError):
    """Two plugins claim the same thing with equal right."""


class MissingPluginError(AccelerateError, ImportError):
    """Something was asked for whose package is not installed; the text has the pip command."""


class RuntimeConflictError(AccelerateError, RuntimeError):
    """The process already runs with a group or device that the request does not fit."""


class PrepareError(AccelerateError, RuntimeError):
    """`prepare` would have left a model that does not train as asked."""


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint cannot be written or read."""


class TrackerError(AccelerateError, RuntimeError):
    """Tracking was used in the wrong order."""


class DistributedOperationException(AccelerateError, RuntimeError):
    """The ranks called a collective with data that does not fit together."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the option nearest to `name`, else the empty string."""
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def listing(options: Iterable[object]) -> str:
    """Join the allowed values for an error text: `'a', 'b', 'c'`."""
    return ", ".join(repr(str(option)) for option in options) or "(none)"


#: Modules between a script and the line of ours that warns or refuses.
_BETWEEN = re.compile(
    r"(accelerate(_\w+)?|click|concurrent|contextlib|functools|pluggy|threading|torch)(\.|$)"
)


def of_the_user(frame: FrameType) -> bool:
    """Tell whether a frame is neither ours nor of a library between the script and us."""
    return not _BETWEEN.match(frame.f_globals.get("__name__", ""))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, from however deep it is called."""
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    # A thread of ours has no such line: it is said where we are.
    level = next((at for at, frame in enumerate(stack) if of_the_user(frame)), 0)
    warnings.warn(text, category, stacklevel=level + 2)
