"""The Accelerator's access to its checkpointer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from accelerate_core.builtin.no_checkpointer import NoCheckpointer
from accelerate_core.config.handlers import ProjectConfiguration
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.contract.checkpointer import Checkpointer, RunParts
from accelerate_core.contract.members import Stateful
from accelerate_core.errors import ConfigurationError, listing
from accelerate_core.plugins.factory import Part

#: Seconds a save waits for trackers.
SAVE_WAIT = 2.0


class Saving:
    """Creates the checkpointer when it is first needed, and passes calls on to it.

    Args:
        chosen: the plugin of the checkpointer, or None if none is installed.
        project: directories, naming and retention.
        signals: `preemption_signals`.
        needed: whether to create the checkpointer immediately, because it was named or the backend needs it.

    Raises:
        ConfigurationError: checkpoint settings contradict each other.
        MissingPluginError: settings need checkpoints, but no checkpointer is installed.
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
        #: The checkpointer, or None if it doesn't exist yet.
        self.made: Checkpointer | None = None
        self.registered: list[Stateful] = []
        self.save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        numbered = project.automatic_checkpoint_naming
        if signals.value or numbered or project.total_limit is not None or needed:
            self.made = self._make(project, signals.value)
        if signals.value and (project.project_dir is None or not numbered):
            raise ConfigurationError(
                f"preemption_signals ({signals.origin}) needs a directory to save to: pass "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )

    def attach(self, run: Callable[[], RunParts]) -> None:
        """Set the function that returns the run to save.

        The function is only called once a checkpointer exists, because a run refers to the Accelerator,
        which refers to this object.
        """
        self._run = run
        if self.made is not None:
            self.made.attach(run())

    @property
    def checkpointer(self) -> Checkpointer:
        """The active checkpointer."""
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
        """Include objects with `state_dict` and `load_state_dict` in checkpoints."""
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
        """Deliver the values that a script resuming from this checkpoint won't log again."""
        run = self._run()
        late = run.tracking.flush_trackers(SAVE_WAIT)
        if late:
            run.warn_once(
                f"save_state waited {SAVE_WAIT:.0f} s for the trackers, but {listing(late)} had not received "
                "all values. If the run is killed now, that tracker may lack values from before "
                "the checkpoint. To keep every value after a kill, add 'jsonl' to log_with.",
                every_rank=True,
            )

    @property
    def preemption_requested(self) -> bool:
        """Whether one of `preemption_signals` was received."""
        return self.made is not None and self.made.preemption_requested

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save is complete, and raise its error if it failed."""
        if self.made is not None:
            self.made.wait()

    def release(self) -> None:
        """Wait for a background save, and free the memory that is reserved for such saves."""
        if self.made is not None:
            self.made.release()

    def close(self, failed: bool) -> None:
        """Shut down. If `failed`, other ranks may have exited, so don't communicate with them."""
        if self.made is not None:
            self.made.close(failed)
