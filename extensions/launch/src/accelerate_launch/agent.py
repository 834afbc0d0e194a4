"""torch's agent, with the exit status of a run that was preempted, and its signals passed on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from accelerate_launch.failures import describe, remember

#: Stands between the agent's options and the program.
TARGET = "--"

#: `EX_TEMPFAIL`: the ranks have saved and want to be started again.
_AGAIN = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `torch.distributed.run`; return the status of the rank that failed first, which is shown."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    try:
        run(arguments)
    except ChildFailedError as error:
        text, status = describe(error)
        if status != _AGAIN:
            sys.stderr.write(text)
        return status
    except SignalException as error:  # Ctrl-C: the ranks have been ended
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        sys.stderr.write(
            f"Error: this machine did not meet the others: {reason}\n"
            "Look at --main_process_ip and --main_process_port, which must be those of machine 0 "
            "on every machine, at --num_machines, and at firewalls between them.\n"
        )
        return 1
    return 0


def run(arguments: Sequence[str] | None = None) -> None:
    """Run `torch.distributed.run` with what a run that may be preempted needs of its agent.

    Raises:
        ChildFailedError: a rank failed, or was preempted (status 75).
    """
    from torch.distributed import run as torchrun

    agent: Any = torchrun
    _pass_signals_on()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = agent.parse_args([*given[: given.index(TARGET)], "target"])
    # Not parsed by anybody: it may begin with a dash, or have a "--" of its own.
    parsed.training_script, *parsed.training_script_args = given[given.index(TARGET) + 1 :]
    _wait_for_terminated(parsed)
    _never_restart_preempted()
    _count_restarts_together()
    _notice_a_lost_rendezvous(parsed)
    agent.run(parsed)


def _send_on(number: int, frame: Any) -> None:
    import psutil

    for rank in psutil.Process().children():
        rank.send_signal(number)


def _pass_signals_on() -> None:
    """Send the user's signals on to the ranks; by default they would end the agent alone."""
    for name in ("SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _send_on)


def _never_restart_preempted() -> None:
    """Let the agent end when ranks have left with 75: it is the machine that is taken away."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    agent: Any = LocalElasticAgent
    monitor = getattr(agent, "_monitor_workers", None)
    if monitor is None:
        return

    def watched(self: Any, group: Any) -> Any:
        processes = self._pcontext  # torch lets go of it when a rank has failed
        result = monitor(self, group)
        if result.failures and processes is not None:
            remember(processes)
        if any(getattr(f, "exitcode", 0) == _AGAIN for f in (result.failures or {}).values()):
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = watched


def _count_restarts_together() -> None:
    """Let the agents of all machines agree on how often the group was started again.

    Each counts its own failures: after one on another machine the ranks would otherwise look for
    each other under the numbers of different attempts, and wait until they give up.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    agent: Any = LocalElasticAgent
    rendezvous = getattr(agent, "_rendezvous", None)
    if rendezvous is None:
        return

    def agreed(self: Any, group: Any) -> None:
        rendezvous(self, group)
        # The store of a static rendezvous is the same in every round: it would remember the last.
        if group.group_world_size == 1 or group.spec.rdzv_handler.get_backend() == "static":
            return
        limit = group.spec.max_restarts
        mine = limit - self._remaining_restarts
        group.store.set(f"accelerate/restarts/{group.group_rank}", str(mine))
        keys = [f"accelerate/restarts/{rank}" for rank in range(group.group_world_size)]
        self._remaining_restarts = limit - max(int(group.store.get(key)) for key in keys)

    agent._rendezvous = agreed


def _notice_a_lost_rendezvous(parsed: Any) -> None:
    """End the agent where the store on another machine has stopped to answer."""
    from torch.distributed.elastic.agent.server import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from accelerate_launch.lost_rendezvous import LONG_PATIENCE, LostRendezvous

    agent: Any = LocalElasticAgent
    monitor, rendezvous = agent._monitor_workers, agent._rendezvous
    several = str(getattr(parsed, "nnodes", "1")) not in ("1", "1:1")
    if not several or getattr(parsed, "rdzv_backend", "static") == "static":
        return
    watch = LostRendezvous(parsed.rdzv_endpoint)

    def monitored(self: Any, group: Any) -> Any:
        watch.answered()
        result = monitor(self, group)
        limits = {
            WorkerState.HEALTHY: None,
            # It waits for the other machines to end, too.
            WorkerState.SUCCEEDED: self._exit_barrier_timeout + LONG_PATIENCE,
        }
        watch.waiting(limits.get(result.state, LONG_PATIENCE))
        return result

    def met(self: Any, group: Any) -> None:
        timeout = getattr(group.spec.rdzv_handler, "_settings", None)
        join = timeout.timeout.join.total_seconds() if timeout is not None else 600.0
        watch.waiting(join + LONG_PATIENCE)
        try:
            rendezvous(self, group)
        finally:
            watch.answered()

    agent._monitor_workers, agent._rendezvous = monitored, met


def _wait_for_terminated(parsed: Any) -> None:
    """Send a SIGTERM on to the ranks and let them end; at a second one the agent ends them.

    By itself the agent would kill them after 30 seconds, in the middle of a save, and forget
    with what status they left.
    """
    handled = getattr(parsed, "signals_to_handle", None)
    if handled is None or "SIGTERM" not in handled:
        return  # an older torch, which cannot be told
    parsed.signals_to_handle = ",".join(s for s in handled.split(",") if s != "SIGTERM")

    def send(number: int, frame: Any) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        if said:
            raise SignalException("terminated twice", signal.Signals(number))
        said.append(number)
        _send_on(number, frame)

    said: list[int] = []
    signal.signal(signal.SIGTERM, send)


if __name__ == "__main__":
    sys.exit(main())
