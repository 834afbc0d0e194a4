"""Seed all random number generators of the process."""

from __future__ import annotations

import importlib.util
import random

import torch

from accelerate_core.distributed.process import current_runtime, current_user


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy (if installed), and torch on the CPU and all accelerators.

    Args:
        seed: the seed.
        device_specific: add the rank to the seed, so that each process draws different numbers.
        deterministic: also restrict torch to algorithms with bitwise reproducible results.

    Example:
        set_seed(42)
        model = nn.Linear(8, 2)  # has the same weights in every run
    """
    if device_specific:
        # Only this needs a rank. Seeding without it must not start a process group.
        seed += current_runtime().process_index
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    user = current_user()
    if user is not None:  # seed the generators of its backend
        user.hooks.on_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
