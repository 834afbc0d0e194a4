"""`ObjectStorage`: keeps checkpoints in an object store, and other targets on the local disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import obstore

from accelerate_checkpoint import MANIFEST, LocalStorage, Storage, is_url, join
from accelerate_core.plugin import CheckpointError, without_credentials
from accelerate_object_store.redaction import redact
from accelerate_object_store.settings import ObjectStoreSettings
from accelerate_object_store.stores import Stores, bucket_of

#: Parts of one file that are uploaded at once. Each takes `part_size` bytes of memory.
_PARTS_AT_ONCE = 4

#: S3 accepts 10,000 parts per object.
_MOST_PARTS = 9_000

_TRANSIENT = re.compile(r"HTTP error|timed? ?out|connection|status code: (408|429|5\d\d)", re.I)


class StoreError(CheckpointError):
    """A request to an object store failed. Its text contains no credentials.

    Cause: the store refused the request or did not answer; the message quotes it.
    Fix: check the URL, the credentials and the network that the message names.

    Attributes:
        transient: whether another attempt may succeed.
    """

    def __init__(self, text: str, transient: bool) -> None:
        super().__init__(text)
        self.transient = transient


class ObjectStorage(Storage):
    """A store whose places are URLs. Absolute local paths are kept on the local disk.

    Args:
        url: relative targets are resolved against this URL.
        settings: options of the store, and how files are transferred.
    """

    #: obstore itself repeats requests, also for a part of a file, so nothing else does.
    attempts = 1

    def __init__(self, url: str | None = None, settings: ObjectStoreSettings | None = None) -> None:
        settings = settings or ObjectStoreSettings()
        self._url = url
        self._options = settings.options
        self._part_size = settings.part_size
        self._stores = Stores(settings.options, settings.attempts)
        self._local = LocalStorage()
        self.parallel = settings.parallel

    def locate(self, target: str | os.PathLike[str], *, saving: bool = False) -> str:
        """Return a URL, or an absolute path.

        Raises:
            CheckpointError: no store has this kind of URL, its options are invalid, or the URL contains
                credentials.
        """
        text = os.fspath(target)
        if is_url(text) and without_credentials(text) != text:
            raise CheckpointError(
                f"The URL {text} contains credentials, which stores don't read from there. Pass them "
                "with ObjectStoreSettings(options={...}), or in the environment variables of the store."
            )
        if self._url is not None and not is_url(text) and not os.path.isabs(text):
            text = join(self._url, text)
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        if not is_url(text):
            return self._local.locate(text, saving=saving)
        self._open(text)
        return text

    def _open(self, place: str, name: str = "") -> tuple[Any, str]:
        """Return the store that holds a place, and the path of a file in it."""
        with self._errors(place):
            bucket, path = bucket_of(place)
            return self._stores.open(bucket), join(path, name).strip("/")

    @contextmanager
    def _errors(self, address: str) -> Iterator[None]:
        """Raise errors without credentials. The exceptions of obstore may contain some."""
        try:
            yield
        except FileNotFoundError as error:
            text = self._text(error)
            if "NoSuchBucket" in str(error):
                raise StoreError(f"{bucket_of(address)[0]} does not exist. {text}", False) from None
            raise FileNotFoundError(text) from None
        except CheckpointError:
            raise
        except (obstore.exceptions.BaseError, OSError) as error:
            text = self._text(error)
            raise StoreError(f"{address}: {text}", bool(_TRANSIENT.search(text))) from None

    def _text(self, error: Exception) -> str:
        """Return the first line of an error, without credentials."""
        first = str(error).partition("\n")[0].strip()
        return str(redact(first, self._options))

    # --- the six methods of a storage -----------------------------------------------------------

    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        """Return the names in a folder."""
        if not is_url(place):
            return self._local.list(place, folder)
        store, path = self._open(place, folder)
        with self._errors(join(place, folder)):
            found = obstore.list_with_delimiter(store, prefix=path or None)
        names: dict[str, int | None] = {}
        for one in found["objects"]:
            names[one["path"].rpartition("/")[2]] = one["size"]
        for prefix in found["common_prefixes"]:
            names[prefix.rstrip("/").rpartition("/")[2]] = None
        return names

    def read(self, place: str, name: str) -> bytes:
        """Return a whole object."""
        if not is_url(place):
            return self._local.read(place, name)
        store, path = self._open(place, name)
        with self._errors(join(place, name)):
            return bytes(obstore.get(store, path).bytes())

    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        """Return a part of an object."""
        if not is_url(place):
            return self._local.fetch(place, name, start, stop)
        store, path = self._open(place, name)
        with self._errors(join(place, name)):
            return bytes(obstore.get_range(store, path, start=start, end=stop))

    def write(self, place: str, name: str, source: Path, progress: Callable[[int], None]) -> None:
        """Upload a file. A large one is sent in several parts at once, and exists once all are."""
        if not is_url(place):
            self._local.write(place, name, source, progress)
            return
        store, path = self._open(place, name)
        size = source.stat().st_size
        with self._errors(join(place, name)):
            if size <= self._part_size:
                obstore.put(store, path, source.read_bytes(), use_multipart=False)
                progress(size)
                return
            part = max(self._part_size, -(-size // _MOST_PARTS))
            parts = _parts(source, part, progress)
            obstore.put(store, path, parts, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def publish(self, place: str, save: str, manifest: bytes) -> None:
        """Write the manifest. An object appears as a whole."""
        if not is_url(place):
            self._local.publish(place, save, manifest)
            return
        store, path = self._open(place, MANIFEST)
        with self._errors(join(place, MANIFEST)):
            obstore.put(store, path, manifest, use_multipart=False)

    def delete(self, place: str, name: str = "") -> None:
        """Delete an object, or everything below a folder."""
        if not is_url(place):
            self._local.delete(place, name)
            return
        store, path = self._open(place, name)
        with self._errors(join(place, name)):
            below = [one["path"] for page in obstore.list(store, prefix=path) for one in page]
            try:
                obstore.delete(store, below or path)
            except FileNotFoundError:  # another process deleted it, or it never existed
                pass

    # --- what local targets do differently ------------------------------------------------------

    def path(self, place: str, name: str = "") -> Path | None:
        """Return the path of a local file, or None for an object."""
        return None if is_url(place) else self._local.path(place, name)

    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Hold a lease next to the objects of the save, or lock its local directory."""
        return super().lock(place, save) if is_url(place) else self._local.lock(place, save)

    def clean(self, place: str) -> None:
        """Delete the files that saves of killed processes left at a place."""
        if is_url(place):
            super().clean(place)
        else:
            self._local.clean(place)

    def is_transient(self, error: Exception) -> bool:
        """Return whether another attempt may succeed."""
        if isinstance(error, StoreError):
            return error.transient
        return super().is_transient(error)


def _parts(source: Path, size: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Read a file in parts, and report each one."""
    with source.open("rb") as file:
        while part := file.read(size):
            yield part
            progress(len(part))
