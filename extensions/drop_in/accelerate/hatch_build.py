"""Gives the wheel the header `Home-page`, which libraries read and hatchling no longer writes.

sentence-transformers counts the distribution `accelerate` as installed only if that header names the
owner of the original. Hatchling writes addresses as `Project-URL`, as current metadata has them.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class HomePage(BuildHookInterface[Any]):
    """Adds the header to the metadata of a wheel that was built."""

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Write the wheel once more: with the header, and with the new digest in its record."""
        folder = f"{self.metadata.core.name}-{self.metadata.version}.dist-info"
        metadata, record = f"{folder}/METADATA", f"{folder}/RECORD"
        with zipfile.ZipFile(artifact_path) as wheel:
            entries = wheel.infolist()
            contents = {entry.filename: wheel.read(entry) for entry in entries}
        before = contents[metadata]
        header = f"Home-page: {self.metadata.core.urls['Homepage']}\n".encode()
        after = before.replace(b"Project-URL:", header + b"Project-URL:", 1)
        contents[metadata] = after
        contents[record] = contents[record].replace(_digest(before), _digest(after))
        with zipfile.ZipFile(artifact_path, "w") as wheel:
            for entry in entries:
                wheel.writestr(entry, contents[entry.filename])


def _digest(content: bytes) -> bytes:
    """Return digest and size of a file as a wheel's record has them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b"sha256=%b,%d" % (digest, len(content))
