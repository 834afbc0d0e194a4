"""Open the store of a URL, with credentials from the options, the environment or the machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from accelerate_core.plugin import CheckpointError
from accelerate_object_store.redaction import redact

#: Scheme -> the prefix of the environment variables that configure its store.
SCHEMES = {
    "s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "azure": "AZURE_",
    "abfs": "AZURE_", "abfss": "AZURE_", "memory": "",
}  # fmt: skip

#: Options of the HTTP client. obstore takes them separately.
_CLIENT = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers",
    "pool_idle_timeout", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "read_timeout",
    "root_certificate", "timeout", "user_agent",
}  # fmt: skip

#: obstore's own limit is 30 seconds for a whole request, which a part on a slow line exceeds.
_TIMEOUT = "5 minutes"

#: If one of these variables is set, credentials of S3 don't come from a profile.
_OTHER_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)

#: The stores of `memory://` URLs, which all parts of this process share.
_memory: dict[str, MemoryStore] = {}


def bucket_of(place: str) -> tuple[str, str]:
    """Split a URL into the bucket or container, and the path in it."""
    scheme, _, rest = place.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme.lower()}://{bucket}", path.strip("/")


class Stores:
    """The stores that this process has opened, one per bucket.

    Args:
        options: options of the stores.
        attempts: attempts of each request.
    """

    def __init__(self, options: Mapping[str, Any], attempts: int) -> None:
        self._options = options
        self._attempts = attempts
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def open(self, bucket: str) -> Any:
        """Return the store of a bucket.

        Raises:
            CheckpointError: there is no store for this kind of URL, or an option is invalid.
        """
        with self._lock:
            if bucket not in self._open:
                self._open[bucket] = self._new(bucket)
            return self._open[bucket]

    def _new(self, bucket: str) -> Any:
        scheme = urlsplit(bucket).scheme
        if scheme not in SCHEMES:
            raise CheckpointError(
                f"{bucket}/...: accelerate-object-store has no store for {scheme}://. It has "
                f"{', '.join(f'{one}://' for one in SCHEMES)}. For another one, write a Storage of "
                "accelerate-checkpoint."
            )
        if scheme == "memory":
            return _memory.setdefault(bucket, MemoryStore())
        client: dict[str, Any] = {"timeout": _TIMEOUT}
        if self._endpoint(scheme).startswith("http://"):
            client["allow_http"] = True
        client |= {name: one for name, one in self._options.items() if name in _CLIENT}
        config = {name: one for name, one in self._options.items() if name not in _CLIENT}
        arguments: dict[str, Any] = {"config": config, "client_options": client}
        if scheme.startswith("s3") and _needs_profile(config):
            arguments["credential_provider"] = _profile(bucket)
        pauses = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=30)}
        arguments["retry_config"] = {"max_retries": self._attempts - 1, "backoff": pauses}
        try:
            return from_url(bucket, **arguments)
        except (BaseError, ValueError, TypeError) as error:
            text = redact(str(error).partition("\n")[0], self._options)
            raise CheckpointError(
                f"{bucket} cannot be opened: {text} Set options with ObjectStoreSettings(options="
                f"{{...}}) or environment variables {SCHEMES[scheme]}...."
            ) from None

    def _endpoint(self, scheme: str) -> str:
        prefix = SCHEMES[scheme]
        found = [self._options.get("endpoint"), self._options.get(f"{prefix.lower()}endpoint")]
        found += [os.environ.get(f"{prefix}ENDPOINT"), os.environ.get(f"{prefix}ENDPOINT_URL")]
        return next((str(one) for one in found if one), "")


def _needs_profile(config: Mapping[str, Any]) -> bool:
    """Return whether credentials of S3 come from a profile in the files of AWS's tools."""
    given = {name.removeprefix("aws_") for name in config}
    if given & {"access_key_id", "skip_signature"}:
        return False
    if os.environ.get("AWS_PROFILE"):
        return True
    if any(os.environ.get(name) for name in _OTHER_CREDENTIALS):
        return False
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return Path(file).expanduser().is_file()


def _profile(bucket: str) -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise CheckpointError(
            f"{bucket} needs the credentials of an AWS profile, which boto3 reads. Install it with "
            '`pip install "accelerate-object-store[aws-profiles]"`, or set AWS_ACCESS_KEY_ID and '
            "AWS_SECRET_ACCESS_KEY."
        ) from None
    return Boto3CredentialProvider()
