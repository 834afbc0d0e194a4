"""Add the header `Home-page` to the wheel, because libraries read it and hatchling no longer writes it.

sentence-transformers considers the distribution `accelerate` installed only if this header names the
owner of Hugging Face Accelerate. Hatchling writes URLs only as `Project-URL`.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class HomePage(BuildHookInterface[Any]):
    """Adds the header to the metadata of the finished wheel."""

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Rewrite the wheel with the header, and with the new digest in its RECORD file."""
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
    """Return the digest and size of a file in the format of a wheel's RECORD file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b"sha256=%b,%d" % (digest, len(content))
