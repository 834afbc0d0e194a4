"""`notebook_launcher` starts processes, and stops all of them when one fails."""

import os
import time

from accelerate import PartialState, notebook_launcher

NUM_PROCESSES = int(os.environ.get("ACCELERATE_NUM_PROCESSES", 1))


def say():
    print(f"PartialState:\n{PartialState()}")


def fail_or_wait(seconds):
    if PartialState().process_index == 0:
        raise RuntimeError("the first one fails")
    time.sleep(seconds)


def main():
    notebook_launcher(say, (), num_processes=NUM_PROCESSES)
    if NUM_PROCESSES < 2:
        return
    start = time.monotonic()
    try:
        notebook_launcher(fail_or_wait, (100,), num_processes=NUM_PROCESSES)
    except Exception as error:
        said = str(error)
    else:
        raise AssertionError("A failure in a process was not reported.")
    assert "the first one fails" in said, said
    assert time.monotonic() - start < 100


if __name__ == "__main__":
    main()
