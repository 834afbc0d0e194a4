"""`CheckContext`: creates Accelerators with the plugin under test, compares, and cleans up.

Importing this module does not import torch, because the check `imports` runs before anything else.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate_testing.results import Skip

if TYPE_CHECKING:
    from accelerate_core.plugin import Accelerator

#: Prefixes of the variables with which a launcher describes the ranks.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


@dataclass(eq=False)
class CheckContext:
    """One plugin under test, on one rank.

    Attributes:
        kind, name: which plugin it is.
        plugin: its name, or the class itself (backends only).
        folder: a directory that all ranks share.
        timeout: seconds a collective may wait.
        options: the suite's options for checks of this kind.
        device: type of the device on which the checks must run, such as "cuda"; "" for the CPU if
            the plugin runs there.
    """

    kind: str
    name: str
    plugin: Any
    folder: Path
    timeout: float = 20.0
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    made: list[Accelerator] = field(default_factory=list)
    #: Hooks that a failure points to from here on, if a check knows better than its field `hooks`.
    hooks: str = ""

    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    size: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    def accelerator(self, **arguments: Any) -> Accelerator:
        """Return an Accelerator with the plugin and these arguments; it ends with the check.

        Raises:
            Skip: this machine has no device on which the plugin runs, or no backend for several
                processes.
        """
        from accelerate_core.plugin import Accelerator

        on_cpu, missing = self.placement
        if missing:
            self.skip(missing)
        given: dict[str, Any] = {"cpu": on_cpu}
        if self.size > 1:
            given["process_group_timeout"] = self.timeout
            if self.kind != "backend":
                self.need_several()
        if self.kind == "backend":
            given["backend"] = self.plugin
        elif self.kind == "precision":
            given["mixed_precision"] = self.name
        elif self.kind in ("checkpointer", "loaders"):
            given[self.kind] = self.name
        made = Accelerator(**{**given, **arguments})
        self.made.append(made)
        if self.device and not arguments.get("cpu"):
            kind = made.device.type
            assert kind == self.device, (
                f"it runs on {kind!r}, but the suite was started for {self.device!r}"
            )
        return made

    def create(self, *arguments: Any) -> Any:
        """Return an instance of the plugin, created as the runtime does, with its settings.

        Args:
            arguments: what its class gets before the settings.
        """
        from accelerate_core.plugin import PluginFactory, Sources, find

        factory = PluginFactory(Sources.of(dict(os.environ)))
        record = find(self.kind, self.name, source="the conformance suite")
        return factory.create(record, *arguments)

    def need_several(self) -> None:
        """Skip the check if no installed backend runs several processes."""
        from accelerate_core.plugin import Request, Topology, select

        request = Request({}, {}, Topology(0, 2, 0, 2, "as checked"))
        if (error := select("backend", request).error) is not None:
            self.skip(f"no backend for several processes is installed: {error}")

    @cached_property
    def placement(self) -> tuple[bool, str]:
        """Whether the checks run on the CPU; and why they cannot run on this machine, "" if they can."""
        from accelerate_testing.devices import placement_of

        return placement_of(self.found, self.device)

    @property
    def supports(self) -> Mapping[str, Any]:
        """The plugin's `supports`; empty for a tracker, whose `supports` is the set of its methods."""
        said = getattr(self.found, "supports", {})
        return said if isinstance(said, Mapping) else {}

    @property
    def found(self) -> Any:
        """The plugin's class."""
        if not isinstance(self.plugin, str):
            return self.plugin
        from accelerate_core.plugin import find

        return find(self.kind, self.plugin, source="the conformance suite").load()

    def end(self) -> None:
        """End everything that the check has started, even after a failure."""
        while self.made:
            accelerator = self.made.pop(0)
            if not accelerator._closed:
                accelerator.end_training()
            del accelerator  # so that the collection below frees it
        gc.collect()
        if self.size > 1:
            _destroy_group()

    def abandon(self) -> None:
        """Drop what a failed check has left, without waiting for other ranks."""
        from accelerate_core.distributed import process

        while self.made:
            accelerator = self.made.pop(0)
            accelerator._closed = True
            process.release(accelerator)
            del accelerator
        gc.collect()
        _destroy_group()

    @contextmanager
    def each_alone(self) -> Iterator[None]:
        """Make each rank a single process inside the block; what it creates there ends with the block."""
        self.end()
        size = self.size
        self.size = 1
        kept = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(_OF_RANKS)}
        try:
            yield
            self.end()
        finally:
            self.size = size
            os.environ.update(kept)

    def scratch(self, name: str) -> Path:
        """Return a path in the folder that all ranks share."""
        return self.folder / name

    def skip(self, why: str) -> NoReturn:
        """Leave the check, because it does not apply.

        Args:
            why: the reason, for the report.
        """
        raise Skip(why)

    def equal(self, got: object, expected: object, what: str) -> None:
        """Fail unless `got` equals `expected`; `what` names them in the report."""
        assert got == expected, f"{what}: {got!r} instead of {expected!r}"

    def close(self, got: Any, expected: Any, what: str, tolerance: float = 1e-5) -> None:
        """Fail unless `got` and `expected` differ by at most `tolerance`.

        They are numbers, tensors, or lists or dicts of these. `what` names them in the report.
        """
        import torch

        for where, *both in leaves(got, expected, what):
            one, other = (torch.as_tensor(value).cpu().double() for value in both)
            shapes = f"shape {list(one.shape)} instead of {list(other.shape)}"
            assert one.shape == other.shape, f"{where}: {shapes}"
            error = float((one - other).abs().max()) if one.numel() else 0.0
            if not error <= tolerance:
                single = one.numel() == 1
                shown = f": {one.item():.6g} instead of {other.item():.6g}" if single else ""
                raise AssertionError(f"{where}: differs by {error:.3g} (> {tolerance:g}){shown}")

    def alike(self, accelerator: Accelerator, value: Any, what: str) -> None:
        """Fail unless a plain value is the same on all ranks; `what` names it in the report."""
        seen = accelerator.communicator.gather_object(value)
        assert all(one == seen[0] for one in seen), f"{what}: the ranks differ, {seen}"


def raised(kind: type[BaseException], call: Callable[[], object]) -> BaseException | None:
    """Return the exception of this class that a call raises, None if it raises nothing."""
    try:
        call()
    except kind as error:
        return error
    return None


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leaves(got: Any, expected: Any, what: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each value in a nested structure, and both values; fail if they don't match."""
    if isinstance(expected, Mapping):
        wrong = f"{what}: keys {sorted(map(str, got))} instead of {sorted(map(str, expected))}"
        assert set(got) == set(expected), wrong
        for key in expected:
            yield from leaves(got[key], expected[key], f"{what}, {key}")
    elif isinstance(expected, list | tuple):
        wrong = f"{what}: {len(got)} entries instead of {len(expected)}"
        assert len(got) == len(expected), wrong
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from leaves(one, other, f"{what}[{index}]")
    else:
        yield what, got, expected
