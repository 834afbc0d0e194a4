"""Run a script on a Ray cluster. `accelerate-core launch --launcher ray` starts this module."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import Any

from accelerate_core.plugin import AccelerateError
from accelerate_launch import Target
from accelerate_launch.plan import PREEMPTED
from accelerate_ray.options import RunOptions, rank_command
from accelerate_ray.settings import RaySettings

#: Separates the driver's options from the program.
_TARGET = "--"


def main(arguments: list[str]) -> int:
    """Run the target in all ranks, and return the exit status of the rank that failed first."""
    at = arguments.index(_TARGET)
    given = _parser().parse_args(arguments[:at])
    name, *rest = arguments[at + 1 :]
    target = Target(name, tuple(rest), given.kind)
    try:
        return _run(given, target)
    except AccelerateError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(given: Any, target: Target) -> int:
    settings = RaySettings(
        address=given.address,
        strategy=given.strategy,
        cpus=given.cpus,
        gpus=given.gpus,
        resources=given.resources,
        wait=given.wait,
        join_wait=given.join_wait,
        files=given.files,
        runtime_env=given.runtime_env,
    )
    options = RunOptions(
        settings,
        None if given.num_processes == "auto" else int(given.num_processes),
        environment={},
        address_source=given.address_source,
        max_restarts=given.max_restarts,
        least=given.least,
        share=given.share,
        port=given.main_process_port,
        log_dir=given.log_dir,
        tee=given.tee,
        prefix=f"[{given.role} ${{rank}}] ",
        quiet=given.quiet,
    )
    # Ray takes almost half a second to import.
    from accelerate_ray import run as running

    signals: list[int] = []
    try:
        outcome = running.run(
            options,
            lambda cluster: _prepared(cluster.shipped, target, signals),
            signals,
        )
    except running.Terminated:
        return 128 + signal.SIGTERM
    if outcome.ok:
        return 0
    text, status = outcome.explain(quiet=options.quiet)
    if status != PREEMPTED:
        sys.stderr.write(text)
    return status


def _prepared(shipped: bool, target: Target, signals: list[int]) -> list[str]:
    """Pass signals on from now on, because Ray sets its own handlers, and return the command."""
    if shipped:
        sys.stderr.write(
            "The ranks run in a copy of this directory on their nodes, so save checkpoints to a path "
            "that all nodes share.\n"
        )

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), note)
    return rank_command(target, shipped=shipped)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m accelerate_ray.driver", allow_abbrev=False)
    parser.add_argument("--num_processes", default="auto")
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("--least", type=int)
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--join_wait", type=float, default=30.0)
    parser.add_argument("--address")
    parser.add_argument("--address_source", default="default")
    parser.add_argument("--strategy", default="pack")
    parser.add_argument("--cpus", type=float, default=1.0)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--resources", default="")
    parser.add_argument("--wait", type=float, default=600.0)
    parser.add_argument("--files", default="auto")
    parser.add_argument("--runtime_env", default="")
    parser.add_argument("--main_process_port", type=int)
    parser.add_argument("--log_dir")
    parser.add_argument("--tee", default="3")
    parser.add_argument("--role", default="rank")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--kind", default="script")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
