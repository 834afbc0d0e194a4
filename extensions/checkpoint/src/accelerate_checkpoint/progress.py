"""A progress bar for reading and writing large files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate_core.plugin import console


@contextmanager
def byte_bar(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal if the work takes more than two seconds.

    Only the first rank of each machine shows it.

    Args:
        what: what is being done, such as "Uploading checkpoint_3".
        total: number of bytes.
        shown: False never shows a bar, for example during training, which may have its own.

    Yields:
        A function to call with the number of bytes read or written since the last call.
    """
    if not shown or not sys.stderr.isatty() or os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count: None
        return
    from rich import progress
    from rich.table import Column

    cut = Column(no_wrap=True, max_width=30)  # so that a long name does not push out the numbers
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
