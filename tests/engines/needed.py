"""What the tests of engines need on this machine, and its installation on Debian.

python tests/engines/needed.py --install    as root: install what is missing
python tests/engines/needed.py              say what is missing
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Debian package -> a program that it contains.
PROGRAMS = {
    "slurm-wlm": "slurmctld",
    "munge": "munged",
    "openmpi-bin": "mpirun.openmpi",
    "mpich": "mpirun.mpich",
    "pdsh": "pdsh",
    "openssh-server": "sshd",
    "openssh-client": "ssh",
    "iproute2": "ip",
    "procps": "ps",
    "util-linux": "nsenter",
}
_BUILD = Path(__file__).parents[2] / "build"
#: MPIs from the package index, outside of the environment: there, they would hide the other `mpirun`.
INTEL, NEW_MPICH = _BUILD / "impi", _BUILD / "mpich"
WHEELS = {INTEL: "impi-rt>=2021.16", NEW_MPICH: "mpich>=5"}


def has_program(name: str) -> bool:
    """Return whether a program is installed, including those that only root has on the path."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    return shutil.which(name, path=path) is not None


def missing_packages() -> list[str]:
    """Return the Debian packages that are not installed."""
    return [package for package, program in PROGRAMS.items() if not has_program(program)]


def missing_rights() -> str:
    """Return why machines can't be simulated here, "" if they can."""
    if sys.platform != "linux":
        return "the machines are simulated with Linux namespaces"
    test = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--mount-proc"]
    network = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(
        [*test, "sh", "-c", network], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode == 0:
        return ""
    return f"no namespaces here, which need root or CAP_SYS_ADMIN: {done.stderr.strip()}"


def install() -> None:
    """Install what is missing. Needs root and apt-get for programs."""
    packages = missing_packages()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-q"], check=True, env=quiet)
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
        # The packages start daemons, which the tests don't use. 101 means: not now.
        policy = Path("/usr/sbin/policy-rc.d")
        ours = not policy.exists()
        if ours:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            subprocess.run(command, check=True, env=quiet)
        finally:
            if ours:
                policy.unlink()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for folder, package in WHEELS.items():
        if not (folder / "bin" / "mpirun").exists():
            subprocess.run([*pip, "--target", str(folder), package], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="install what is missing")
    if parser.parse_args().install:
        install()
    packages, rights = missing_packages(), missing_rights()
    if packages:
        print(f"Missing programs. On Debian, as root: apt-get install {' '.join(packages)}")
    if rights:
        print(f"Machines cannot be simulated: {rights}")
    for folder, package in WHEELS.items():
        if not (folder / "bin" / "mpirun").exists():
            print(f"An MPI is missing: pip install --target {folder} '{package}'")
    return 1 if packages or rights else 0


if __name__ == "__main__":
    sys.exit(main())
