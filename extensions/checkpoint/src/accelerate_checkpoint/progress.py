"""How far reading or writing of large files has come, for whom a terminal shows it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate_core.plugin import console


@contextmanager
def byte_bar(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show bytes, rate and time left on a terminal, once it has taken two seconds; on one rank.

    Args:
        shown: False shows nothing, as beside a training that has a bar of its own.

    Yields:
        A function that takes the bytes that were read or written since the last call.
    """
    if not shown or not sys.stderr.isatty() or os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count: None
        return
    from rich import progress
    from rich.table import Column

    cut = Column(no_wrap=True, max_width=30)  # a long name leaves room for the figures
    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=cut),
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console(stderr=True), transient=True)
    task, begun = bar.add_task(what, total=total), time.monotonic()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - begun > 2:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
