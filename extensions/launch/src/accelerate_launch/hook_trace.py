"""`ACCELERATE_DEBUG_HOOKS`: log every call of a hook, or count the calls for a table."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate_core.contract.hooks import HOOKS
from accelerate_core.plugin import Claim, ConfigurationError, Request, parse_bool, read_topology

VARIABLE = "ACCELERATE_DEBUG_HOOKS"


@dataclass
class HookCount:
    """The calls of one hook in one plugin. `seconds` includes nested hook calls."""

    hook: str
    kind: str
    plugin: str
    calls: int = 0
    seconds: float = 0.0


class HookTrace:
    """Logs every call of a hook to stderr, with rank, nesting, plugin and duration.

    If `ACCELERATE_DEBUG_HOOKS` is a folder, which `plugins hooks --trace` sets, each rank writes a
    file there at exit instead: one `HookCount` for each hook and plugin, ordered by first call.
    """

    name = "hook_trace"
    api_version = (1, 0)

    def __init__(self) -> None:
        said = os.environ.get(VARIABLE, "")
        self._rank = read_topology(os.environ).process_index
        self._counts: dict[tuple[str, str], HookCount] = {}
        self._lock = threading.Lock()
        self._nesting = threading.local()
        self._logs = parse_bool(said) is not None or said == ""
        if not self._logs:
            folder = Path(said)
            if not folder.is_dir():
                raise ConfigurationError(
                    f"{VARIABLE}={said!r} is neither a boolean nor an existing folder. Set it to 1 to "
                    "log every call of a hook."
                )
            atexit.register(self._write, folder)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim runs in which the variable is set. The trigger ignores false values."""
        return Claim(0, f"{VARIABLE} is set") if request.environ.get(VARIABLE) else None

    def wrap_hook(self, hook: str, plugin: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that traces the call of a plugin's hook."""

        @functools.wraps(call)
        def traced(*arguments: Any) -> Any:
            depth = getattr(self._nesting, "depth", 0)
            self._nesting.depth = depth + 1
            counted = self._begin(hook, plugin, depth)
            begun = time.perf_counter()
            outcome = ""
            try:
                return call(*arguments)
            except BaseException as error:
                outcome = f"raised {type(error).__name__} after "
                raise
            finally:
                seconds = time.perf_counter() - begun
                self._nesting.depth = depth
                with self._lock:
                    counted.calls += 1
                    counted.seconds += seconds
                self._log(depth, f"< {hook} ({plugin}) {outcome}{1000 * seconds:.3f} ms")

        return traced

    def _begin(self, hook: str, plugin: str, depth: int) -> HookCount:
        self._log(depth, f"> {hook} ({plugin})")
        with self._lock:
            new = HookCount(hook, HOOKS[hook], plugin)
            return self._counts.setdefault((hook, plugin), new)

    def _log(self, depth: int, text: str) -> None:
        if self._logs:
            # A single write per line keeps the lines of several ranks apart.
            sys.stderr.write(f"[rank {self._rank}] {'  ' * depth}{text}\n")
            sys.stderr.flush()

    def _write(self, folder: Path) -> None:
        # A process may have several Accelerators, and each writes its own trace.
        number = len(list(folder.glob(f"rank-{self._rank}-*.json")))
        counts = [asdict(one) for one in self._counts.values()]
        said = {"rank": self._rank, "hooks": counts}
        (folder / f"rank-{self._rank}-{number}.json").write_text(json.dumps(said))
