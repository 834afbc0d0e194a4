"""Loggers that log an event once per run rather than once per process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from accelerate_core.plugin import (
    ConfigurationError,
    PartialState,
    did_you_mean,
    listing,
    read_topology,
    running,
)

LOG_LEVEL_VARIABLE = "ACCELERATE_LOG_LEVEL"


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger with the additional keywords `main_process_only` and `in_order`.

    `main_process_only=True` (the default) logs on the main process only.
    `main_process_only=False, in_order=True` logs on every process in rank order. This is a collective, so
    every process must make the call.

    Logging never starts a process group. Before an Accelerator exists, the rank comes from the launcher's
    environment variables, and `in_order` has no effect.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, dict(extra or {}))
        self._said: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, as `main_process_only` and `in_order` specify."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if main_process_only or not in_order or running() is None:
            if self.isEnabledFor(level) and (not main_process_only or _rank() == 0):
                self._emit(level, msg, args, kwargs)
            return
        # Every rank takes part, even if its level hides the message, because levels may differ.
        state = PartialState()
        for turn in range(state.num_processes):
            if turn == state.process_index and self.isEnabledFor(level):
                self._emit(level, msg, args, kwargs)
            state.wait_for_everyone()

    def _emit(
        self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]
    ) -> None:
        msg, kwargs = self.process(msg, kwargs)
        # One more for this method, on top of those counted in `log`.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
        self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning once. The same message with other arguments counts as another message."""
        key = repr((msg, args, sorted(kwargs.items())))
        if key not in self._said:
            self._said.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger `name`, which logs on the main process by default.

    Args:
        log_level: `"DEBUG"`, `"INFO"`, ... The default is the environment variable
            ACCELERATE_LOG_LEVEL; if that is unset, the logger's level is not changed.

    Raises:
        ConfigurationError: the level does not exist.

    Example:
        logger = get_logger(__name__)
        logger.info("once per run")
        logger.info("once per process", main_process_only=False)
    """
    logger = logging.getLogger(name)
    wanted = log_level if log_level is not None else os.environ.get(LOG_LEVEL_VARIABLE)
    if wanted:
        levels = logging.getLevelNamesMapping()
        if wanted.upper() not in levels:
            origin = "log_level" if log_level is not None else f"variable {LOG_LEVEL_VARIABLE}"
            raise ConfigurationError(
                f"{wanted!r} (from {origin}) is not a log level; the levels are {listing(levels)}."
                f"{did_you_mean(wanted, levels)}"
            )
        logger.setLevel(wanted.upper())
    return MultiProcessAdapter(logger)


def _rank() -> int:
    return (running() or read_topology(os.environ)).process_index
