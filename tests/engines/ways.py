"""The ways to start the digits, and what is checked for each of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needed import INTEL, NEW_MPICH
from table import Row

#: The checkpoint from which a killed run continues.
SAVED_AT = 40

Result = dict[str, Any]
#: Runs a shell command.
Run = Callable[[str], subprocess.CompletedProcess[str]]
TRAIN = Path(__file__).with_name("train_digits.py")
#: Environment variables that ssh does not pass on.
_REMOTE = "cd {cwd} && env PATH=$PATH PYTHONPATH=$PYTHONPATH OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=1"


@dataclass(frozen=True)
class Way:
    """How a run is started, as a shell command on the login machine.

    Attributes:
        command: the command, with {train} for the script and its arguments.
        ranks: the number of ranks of the run.
        restarts: whether the command itself restarts killed ranks. If not, it is run again.
        files: files in the working directory.
        needs: a folder that `make engines` installs.
    """

    command: str
    ranks: int = 2
    restarts: bool = False
    files: tuple[tuple[str, str], ...] = ()
    needs: Path | None = None

    def shell(self, arguments: str, folder: Path) -> str:
        """Return the shell command, and write its files."""
        for name, text in self.files:
            (folder / name).write_text(text)
        remote = _REMOTE.format(cwd=folder)
        fields = {"train": f"{TRAIN} {arguments}", "remote": remote, "intel": INTEL / "bin"}
        fields["mpich"] = NEW_MPICH / "bin"
        text = self.command
        for name, value in fields.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text


_SLOTS = (("hosts", "n1 slots=1\nn2 slots=1\n"),)
_COLONS = (("hosts", "n1:1\nn2:1\n"),)

LOCAL = {
    "`python`": Way("python {train}", ranks=1),
    "`torchrun --max-restarts 1`": Way(
        "torchrun --standalone --nproc-per-node 2 --max-restarts 1 {train}", restarts=True
    ),
    "`launch --max_restarts 1`": Way(
        "accelerate-core launch --num_processes 2 --max_restarts 1 {train}", restarts=True
    ),
}

SLURM = {
    "`srun python`": Way("srun --nodes 2 --ntasks 2 --kill-on-bad-exit python {train}"),
    "`srun`, one launcher per node": Way(
        "srun --nodes 2 --ntasks-per-node 1 accelerate-core launch --rdzv_backend c10d "
        "--max_restarts 1 {train}",
        restarts=True,
    ),
    "`srun`, one task per rank": Way(
        "srun --nodes 1 --ntasks-per-node 2 --kill-on-bad-exit accelerate-core launch {train}"
    ),
    "`salloc`, launch calls `srun`": Way(
        "salloc --nodes 2 accelerate-core launch --num_processes 2 --max_restarts 1 {train}",
        restarts=True,
    ),
}

MPI = {
    "`mpirun` of Open MPI": Way(
        "mpirun.openmpi -n 2 --hostfile hosts --npernode 1 -x PATH -x PYTHONPATH -x OMP_NUM_THREADS "
        "-x MASTER_ADDR=n1 python {train}",
        files=_SLOTS,
    ),
    "`mpirun` of MPICH": Way(
        "mpirun.mpich -n 2 -f hosts -ppn 1 -genv MASTER_ADDR n1 python {train}", files=_COLONS
    ),
    "`mpirun` of MPICH 5": Way(
        "PATH={mpich}:$PATH mpirun -n 2 -f hosts -ppn 1 -genv MASTER_ADDR n1 python {train}",
        files=_COLONS,
        needs=NEW_MPICH,
    ),
    "`mpirun` of Intel MPI": Way(
        "PATH={intel}:$PATH mpirun -n 2 -f hosts -ppn 1 -genv MASTER_ADDR n1 python {train}",
        files=_COLONS,
        needs=INTEL,
    ),
    "`launch --mpirun_hostfile`, Open MPI": Way(
        "accelerate-core launch --num_processes 2 --mpirun_hostfile hosts {train}", files=_COLONS
    ),
    "`launch --mpirun_hostfile`, MPICH": Way(
        "mkdir -p bin; ln -sf /usr/bin/mpirun.mpich bin/mpirun; ln -sf /usr/bin/hydra_pmi_proxy bin; "
        "PATH=$PWD/bin:$PATH accelerate-core launch --num_processes 2 --mpirun_hostfile hosts {train}",
        files=_SLOTS,
    ),
    "`launch --mpirun_hostfile`, Intel MPI": Way(
        "PATH={intel}:$PATH accelerate-core launch --num_processes 2 --mpirun_hostfile hosts {train}",
        files=_SLOTS,
        needs=INTEL,
    ),
}

_MACHINES = "--num_machines 2 --num_processes 2 --main_process_ip n1"
SSH = {
    "`ssh`, one launcher per machine": Way(
        f'for i in 1 2; do ssh n$i "{{remote}} accelerate-core launch {_MACHINES} '
        '--rdzv_backend c10d --max_restarts 1 {train}" & done; wait -n; status=$?; wait; exit $status',
        restarts=True,
    ),
    "`pdsh`, one launcher per machine": Way(
        f'pdsh -S -R ssh -w n1,n2 "{{remote}} accelerate-core launch {_MACHINES} '
        '--rdzv_backend c10d --max_restarts 1 {train}"',
        restarts=True,
    ),
    "`pdsh`, launcher of DeepSpeed": Way(
        "python -m deepspeed.launcher.runner --hostfile hosts --launcher pdsh --no_local_rank "
        "--master_addr n1 {train}",
        # DeepSpeed passes on no other variables, and more threads would round differently.
        files=(*_SLOTS, (".deepspeed_env", "OMP_NUM_THREADS=1\nACCELERATE_USE_CPU=1\n")),
    ),
}


def read_result(folder: Path) -> Result:
    return json.loads((folder / "result.json").read_text())


def check_way(
    name: str, way: Way, run: Run, folder: Path, reference: Callable[[int], Result]
) -> Row:
    """Start a way with a rank that raises, and with a rank that is killed, and return its row."""
    begun = time.time()
    failed = run(way.shell("failing --fail", folder))
    assert failed.returncode != 0, failed.stderr[-3000:]
    assert "this rank fails on purpose" in failed.stderr + failed.stdout
    first_step = min(float(file.read_text()) for file in (folder / "failing").glob("first.*"))

    killed = run(way.shell("killed --kill", folder))
    if way.restarts:
        assert killed.returncode == 0, killed.stderr[-3000:]
        who = "restarts"
    else:
        assert killed.returncode != 0
        again = run(way.shell("killed --kill", folder))
        assert again.returncode == 0, again.stderr[-3000:]
        who = "run again"
    result, expected = read_result(folder / "killed"), reference(way.ranks)
    assert result["resumed"] == SAVED_AT
    assert {**result, "resumed": 0} == expected, "not the same weights as without a break"
    resumed = f"{who}, continues at step {result['resumed']}"
    status = failed.returncode
    if status < 0:
        status = 128 - status
    return Row(name, way.ranks, first_step - begun, status, resumed, result["correct"])
