"""Compile the fake device once for each environment, and load it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion
from torch.utils import cpp_extension

from accelerate_core.plugin import ConfigurationError

_SOURCE = Path(__file__).with_name("device.cpp")
_MODULE = "accelerate_fake_device"
#: The first version of torch with all interfaces that the device implements.
_TORCH = "2.13"


@functools.cache
def load() -> Any:
    """Return the compiled module. Importing it registers the device's kernels with torch."""
    spec = importlib.util.spec_from_file_location(_MODULE, compiled())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def compiled() -> Path:
    """Return the path of the compiled module, after compiling it if necessary, which takes 20 seconds.

    It is kept in the directory for torch's extensions (`TORCH_EXTENSIONS_DIR`), under a name that depends
    on the source and the versions of torch and Python. Other processes wait meanwhile.

    Raises:
        ConfigurationError: torch is too old, there is no C++ compiler, or it failed.
    """
    if TorchVersion(torch.__version__) < _TORCH:
        raise ConfigurationError(
            f"The fake device needs torch {_TORCH} or newer; this is torch {torch.__version__}."
        )
    versions = f"{torch.__version__} {torch.__file__} {sys.version}".encode()
    digest = hashlib.sha256(_SOURCE.read_bytes() + versions).hexdigest()[:16]
    folder = Path(cpp_extension._get_build_directory(f"{_MODULE}_{digest}", verbose=False))
    library = folder / f"{_MODULE}.so"
    # With a lock of the operating system, a killed process doesn't block later ones.
    with (folder / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigurationError(
            "The fake device is compiled when it is first used, but there is no C++ compiler "
            f"{compiler!r}. Install one (on Debian: apt install g++), or set CXX to its command."
        )
    made = library.with_suffix(".part")
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    folder = cpp_extension.library_paths()[0]
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-w"]
    command += [f"-DTORCH_EXTENSION_NAME={_MODULE}", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
    command += [f"-I{path}" for path in includes]
    command += [str(_SOURCE), "-o", str(made), f"-L{folder}", f"-Wl,-rpath,{folder}"]
    command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise ConfigurationError(
            f"{compiler} could not compile the fake device with torch {torch.__version__}:\n"
            f"{run.stderr[-4000:]}"
        )
    made.rename(library)


def _abi() -> int:
    return int(torch._C._GLIBCXX_USE_CXX11_ABI)
