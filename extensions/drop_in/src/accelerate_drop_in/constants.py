"""Accelerate's constants: file names, option names, and an enumeration of small dtypes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

#: Names of files in a checkpoint, or their prefixes.
MODEL_NAME: Final = "pytorch_model"
SAFE_MODEL_NAME: Final = "model"
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
RNG_STATE_NAME: Final = "random_states"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

#: Names of weight files and their indices. `SAFE` names are for safetensors.
WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"

FSDP_MODEL_NAME: Final = "pytorch_model_fsdp"

#: The versions that Accelerate requires for certain features.
BETA_CP_AVAILABLE_PYTORCH_VERSION: Final = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: Final = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION: Final = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: Final = "4.52.0"
DTENSOR_PYTORCH_VERSION: Final = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION: Final = "2.2.0"
FSDP2_PYTORCH_VERSION: Final = "2.6.0"
FSDP_PYTORCH_VERSION: Final = "2.1.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"

SAGEMAKER_PYTORCH_VERSION: Final = "1.10.2"
SAGEMAKER_PYTHON_VERSION: Final = "py38"
SAGEMAKER_TRANSFORMERS_VERSION: Final = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES: Final = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]

# Values in Accelerate's config files and command line.
DEEPSPEED_MULTINODE_LAUNCHERS: Final = [
    "pdsh",
    "standard",
    "openmpi",
    "mvapich",
    "mpich",
    "nossh",
    "slurm",
]
FSDP_AUTO_WRAP_POLICY: Final = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH: Final = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_SHARDING_STRATEGY: Final = [
    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    *("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
]
FSDP_STATE_DICT_TYPE: Final = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE: Final = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
TORCH_DYNAMO_MODES: Final = ["default", "reduce-overhead", "max-autotune"]
CUDA_DISTRIBUTED_TYPES: Final = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES: Final = [
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{kind}" for kind in ["NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON"]),
]

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
    """Number formats that torch has no dtype for, for planning memory only."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


#: Methods that Accelerate replaces on modules whose device map forbids moving them.
ADDED_ATTRIBUTES = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]
