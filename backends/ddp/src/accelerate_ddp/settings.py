"""Settings of the ddp backend."""

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

    `comm_wrapper` compresses the gradients that `comm_hook` sends to fp16 or bf16.
    `comm_state_option` holds the arguments of `PowerSGDState`.

    Raises:
        ConfigurationError: `comm_wrapper` is not `no`, `fp16` or `bf16`.
    """

    dim: int = option(default=0, help="dimension along which inputs are scattered")
    broadcast_buffers: bool = option(
        default=True, help="broadcast rank 0's buffers before each forward"
    )
    bucket_cap_mb: int = option(default=25, help="size of a gradient bucket in MiB", ge=1)
    find_unused_parameters: bool = option(
        default=False, help="find parameters that the forward did not use"
    )
    check_reduction: bool = option(default=False, help="deprecated; torch ignores it")
    gradient_as_bucket_view: bool = option(default=False, help="store gradients in the buckets")
    static_graph: bool = option(default=False, help="the autograd graph is the same in every step")
    comm_hook: DDPCommunicationHookType = option(
        default=DDPCommunicationHookType.NO, help="no, fp16, bf16, power_sgd or batched_power_sgd"
    )
    comm_wrapper: DDPCommunicationHookType = option(
        default=DDPCommunicationHookType.NO, help="compression around comm_hook: no, fp16 or bf16"
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
                f"comm_wrapper={self.comm_wrapper} is not a compression. Allowed values are "
                f"{listing(wrappers)}."
            )

    def constructor_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that differ from torch's defaults."""
        ours = ("check_reduction", "comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in self.to_kwargs().items() if name not in ours}

    @property
    def has_comm_hook(self) -> bool:
        """Whether a communication hook written in Python is used."""
        return {self.comm_hook, self.comm_wrapper} != {DDPCommunicationHookType.NO}

    def register_comm_hook(self, model: Any) -> None:
        """Register the selected hook, if any, with a `DistributedDataParallel` model."""
        if self.has_comm_hook:
            register(model, self.comm_hook, self.comm_wrapper, self.comm_state_option)
