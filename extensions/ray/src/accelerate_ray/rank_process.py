"""Replace this process by a rank that ends when the process that started it ends.

Usage: `rank_process.py PARENT_PID COMMAND...`

Ray kills the processes of a dead node without a signal to their children. This file runs as a script,
because the rank should wait for no import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Set what the rank inherits, and run its command."""
    # Ray's processes block Ctrl-C, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
