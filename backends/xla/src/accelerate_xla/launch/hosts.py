"""`python -m accelerate_xla.launch.hosts --host A --host B COMMAND`: run COMMAND on hosts with ssh.

If it fails on one host, it is terminated on the others, because they would wait for that host.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

#: `-tt` allocates a terminal, so that the command ends when the connection does. BatchMode never
#: asks for a password.
_SSH = ("ssh", "-tt", "-o", "BatchMode=yes")


def run(hosts: Sequence[str], command: str) -> int:
    """Run a shell command on all hosts.

    Returns:
        The exit status of the first host that failed, or 0.
    """
    if shutil.which("ssh") is None:
        sys.stderr.write("ssh was not found on this machine. Install the OpenSSH client.\n")
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
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser("python -m accelerate_xla.launch.hosts", description=__doc__)
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("command")
    arguments = parser.parse_args(words)
    sys.exit(run(arguments.host, arguments.command))


if __name__ == "__main__":
    main()
