"""The trackers by name, as the original lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from typing import Any

from accelerate_core.errors import ConfigurationError, MissingPluginError
from accelerate_tracking import GeneralTracker, get_available_trackers, normalise_log_with
from accelerate_tracking.choice import _registered, available_names, tracker_class


class _Classes(MutableMapping[str, type[GeneralTracker]]):
    """Classes of trackers by name: what is installed or registered; an entry registers one."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        try:
            return tracker_class(str(name))
        except MissingPluginError as error:
            raise KeyError(str(error)) from error

    def __setitem__(self, name: str, value: type[GeneralTracker]) -> None:
        _registered[name] = value

    def __delitem__(self, name: str) -> None:
        del _registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(available_names())

    def __len__(self) -> int:
        return len(available_names())


LOGGER_TYPE_TO_CLASS = _Classes()


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the trackers that are asked for and installed, each once.

    Args:
        log_with: as of the Accelerator; "all" stands for every one that is installed.
        logging_dir: where those write that need a folder.

    Raises:
        MissingPluginError: one is not installed.
        ConfigurationError: one needs `logging_dir`.
    """
    asked = normalise_log_with(log_with)
    if "all" in asked:
        return [one for one in asked if not isinstance(one, str)] + get_available_trackers()
    for one in asked:
        cls: Any = tracker_class(one) if isinstance(one, str) else one
        if cls.requires_logging_directory and isinstance(one, str) and logging_dir is None:
            raise ConfigurationError(f"The tracker {one!r} writes to logging_dir; pass one.")
    return list(asked)
