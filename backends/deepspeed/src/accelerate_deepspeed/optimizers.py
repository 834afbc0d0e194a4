"""Optimizers: stand-ins for what a config describes, DeepSpeed's own for the CPU, compiling them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError
from accelerate_deepspeed.config import HfDeepSpeedConfig


class DummyOptim:
    """Holds the place of the optimizer in the config's section `optimizer`.

    Args:
        params: parameters or groups of them, as for an optimizer.
        lr: learning rate where the config says "auto".
        weight_decay: weight decay where the config says "auto".
        optimizer_callable: makes the optimizer from the parameters, where the config has none.
        kwargs: further hyperparameters where the config says "auto".
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
    """Holds the place of the scheduler in the config's section `scheduler`, or of a function's.

    Args:
        optimizer: the optimizer it is for.
        total_num_steps: steps of the whole schedule where the config says "auto".
        warmup_num_steps: steps of warming up where the config says "auto".
        lr_scheduler_callable: makes the scheduler from the optimizer that is really stepped; then
            the config must not have one.
        kwargs: further parameters where the config says "auto".

    Both numbers count as for one process, in batches of a loader that is not shared out; they are
    divided by the number of ranks with different samples, as the steps are.
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


# --- DeepSpeed's for the CPU ----------------------------------------------------------------------

#: Optimizer -> DeepSpeed's op, its module in `deepspeed.ops`, class, and constant arguments.
_ON_CPU = {
    "AdamW": ("cpu_adam", "adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adam": ("cpu_adam", "adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "Adagrad": ("cpu_adagrad", "adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("cpu_lion", "lion", "DeepSpeedCPULion", {}),
}
_WAY_OUT = (
    'set "zero_force_ds_cpu_optimizer": false in the DeepSpeed config to step with torch\'s on the '
    "CPU, which is slower and needs no compiler"
)


def for_offload(config: HfDeepSpeedConfig, optimizer: Any) -> Any:
    """Return the optimizer for state that is kept on the CPU: DeepSpeed's, unless told not to."""
    its_own = type(optimizer).__name__.startswith("DeepSpeedCPU")
    if its_own or not _offloads(config) or config.is_false("zero_force_ds_cpu_optimizer"):
        return optimizer
    return map_pytorch_optim_to_deepspeed(optimizer)


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's CPU optimizer of the same kind, with the same groups.

    Every hyperparameter of every group is kept. The optimizer is compiled at first use.

    Raises:
        ConfigurationError: there is none of that kind, one of its options is missing there, or
            no compiler is here.
    """
    kinds = [base.__name__ for base in type(optimizer).__mro__]
    kind = next((name for name in kinds if name in _ON_CPU), None)
    if kind is None:
        raise ConfigurationError(
            f"DeepSpeed has no {type(optimizer).__name__} for an optimizer state on the CPU, only "
            f"Adam, AdamW, Adagrad and Lion. Use one of these, or {_WAY_OUT}."
        )
    for option in ("amsgrad", "maximize"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ConfigurationError(
                f"DeepSpeed's {kind} for the CPU has no {option}; leave it out, or {_WAY_OUT}."
            )
    op, module, name, constants = _ON_CPU[kind]
    check_compiler(op)
    groups = [dict(group) for group in optimizer.param_groups]
    known = {"lr", "eps", "weight_decay", "betas"} & optimizer.defaults.keys()
    with build_note(op):
        make = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
        return make(groups, **{key: optimizer.defaults[key] for key in known}, **constants)


def needs_build(config: HfDeepSpeedConfig) -> str | None:
    """Return the op that the config's optimizer is made of, None for one of torch's."""
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
    """Refuse an op that is not built yet where it cannot be."""
    if _built(op):
        return
    lacking = []
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))):
        lacking.append("a C++ compiler (Debian: apt install g++)")
    if not shutil.which("ninja") and importlib.util.find_spec("ninja") is None:
        lacking.append("ninja (pip install ninja)")
    if lacking:
        raise ConfigurationError(
            f"DeepSpeed's op {op} is compiled at first use, and this machine lacks "
            f"{' and '.join(lacking)}. Install that, or {_WAY_OUT}."
        )


def _folder(op: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(op, verbose=False))


def _built(op: str) -> bool:
    folder = _folder(op)
    return (folder / f"{op}.so").exists() and not (folder / "lock").exists()


@contextmanager
def build_note(op: str | None) -> Iterator[None]:
    """Say that an op is compiled, if it will be, and every half minute that it still is.

    A build that was killed leaves a lock, on which every later one waits for ever: it is named.
    """
    if op is None or _built(op):
        yield
        return
    done = threading.Event()
    started = time.monotonic()
    lock = _folder(op) / "lock"
    held = lock.exists()

    def tell() -> None:
        while not done.wait(30):
            if held and lock.exists():
                _say(
                    f"still waiting for {lock}, which another process or a build that was killed "
                    "holds; if no build is running, remove it"
                )
            else:
                _say(f"still compiling {op}, {time.monotonic() - started:.0f} s so far")

    _say(f"compiling DeepSpeed's op {op} into {lock.parent}; this takes minutes, once")
    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    _say(f"{op} is ready after {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"accelerate-deepspeed: {text}", flush=True)
