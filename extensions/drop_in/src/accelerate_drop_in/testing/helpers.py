"""The test device, decorators that skip tests, test cases, and functions that run commands."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate_core import AcceleratorState, GradientState, PartialState, utils
from accelerate_core.plugin import did_you_mean
from accelerate_drop_in import private  # noqa: F401  (adds `_reset_state`)
from accelerate_drop_in.environment import parse_flag_from_env
from accelerate_drop_in.verbs import gather
from accelerate_drop_in.versions import compare_versions, is_torch_version


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type, the number of devices, and a function that returns the bytes in use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "cpu", 1, int
    module = getattr(torch, kind.type)
    used = getattr(module, "memory_allocated", None) or module.current_allocated_memory
    return kind.type, torch.accelerator.device_count(), used


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return a launch command with the given options. True means an option without a value."""
    said = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in said.items()]
    return ["accelerate", "launch", *options]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)

# --- requirements of tests --------------------------------------------------------------------

_run_slow = parse_flag_from_env("RUN_SLOW", False)


def skip(test_case: Any) -> Any:
    """Skip a test."""
    return unittest.skip("skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Skip a test unless the environment variable RUN_SLOW is true."""
    return unittest.skipUnless(_run_slow, "slow; set RUN_SLOW=1 to run it")(test_case)


def run_first(test_case: Any) -> Any:
    """Run a test before the others, if pytest-order is installed."""
    if importlib.util.find_spec("pytest") is None:
        return test_case
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test if torch is older than a version."""
    if test_case is None:
        return lambda given: require_torch_min_version(given, version)
    there = version is None or is_torch_version(">=", version)
    return unittest.skipUnless(there, f"needs torch {version}")(test_case)


def _has(name: str) -> Callable[[], bool]:
    return lambda: bool(getattr(utils, f"is_{name}_available")())


def _kind(*kinds: str) -> Callable[[], bool]:
    return lambda: torch_device in kinds


def _devices(few: int, many: float, *kinds: str) -> Callable[[], bool]:
    return lambda: (
        torch_device in (kinds or {torch_device} - {"cpu"}) and (few <= device_count <= many)
    )


def _fp8() -> bool:
    too_old = torch.cuda.is_available() and not utils.check_cuda_fp8_capability()
    return bool(utils.is_fp8_available()) and not too_old


def _several_trackers() -> bool:
    some = ("wandb", "tensorboard", "trackio", "swanlab")
    return any(_has(name)() for name in some) and not _has("comet_ml")()


_MANY = float("inf")
#: The condition of `require_NAME` for these names. For any other name, the library must be installed.
_NEEDS: dict[str, Callable[[], bool]] = {
    "cpu": _kind("cpu"),
    "non_cpu": lambda: torch_device != "cpu",
    "cuda": _kind("cuda"),
    "cuda_or_hpu": _kind("cuda", "hpu"),
    "cuda_or_xpu": _kind("cuda", "xpu"),
    "non_xpu": lambda: torch_device != "xpu",
    "non_hpu": lambda: torch_device != "hpu",
    "non_torch_xla": lambda: torch_device != "xla",
    "tpu": _kind("xla"),
    "single_device": _devices(1, 1),
    "single_gpu": _devices(1, 1, "cuda"),
    "single_xpu": _devices(1, 1, "xpu"),
    "multi_device": _devices(2, _MANY),
    "multi_gpu": _devices(2, _MANY, "cuda"),
    "multi_xpu": _devices(2, _MANY, "xpu"),
    "multi_gpu_or_xpu": _devices(2, _MANY, "cuda", "xpu"),
    "fp8": _fp8,
    "fsdp2": lambda: True,
    "huggingface_suite": lambda: _has("transformers")() and _has("datasets")(),
    "torchdata_stateful_dataloader": _has("torchdata_stateful_dataloader"),
    "tp": lambda: _has("transformers")() and compare_versions("transformers", ">=", "4.52.0"),
    "trackers": _several_trackers,
}


def __getattr__(name: str) -> Any:
    """Return a decorator `require_...`, which skips a test if a requirement is not met."""
    wanted = name.removeprefix("require_")
    probe = f"is_{wanted}_available"
    if wanted == name or not (wanted in _NEEDS or hasattr(utils, probe)):
        known = [f"require_{one}" for one in _NEEDS]
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, known)}"
        )

    def require(test_case: Any) -> Any:
        there = _NEEDS.get(wanted) or getattr(utils, probe)
        return unittest.skipUnless(there(), f"needs {wanted.replace('_', ' ')}")(test_case)

    require.__name__ = require.__qualname__ = name
    require.__doc__ = f"Skip a test without {wanted.replace('_', ' ')}."
    return globals().setdefault(name, require)


# --- test cases -------------------------------------------------------------------------------


class TempDirTestCase(unittest.TestCase):
    """A test case with a folder `tmpdir`, which is emptied before each test if `clear_on_setup`."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        for one in self.tmpdir.iterdir() if self.clear_on_setup else ():
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()


class AccelerateTestCase(unittest.TestCase):
    """A test case that resets the states after each test."""

    def tearDown(self) -> None:
        super().tearDown()
        AcceleratorState._reset_state(True)  # type: ignore[attr-defined]
        GradientState._reset_state()  # type: ignore[attr-defined]


class MockingTestCase(unittest.TestCase):
    """A test case with mocks that stop when the test ends."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one mock, or several."""
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)


