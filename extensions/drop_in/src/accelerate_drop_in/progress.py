"""Progress bars that only one process on each machine shows."""

from __future__ import annotations

import importlib
import os
from typing import Any

from accelerate_core.distributed import process as runtime
from accelerate_core.plugin import MissingPluginError, read_topology

try:
    _library: Any = importlib.import_module("tqdm.auto")
except ImportError as error:
    raise MissingPluginError(
        'Progress bars need tqdm. Install it with: pip install "tqdm>=4.66"', name="tqdm"
    ) from error


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Create a `tqdm.auto.tqdm` that is only enabled on the first process of each machine.

    Args:
        args: arguments of tqdm; the first one is the iterable.
        main_process_only: False shows a bar for every process.
        kwargs: arguments of tqdm.

    Raises:
        TypeError: `main_process_only` is the first argument, as in older versions of Accelerate.

    Example:
        for x, y in tqdm(loader, desc="epoch 1"):
            loss = loss_function(model(x), y)
    """
    if args and isinstance(args[0], bool):
        raise TypeError(
            "tqdm() takes main_process_only only as a keyword: tqdm(iterable, main_process_only=...)."
        )
    if main_process_only and _local_index() != 0:
        kwargs["disable"] = True
    return _library.tqdm(*args, **kwargs)


def _local_index() -> int:
    # Don't start a process group just for a progress bar.
    running = runtime.running()
    if running is not None:
        return running.local_process_index
    return read_topology(os.environ).local_process_index
