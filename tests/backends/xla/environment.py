"""Create the environment for XLA's tests, with torch_xla and the torch that it was built for.

That torch is only available for CUDA. The tests never call CUDA, but the loader needs every library
that torch links. Each is replaced by a stub with the right name, whose functions all return
"no device". torch then reports that CUDA is not available. Don't use this for anything but tests.

    python environment.py FOLDER PACKAGE [PACKAGE ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections import defaultdict
from pathlib import Path

TORCH, XLA = "2.9.0", "2.9.0"
#: Dependencies of torch and torch_xla, which are installed without them to avoid gigabytes of CUDA.
NEEDED = (
    *("numpy", "absl-py", "pyyaml", "requests", "typing_extensions", "sympy", "networkx", "jinja2"),
    *("fsspec", "filelock", "packaging", "setuptools"),
)
#: Dependencies of the tests, the examples and the build.
TESTED = (
    *("hatchling", "editables", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
    *("scikit-learn", "tqdm"),
)
#: Dependencies that pip should not resolve: already installed, or ours.
_WITHOUT = re.compile(r"torch\b|torch_xla|accelerate-")

_CUDA = "lib(?:cu|nv|nccl)"
_COMMON = "libwithout_version.so"


def install(python: Path, packages: list[str]) -> None:
    """Install torch, torch_xla, all dependencies, and our packages in editable mode."""
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-compile"]
    subprocess.run([*pip, "-U", "pip>=25.1"], check=True)
    subprocess.run([*pip, "--no-deps", f"torch=={TORCH}", f"torch_xla=={XLA}"], check=True)
    ours = []
    for package in packages:
        project = tomllib.loads((Path(package) / "pyproject.toml").read_text())["project"]
        ours += [one for one in project["dependencies"] if not _WITHOUT.match(one)]
    subprocess.run([*pip, *NEEDED, *TESTED, *ours], check=True)
    edited = [word for package in packages for word in ("-e", package)]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *edited], check=True)


def make_stubs(libraries: Path) -> None:
    """Build stubs of the CUDA libraries that torch links, in torch's own folder.

    The loader looks there first. A symbol is either required with the version of its library, or
    without a version. The latter are all in one additional library, on which the others depend.
    """
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in libraries.glob("*.so"):
        for name in re.findall(rf"NEEDED.*\[({_CUDA}.*?)\]", _read("-d", library)):
            wanted[name]
        owners = {}
        for block in _read("-V", library).split(" File: ")[1:]:
            owners.update(dict.fromkeys(re.findall(r" Name: (\S+)", block), block.split()[0]))
        for symbol, version in re.findall(r" UND (\w+)(?:@(\S+))?", _read("--dyn-syms", library)):
            if re.match(_CUDA, owners.get(version, "")):
                wanted[owners[version]][version].add(symbol)
            elif not version and re.match("cu|nv|nccl", symbol):
                wanted[_COMMON][""].add(symbol)
    _build(libraries / _COMMON, wanted.pop(_COMMON))
    for name, versions in wanted.items():
        _build(libraries / name, versions, "-Wl,--no-as-needed", f"-l:{_COMMON}")


def _read(what: str, library: Path) -> str:
    command = ["readelf", "-W", what, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _build(target: Path, versions: dict[str, set[str]], *link: str) -> None:
    code, script = target.with_suffix(".c"), target.with_suffix(".map")
    symbols = sorted(set().union(*versions.values()))
    code.write_text("".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in symbols))
    lines = [f"{name} {{ {'; '.join(sorted(own))}; }};" for name, own in versions.items() if name]
    script.write_text("\n".join(lines))
    how = ["-shared", "-fPIC", "-w", "-O0", f"-Wl,-soname,{target.name}", "-Wl,-rpath,$ORIGIN"]
    how += [f"-Wl,--version-script={script}"] if lines else []
    where = ["-o", str(target), str(code), f"-L{target.parent}"]
    subprocess.run(["gcc", *how, *where, *link], check=True)


if __name__ == "__main__":
    folder, *packages = sys.argv[1:]
    venv.create(folder, clear=True, with_pip=True)
    python = Path(folder).absolute() / "bin" / "python"
    install(python, packages)
    site = python.parents[1] / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    make_stubs(site / "torch" / "lib")
    subprocess.run([str(python), "-c", "import torch_xla; print(torch_xla.device())"], check=True)
