"""What users may say about `DistributedDataParallel`."""

from __future__ import annotations

from typing import Any

from accelerate_core.plugin import (
    ConfigurationError,
    KwargsHandler,
    listing,
    option,
    settings,
    warn,
)
from accelerate_ddp.hooks import DDPCommunicationHookType as DDPCommunicationHookType
from accelerate_ddp.hooks import register


@settings(env_prefix="ACCELERATE_DDP_", section="ddp_config")
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    `comm_wrapper` compresses what `comm_hook` sends, to fp16 or bf16;
    `comm_state_option` are the arguments of PowerSGD's state.

    Raises:
        ConfigurationError: `comm_wrapper` is no compression.
    """

    dim: int = option(default=0, help="dimension along which inputs are scattered")
    broadcast_buffers: bool = option(default=True, help="send rank 0's buffers before each forward")
    bucket_cap_mb: int = option(default=25, help="size of a gradient bucket in MiB", ge=1)
    find_unused_parameters: bool = option(
        default=False, help="look for parameters that a forward did not use"
    )
    check_reduction: bool = option(default=False, help="older: torch ignores it")
    gradient_as_bucket_view: bool = option(default=False, help="store gradients in the buckets")
    static_graph: bool = option(default=False, help="the graph is the same in every step")
    comm_hook: DDPCommunicationHookType = option(
        default=DDPCommunicationHookType.NO, help="no, fp16, bf16, power_sgd or batched_power_sgd"
    )
    comm_wrapper: DDPCommunicationHookType = option(
        default=DDPCommunicationHookType.NO, help="no, fp16 or bf16, around comm_hook"
    )
    comm_state_option: dict[str, Any] = option(
        default_factory=dict, help="arguments of the hook's state"
    )

    def __post_init__(self) -> None:
        if self.check_reduction:
            warn("check_reduction=True has no effect: torch ignores it.")
        kinds = DDPCommunicationHookType
        wrappers = (kinds.NO, kinds.FP16, kinds.BF16)
        if self.comm_wrapper not in wrappers:
            raise ConfigurationError(
                f"comm_wrapper={self.comm_wrapper} wraps nothing; allowed are {listing(wrappers)}."
            )

    def constructor_arguments(self) -> dict[str, Any]:
        """Return what differs from torch's own defaults, for its constructor."""
        ours = ("check_reduction", "comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in self.to_kwargs().items() if name not in ours}

    @property
    def has_comm_hook(self) -> bool:
        """Whether gradients go through a hook written in Python."""
        return {self.comm_hook, self.comm_wrapper} != {DDPCommunicationHookType.NO}

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook these settings name with a `DistributedDataParallel` model, if any."""
        if self.has_comm_hook:
            register(model, self.comm_hook, self.comm_wrapper, self.comm_state_option)
