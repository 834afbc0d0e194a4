"""Whether a tracker's server answers, asked before a library waits for it without an end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

#: How long a server may take to take a connection.
SECONDS = 3.0


def unreachable(url: str, environ: Mapping[str, str]) -> str | None:
    """Return why a server cannot be used now, None if it, or the proxy before it, answers."""
    parts = urlsplit(url if "://" in url else f"https://{url}")
    for name in (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper()):
        if environ.get(name):
            proxy = environ[name]
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            break
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=SECONDS),
        ):
            answered.set()

    # Looking a name up takes no time limit: hence the thread.
    thread = threading.Thread(target=connect, name="reach", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return None if answered.is_set() else f"its server does not answer ({host}:{port})"
