"""Free memory, and find a batch size that fits into it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError, clear_device_cache

_OUT_OF_MEMORY = (
    "out of memory",
    "cudnn error: cudnn_status_not_supported",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "can't allocate memory",
    "not enough memory",
)


def release_memory(*objects: Any) -> list[None]:
    """Free the memory of objects. The caller must assign the result to the same variables.

    Example:
        model, optimizer = release_memory(model, optimizer)
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an exception means that a device or the host ran out of memory."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(exception, RuntimeError):
        return False
    text = str(exception).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY)


def _nine_tenths(batch_size: int) -> int:
    return int(batch_size * 0.9)


def _shrinker(reduce: Callable[..., int] | None) -> Callable[[int], int]:
    """Return a function of the last size, even for a function without arguments."""
    if reduce is None:
        return _nine_tenths
    if inspect.signature(reduce).parameters:
        return reduce
    without_argument = reduce
    return lambda _: without_argument()


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if not names:
        raise ConfigurationError(
            f"{function.__name__}() must take the batch size as its first argument, but it takes none."
        )
    if len(args) >= len(names):
        shown = ", ".join(f"{name}={arg!r}" for name, arg in zip(names[1:], args[1:]))
        raise TypeError(
            f"find_executable_batch_size passes the first argument of {function.__name__}(), the batch"
            f" size. Call it without that: {function.__name__}({shown})."
        )


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Call a function with smaller and smaller batch sizes until memory suffices.

    This is a decorator, with or without arguments. It passes the batch size as the function's first
    argument, so callers leave that out. Every call starts with `starting_batch_size`. Errors other
    than a lack of memory are raised unchanged.

    Args:
        function: the decorated function.
        starting_batch_size: the first size to try, in samples.
        reduce_batch_size_fn: returns the next size, given the last one or without an argument. The
            default is 90% of the last size, rounded down.

    Raises:
        RuntimeError: even the smallest size doesn't fit; the text has the last failure.

    Example:
        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size, epochs):
            loader = accelerator.prepare(DataLoader(dataset, batch_size))
            for _ in range(epochs):
                for x, y in loader:
                    accelerator.backward(loss_function(model(x), y))

        train(epochs=1)  # without the batch size
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    shrink = _shrinker(reduce_batch_size_fn)

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_call(function, args)
        batch_size, failure = starting_batch_size, ""
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                # Keep only the text, because the traceback would keep the tensors alive.
                failure = f"{type(error).__name__}: {error}"
            batch_size = shrink(batch_size)
        raise RuntimeError(
            f"No executable batch size found, reached zero. The last try of {function.__name__}()"
            f" ended with {failure or 'nothing, because starting_batch_size is not positive'}"
        )

    return search
