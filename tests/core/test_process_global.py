"""`process_global`: process-wide objects are created, shared, refused and ended by one rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from accelerate_core import Accelerator, Backend, process_global
from accelerate_core.distributed import process
from accelerate_core.errors import RuntimeConflictError


class Library:
    """A typical library with global state that must not be started twice."""

    state: tuple[int, int] | None = None
    events: list[str] = []

    @classmethod
    def start(cls, size: int) -> int:
        assert cls.state is None, "started twice"
        cls.state = (size, id(cls))
        cls.events.append(f"start {size}")
        return size

    @classmethod
    def stop(cls, size: int) -> None:
        assert cls.state is not None
        cls.state = None
        cls.events.append(f"stop {size}, {'with' if dist.is_initialized() else 'without'} a group")


class Halves(Backend):
    """A backend whose library has parallel groups of two."""

    name = "halves"
    api_version = (1, 0)
    reduces_gradients = "never"
    needs_group = True
    size = 2

    def mesh(self, runtime: Any) -> Any:
        size = self.size
        self.found = process_global(
            "library.groups", {"tp": size}, lambda: Library.start(size), Library.stop
        )
        return super().mesh(runtime)


class Quarters(Halves):
    name = "quarters"
    size = 4


class Broken(Quarters):
    name = "broken"

    def device(self, setup: Any, topology: Any, cpu: bool) -> Any:
        self.mesh(setup)
        raise OSError("no such device")


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(process, "_current", None)
    monkeypatch.setattr(Library, "events", [])
    yield Library.events
    assert Library.state is None
    assert process.running() is None


def test_process_wide_object_ends_with_its_last_accelerator(events: list[str]) -> None:
    first, second = Accelerator(backend=Halves), Accelerator(backend=Halves)
    assert (first.backend.found, second.backend.found) == (2, 2)
    first.end_training()
    assert events == ["start 2"]
    second.end_training()
    assert events == ["start 2", "stop 2, with a group"]
    assert not dist.is_initialized()


def test_conflicting_request_is_refused_until_the_object_has_ended(events: list[str]) -> None:
    first = Accelerator(backend=Halves)
    with pytest.raises(RuntimeConflictError) as caught:
        Accelerator(backend=Quarters)
    text = str(caught.value)
    assert "library.groups exists once per process" in text
    assert f"{__name__} created it with {{'tp': 2}}" in text
    assert "needs {'tp': 4}" in text
    assert "end_training()" in text
    assert events == ["start 2"]
    first.end_training()
    Accelerator(backend=Quarters).end_training()
    assert events[2:] == ["start 4", "stop 4, with a group"]


def test_failed_start_leaves_nothing_behind(events: list[str]) -> None:
    with pytest.raises(OSError, match="no such device"):
        Accelerator(backend=Broken)
    assert events == ["start 4", "stop 4, without a group"]


def test_objects_end_in_reverse_order_even_if_one_fails(events: list[str]) -> None:
    accelerator = Accelerator(backend=Halves)

    def fails(value: str) -> None:
        events.append(f"fails to end {value}")
        raise OSError("busy")

    assert process_global("switch", True, lambda: "on", fails) == "on"
    assert process_global("other", True, lambda: "there", events.append) == "there"
    with pytest.raises(OSError, match="busy"):
        accelerator.end_training()
    assert events[1:] == ["there", "fails to end on", "stop 2, with a group"]
    assert not dist.is_initialized()
