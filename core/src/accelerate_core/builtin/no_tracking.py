"""The `Tracking` of a run without trackers, so that scripts can call `log` unconditionally."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins import catalog
from accelerate_core.plugins.discovery import why_without


def asks(log_with: object) -> bool:
    """Return whether `log_with` requests a tracker."""
    none = isinstance(log_with, (list, tuple, set, frozenset)) and not log_with
    return log_with is not None and not none


class Nothing:
    """Replaces a tracker or its library's run object. Any call or attribute does nothing."""

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
        return "<no tracker runs in this process>"


class NoTracking:
    """Does nothing.

    Raises:
        MissingPluginError: a tracker was requested, but no tracking plugin is installed.
    """

    def __init__(self, asked: object = None, *_: object) -> None:
        if asks(asked):
            several = asked if isinstance(asked, (list, tuple, set, frozenset)) else [asked]
            known = catalog.known_names("tracker")
            extras = ",".join(sorted({known[name] for name in map(str, several) if name in known}))
            why = why_without("tracking", extras or "standard")
            raise MissingPluginError(f"log_with={asked!r} needs a tracking plugin: {why}")
        self.names: list[str] = []
        self.trackers: list[Any] = []
        self.resumed_runs: dict[str, str] = {}

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""

    init_trackers = log = log_images = log_table = log_figure = log_artifact = _nothing
    log_text = log_histogram = is_failing = finish = _nothing

    def get_tracker(self, name: str, unwrap: bool = False) -> Nothing:
        """Return an object that ignores every call."""
        return Nothing(str(name))

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Return immediately; no tracker is late."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the tracker runs of the checkpoint, which scripts can read."""
        self.resumed_runs = dict(state.get("runs", {}))
