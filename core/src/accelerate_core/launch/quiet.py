"""`launch --quiet`: torch's agent without its own traceback around a rank's failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from accelerate_core.launch.agent import run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `torch.distributed.run`; return the exit status of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        text = (
            message.get("extraInfo", {}).get("py_callstack", "")
            if isinstance(message, dict)
            else ""
        )
        sys.stderr.write(f"\nRank {rank} failed with exit status {failure.exitcode}.\n")
        sys.stderr.write(f"{str(text or message).rstrip()}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
