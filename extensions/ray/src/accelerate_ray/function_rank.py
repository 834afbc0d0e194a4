"""Run a pickled function as one rank, and pickle what it returns.

python -m accelerate_ray.function_rank FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from ray import cloudpickle

#: Folders of the packages that call the function.
_CALLERS = ("/accelerate_ray/", "/accelerate_launch/")


def main(folder: Path) -> int:
    """Run the function in the file `function`, and write its value to the file `result`.

    Returns the exit status. An exception is left to the launcher, which raises it again.
    """
    try:
        paths, function, args = cloudpickle.loads((folder / "function").read_bytes())
        sys.path += [path for path in paths if path not in sys.path]
        call, arguments = cloudpickle.loads(function), cloudpickle.loads(args)
        (folder / "result").write_bytes(_pickled(call(*arguments)))
    except Exception as error:
        _record(error)
        return 1
    return 0


def _pickled(value: object) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:  # objects may raise anything when they are pickled
        raise TypeError(
            f"The launched function returned a {type(value).__name__} that cannot be pickled: {error}"
        ) from error
    return content


def _record(error: Exception) -> None:
    """Write an exception to the launcher's file in the format of torchrun."""
    trace = "".join(traceback.format_exception(error.with_traceback(_own(error.__traceback__))))
    more = {"py_callstack": trace, "timestamp": str(int(time.time())), "left": True}
    said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(said), encoding="utf-8")


def _own(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the function."""
    while trace is not None and any(
        one in trace.tb_frame.f_code.co_filename.replace(os.sep, "/") for one in _CALLERS
    ):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
