"""File names, parameter names and the few enumerations that need no torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
RNG_STATE_NAME: Final = "random_states"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"

MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"

#: The options of `python -m torch.distributed.run` that a launcher may pass on.
TORCH_LAUNCH_PARAMS: Final = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("standalone", "max_restarts", "monitor_interval", "start_method", "role", "module", "m"),
    *("no_python", "run_path", "log_dir", "r", "redirects", "t", "tee"),
    *("node_rank", "master_addr", "master_port"),
]

STR_OPERATION_TO_FUNC: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


class CustomDtype(Enum):
    """Number formats of less than torch's smallest, for planning memory only."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