@contextlib.contextmanager
def assert_exception(
    exception_class: type[BaseException], msg: str | None = None
) -> Iterator[None]:
    """Expect an error of a class whose text contains `msg`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class) or (msg is not None and msg not in str(error)):
            wanted = f"{exception_class.__name__} with {msg or ''!r}"
            raise AssertionError(f"Expected {wanted}, but got {error!r}.") from error
        return
    raise AssertionError(f"Expected {exception_class.__name__}, but no error was raised.")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same tensor."""
    every = gather(tensor[None].clone().to(PartialState().device))
    return all(torch.equal(one, every[0]) for one in every)


# --- commands ---------------------------------------------------------------------------------


class SubprocessCallException(Exception):
    """A command failed."""


@dataclass
class _Output:
    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: list[Any],
    env: dict[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _Output:
    """Run a command and show its output while it runs; return the output and the exit status.

    Raises:
        RuntimeError: the command failed; the text has its output.
    """
    command = [str(part) for part in cmd]
    if echo:
        print("\nRunning:", *command)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": stdin}
    with subprocess.Popen(command, env=env, text=True, errors="replace", **pipes) as process:
        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, process.kill)
        timer.daemon = True
        timer.start()
        out: list[str] = []
        err: list[str] = []

        def follow(stream: Any, lines: list[str], name: str) -> None:
            for line in stream:
                lines.append(line.rstrip())
                if not quiet:
                    print(f"{name}: {line.rstrip()}", file=getattr(sys, name))

        other = threading.Thread(target=follow, args=(process.stderr, err, "stderr"))
        other.start()
        follow(process.stdout, out, "stdout")
        other.join()
        status = process.wait()
        timer.cancel()
    if status:
        raise RuntimeError(f"{' '.join(command)!r} failed with status {status}:\n" + "\n".join(err))
    return _Output(status, out, err)


def run_command(
    command: list[Any], return_stdout: bool = False, env: dict[str, str] | None = None
) -> str | None:
    """Run a command without showing its output, which is returned with `return_stdout`.

    Raises:
        SubprocessCallException: the command failed; the text has its output.
    """
    words = [str(part) for part in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    )
    if done.returncode:
        raise SubprocessCallException(
            f"Command `{' '.join(words)}` failed with status {done.returncode}:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the output that a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        func(*args, **kwargs)
    return said.getvalue()


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker, 0 without pytest-xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker uses."""
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the folder of the package `accelerate`."""
    package = importlib.import_module("accelerate")
    return Path(inspect.getfile(package)).parent.joinpath(*components)
