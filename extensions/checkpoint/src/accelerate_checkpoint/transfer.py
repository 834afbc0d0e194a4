"""Upload and download several files at once, and repeat requests that fail with transient errors."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from accelerate_checkpoint.files import Progress, first_line
from accelerate_checkpoint.store import Store, join
from accelerate_core.plugin import CheckpointError, without_credentials

#: Bytes that are fetched in one request.
PART = 32 << 20

#: Seconds before the second attempt. The pause doubles with each attempt, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


def persist(storage: Store, what: str, job: Callable[[], T]) -> T:
    """Run a job, and repeat it if it fails with a transient error.

    Args:
        what: the start of the error message, such as "s3://a/b cannot be read".

    Raises:
        FileNotFoundError: the job raised it.
        CheckpointError: the job raised it and the storage does not call it transient, or its last
            attempt failed.
    """
    for attempt in range(1, storage.attempts + 1):
        try:
            return job()
        except FileNotFoundError:
            raise
        except Exception as error:
            is_transient = storage.is_transient(error)
            if isinstance(error, CheckpointError) and not is_transient:
                raise
            reason = without_credentials(f"{type(error).__name__}: {first_line(error)}")
            if not is_transient:
                raise CheckpointError(f"{what}: {reason}") from error
            if attempt == storage.attempts:
                made = f" after {attempt} attempts" if attempt > 1 else ""
                raise CheckpointError(f"{what}{made}: {reason}") from error
            pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.8, 1.2)
            shown = without_credentials(what)
            logger.info("%s: %s. Starting attempt %d in %.1f s.", shown, reason, attempt + 1, pause)
        time.sleep(pause)
    raise AssertionError("a store must allow at least one attempt")


def upload(storage: Store, place: str, files: Mapping[str, Path], progress: Progress) -> None:
    """Write local files below a place, largest first.

    Args:
        files: name below the place -> local file.
        progress: called with the number of bytes sent. If an attempt fails, it is called with
            their negative sum.

    Raises:
        CheckpointError: a file could not be written. The message names it.
    """

    def send(name: str, source: Path) -> None:
        def attempt() -> None:
            counted = _Counted(progress)
            try:
                storage.write(place, name, source, counted)
            except BaseException:
                counted.take_back()
                raise

        persist(storage, f"{join(place, name)} cannot be written", attempt)

    by_size = sorted(files, key=lambda name: files[name].stat().st_size, reverse=True)
    _run_all(storage.parallel, [partial(send, name, files[name]) for name in by_size])


def download(
    storage: Store, place: str, files: Mapping[str, tuple[Path, int]], progress: Progress
) -> None:
    """Fetch files in parts.

    Args:
        files: name below the place -> local file and its size in bytes.
        progress: called with the number of bytes received.

    Raises:
        CheckpointError: a file is missing or cannot be read. The message names it.
    """

    def receive(name: str, target: Path, start: int, stop: int) -> None:
        address = join(place, name)
        try:
            data = persist(
                storage,
                f"{address} cannot be read",
                lambda: storage.fetch(place, name, start, stop),
            )
        except FileNotFoundError:
            raise CheckpointError(f"{address} is missing.") from None
        with target.open("r+b") as file:
            file.seek(start)
            file.write(data)
        progress(len(data))

    jobs: list[Callable[[], None]] = []
    for name, (target, size) in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        for start in range(0, size, PART):
            stop = min(start + PART, size)
            jobs.append(partial(receive, name, target, start, stop))
    _run_all(storage.parallel, jobs)


def _run_all(parallel: int, jobs: Iterable[Callable[[], None]]) -> None:
    """Run jobs in threads. After the first failure, no further job is started."""
    with ThreadPoolExecutor(parallel, thread_name_prefix="checkpoint transfer") as pool:
        running = [pool.submit(job) for job in jobs]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=True, cancel_futures=True)
    for one in running:
        if one in done:
            one.result()


class _Counted:
    """Counts the progress of one attempt, so that it can be subtracted if the attempt fails."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._sent = progress, 0

    def __call__(self, count: int) -> None:
        self._sent += count
        self._progress(count)

    def take_back(self) -> None:
        self._progress(-self._sent)
