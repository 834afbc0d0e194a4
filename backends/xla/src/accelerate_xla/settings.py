"""Settings of the xla backend."""

from __future__ import annotations

from typing import Literal

from accelerate_core.plugin import KwargsHandler, option, settings


@settings(env_prefix="ACCELERATE_XLA_", section="xla_config", argument="xla_plugin")
class XLAPlugin(KwargsHandler):
    """How training runs on XLA.

    A `ParallelismConfig` turns on SPMD. The product of its sizes must be the number of devices.
    """

    spmd: bool = option(
        default=False,
        help="use all devices from one process, data parallel if no mesh is given",
        ask="Use all devices from one process (SPMD)?",
    )
    downcast_bf16: bool = option(
        default=False,
        help="with bf16, also keep parameters and buffers in bf16",
        env="ACCELERATE_DOWNCAST_BF16",
        ask="Keep parameters and buffers in bf16 too?",
        ask_if="mixed_precision=bf16",
    )
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] = option(
        default="FULL_STATE_DICT",
        help="write whole checkpoints, or one shard per device",
        ask="How should checkpoints be written?",
    )
    metrics: bool = option(
        default=False, help="show compilations, transfers and CPU fallbacks in explain()"
    )
