"""Check whether a tracker's server answers, because some libraries wait for it forever."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from accelerate_tracking.ending import limited

#: Timeout of the connection in seconds.
SECONDS = 3.0


def unreachable(url: str, environ: Mapping[str, str]) -> str | None:
    """Return why a server cannot be reached, or None if it, or its proxy, answers.

    Args:
        url: URL of the server.
        environ: environment variables, which may set a proxy.
    """
    parts = urlsplit(url if "://" in url else f"https://{url}")
    for name in (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper()):
        if environ.get(name):
            proxy = environ[name]
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            break
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)

    def connect() -> None:
        socket.create_connection((host, port), timeout=SECONDS).close()

    try:  # name resolution has no timeout, so this adds one
        limited(connect, SECONDS, "reach")
    except (OSError, ValueError):
        return f"its server does not answer ({host}:{port})"
    return None
