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
    """Base of every error this package raises on purpose.

    Cause: catch it to tell what we refuse from what torch or your code raises.
    Mend: read the text: it ends with what is allowed or what to do.
    """


class ConfigurationError(AccelerateError, ValueError):
    """A value that was given is wrong, or two values contradict each other.

    Cause: an argument, option, variable or key of a config file; the text names which.
    Mend: give one of the values the text lists. `accelerator.explain()` and `accelerate-core launch
    --explain` show every value and where it came from.
    """


class UnknownArgumentError(AccelerateError, TypeError):
    """`Accelerator` was called with an argument that neither the core nor a plugin knows.

    Cause: a misspelt name, or an argument of a plugin that is not installed.
    Mend: take the name the text offers, or install the package it names.
    """


class PluginError(AccelerateError):
    """A plugin is broken or does not keep the contract.

    Cause: its module cannot be imported, its entry point names nothing, or a hook answers what no hook
    may; the text has its distribution and version.
    Mend: `accelerate-core plugins why NAME` shows each step. Upgrade the plugin, tell its author
    (`accelerate-core plugins check NAME`), or leave it out: `ACCELERATE_DISABLED_PLUGINS=NAME`.
    """


class PluginVersionError(PluginError):
    """A plugin was written for a major version of the contract this core does not speak.

    Cause: plugin and core were released for different major versions.
    Mend: upgrade the one the text names.
    """


class PluginConflictError(PluginError, ConfigurationError):
    """Two plugins claim the same thing with equal right.

    Cause: two backends, say, are asked for by sources of the same strength.
    Mend: name the one you want, such as `Accelerator(backend="NAME")`; the text has the ways.
    """


class MissingPluginError(AccelerateError, ImportError):
    """Something was asked for that no installed package brings.

    Cause: a name, argument or command of a plugin that this environment does not have, or a misspelt one.
    Mend: where the text has a pip command, run it in the environment of every machine of the run; else
    take one of the names it lists.
    """


class RuntimeConflictError(AccelerateError, RuntimeError):
    """The process already runs with a group or device that the request does not fit.

    Cause: an earlier Accelerator, the script or a notebook made a group or used a device that the
    new request does not fit; or not every rank makes its Accelerator.
    Mend: end the earlier one with `end_training()`, or ask for the same; in a notebook restart the
    kernel. Make the Accelerator on every rank.
    """


class PrepareError(AccelerateError, RuntimeError):
    """`prepare` would have left a model that does not train as asked.

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
    """Tracking was used in the wrong order.

    Cause: `init_trackers` was called twice, a plugin offers something that is no tracker, or a
    directory has no run.
    Mend: call `init_trackers` once, before the first value; else as the text says.
    """


class DistributedOperationException(AccelerateError, RuntimeError):
    """The ranks called a collective with data that does not fit together.

    Cause: shapes, dtypes or structures differ between ranks. The first call of each collective compares
    them, and every call with `launch --debug` or `ACCELERATE_DEBUG_MODE=1`.
    Mend: the text has what each rank brought. Pad first (`pad_across_processes`), or use
    `gather_for_metrics`, which cuts what was added to fill the last batch.
    """


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the option nearest to `name`, else the empty string."""
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def listing(options: Iterable[object]) -> str:
    """Join the allowed values for an error text: `'a', 'b', 'c'`.

    Args:
        options: the values; of none it is "(none)".
    """
    return ", ".join(repr(str(option)) for option in options) or "(none)"


#: Modules between a script and the line of ours that warns or refuses.
_BETWEEN = re.compile(
    r"(accelerate(_\w+)?|click|concurrent|contextlib|functools|pluggy|threading|torch)(\.|$)"
)


def of_the_user(frame: FrameType) -> bool:
    """Tell whether a frame is neither ours nor of a library between the script and us."""
    return not _BETWEEN.match(frame.f_globals.get("__name__", ""))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, from however deep it is called.

    Args:
        text: what is warned of, and what to do.
        category: the class of the warning.
    """
    stack = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    # A thread of ours has no such line: it is said where we are.
    level = next((at for at, frame in enumerate(stack) if of_the_user(frame)), 0)
    warnings.warn(text, category, stacklevel=level + 2)
