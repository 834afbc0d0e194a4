"""An ssh server on each simulated machine, with keys made for the test session."""

from __future__ import annotations

import subprocess

from simulated_machines import LOGIN, NODES, Machines

_SERVER = """\
ListenAddress 0.0.0.0
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
PermitRootLogin yes
StrictModes no
PrintMotd no
"""

_CLIENT = """\
Host *
    IdentityFile {folder}/user
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


class SshHosts:
    """ssh between the machines, as root and without passwords. The keys of the host are not used."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.folder = machines.folder / "ssh"

    def start(self) -> None:
        """Create keys, and start a server on every node."""
        self.folder.mkdir()
        for name in ("host", "user"):
            key = self.folder / name
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
            subprocess.run(make, check=True, timeout=30)
        for name, text in (("server", _SERVER), ("client", _CLIENT)):
            (self.folder / name).write_text(text.format(folder=self.folder))
        for machine in (LOGIN, *NODES):
            self.machines.check(
                machine, "mount", "--bind", self.folder / "client", "/etc/ssh/ssh_config"
            )
        for machine in NODES:
            self.machines.check(machine, "mkdir", "-p", "/run/sshd")
            self.machines.check(machine, "/usr/sbin/sshd", "-f", self.folder / "server")
