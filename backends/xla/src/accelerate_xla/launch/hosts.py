"""`python -m accelerate_xla.launch.hosts --host A --host B COMMAND`: one command on several hosts by ssh.

When it fails on one of them it is ended on the others, which would wait for that one.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

#: A terminal on the host, so that what runs there ends with the connection; no questions.
_SSH = ("ssh", "-tt", "-o", "BatchMode=yes")


def run(hosts: Sequence[str], command: str) -> int:
    """Run a line of a shell on all hosts; return the exit status of the first that failed, or 0."""
    if shutil.which("ssh") is None:
        sys.stderr.write("ssh was not found on this machine: install OpenSSH's client.\n")
        return 1
    started = {
        host: subprocess.Popen([*_SSH, host, command], stdin=subprocess.DEVNULL)
        for host in dict.fromkeys(hosts)
    }
    try:
        while any(one.poll() is None for one in started.values()):
            time.sleep(0.1)
            for host, one in started.items():
                if one.poll():
                    return _failed(host, one.returncode)
        failed = [(host, one.returncode) for host, one in started.items() if one.returncode]
        return _failed(*failed[0]) if failed else 0
    finally:
        for one in started.values():
            if one.poll() is None:
                one.terminate()
                one.wait()


def _failed(host: str, status: int) -> int:
    sys.stderr.write(f"The command failed on {host} with exit status {status}.\n")
    return status if status > 0 else 1


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and run what it says."""
    parser = argparse.ArgumentParser("python -m accelerate_xla.launch.hosts", description=__doc__)
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("command")
    said = parser.parse_args(words)
    sys.exit(run(said.host, said.command))


if __name__ == "__main__":
    main()
