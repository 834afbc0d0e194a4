"""A rank configured by its own variables. Reports the error and how long it took."""

from __future__ import annotations

import os
import time

from worker import RANK, write_result

from accelerate_core import Accelerator

for name, value in (part.split("=") for part in os.environ[f"ONLY_{RANK}"].split(",") if part):
    os.environ[name] = value
start = time.monotonic()
try:
    Accelerator(cpu=True, process_group_timeout=30)
except Exception as error:
    write_result([type(error).__name__, str(error), time.monotonic() - start])
else:
    write_result(["fine", "", time.monotonic() - start])
