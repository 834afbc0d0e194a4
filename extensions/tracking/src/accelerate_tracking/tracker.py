"""`GeneralTracker`, the base class of all trackers, and `BlankTracker`, which does nothing."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from packaging.requirements import Requirement

from accelerate_core.plugin import (
    Nothing,
    TrackerError,
    check_near_miss,
    is_newer,
    read_topology,
    running,
)
from accelerate_tracking.normalise import is_third_party, made_by

#: Kinds of media. A tracker supports a verb if it has the method `log_<verb>`.
VERBS = ("images", "table", "figure", "artifact", "text", "histogram")

#: Arguments of `log_table`: column names, and rows of plain values.
Columns = list[str]
Rows = list[list[Any]]

P = ParamSpec("P")
R = TypeVar("R")
Self_ = TypeVar("Self_")

#: Required attributes of a subclass -> how to write them.
_REQUIRED = {
    "name": "name = 'my_tracker'",
    "requires_logging_directory": "requires_logging_directory = False",
    "tracker": "a property `tracker` that returns the library's own run object",
}


class IncompleteTrackerError(TrackerError, NotImplementedError):
    """A tracker class lacks a required attribute.

    Cause: a subclass of `GeneralTracker` has no `name`, `requires_logging_directory` or `tracker`.
    Fix: add the attributes that the message lists.
    """


def on_main_process(
    function: Callable[Concatenate[Self_, P], R],
) -> Callable[Concatenate[Self_, P], R | None]:
    """Run a tracker's method on the main process only. On other ranks, it returns None.

    If the tracker's `main_process_only` is False, the method runs on every rank. Finding out the
    rank starts no process group, so `__init__` can be decorated, and called before an Accelerator
    exists.
    """

    @functools.wraps(function)
    def guarded(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(self, "main_process_only", True) and not _on_main(self):
            return None
        return function(self, *args, **kwargs)

    return guarded


def _on_main(tracker: object) -> bool:
    is_main: bool | None = getattr(tracker, "_is_main_process", None)
    if is_main is not None:
        return is_main
    runtime = running()
    rank = runtime.process_index if runtime else read_topology(os.environ).process_index
    return rank == 0


@dataclass(frozen=True)
class RunGroup:
    """Groups the runs of all ranks, for a tracker that runs on every rank."""

    name: str
    rank: int
    size: int


class GeneralTracker:
    """The base class of trackers. Subclass it to log to another library.

    A subclass needs the class attributes `name` (a string, also used in `init_kwargs`,
    `log_kwargs` and `get_tracker`) and `requires_logging_directory` (a bool), and a property
    `tracker` (the run object of the library). It implements `store_init_configuration` and `log`,
    and also `start` and `finish` if needed.

    If `log_with` contains the class, `init_trackers` creates `cls(project_name, **init_kwargs)`,
    or `cls(project_name, logging_dir, **init_kwargs)` if the class requires a directory.

    The thread that calls `init_trackers` also calls `start` and `store_init_configuration`. One
    writer thread per tracker calls `log`, the methods for media and `flush`, in the order of the
    user's calls. A separate thread calls `finish`, which may take a minute. If the library can
    only be used from one thread, as a sqlite3 connection can, set `same_thread = True`.

    The methods for media, all optional:

        log_images(values, step, **kwargs)      name -> uint8 array, N H W C
        log_table(table_name, columns, data, step, **kwargs)    data: a list of rows
        log_figure(name, figure, step, **kwargs)                a matplotlib figure
        log_artifact(path, name, **kwargs)                      a file or directory
        log_text(name, text, step, **kwargs)
        log_histogram(name, values, step, **kwargs)             a one-dimensional array

    `docs/write_a_tracker.md` has a complete example.

    Raises:
        IncompleteTrackerError: the subclass lacks `name`, `requires_logging_directory` or
            `tracker`.
    """

    #: Whether the tracker runs on the main process only. If False, it runs on every rank.
    main_process_only: bool = True
    #: Version of the plugin contract that the class was written for. Another major version is
    #: refused.
    api_version: tuple[int, int] = (1, 0)
    #: Requirement of the library, with its oldest supported version: `name>=1.2`.
    library: str = ""
    #: The library's status for the run of a script that raised, or "" if it has none.
    failed_word: str = ""
    #: Whether values logged without a step get the next step, counted per verb.
    counts_steps: bool = False
    #: Whether the library can only be used from the thread that created it. `log` and the methods
    #: for media are then called in the training thread, which waits for them and for tensors on
    #: devices.
    same_thread: bool = False
    #: Whether `finish` must be called, without a time limit, in the thread that called `start`.
    finishes_in_place: bool = False
    #: Whether `log_artifact` receives the original file instead of a copy made at the call.
    artifacts_in_place: bool = False
    #: Whether `log_histogram` also accepts NaN and infinities.
    takes_not_finite: bool = False
    #: Whether the tracker uses `resume_id` to continue a run when a script resumes.
    resumes: bool = False
    #: Whether the tracker uses `run_group` to show the runs of all ranks as one group.
    groups: bool = False
    #: Top-level packages whose objects `log` accepts. None accepts objects of all packages except
    #: Python's, NumPy's and torch's.
    packages: tuple[str, ...] | None = None
    #: Names of methods that look like misspelt hooks but are intended.
    not_hooks: tuple[str, ...] = ()
    #: The verbs for which the class has a method. Filled in automatically.
    supports: frozenset[str] = frozenset()

    #: Set before `start`: the run to continue, and the group of all ranks' runs.
    resume_id: str | None = None
    run_group: RunGroup | None = None

    if TYPE_CHECKING:
        # Only declared, because a value would hide that a subclass lacks its own.
        name: Any
        requires_logging_directory: Any

        @property
        def tracker(self) -> Any:
            """The run object of the library, or None if no run is open."""

    # Set by the hub. Before that, `on_main_process` determines the rank itself.
    _is_main_process: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_declared(cls)
        known = {*dir(GeneralTracker), "tracker", *(f"log_{verb}" for verb in VERBS)}
        for name in vars(cls).keys() - known - {"name", "not_hooks", *_FLAGS, *cls.not_hooks}:
            if is_newer(cls):
                continue
            if not name.startswith("_") and callable(vars(cls)[name]):
                check_near_miss(name, known, f"The tracker class {cls.__qualname__}")
            elif isinstance(vars(cls)[name], bool):
                _check_flag(cls, name)
        cls.supports = frozenset(verb for verb in VERBS if callable(getattr(cls, f"log_{verb}", 0)))

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            self.validate()

    def validate(self) -> None:
        """Check that the instance has all required attributes.

        Raises:
            IncompleteTrackerError: some are missing. The message lists them and how to write them.
        """
        cls = type(self)
        # Looked up without evaluating them, because a property may need an open run.
        places = [vars(self), *map(vars, cls.__mro__)]
        missing = [name for name in _REQUIRED if not any(name in place for place in places)]
        if missing:
            raise IncompleteTrackerError(
                f"The tracker class {cls.__qualname__} ({cls.__module__}) lacks "
                f"{' and '.join(f'`{name}`' for name in missing)}. Add "
                f"{'; '.join(_REQUIRED[name] for name in missing)}."
            )

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        """Return why the tracker cannot run here without a prompt or an account, or None.

        It must not import the library. The default checks that a suitable version of `library` is
        installed.
        """
        if not cls.library:
            return None
        wanted = Requirement(cls.library)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            return f"its library is not installed: pip install '{wanted}'"
        if wanted.specifier.contains(version, prereleases=True):
            return None
        return (
            f"{wanted.name} {version} is installed, but the tracker needs {wanted}: pip install -U "
            f"'{wanted}'"
        )

    @property
    def run_id(self) -> str | None:
        """The id of the run, for a later `resume_id`. None if runs cannot be continued."""
        return None

    def start(self) -> None:
        """Open the run. Called once, after the process group was created. Default: do nothing."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: a flat dict, with nested keys joined by `/`. The values are Python numbers,
                bools, strings, None, and lists, which may contain lists and dicts.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record one set of values.

        Args:
            values: a flat dict, with nested keys joined by `/`. The values are Python numbers,
                bools and strings, and objects for which `accepts` returned True.
            step: the step they belong to, or None.
            kwargs: this tracker's entry in the caller's `log_kwargs`.
        """

    def log_many(self, entries: Sequence[tuple[dict[str, Any], int | None]]) -> None:
        """Record several sets of values in order. Default: call `log` for each.

        Args:
            entries: pairs of values and step, oldest first.
        """
        for values, step in entries:
            self.log(values, step=step)

    def flush(self) -> bool | None:
        """Write logged values to where they survive a crash of this process.

        Called every two seconds, in `save_state` and at the end. Default: do nothing.

        Returns:
            False if the library cannot guarantee that before `finish`. Users are then warned in
            `save_state`.
        """
        return None

    def accepts(self, value: object) -> bool:
        """Return whether `log` accepts this value, which is neither a number nor a string.

        Called for media objects of other packages, tensors and arrays with several elements, and
        containers. Default: accept objects of `packages`. If that is None, accept objects of any
        package except Python, NumPy and torch, and containers with such an object.
        """
        return is_third_party(value) if self.packages is None else made_by(value, self.packages)

    def discard(self) -> None:
        """Close a run that has no values yet, because another run is continued instead."""
        self.finish()

    def finish(self) -> None:
        """Write the remaining values and close the run. Default: do nothing."""

    def finish_failed(self) -> None:
        """Close the run of a script that raised. Default: call `finish`."""
        self.finish()


#: Boolean attributes that a class may declare.
_FLAGS = (
    "requires_logging_directory",
    *(name for name, value in vars(GeneralTracker).items() if isinstance(value, bool)),
)


def _check_flag(cls: type[GeneralTracker], name: str) -> None:
    """Refuse an unknown declaration that looks like a misspelt flag."""
    if near := difflib.get_close_matches(name, _FLAGS, n=1, cutoff=0.83):
        raise TrackerError(
            f"The tracker class {cls.__qualname__} declares {name!r}, which has no effect. Did you "
            f"mean {near[0]!r}? If the attribute is intended, start its name with _ or set "
            f"not_hooks = ({name!r},)."
        )


def _check_declared(cls: type[GeneralTracker]) -> None:
    name = cls.__dict__.get("name", "")
    if inspect.isfunction(name) or not (isinstance(name, str) or hasattr(name, "__get__")):
        raise IncompleteTrackerError(
            f"{cls.__qualname__}.name must be a string, not {type(name).__name__}."
        )
    for flag in _FLAGS:
        value = cls.__dict__.get(flag, False)
        if inspect.isfunction(value) or not (isinstance(value, bool) or hasattr(value, "__get__")):
            raise IncompleteTrackerError(
                f"{cls.__qualname__}.{flag} must be True or False, not {value!r}."
            )


class BlankTracker(GeneralTracker):
    """A tracker that does nothing, for ranks that don't track.

    You can call any method of the real tracker, or of its library's run object, on it. Scripts
    therefore need no `if is_main_process`.
    """

    requires_logging_directory = False

    def __init__(self, name: str = "blank") -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> Any:
        """An object that ignores every call."""
        return Nothing(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __repr__(self) -> str:
        return f"<blank tracker {self.name!r}>"
