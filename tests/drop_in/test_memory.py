"""Memory is freed, and a batch size that fits into memory is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accelerate_core.utils as utils
from accelerate_core.errors import ConfigurationError


def test_batch_size_shrinks_until_memory_suffices() -> None:
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int, epochs: int) -> tuple[int, int]:
        tried.append(batch_size)
        if batch_size > 50:
            torch.empty(1 << 55, dtype=torch.uint8)  # torch's own error for a lack of memory
        return batch_size, epochs

    assert train(3) == (45, 3)
    assert tried == [64, 57, 51, 45]
    assert train(epochs=1) == (45, 1)
    assert tried[4] == 64, "every call must start with the first size"


@pytest.mark.parametrize("shrink", [lambda size: size // 2, iter([4, 2, 1, 0]).__next__])
def test_caller_can_choose_the_next_batch_size(shrink: Any) -> None:
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size

    assert utils.find_executable_batch_size(train, 8, shrink)() == 2


def _wrong() -> None:
    raise RuntimeError("shapes do not match")


def _too_large() -> None:
    raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


@pytest.mark.parametrize(
    ("failure", "text"),
    [(_wrong, "shapes do not match"), (_too_large, "reached zero.*CUDNN_STATUS")],
)
def test_other_errors_and_the_last_failure_are_raised(failure: Any, text: str) -> None:
    @utils.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        failure()

    with pytest.raises(RuntimeError, match=text):
        train()


def test_passing_the_batch_size_is_an_error_with_the_right_call() -> None:
    @utils.find_executable_batch_size
    def train(batch_size: int, epochs: int) -> None: ...

    with pytest.raises(TypeError, match=r"Call it without that: train\(epochs=3\)"):
        train(8, 3)
    with pytest.raises(ConfigurationError, match="first argument"):
        utils.find_executable_batch_size(lambda: None)()


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("index out of range"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, answer: bool) -> None:
    assert utils.should_reduce_batch_size(error) is answer


def test_release_memory_frees_the_objects() -> None:
    import weakref

    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    model, other = utils.release_memory(model, None)
    assert gone() is None
    assert other is None
