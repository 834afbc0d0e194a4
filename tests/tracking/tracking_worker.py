"""Scripts that log values: killed, resumed, on two ranks, raising, or with a slow or hanging tracker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from accelerate_core import Accelerator
from accelerate_tracking import GeneralTracker, register_tracker_class


@register_tracker_class
class Slow(GeneralTracker):
    """Appends one line per call to a file, slowly."""

    name = "slow"
    requires_logging_directory = True
    resumes = True
    groups = True
    packages = ()
    seconds = float(os.environ.get("SLOW_SECONDS", "0"))

    def __init__(self, project_name: str, logging_dir: str) -> None:
        super().__init__()
        self.directory = Path(logging_dir)

    @property
    def tracker(self) -> Any:
        return self.path

    @property
    def run_id(self) -> str:
        return self.path.name

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        rank = self.run_group.rank if self.run_group else 0
        name = self.resume_id or f"slow-{rank}-{os.getpid()}.txt"
        self.path = self.directory / name
        self.log_text("group", self.run_group.name if self.run_group else "")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        self.log_text("log", f"{step} {values['loss']}")

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(f"{name} {text}\n")

    def finish(self) -> None:
        self.log_text("end", "finished")

    def finish_failed(self) -> None:
        self.log_text("end", "failed")


def make(log_with: Any = ("slow", "jsonl")) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, log_with=list(log_with), project_dir=".")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    return accelerator, model


def killed() -> None:
    accelerator, _ = make()
    accelerator.init_trackers("project")
    for step in range(3):
        accelerator.log({"loss": step + 0.5}, step=step)
    accelerator.save_state("checkpoint")
    for step in range(3, 20):
        accelerator.log({"loss": step + 0.5}, step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed() -> None:
    accelerator, _ = make()
    if "late" in sys.argv:
        accelerator.init_trackers("project")
    accelerator.load_state("checkpoint")
    if "late" not in sys.argv:
        accelerator.init_trackers("project")
    assert set(accelerator.resumed_runs) == {"slow", "jsonl"}
    for step in range(3, 20):
        accelerator.log({"loss": step + 0.5}, step=step)
    accelerator.end_training()


def raises() -> None:
    accelerator, _ = make()
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({"loss": step + 0.5}, step=step)
    raise ValueError("the script is at fault")


def ends() -> None:
    accelerator, _ = make()
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({"loss": step + 0.5}, step=step)


def ranks() -> None:
    accelerator, _ = make(["slow", "jsonl"])
    kwargs = {"slow": {"main_process_only": False}}
    accelerator.init_trackers("project", init_kwargs=kwargs)
    accelerator.log({"loss": float(accelerator.process_index)}, step=0)
    accelerator.end_training()


def one_rank_raises() -> None:
    accelerator, _ = make()
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({"loss": step + 0.5}, step=step)
    if accelerator.process_index == 1:
        raise ValueError("rank 1 is at fault")
    accelerator.wait_for_everyone()


def stuck() -> None:
    from accelerate_tracking import tracker_threads

    tracker_threads.PATIENCE = 1.0
    Slow.seconds = 3600.0
    accelerator, _ = make()
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({"loss": step + 0.5}, step=step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.end_training()
    print("SAID", [str(one.message) for one in caught])


def lingers() -> None:
    class Lingers(Slow):
        name = "lingers"

        def start(self) -> None:
            super().start()
            threading.Thread(target=self.pump, name="pump").start()

        def pump(self) -> None:
            time.sleep(4.0)

    accelerator = Accelerator(cpu=True, log_with=Lingers, project_dir=".")
    accelerator.init_trackers("project")
    accelerator.end_training()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
