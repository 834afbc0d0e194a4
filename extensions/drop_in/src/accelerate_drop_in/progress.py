"""Progress bars that only one process of a machine draws."""

from __future__ import annotations

import importlib
import os
from typing import Any

from accelerate_core.contract.topology import read_topology
from accelerate_core.distributed import process as runtime
from accelerate_core.errors import MissingPluginError

try:
    _library: Any = importlib.import_module("tqdm.auto")
except ImportError as error:
    raise MissingPluginError(
        'Progress bars need tqdm. Install it with: pip install "tqdm>=4.66"', name="tqdm"
    ) from error


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a `tqdm.auto.tqdm`, by default disabled except on the first process of a machine.

    Args:
        args: those of tqdm; the first is what to iterate over.
        main_process_only: False draws one bar per process.
        kwargs: those of tqdm.

    Raises:
        TypeError: the first argument is `main_process_only`, which older versions took there.

    Example:
        for x, y in tqdm(loader, desc="epoch 1"):
            loss = loss_function(model(x), y)
    """
    if args and isinstance(args[0], bool):
        raise TypeError("tqdm() takes main_process_only as a keyword: tqdm(iterable, ...).")
    if main_process_only and _local_index() != 0:
        kwargs["disable"] = True
    return _library.tqdm(*args, **kwargs)


def _local_index() -> int:
    # A progress bar is no reason to start a process group.
    running = runtime.running()
    if running is not None:
        return running.local_process_index
    return read_topology(os.environ).local_process_index
