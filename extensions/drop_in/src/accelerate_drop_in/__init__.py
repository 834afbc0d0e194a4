"""Serve the import name `accelerate` from accelerate-core on request.

Call `install`, or run `python -m accelerate_drop_in script.py --its arguments`. The distribution
`accelerate` that `make drop-in` builds needs neither.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import metadata
from pathlib import Path

from accelerate_core.plugin import AccelerateError

__all__ = ["NAME", "VERSION", "install", "uninstall"]

#: The import name that is served.
NAME = "accelerate"
#: The version that libraries see. It follows the version of Accelerate whose names are served.
VERSION = "1.15.0.post1"

_SERVED = str(Path(__file__).with_name("served"))


def install() -> None:
    """Serve `import accelerate` from now on, in this process and in processes that it starts.

    Calling this again has no effect.

    Raises:
        AccelerateError: Hugging Face Accelerate is already imported, or installed as well.

    Example:
        import accelerate_drop_in

        accelerate_drop_in.install()
        from accelerate import Accelerator
    """
    there = sys.modules.get(NAME)
    if there is not None and getattr(there, "__version__", None) != VERSION:
        raise AccelerateError(
            f"The package {NAME!r} is already imported from {getattr(there, '__file__', '?')}. "
            "Call accelerate_drop_in.install() before anything imports it."
        )
    for other in metadata.distributions(name=NAME):
        if other.version != VERSION:
            raise AccelerateError(
                f"Hugging Face Accelerate {other.version} is also installed, so libraries would mix "
                f"parts of both. Uninstall it first: pip uninstall {NAME}"
            )
    if _SERVED not in sys.path:
        sys.path.insert(0, _SERVED)
        paths = [_SERVED, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def uninstall() -> None:
    """Stop serving the name, and remove the served modules from `sys.modules`."""
    if _SERVED in sys.path:
        sys.path.remove(_SERVED)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != _SERVED)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def main() -> None:
    """Run a script that can import `accelerate`."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m accelerate_drop_in script.py [arguments]")
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0] or ".")
    runpy.run_path(sys.argv[0], run_name="__main__")
