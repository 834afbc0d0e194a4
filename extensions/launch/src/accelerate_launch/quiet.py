"""`launch --quiet`: torch's agent without its own traceback around a rank's failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from accelerate_launch.agent import run
from accelerate_launch.failures import describe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `torch.distributed.run`; return the exit status of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run(arguments)
    except ChildFailedError as error:
        text, status = describe(error, brief=True)
        sys.stderr.write(text)
        return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
