"""Keep credentials out of everything that is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from accelerate_core.plugin import HIDDEN, without_credentials

#: Options whose values are shown, because they never hold credentials.
_HARMLESS = {
    "account_name", "allow_http", "bucket", "connect_timeout", "container", "default_region",
    "endpoint", "region", "skip_signature", "timeout", "use_emulator",
    "virtual_hosted_style_request",
}  # fmt: skip

#: Environment variables that hold credentials of the supported stores.
_VARIABLES = re.compile(
    r"(AWS_.*(KEY|TOKEN|SECRET)|AZURE_.*(KEY|TOKEN|SECRET|SAS|PASSWORD)|GOOGLE_.*(KEY|TOKEN|SECRET))"
    r"[A-Z_]*"
)

#: Shorter values would also replace unrelated text.
_SHORTEST = 6


class Options(dict[str, Any]):
    """Options of a store. Values that may be credentials are hidden in its text."""

    def __repr__(self) -> str:
        return repr({name: _shown(name, value) for name, value in self.items()})

    __str__ = __repr__


def _shown(name: str, value: Any) -> Any:
    return redact(value) if name.lower() in _HARMLESS else HIDDEN


def redact(value: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Replace credentials in a text. Other values are returned unchanged.

    Args:
        value: the text.
        options: the options of the store. Their values are replaced too, except harmless ones.
    """
    if not isinstance(value, str):
        return value
    secret = [text for name, text in (options or {}).items() if name.lower() not in _HARMLESS]
    secret += [text for name, text in os.environ.items() if _VARIABLES.fullmatch(name)]
    texts = {text for text in secret if isinstance(text, str) and len(text) >= _SHORTEST}
    for text in sorted(texts, key=len, reverse=True):
        value = value.replace(text, HIDDEN)
    return without_credentials(value)
