"""A setting that differs between ranks is an error, unless it is declared `per_rank`."""

from __future__ import annotations

import os
import re

from worker import PG_TIMEOUT, RANK, write_result

os.environ |= {"ROLES_RANK": str(RANK), "ROLES_SIZE": str(RANK + 1)}

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError

try:
    Accelerator(cpu=True, process_group_timeout=PG_TIMEOUT)
except ConfigurationError as error:
    write_result(re.findall(r"extension roles\.\w+", str(error)))
