"""`GeneralTracker`, the base class of every tracker, and its stand-in for other ranks."""

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
from accelerate_tracking.normalise import is_foreign, made_by

#: What can be logged beside values; a tracker supports a verb by having the method `log_<verb>`.
VERBS = ("images", "table", "figure", "artifact", "text", "histogram")

#: What `log_table` gets: names, and for each row a plain value of each.
Columns = list[str]
Rows = list[list[Any]]

P = ParamSpec("P")
R = TypeVar("R")
Self_ = TypeVar("Self_")

#: What a subclass must have, and what to write to have it.
_REQUIRED = {
    "name": "name = 'my_tracker'",
    "requires_logging_directory": "requires_logging_directory = False",
    "tracker": "a property `tracker` that returns the library's own run object",
}


class IncompleteTrackerError(TrackerError, NotImplementedError):
    """A tracker class lacks something every tracker must have.

    Cause: a subclass of `GeneralTracker` without `name` or one of the needed methods.
    Mend: write what the text names, as it shows.
    """


def on_main_process(
    function: Callable[Concatenate[Self_, P], R],
) -> Callable[Concatenate[Self_, P], R | None]:
    """Let a tracker's method run on the main process only, and return None elsewhere.

    A tracker whose `main_process_only` is False runs it on every rank. No process group is started
    to find the rank out: `__init__` can be decorated, and called before there is an Accelerator.
    """

    @functools.wraps(function)
    def guarded(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(self, "main_process_only", True) and not _on_main(self):
            return None
        return function(self, *args, **kwargs)

    return guarded


def _on_main(tracker: object) -> bool:
    told: bool | None = getattr(tracker, "_is_main_process", None)
    if told is not None:
        return told
    runtime = running()
    rank = runtime.process_index if runtime else read_topology(os.environ).process_index
    return rank == 0


@dataclass(frozen=True)
class RunGroup:
    """What the runs of all ranks have in common, for a tracker that runs on each of them."""

    name: str
    rank: int
    size: int


class GeneralTracker:
    """Base of the trackers: subclass it to send metrics wherever you like.

    A subclass has the class attributes `name` (a string, its name in `init_kwargs`, `log_kwargs`
    and `get_tracker`), `requires_logging_directory` (a bool) and a property `tracker` (the
    library's own run object), and implements `store_init_configuration` and `log`; `start` and
    `finish` where there is something to do.

    One named in `log_with` by class is built by `init_trackers` as `cls(project_name,
    **init_kwargs)`, or `cls(project_name, logging_dir, **init_kwargs)` if it requires a directory.

    `start` and `store_init_configuration` are called by the thread that calls
    `init_trackers`; `log`, the verbs and `flush` by one writer thread per tracker, in
    the order of the calls; `finish` by a thread of its own, which may take a minute. A
    library bound to one thread (a connection of sqlite3) asks for `same_thread = True`.
    The verbs a tracker may have:

        log_images(values, step, **kwargs)      name -> uint8 array, N H W C
        log_table(table_name, columns, data, step, **kwargs)    data: a list of rows
        log_figure(name, figure, step, **kwargs)                a matplotlib figure
        log_artifact(path, name, **kwargs)                      a file or directory
        log_text(name, text, step, **kwargs)
        log_histogram(name, values, step, **kwargs)             a one-dimensional array

    `docs/write_a_tracker.md` has a whole one.

    Raises:
        IncompleteTrackerError: the subclass lacks one of the three.
    """

    #: False: every rank has one that works.
    main_process_only: bool = True
    #: The version of the contract it was written for; another major one is refused by name.
    #: A class that does not state one is taken for the first version's.
    api_version: tuple[int, int] = (1, 0)
    #: The library as pip names it, with the oldest version that will do: `name>=1.2`.
    library: str = ""
    #: The library's word for the run of a script that raised, "" if it has none.
    failed_word: str = ""
    #: Whether values logged without a step get the next one, counted per verb.
    counts_steps: bool = False
    #: Whether the library is bound to the thread that made it: `log` and the verbs are then called
    #: by the training thread, which waits for them and for tensors of devices.
    same_thread: bool = False
    #: Whether `finish` has to be called by the thread that called `start`, without a time limit.
    finishes_in_place: bool = False
    #: Whether `log_artifact` gets the file where it lies, not a copy made at the call.
    artifacts_in_place: bool = False
    #: Whether `log_histogram` gets what is not finite too.
    takes_not_finite: bool = False
    #: Whether `resume_id` is honoured: a resumed script goes on in the same run.
    resumes: bool = False
    #: Whether `run_group` is honoured: the ranks' runs are shown as one group.
    groups: bool = False
    #: Top-level packages whose objects `log` takes; None: of any but Python, NumPy and torch.
    packages: tuple[str, ...] | None = None
    #: Methods of the class's own whose names are near to one that is called.
    not_hooks: tuple[str, ...] = ()
    #: The verbs of `VERBS` for which the class has a method; filled in by itself.
    supports: frozenset[str] = frozenset()

    #: Set before `start`: the run to go on in, and the group of the ranks' runs.
    resume_id: str | None = None
    run_group: RunGroup | None = None

    if TYPE_CHECKING:
        # Only announced: a value here would hide that a subclass forgot its own.
        name: Any
        requires_logging_directory: Any

        @property
        def tracker(self) -> Any:
            """The library's own run, None where nothing runs."""

    # Told by the hub; before that `on_main_process` reads the rank itself.
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
        """Raise `IncompleteTrackerError` unless the instance has all a tracker must have.

        Raises:
            IncompleteTrackerError: with what is missing and how to write it.
        """
        cls = type(self)
        # Looked up without evaluating: a property may only work once the run is open.
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

        Imports nothing. The default asks whether `library` is installed and new enough.
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
            f"its library is too old or too new: {wanted.name} {version}, it needs {wanted}: "
            f"pip install -U '{wanted}'"
        )

    @property
    def run_id(self) -> str | None:
        """What `resume_id` takes later; None if the tracker cannot go on in a run."""
        return None

    def start(self) -> None:
        """Open the run; called once, after the process group stands. Default: nothing."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration.

        Args:
            values: one level deep, nested keys joined by `/`; the values are Python numbers, bools,
                strings, None, and lists (of those, of lists, of dicts).
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record one set of values.

        Args:
            values: one level deep, nested keys joined by `/`; Python numbers, bools and strings,
                and objects for which `accepts` said yes.
            step: the step they belong to, or None.
            kwargs: this tracker's entry in the caller's `log_kwargs`.
        """

    def log_many(self, entries: Sequence[tuple[dict[str, Any], int | None]]) -> None:
        """Record several sets of values at once, in order. Default: `log` for each.

        Args:
            entries: pairs of values and step, oldest first.
        """
        for values, step in entries:
            self.log(values, step=step)

    def flush(self) -> bool | None:
        """Bring what was logged to where a crash of this process does not reach it.

        Called every other second, in `save_state` and at the end. Default: nothing to do.

        Returns:
            False if the library cannot promise that before `finish`; who relies on it is told.
        """
        return None

    def accepts(self, value: object) -> bool:
        """Whether `log` takes this value, which is neither a number nor a string.

        Asked for media objects of other packages, tensors and arrays of several elements, and
        containers. Default: objects of `packages`; if that is None, anything but tensors, arrays,
        None and containers without a foreign object.
        """
        return is_foreign(value) if self.packages is None else made_by(value, self.packages)

    def discard(self) -> None:
        """Close a run into which nothing was logged, because another one is resumed."""
        self.finish()

    def finish(self) -> None:
        """Write out what is left and close the run. Default: nothing."""

    def finish_failed(self) -> None:
        """Close the run of a script that raised. Default: `finish`."""
        self.finish()


#: What a class declares by True or False.
_FLAGS = (
    "requires_logging_directory",
    *(name for name, value in vars(GeneralTracker).items() if isinstance(value, bool)),
)


def _check_flag(cls: type[GeneralTracker], name: str) -> None:
    """Refuse a declaration that nobody reads: the ability would be lost in silence."""
    if near := difflib.get_close_matches(name, _FLAGS, n=1, cutoff=0.83):
        raise TrackerError(
            f"The tracker class {cls.__qualname__} declares {name!r}, which nobody reads: is {near[0]!r} "
            f"meant? If it is its own, begin its name with _ or let it say not_hooks = ({name!r},)."
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
    """Does nothing, whatever it is asked: for ranks that do not track.

    Any method of the real tracker or of its library's run object can be called on it, so that a
    script needs no `if is_main_process`.
    """

    requires_logging_directory = False

    def __init__(self, name: str = "blank") -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> Any:
        """An object that swallows every call."""
        return Nothing(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __repr__(self) -> str:
        return f"<blank tracker {self.name!r}>"
