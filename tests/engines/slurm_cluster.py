"""A SLURM controller, with one node daemon on each simulated machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Container, Iterable
from pathlib import Path

from simulated_machines import LOGIN, NODES, Machines, run_environment

#: A job in the partition `urgent` preempts jobs in `main`, which then have GraceTime seconds to exit.
_CONF = """\
ClusterName=engines
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
JobRequeue=1
ReturnToService=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
MinJobAge=900
NodeName={names} CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

#: States of a job that has ended.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


class SlurmCluster:
    """SLURM on simulated machines. Its daemons end with the machines."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.folder = machines.folder / "slurm"
        self.conf = self.folder / "slurm.conf"

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        (self.folder / "state").mkdir(parents=True)
        fields = {"login": LOGIN, "folder": self.folder, "names": ",".join(NODES)}
        self.conf.write_text(_CONF.format(**fields))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._start_munge(LOGIN)
        self._daemon(LOGIN, "slurmctld", "-f", self.conf)
        for name in NODES:
            self.start_node(name)
        self.wait_for_nodes({"idle"})

    def start_node(self, name: str) -> None:
        """Start the daemons of a node, after the machine has started."""
        self._start_munge(name)
        self._daemon(name, "slurmd", "-f", self.conf, "-N", name)

    def run(
        self, *words: str | Path, cwd: Path, timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM on the login machine."""
        env = self.environment(**variables)
        return self.machines.run(LOGIN, *words, env=env, cwd=cwd, timeout=timeout)

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of clients, which SLURM copies to the tasks."""
        return {**run_environment(), "SLURM_CONF": str(self.conf), **variables}

    def submit(self, script: str, *options: str, cwd: Path) -> str:
        """Submit a batch script, and return the number of the job. Its output goes to `job.out`."""
        file = cwd / "job.sh"
        file.write_text(script)
        out = ["--parsable", "--output", "job.out", "--open-mode", "append"]
        done = self.run("sbatch", *out, *options, file, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` prints about a job."""
        shown = self.run("scontrol", "show", "job", "--oneliner", number, cwd=self.folder)
        words = (word.partition("=") for word in shown.stdout.split())
        return {name: value for name, _, value in words}

    def wait_for_job(self, number: str, states: Iterable[str] = ENDED, timeout: float = 150) -> str:
        """Wait until a job is in one of these states, and return the state.

        SLURM starts a requeued job after two minutes. This starts it immediately.
        """
        until = time.monotonic() + timeout
        wanted = set(states)
        while time.monotonic() < until:
            job = self.job(number)
            state = job.get("JobState", "unknown")
            if state in wanted:
                return state
            if (state, job.get("Reason")) == ("PENDING", "BeginTime"):
                now = ["scontrol", "update", f"jobid={number}", "StartTime=now"]
                self.run(*now, cwd=self.folder)
            time.sleep(0.2)
        raise AssertionError(f"job {number} is {state} instead of {', '.join(sorted(wanted))}")

    def wait_for_nodes(self, states: Container[str], timeout: float = 60) -> None:
        """Wait until every node is in one of these states."""
        until = time.monotonic() + timeout
        listed = ""
        while time.monotonic() < until:
            listed = self.run("sinfo", "-h", "-p", "main", "-N", "-o", "%T", cwd=self.folder).stdout
            if listed.split() and all(state in states for state in listed.split()):
                return
            time.sleep(0.2)
        log = (self.folder / "slurmctld.log").read_text()[-2000:]
        raise AssertionError(f"the nodes are {listed.split()}; slurmctld says:\n{log}")

    def reset(self) -> None:
        """End all jobs, and wait until the nodes are free."""
        self.run("scancel", "--user=root", cwd=self.folder)
        self.wait_for_nodes({"idle"})

    def _start_munge(self, machine: str) -> None:
        folder = self.folder / f"munge-{machine}"
        folder.mkdir(mode=0o755, exist_ok=True)
        files = [f"--{kind}-file={folder}/{kind}" for kind in ("log", "seed", "pid")]
        self.machines.check(machine, "mkdir", "-p", "/run/munge")
        self._daemon(machine, "munged", "--force", f"--key-file={self.folder}/munge.key", *files)

    def _daemon(self, machine: str, *words: str | Path) -> None:
        # A daemon would keep the pipes of a captured output open.
        done = subprocess.run(
            self.machines.command(machine, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{words[0]} on {machine} exited with {done.returncode}"
