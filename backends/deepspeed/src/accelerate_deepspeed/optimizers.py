"""Placeholders for the optimizer and scheduler in a config, and DeepSpeed's optimizers for the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError, warn
from accelerate_deepspeed.config import HfDeepSpeedConfig


class DummyOptim:
    """A placeholder for the optimizer that the config's section `optimizer` describes.

    Args:
        params: parameters or parameter groups, as for an optimizer.
        lr: learning rate to use if the config has "auto".
        weight_decay: weight decay to use if the config has "auto".
        optimizer_callable: creates the optimizer from the parameters, if the config has none.
        kwargs: more hyperparameters to use if the config has "auto".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0.0,
        optimizer_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.params = list(params)
        self.optimizer_callable = optimizer_callable
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as groups."""
        if self.params and isinstance(self.params[0], dict):
            return self.params
        return [{"params": self.params}]


class DummyScheduler:
    """A placeholder for the scheduler that the config's section `scheduler` describes.

    Args:
        optimizer: the optimizer of the scheduler.
        total_num_steps: number of steps of the schedule, to use if the config has "auto".
        warmup_num_steps: number of warm-up steps, to use if the config has "auto".
        lr_scheduler_callable: creates the scheduler from the engine's optimizer. The config must
            then not have a scheduler.
        kwargs: more parameters to use if the config has "auto".

    Give both numbers of steps as for one process. They are divided by the number of ranks that read
    different samples.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


# --- DeepSpeed's optimizers for the CPU -----------------------------------------------------------

#: Optimizer -> DeepSpeed's op, its module in `deepspeed.ops`, class, and constant arguments.
_ON_CPU = {
    "AdamW": ("cpu_adam", "adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adam": ("cpu_adam", "adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "Adagrad": ("cpu_adagrad", "adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("cpu_lion", "lion", "DeepSpeedCPULion", {}),
}
_WAY_OUT = (
    'set "zero_force_ds_cpu_optimizer": false in the DeepSpeed config to use torch\'s optimizer on '
    "the CPU, which is slower but needs no compiler"
)


def for_offload(config: HfDeepSpeedConfig, optimizer: Any) -> Any:
    """Return DeepSpeed's CPU optimizer if the state is offloaded, unless the config forbids it."""
    is_deepspeeds = type(optimizer).__name__.startswith("DeepSpeedCPU")
    if is_deepspeeds or not _offloads(config) or config.is_false("zero_force_ds_cpu_optimizer"):
        return optimizer
    return map_pytorch_optim_to_deepspeed(optimizer)


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's CPU optimizer of the same kind, with the same groups and hyperparameters.

    DeepSpeed's optimizer is compiled at first use.

    Raises:
        ConfigurationError: DeepSpeed has no such optimizer, does not support one of its options, or
            there is no compiler.
    """
    kinds = [base.__name__ for base in type(optimizer).__mro__]
    kind = next((name for name in kinds if name in _ON_CPU), None)
    if kind is None:
        raise ConfigurationError(
            f"DeepSpeed has no {type(optimizer).__name__} for offload to the CPU, only Adam, AdamW, "
            f"Adagrad and Lion. Use one of these, or {_WAY_OUT}."
        )
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ConfigurationError(
                f"DeepSpeed's {kind} for the CPU does not support {option}=True. Leave it out, or "
                f"{_WAY_OUT}."
            )
    op, module, name, constants = _ON_CPU[kind]
    check_compiler(op)
    groups = [dict(group) for group in optimizer.param_groups]
    known = {"lr", "eps", "weight_decay", "betas"} & optimizer.defaults.keys()
    with build_note(op):
        make = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
        return make(groups, **{key: optimizer.defaults[key] for key in known}, **constants)


def needs_build(config: HfDeepSpeedConfig) -> str | None:
    """Return the op that the config's optimizer needs, or None for an optimizer of torch."""
    kind = str(config.get_value("optimizer.type") or "")
    if not kind or config.is_true("optimizer.params.torch_adam"):
        return None
    on_cpu, on_device = {
        "adam": ("cpu_adam", "fused_adam"),
        "adamw": ("cpu_adam", "fused_adam"),
        "adagrad": ("cpu_adagrad", None),
        "lion": ("cpu_lion", "fused_lion"),
        "lamb": ("fused_lamb", "fused_lamb"),
    }.get(kind.lower(), (None, None))
    return on_cpu if _offloads(config) else on_device


def _offloads(config: HfDeepSpeedConfig) -> bool:
    device = config.get_value("zero_optimization.offload_optimizer.device")
    return device in ("cpu", "nvme")


def check_compiler(op: str) -> None:
    """Check that an op is already built or can be.

    Raises:
        ConfigurationError: it is not built, and there is no compiler or no ninja.
    """
    if _built(op):
        return
    lock = _folder(op) / "lock"
    if lock.exists() and not _is_open_here(lock):
        warn(
            f"DeepSpeed waits for the lock {lock} before it compiles its op {op}, but no process on this "
            "machine holds the lock: a build that was killed leaves it behind. If no other machine is "
            "compiling into this folder, delete the file."
        )
    lacking = []
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))):
        lacking.append("a C++ compiler (Debian: apt install g++)")
    if not shutil.which("ninja") and importlib.util.find_spec("ninja") is None:
        lacking.append("ninja (pip install ninja)")
    if lacking:
        raise ConfigurationError(
            f"DeepSpeed's op {op} is compiled at first use, but this machine lacks "
            f"{' and '.join(lacking)}. Install what is missing, or {_WAY_OUT}."
        )


def _is_open_here(path: Path) -> bool:
    """Tell whether a process on this machine has a file open; True if that cannot be found out."""
    descriptors = Path("/proc").glob("[0-9]*/fd/*")
    if not Path("/proc/self/fd").is_dir():
        return True
    for descriptor in descriptors:
        with suppress(OSError):  # of another user, or already closed
            if os.readlink(descriptor) == str(path.resolve()):
                return True
    return False


def _folder(op: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(op, verbose=False))


def _built(op: str) -> bool:
    folder = _folder(op)
    return (folder / f"{op}.so").exists() and not (folder / "lock").exists()


@contextmanager
def build_note(op: str | None) -> Iterator[None]:
    """A context that prints a message if an op has to be compiled, and progress every 30 seconds.

    A build that was killed leaves a lock file, on which later builds wait forever. The message names
    this file.
    """
    if op is None or _built(op):
        yield
        return
    done = threading.Event()
    started = time.monotonic()
    lock = _folder(op) / "lock"
    held = lock.exists()

    def report_progress() -> None:
        while not done.wait(30):
            if held and lock.exists():
                _print(
                    f"still waiting for the lock file {lock} of another process, or of a build "
                    "that was killed. If no build is running, delete the file"
                )
            else:
                _print(f"still compiling {op} after {time.monotonic() - started:.0f} s")

    _print(f"compiling DeepSpeed's op {op} into {lock.parent} once, which takes a few minutes")
    threading.Thread(target=report_progress, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    _print(f"{op} is ready after {time.monotonic() - started:.0f} s")


def _print(text: str) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"accelerate-deepspeed: {text}", flush=True)
