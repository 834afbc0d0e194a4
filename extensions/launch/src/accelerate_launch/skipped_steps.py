"""Notices a backend that reports steps as skipped although nothing skips them."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_core.plugin import warn


class SkippedSteps:
    """Warns if a backend reports steps as skipped although they were taken, or skips all of them.

    Only for runs in which no loss scale gives a reason to skip a step. Nothing is called in a step
    unless the step before was reported as skipped.

    Args:
        backend: its name, for the warning.
    """

    #: Steps in a row that may be reported as skipped.
    PATIENCE = 20

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._in_a_row = 0
        self._parameters: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._warned = False
        #: Whether the next step is watched.
        self.armed = False

    def before_step(self, optimizer: Any) -> None:
        """Remember how often each parameter has been changed in place."""
        groups = getattr(optimizer, "param_groups", ())
        self._parameters = [p for g in groups for p in g["params"] if not p.is_inference()]
        self._versions = [parameter._version for parameter in self._parameters]

    def after_step(self, skipped: bool) -> None:
        """Compare, after a step that was watched or reported as skipped."""
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        versions = [parameter._version for parameter in self._parameters]
        changed = skipped and versions != self._versions
        self.armed = skipped and not self._warned
        self._parameters = []
        self._versions = []
        if self._warned or not (changed or self._in_a_row == self.PATIENCE):
            return
        self._warned = True
        self.armed = False
        what = "although the step changed the parameters"
        if not changed:
            what = f"{self.PATIENCE} times in a row, although no loss scale is active"
        warn(
            f"optimizer_step of backend {self._backend!r} returned False (the step was skipped) {what}. "
            "Schedulers don't advance and no step is counted. The hook must return True after a step."
        )
