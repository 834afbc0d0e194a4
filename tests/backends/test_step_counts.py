"""A step costs as much as in a loop written with the library alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_counts import check_counts

pytestmark = pytest.mark.dist


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed"])
def test_step_is_as_cheap_as_the_raw_loop(tmp_path: Path, backend: str) -> None:
    check_counts(tmp_path, backend)
