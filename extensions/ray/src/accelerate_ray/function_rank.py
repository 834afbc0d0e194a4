"""Run a pickled function as one rank, and pickle what it returns.

python -m accelerate_ray.function_rank FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from ray import cloudpickle

from accelerate_launch.uncaught import record

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
        trace = _own(error.__traceback__)
        record(error.with_traceback(trace), Path(os.environ["TORCHELASTIC_ERROR_FILE"]), True)
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


def _own(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the function."""
    while trace is not None and any(
        one in trace.tb_frame.f_code.co_filename.replace(os.sep, "/") for one in _CALLERS
    ):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
