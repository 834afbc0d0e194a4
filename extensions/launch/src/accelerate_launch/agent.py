"""torch's elastic agent, extended to pass signals on to the ranks and to report preemption."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as agent
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.launcher import api

from accelerate_core.plugin import ConfigurationError, parse_bool
from accelerate_launch import late_ranks
from accelerate_launch.elastic import RESTARTED
from accelerate_launch.failures import caused_by_setting, describe, held, remember, tell_others
from accelerate_launch.lost_rendezvous import LONG_PATIENCE, LostRendezvous
from accelerate_launch.machine_0 import (
    MachineZero,
    check_resolves,
    find_machine_0,
    is_here,
    is_reached_by,
    split_endpoint,
)
from accelerate_launch.membership import Membership
from accelerate_launch.plan import PREEMPTED, counted
from accelerate_launch.uncaught import AGENT_VARIABLE

#: Separates the agent's options from the program.
_TARGET = "--"

#: After waiting this many seconds for the other machines, the agent prints that it is waiting.
_SILENCE = 8.0

#: The error of a machine that comes when the others have closed the rendezvous.
_CLOSED = "Error: this machine can't take part in the run, because the run has already ended.\n"


def main(arguments: list[str]) -> int:
    """Run `torch.distributed.run`, print the first failure, and return that rank's exit status.

    Three options come before those of torchrun. `--quiet` prints nothing about the other ranks.
    `--address_source TEXT` says where machine 0's address came from. `--claim TEXT` says where this
    machine was called machine 0, for a rendezvous that numbers the machines itself.
    """
    at = arguments.index(_TARGET)
    ours, theirs = _own_options().parse_known_args(arguments[:at])
    quiet = ours.quiet
    _Agent.quiet = quiet
    torchrun: Any = agent
    parsed = torchrun.parse_args([*theirs, "target"])
    # The script isn't parsed: its name may begin with a dash, and its arguments may contain "--".
    script, *script_arguments = arguments[at + 1 :]
    parsed.training_script = script
    parsed.training_script_args = script_arguments
    if not {"2", "3"} & set(parsed.tee):  # otherwise tracebacks must also go to the ranks' logs
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
        _Agent.membership = Membership(holds_store=_holds_store(parsed))
    api.LocalElasticAgent = _Agent  # type: ignore[misc]
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        text, status = describe(error.failures, brief=quiet)
        if status != PREEMPTED:
            sys.stderr.write(text)
        return status
    except SignalException as error:  # Ctrl-C: the ranks have been stopped
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except RendezvousClosedError:
        sys.stderr.write(_CLOSED)
        return 1
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        where = f" at {machine}" if machine is not None else ""
        if _Agent.connected and isinstance(error, (RendezvousConnectionError, DistNetworkError)):
            sys.stderr.write(
                f"Error: this machine lost the connection to the others{where}: {reason}\n"
                "The run has ended, or machine 0 was lost.\n"
            )
            return 1
        sys.stderr.write(
            f"Error: this machine could not connect to the others{where}: {reason}\n"
            "Check that --main_process_ip, --main_process_port and --num_machines are the same on "
            "every machine, and that no firewall blocks the port.\n"
        )
        return 1
    return 0


def _own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--address_source", default="the launcher's command line")
    parser.add_argument("--claim", default="")
    return parser


def _holds_store(parsed: Any) -> bool:
    """Return whether this machine holds the store of a rendezvous that isn't static."""
    conf = _rendezvous_settings(parsed)
    if "is_host" in conf:
        return bool(parse_bool(conf["is_host"]))
    return is_here(split_endpoint(parsed.rdzv_endpoint)[0])


def _rendezvous_settings(parsed: Any) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in parsed.rdzv_conf.split(",") if pair)


def _find_machine_0(parsed: Any, source: str, claim: str) -> MachineZero | None:
    """Wait for machine 0 if the run has several machines; return None otherwise."""
    if parsed.standalone or parsed.nnodes in ("1", "1:1"):
        return None
    conf = _rendezvous_settings(parsed)
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
    """Pass signals on to the ranks. A second SIGTERM makes the agent stop them.

    torch's own agent would exit on SIGUSR1 and SIGUSR2 and leave the ranks running. 30 seconds after
    a SIGTERM it would kill the ranks, even in the middle of a save, and lose their exit statuses.
    """
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _send_on)
    handled = getattr(parsed, "signals_to_handle", None)
    if handled is None or "SIGTERM" not in handled:
        return  # an older torch, in which the handled signals cannot be configured
    parsed.signals_to_handle = ",".join(s for s in handled.split(",") if s != "SIGTERM")
    said: list[int] = []

    def send(number: int, frame: Any) -> None:
        if said:
            raise SignalException("terminated twice", signal.Signals(number))
        said.append(number)
        _send_on(number, frame)

    # Until there are ranks, SIGTERM ends the agent: torch waits for other machines in C++, where no
    # Python handler runs.
    _Agent.on_sigterm = send


