"""The checkpointer of an installation that has none."""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins.discovery import why_without


def _refusing(verb: str) -> Any:
    def refuse(self: NoCheckpointer, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(verb)

    return refuse


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

    def _refuse(self, what: str) -> NoReturn:
        raise MissingPluginError(f"{what}: {why_without('checkpointer')}")

    def attach(self, state: Any) -> None:
        """Nothing is kept of the run."""

    save = _refusing("save")
    save_model = _refusing("save_model")
    save_state = _refusing("save_state")
    load_state = _refusing("load_state")
    wait = _refusing("wait_for_checkpoint")

    def release(self) -> None:
        """Nothing is held."""

    def close(self, failed: bool) -> None:
        """Nothing is open."""
