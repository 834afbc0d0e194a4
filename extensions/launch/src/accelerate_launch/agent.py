"""torch's agent, with the exit status of a run that was preempted, and its signals passed on."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from dataclasses import replace
from typing import Any, ClassVar

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as agent
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from accelerate_core.booleans import parse_bool
from accelerate_core.errors import ConfigurationError
from accelerate_launch.failures import AGENT_VARIABLE, describe, held, remember
from accelerate_launch.lost_rendezvous import LONG_PATIENCE, LostRendezvous
from accelerate_launch.machine_0 import (
    MachineZero,
    check_resolves,
    find_machine_0,
    is_here,
    is_reached_by,
    split_endpoint,
)

#: Stands between the agent's options and the program.
_TARGET = "--"

#: Seconds of waiting for the other machines after which the agent says so.
_SILENCE = 8.0

#: `EX_TEMPFAIL`: the ranks have saved and want to be started again.
_AGAIN = 75


def main(arguments: list[str]) -> int:
    """Run `torch.distributed.run`; return the status of the rank that failed first, which is shown.

    Three options of ours precede torchrun's. `--quiet` prints nothing about the other ranks,
    `--address_source TEXT` is the source of machine 0's address, and `--claim TEXT` is the source of
    the claim that this is machine 0 under a rendezvous that numbers the machines itself.
    """
    at = arguments.index(_TARGET)
    ours, theirs = _own_options().parse_known_args(arguments[:at])
    quiet = ours.quiet
    _Agent.quiet = quiet
    torchrun: Any = agent
    parsed = torchrun.parse_args([*theirs, "target"])
    # Not parsed by anybody: it may begin with a dash, or have a "--" of its own.
    script, *script_arguments = arguments[at + 1 :]
    parsed.training_script = script
    parsed.training_script_args = script_arguments
    if not {"2", "3"} & set(parsed.tee):  # else what ranks print goes into their logs, too
        os.environ[AGENT_VARIABLE] = str(os.getpid())
    try:
        machine = _find_machine_0(parsed, ours.address_source, ours.claim)
    except ConfigurationError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    _pass_signals_on(parsed)
    if parsed.nnodes not in ("1", "1:1") and parsed.rdzv_backend != "static":
        _Agent.watch = LostRendezvous(parsed.rdzv_endpoint)
    api.LocalElasticAgent = _Agent  # type: ignore[misc]
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        text, status = describe(error.failures, brief=quiet)
        if status != _AGAIN:
            sys.stderr.write(text)
        return status
    except SignalException as error:  # Ctrl-C: the ranks have been ended
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        where = f" at {machine}" if machine is not None else ""
        sys.stderr.write(
            f"Error: this machine did not meet the others{where}: {reason}\n"
            "Look at --main_process_ip and --main_process_port, which must be those of machine 0 "
            "on every machine, at --num_machines, and at firewalls between them.\n"
        )
        return 1
    return 0


def _own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--address_source", default="the launcher's command line")
    parser.add_argument("--claim", default="")
    return parser


def _find_machine_0(parsed: Any, source: str, claim: str) -> MachineZero | None:
    """Wait for machine 0 if there are several machines; say so, or what is wrong with its address."""
    if parsed.standalone or parsed.nnodes in ("1", "1:1"):
        return None
    conf = dict(pair.split("=", 1) for pair in parsed.rdzv_conf.split(",") if pair)
    if parsed.rdzv_backend == "static":
        host, port = parsed.master_addr, parsed.master_port
        is_machine_0 = parsed.node_rank == 0
    else:
        host, port = split_endpoint(parsed.rdzv_endpoint)
        is_machine_0 = parse_bool(conf["is_host"]) if "is_host" in conf else None
    machine = MachineZero(host, port, source, parsed.rdzv_backend, conf)
    if claim and not is_machine_0:
        check_resolves(host, port, source)
        if is_reached_by(machine):
            is_machine_0 = True
            conf["is_host"] = "true"
            parsed.rdzv_conf = ",".join(f"{key}={value}" for key, value in conf.items())
        elif not is_here(host):
            machine = replace(machine, claim=claim, own_address=parsed.local_addr or "")
    find_machine_0(machine, is_machine_0=is_machine_0)
    _Agent.meeting = f"all {parsed.nnodes} machines to meet at {machine}"
    return machine


def _send_on(number: int, frame: Any) -> None:
    for rank in psutil.Process().children():
        rank.send_signal(number)


def _pass_signals_on(parsed: Any) -> None:
    """Send signals on to the ranks; at a second SIGTERM the agent ends them.

    By itself it would end alone at the user's signals, and kill the ranks 30 seconds after a
    SIGTERM, in the middle of a save, and forget with what status they left.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _send_on)
    handled = getattr(parsed, "signals_to_handle", None)
    if handled is None or "SIGTERM" not in handled:
        return  # an older torch, which cannot be told
    parsed.signals_to_handle = ",".join(s for s in handled.split(",") if s != "SIGTERM")
    said: list[int] = []

    def send(number: int, frame: Any) -> None:
        if said:
            raise SignalException("terminated twice", signal.Signals(number))
        said.append(number)
        _send_on(number, frame)

    signal.signal(signal.SIGTERM, send)


