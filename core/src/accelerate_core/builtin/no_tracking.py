"""The `Tracking` of a run that tracks nothing, so that a script needs no `if`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate_core.errors import MissingPluginError

_Kwargs = Mapping[str, Mapping[str, Any]] | None


def asks(log_with: object) -> bool:
    """Tell whether `log_with` asks for a tracker."""
    none = isinstance(log_with, (list, tuple, set, frozenset)) and not log_with
    return log_with is not None and not none


class Nothing:
    """Swallows whatever is done with it: a tracker, or its library's run, where there is none."""

    def __init__(self, name: str = "blank") -> None:
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __getitem__(self, key: object) -> Nothing:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __repr__(self) -> str:
        return "<nothing: no tracker runs here>"


class NoTracking:
    """Does nothing.

    Raises:
        MissingPluginError: a tracker was asked for.
    """

    def __init__(
        self,
        asked: object = None,
        logging_dir: str | os.PathLike[str] | None = None,
        rank: int = 0,
        size: int = 1,
        is_main: bool = True,
    ) -> None:
        if asks(asked):
            raise MissingPluginError(
                f"log_with={asked!r} needs the package that feeds trackers, which is not "
                'installed: pip install "accelerate-core[standard]"'
            )
        self.names: list[str] = []
        self.trackers: list[Any] = []
        self.resumed_runs: dict[str, str] = {}

    def init(self, project_name: str, config: object, init_kwargs: _Kwargs) -> None:
        """Start nothing."""

    def get(self, name: str, unwrap: bool) -> Nothing:
        """Return what swallows every call."""
        return Nothing(str(name))

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: _Kwargs) -> None:
        """Drop the values unread."""

    def log_media(
        self, verb: str, arguments: Mapping[str, Any], step: int | None, log_kwargs: _Kwargs
    ) -> None:
        """Drop it unread."""

    def flush(self, timeout: float | None) -> list[str]:
        """Return at once: nobody is late."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know the runs of the checkpoint, which a script may ask for."""
        self.resumed_runs = dict(state.get("runs", {}))

    def is_failing(self) -> bool:
        """Tell that no run has to be marked."""
        return False

    def finish(self, failed: bool) -> None:
        """Close nothing."""
