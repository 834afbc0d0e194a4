"""Checkpoints, handed to the part that writes and reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from accelerate_core.builtin.no_checkpointer import NoCheckpointer
from accelerate_core.config.handlers import ProjectConfiguration
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.contract.members import Stateful
from accelerate_core.contract.parts import Checkpointer, RunParts
from accelerate_core.errors import ConfigurationError, listing
from accelerate_core.plugins.factory import Part

#: Seconds a save waits for trackers.
SAVE_WAIT = 2.0


class Saving:
    """The verbs of checkpoints, and the checkpointer, which is made when it is first needed.

    Args:
        chosen: the plugin that makes the checkpointer, None where none is installed.
        project: directories, naming and retention.
        signals: `preemption_signals`.
        needed: whether the checkpointer is made at once: it was named, or the backend needs it.

    Raises:
        ConfigurationError: settings of checkpoints contradict each other.
        MissingPluginError: settings ask for checkpoints, and no checkpointer is installed.
    """

    def __init__(
        self,
        chosen: Part | None,
        project: ProjectConfiguration,
        signals: SourcedValue,
        needed: bool,
    ) -> None:
        self._make: Callable[..., Checkpointer] = NoCheckpointer if chosen is None else chosen.make
        #: Whether a checkpointer is installed.
        self.possible = chosen is not None
        self.project = project
        #: The checkpointer if it is made, else None.
        self.made: Checkpointer | None = None
        self.registered: list[Stateful] = []
        self.save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        numbered = project.automatic_checkpoint_naming
        if signals.value or numbered or project.total_limit is not None or needed:
            self.made = self._make(project, signals.value)
        if signals.value and (project.project_dir is None or not numbered):
            raise ConfigurationError(
                f"preemption_signals ({signals.origin}) needs a place to save to: "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )

    def attach(self, run: Callable[[], RunParts]) -> None:
        """Take what returns the run that is to be saved.

        The run holds the Accelerator, which holds this: a run is made only for a checkpointer.
        """
        self._run = run
        if self.made is not None:
            self.made.attach(run())

    @property
    def checkpointer(self) -> Checkpointer:
        """The part that saves and loads."""
        if self.made is None:
            self.made = self._make(self.project, None)
            self.made.attach(self._run())
        return self.made

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before models are saved by `save_state`."""
        handle = RemovableHandle(self.save_hooks)
        self.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded by `load_state`."""
        handle = RemovableHandle(self.load_hooks)
        self.load_hooks[handle.id] = hook
        return handle

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Save and load objects with `state_dict` and `load_state_dict` in `save_state`."""
        bad = [
            f"Item at index {at} ({type(o).__name__})"
            for at, o in enumerate(objects)
            if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))
        ]
        if bad:
            raise ConfigurationError(
                f"register_for_checkpointing needs objects with state_dict and load_state_dict; "
                f"these lack them: {', '.join(bad)}."
            )
        self.registered.extend(objects)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Flush the trackers, and save. See `Checkpointer.save_state` for the arguments."""
        self._flush_for_save()
        return self.checkpointer.save_state(*args, **kwargs)

    def _flush_for_save(self) -> None:
        """Bring to the trackers what a script that goes on from this checkpoint logs no more."""
        run = self._run()
        late = run.tracking.flush_trackers(SAVE_WAIT)
        if late:
            run.accelerator.warn_once(
                f"Saving waits {SAVE_WAIT:.0f} s for trackers, and {listing(late)} had not taken "
                "everything: if the run is killed now, that tracker may lack values from before "
                "the checkpoint. To have every value after a kill, add 'jsonl' to log_with.",
                every_rank=True,
            )

    @property
    def preemption_requested(self) -> bool:
        """Whether one of `preemption_signals` has come: the run ends at the next step boundary."""
        return self.made is not None and self.made.preemption_requested

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint being written stands; raise what it failed with, if it did."""
        if self.made is not None:
            self.made.wait()

    def release(self) -> None:
        """Wait, and give back the memory kept for saving beside the training."""
        if self.made is not None:
            self.made.release()

    def close(self, failed: bool) -> None:
        """End; `failed`: the other ranks may be gone, so meet nobody."""
        if self.made is not None:
            self.made.close(failed)