def _say_what_it_waits_for() -> None:
    sys.stderr.write(f"Still waiting for {_Agent.meeting}.\n")
    sys.stderr.flush()


def _add_ended(failures: dict[int, ProcessFailure], processes: Any, group: WorkerGroup) -> None:
    """Add the ranks that ended after the first failure: torch 2.8 forgets them, and what they left."""
    for local_rank, handler in getattr(processes, "subprocess_handlers", {}).items():
        rank, status = group.workers[local_rank].global_rank, handler.proc.returncode
        if status and rank not in failures:
            file = processes.error_files[local_rank]
            failures[rank] = ProcessFailure(local_rank, handler.proc.pid, status, file)


class _Agent(LocalElasticAgent):
    """An agent whose ranks may be preempted, and whose rendezvous may be lost."""

    #: Ends the agent where the store on another machine has stopped to answer.
    watch: ClassVar[LostRendezvous | None] = None
    quiet: ClassVar[bool] = False
    #: What several machines wait for when they start, for a message; empty for one machine.
    meeting: ClassVar[str] = ""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.watch is not None:
            self.watch.answered()
        processes = self._pcontext  # torch lets go of it when a rank has failed
        result: RunResult = super()._monitor_workers(worker_group)
        if processes is not None:
            if result.failures:
                remember(processes)
                _add_ended(result.failures, processes, worker_group)
            else:
                sys.stderr.write(held(processes))
        if any(failure.exitcode == _AGAIN for failure in (result.failures or {}).values()):
            self._remaining_restarts = 0  # it is the machine that is taken away
        if result.failures and self._remaining_restarts:
            said, _ = describe(result.failures, brief=self.quiet)
            sys.stderr.write(f"{said}All processes are started again.\n")
        if self.watch is not None:
            limits = {
                WorkerState.HEALTHY: None,
                # It waits for the other machines to end, too.
                WorkerState.SUCCEEDED: self._exit_barrier_timeout + LONG_PATIENCE,
            }
            self.watch.waiting(limits.get(result.state, LONG_PATIENCE))
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.watch is not None:
            settings = getattr(worker_group.spec.rdzv_handler, "_settings", None)
            join = settings.timeout.join.total_seconds() if settings is not None else 600.0
            self.watch.waiting(join + LONG_PATIENCE)
        reminder = threading.Timer(_SILENCE, _say_what_it_waits_for)
        reminder.daemon = True
        if self.meeting:
            reminder.start()
        try:
            super()._rendezvous(worker_group)
            self._use_highest_restart_count(worker_group)
        finally:
            reminder.cancel()
            if self.watch is not None:
                self.watch.answered()

    def _use_highest_restart_count(self, group: Any) -> None:
        """Let the agents of all machines agree on how often the group was started again.

        Each counts its own failures: after one on another machine the ranks would otherwise look for
        each other under the numbers of different attempts, and wait until they give up.
        """
        # The store of a static rendezvous is the same in every round: it would remember the last.
        if group.group_world_size == 1 or group.spec.rdzv_handler.get_backend() == "static":
            return
        limit = group.spec.max_restarts
        mine = limit - self._remaining_restarts
        group.store.set(f"accelerate/restarts/{group.group_rank}", str(mine))
        keys = [f"accelerate/restarts/{rank}" for rank in range(group.group_world_size)]
        self._remaining_restarts = limit - max(int(group.store.get(key)) for key in keys)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
