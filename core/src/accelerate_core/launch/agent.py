"""torch's agent, with the exit status of a run that was preempted, and its signals passed on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main", "run"]

#: `EX_TEMPFAIL`: the ranks have saved and want to be started again.
_AGAIN = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `torch.distributed.run`; return 75 if the ranks left with that, else as torchrun does."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run(arguments)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == _AGAIN:
            return _AGAIN
        raise
    return 0


def run(arguments: Sequence[str] | None = None) -> None:
    """Run `torch.distributed.run` with what a run that may be preempted needs of its agent.

    Raises:
        ChildFailedError: a rank failed, or was preempted (status 75).
    """
    from torch.distributed import run as torchrun

    agent: Any = torchrun
    _pass_signals_on()
    parsed = agent.parse_args(list(sys.argv[1:] if arguments is None else arguments))
    _wait_for_terminated(parsed)
    _never_restart_preempted()
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
        result = monitor(self, group)
        if any(getattr(f, "exitcode", 0) == _AGAIN for f in (result.failures or {}).values()):
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = watched


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
