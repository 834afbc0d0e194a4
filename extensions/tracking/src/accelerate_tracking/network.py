"""Whether a tracker's server answers, asked before a library waits for it without an end."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from accelerate_tracking.ending import limited

#: How long a server may take to take a connection.
SECONDS = 3.0


def unreachable(url: str, environ: Mapping[str, str]) -> str | None:
    """Return why a server cannot be used now, None if it, or the proxy before it, answers.

    Args:
        url: of the server.
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

    try:  # looking a name up takes no time limit: hence one around it
        limited(connect, SECONDS, "reach")
    except (OSError, ValueError):
        return f"its server does not answer ({host}:{port})"
    return None
