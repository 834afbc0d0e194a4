"""The checkpointer of an installation that has none."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, NoReturn

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins.discovery import why_without


class NoCheckpointer:
    """Refuses settings that ask for checkpoints at once, and everything else when it is used.

    Args:
        project: the `ProjectConfiguration`.
        signals: text of `preemption_signals`.
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
        """Nothing is kept of the run."""

    save = partialmethod(_refuse, "save")
    save_model = partialmethod(_refuse, "save_model")
    save_state = partialmethod(_refuse, "save_state")
    load_state = partialmethod(_refuse, "load_state")
    wait = partialmethod(_refuse, "wait_for_checkpoint")

    def release(self) -> None:
        """Nothing is held."""

    def close(self, failed: bool) -> None:
        """Nothing is open."""
