"""What the core leaves to other packages is named with its pip command where they are missing."""

from __future__ import annotations

import pool
import pytest
from support import clean_environment

#: No distribution has entry points: as in an environment with accelerate-core alone.
ALONE = """
import importlib.metadata
importlib.metadata.entry_points = lambda: importlib.metadata.EntryPoints()
"""


@pytest.mark.parametrize(
    ("code", "variables", "said"),
    [
        (
            "from accelerate_core import find_executable_batch_size",
            {},
            "find_executable_batch_size comes with a plugin that is not installed. "
            'Install it with: pip install "accelerate-core[drop-in]"',
        ),
        ("from accelerate_core.utils import release_memory", {}, '"accelerate-core[drop-in]"'),
        ("from accelerate_core import clear_device_cache", {}, '"accelerate-core[drop-in]"'),
        ("from accelerate_core import LocalSGD", {}, '"accelerate-core[ddp]"'),
        (
            "from accelerate_core import Accelerator; Accelerator(cpu=True)",
            {"ACCELERATE_CPU_AFFINITY": "true"},
            "Environment variable ACCELERATE_CPU_AFFINITY asks for a plugin that is not installed. "
            'Install it with: pip install "accelerate-core[launch]"',
        ),
    ],
)
def test_a_missing_package_is_named(code: str, variables: dict[str, str], said: str) -> None:
    done = pool.run(["-c", f"{ALONE}\n{code}"], clean_environment(**variables), 60)
    assert done.returncode == 1
    assert said in done.stderr.strip().splitlines()[-1]
