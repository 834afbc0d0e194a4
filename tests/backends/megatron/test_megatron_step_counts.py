"""A step costs as much as one of the library's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_counts import check_counts

pytestmark = pytest.mark.dist


@pytest.mark.timeout(240)
def test_step_is_as_cheap_as_the_raw_loop(tmp_path: Path) -> None:
    check_counts(tmp_path, "megatron")
