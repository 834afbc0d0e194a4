"""Makes DeepSpeed believe that this CPU supports fp16. torch does, slowly, on every CPU.

Import it before DeepSpeed is used. For tests only.
"""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

CPU_Accelerator.is_fp16_supported = lambda self: True
