"""One of two ranks that load weights, which rank 0 reads."""

from __future__ import annotations

import sys

from test_big_model import load_from_rank_0

load_from_rank_0(*sys.argv[1:])
