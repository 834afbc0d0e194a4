"""Imports all files with mutants, which fills the table `MUTANTS`."""

from __future__ import annotations

import of_checkpoints
import of_common_mistakes
import of_endings
import of_loose
import of_models
import of_optimizers
import of_precisions
import of_ranks
import of_steps
from registry import MUTANTS

__all__ = [
    "MUTANTS",
    "of_checkpoints",
    "of_common_mistakes",
    "of_endings",
    "of_loose",
    "of_models",
    "of_optimizers",
    "of_precisions",
    "of_ranks",
    "of_steps",
]
