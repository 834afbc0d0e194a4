"""Report before an uncaught C++ exception aborts the process.

gloo raises one in its own thread if a collective receives data of another size than it expects, which
happens when ranks pass tensors of different shapes or types.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)
#: Keeps the callbacks alive, because C++ may call them until the process ends.
_kept: list[object] = []


def before_abort(report: Callable[[], None]) -> Callable[[], None]:
    """Call `report` before an uncaught C++ exception ends the process; return what undoes this."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # another C++ library
        return lambda: None
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]
    previous: list[int | None] = []

    def terminate() -> None:
        set_terminate(previous[0])
        try:
            report()
        finally:
            if previous[0]:
                _HANDLER(previous[0])()

    callback = _HANDLER(terminate)
    _kept.append(callback)
    previous.append(set_terminate(ctypes.cast(callback, ctypes.c_void_p)))
    return lambda: set_terminate(previous[0])
