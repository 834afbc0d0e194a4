"""The checkpointer that is used if none is installed. It raises errors with the pip command."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, NoReturn

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins.discovery import why_without


class NoCheckpointer:
    """Raises an error for settings that need a checkpointer, and when any method is called.

    Args:
        project: the `ProjectConfiguration`.
        signals: the value of `preemption_signals`.
    """

    preemption_requested = False

    def __init__(self, project: Any, signals: str | None) -> None:
        asked = {
            "preemption_signals": signals,
            "ProjectConfiguration(automatic_checkpoint_naming)": (
                project.automatic_checkpoint_naming
            ),
            "ProjectConfiguration(total_limit)": project.total_limit,
        }
        for name, value in asked.items():
            if value:
                self._refuse(f"{name}={value!r}")

    def _refuse(self, what: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise MissingPluginError(f"{what}: {why_without('checkpointer')}")

    def attach(self, state: Any) -> None:
        """Do nothing."""

    save = partialmethod(_refuse, "save")
    save_model = partialmethod(_refuse, "save_model")
    save_state = partialmethod(_refuse, "save_state")
    load_state = partialmethod(_refuse, "load_state")
    wait = partialmethod(_refuse, "wait_for_checkpoint")

    def release(self) -> None:
        """Do nothing."""

    def close(self, failed: bool) -> None:
        """Do nothing."""
