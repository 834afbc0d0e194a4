"""Which optimizer an engine gets: the user's, the config's, or DeepSpeed's own for the CPU."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelerate_core.errors import ConfigurationError
from accelerate_deepspeed.config import HfDeepSpeedConfig

__all__ = ["build_note", "for_offload", "map_pytorch_optim_to_deepspeed", "needs_build"]

#: Optimizer -> (DeepSpeed's op, class, constant arguments, hyperparameters it knows).
_ON_CPU = {
    "AdamW": ("cpu_adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adam": ("cpu_adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "Adagrad": ("cpu_adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("cpu_lion", "DeepSpeedCPULion", {}),
}
_WAY_OUT = (
    'set "zero_force_ds_cpu_optimizer": false in the DeepSpeed config to step with torch\'s on the '
    "CPU, which is slower and needs no compiler"
)


def for_offload(config: HfDeepSpeedConfig, optimizer: Any) -> Any:
    """Return the optimizer for state that is kept on the CPU: DeepSpeed's, unless told not to.

    Raises:
        ConfigurationError: DeepSpeed has none of that kind, or cannot compile it here.
    """
    device = config.get_value("zero_optimization.offload_optimizer.device")
    if device not in ("cpu", "nvme") or config.is_false("zero_force_ds_cpu_optimizer"):
        return optimizer
    if type(optimizer).__name__.startswith("DeepSpeedCPU"):
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
    op, name, constants = _ON_CPU[kind]
    check_compiler(op)
    groups = [dict(group) for group in optimizer.param_groups]
    arguments = {
        k: optimizer.defaults[k]
        for k in ("lr", "eps", "weight_decay", "betas")
        if k in optimizer.defaults
    }
    with build_note(op):
        from deepspeed.ops import adagrad, adam, lion

        module = {"cpu_adam": adam, "cpu_adagrad": adagrad, "cpu_lion": lion}[op]
        return getattr(module, name)(groups, **arguments, **constants)


def needs_build(config: HfDeepSpeedConfig) -> str | None:
    """Return the op that the config's optimizer is made of, None for one of torch's."""
    kind = str(config.get_value("optimizer.type") or "")
    if not kind or config.is_true("optimizer.params.torch_adam"):
        return None
    offload = config.get_value("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    ops = {
        "adam": "cpu_adam" if offload else "fused_adam",
        "adamw": "cpu_adam" if offload else "fused_adam",
        "adagrad": "cpu_adagrad" if offload else None,
        "lion": "cpu_lion" if offload else "fused_lion",
        "lamb": "fused_lamb",
    }
    return ops.get(kind.lower())


def check_compiler(op: str) -> None:
    """Refuse an op that is not built yet where it cannot be.

    Raises:
        ConfigurationError: with what to install.
    """
    if _built(op):
        return
    compiler = os.environ.get("CXX", "c++")
    lacking = [
        what
        for what, found in (
            (
                "a C++ compiler (Debian: apt install g++)",
                shutil.which(compiler) or shutil.which("g++"),
            ),
            ("ninja (pip install ninja)", shutil.which("ninja") or _has_ninja()),
        )
        if not found
    ]
    if lacking:
        raise ConfigurationError(
            f"DeepSpeed's op {op} is compiled at first use, and this machine lacks "
            f"{' and '.join(lacking)}. Install that, or {_WAY_OUT}."
        )


def _has_ninja() -> bool:
    try:
        import ninja  # noqa: F401
    except ImportError:
        return False
    return True


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
            text = f"still compiling {op}, {time.monotonic() - started:.0f} s so far"
            if held and lock.exists():
                text = (
                    f"still waiting for {lock}, which another process or a build that was killed "
                    "holds; if no build is running, remove it"
                )
            _say(text)

    _say(f"compiling DeepSpeed's op {op} into {lock.parent}; this takes minutes, once")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
    _say(f"{op} is ready after {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print(f"accelerate-deepspeed: {text}", flush=True)
