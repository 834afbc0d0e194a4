"""What users may say about XLA."""

from __future__ import annotations

from accelerate_core import KwargsHandler, option, settings


@settings(env_prefix="ACCELERATE_XLA_", section="xla_config", argument="xla_plugin")
class XLAPlugin(KwargsHandler):
    """How training runs on XLA.

    A `ParallelismConfig` turns SPMD on by itself: its product is the number of devices then.
    """

    spmd: bool | None = option(
        default=None, help="one process computes on all devices (default: where a mesh is asked for)"
    )
    metrics: bool = option(
        default=False, help="show compilations, transfers and CPU fallbacks in explain()"
    )