def _print_waiting() -> None:
    sys.stderr.write(f"Still waiting for {_Agent.meeting}.\n")
    sys.stderr.flush()


def _add_ended(failures: dict[int, ProcessFailure], processes: Any, group: WorkerGroup) -> None:
    """Add the ranks that failed after the first one, because torch 2.8 does not report them."""
    for local_rank, handler in getattr(processes, "subprocess_handlers", {}).items():
        rank, status = group.workers[local_rank].global_rank, handler.proc.returncode
        if status and rank not in failures:
            file = processes.error_files[local_rank]
            failures[rank] = ProcessFailure(local_rank, handler.proc.pid, status, file)


class _Agent(LocalElasticAgent):
    """An agent that handles preempted ranks and a lost rendezvous."""

    #: Ends the agent if the store on another machine stops answering.
    watch: ClassVar[LostRendezvous | None] = None
    #: Follows machines that join and leave; None if their number is fixed or there is only one.
    membership: ClassVar[Membership | None] = None
    #: Whether the store of a rendezvous that isn't static has been reached.
    connected: ClassVar[bool] = False
    quiet: ClassVar[bool] = False
    #: What the machines wait for at the start, as printed; empty if there is only one machine.
    meeting: ClassVar[str] = ""
    #: Handles SIGTERM once there are ranks; None for torch's own handling.
    on_sigterm: ClassVar[Callable[[int, Any], None] | None] = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if type(self).on_sigterm is not None:
            signal.signal(signal.SIGTERM, type(self).on_sigterm)
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._tell_others_before_stopping(worker_group)
        return started

    def _tell_others_before_stopping(self, worker_group: WorkerGroup) -> None:
        """Let the ranks know why they are stopped if one has failed; torch only sends SIGTERM."""
        processes: Any = self._pcontext
        stop = processes.close

        def close(*arguments: Any, **options: Any) -> None:
            tell_others(processes, worker_group.workers[0].global_rank)
            stop(*arguments, **options)

        processes.close = close

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.watch is not None:
            self.watch.answered()
        processes = self._pcontext  # torch drops the reference when a rank fails
        if processes is not None and worker_group.workers:
            late_ranks.ask(processes, worker_group.workers[0].global_rank)  # before torch ends them
        result: RunResult = super()._monitor_workers(worker_group)
        if processes is not None:
            if result.failures:
                remember(processes)
                _add_ended(result.failures, processes, worker_group)
            else:
                sys.stderr.write(held(processes))
        failures = result.failures or {}
        preempted = any(failure.exitcode == PREEMPTED for failure in failures.values())
        # A machine that is being preempted must not be used again, and an invalid setting fails again.
        if preempted or caused_by_setting(failures):
            self._remaining_restarts = 0
        if result.failures and self._remaining_restarts:
            said, _ = describe(result.failures, brief=self.quiet)
            sys.stderr.write(f"{said}Restarting all processes.\n")
        if self.watch is not None:
            limits = {
                WorkerState.HEALTHY: None,
                # The agent also waits for the other machines to finish.
                WorkerState.SUCCEEDED: self._exit_barrier_timeout + LONG_PATIENCE,
            }
            self.watch.waiting(limits.get(result.state, LONG_PATIENCE))
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.watch is not None:
            type(self).connected = True
            settings = getattr(worker_group.spec.rdzv_handler, "_settings", None)
            join = settings.timeout.join.total_seconds() if settings is not None else 600.0
            self.watch.waiting(join + LONG_PATIENCE)
        reminder = threading.Timer(_SILENCE, _print_waiting)
        reminder.daemon = True
        if self.meeting:
            reminder.start()
        try:
            super()._rendezvous(worker_group)
            self._print_membership(worker_group)
            self._use_highest_restart_count(worker_group)
        finally:
            reminder.cancel()
            if self.watch is not None:
                self.watch.answered()

    def _print_membership(self, group: Any) -> None:
        """Print which machines have joined and left since the last group."""
        if self.membership is None:
            return
        text = self.membership.update(group.store, group.group_rank, group.group_world_size)
        if self.membership.restarted:
            os.environ[RESTARTED] = "1"  # the ranks inherit it
        if text is not None:
            ranks = counted(group.workers[0].world_size, "process")
            sys.stderr.write(f"{text}; {ranks}\n")
            sys.stderr.flush()

    def _use_highest_restart_count(self, group: Any) -> None:
        """Set the restart count of all agents to the highest one.

        Each agent counts only the failures on its own machine. Without this, ranks on different
        machines would look for each other under different attempt numbers and time out.
        """
        # A static rendezvous keeps one store for all rounds, so it would return old counts.
        if group.group_world_size == 1 or group.spec.rdzv_handler.get_backend() == "static":
            return
        limit = group.spec.max_restarts
        mine = limit - self._remaining_restarts
        group.store.set(f"accelerate/restarts/{group.group_rank}", str(mine))
        keys = [f"accelerate/restarts/{rank}" for rank in range(group.group_world_size)]
        self._remaining_restarts = limit - max(int(group.store.get(key)) for key in keys)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
