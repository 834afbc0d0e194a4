"""Settings of the torchft backends and their launcher."""

from __future__ import annotations

from typing import Literal

from accelerate_core.plugin import ConfigurationError, KwargsHandler, option, settings


@settings(env_prefix="ACCELERATE_TORCHFT_", section="torchft_config")
class TorchFTKwargs(KwargsHandler):
    """How many replicas train, how often they average, and how long they wait for each other.

    Raises:
        ConfigurationError: `sync_every` is set, but `mode` is `sync`.
    """

    replicas: int = option(
        default=2,
        help="number of replicas that this launch starts; the processes are divided among them",
        ge=1,
    )
    total_replicas: int | None = option(
        default=None,
        help="number of replicas in all launches together; default: those of this launch",
        ge=1,
    )
    first_replica: int = option(default=0, help="number of the first replica of this launch", ge=0)
    lighthouse: str | None = option(
        default=None,
        env=("ACCELERATE_TORCHFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"),
        help="address of a running lighthouse, http://HOST:PORT; default: the launch starts one",
    )
    min_replicas: int = option(default=1, help="a step needs at least this many replicas", ge=1)
    mode: Literal["sync", "local_sgd", "diloco"] = option(
        default="sync",
        help="sync averages gradients in each step; local_sgd averages parameters and diloco steps an "
        "outer optimizer, every sync_every steps",
    )
    sync_every: int = option(
        default=1, help="local steps between two averages, for local_sgd and diloco", ge=1
    )
    outer_lr: float = option(default=0.7, help="learning rate of diloco's outer optimizer", gt=0)
    outer_momentum: float = option(
        default=0.9, help="Nesterov momentum of diloco's outer optimizer", ge=0
    )
    timeout: float = option(
        default=60.0, help="seconds that a collective among replicas may take", gt=0
    )
    quorum_timeout: float = option(
        default=600.0, help="seconds that a replica waits for the others before a step", gt=0
    )
    join_timeout: float = option(
        default=60.0,
        help="seconds that the lighthouse waits for a replica that is alive but late",
        gt=0,
    )
    heartbeat_timeout: float = option(
        default=5.0,
        help="seconds without a sign of life after which the lighthouse counts a replica as dead",
        gt=0,
    )
    replica: int = option(default=0, help="number of this replica; the launcher sets it", ge=0)

    def __post_init__(self) -> None:
        if self.mode == "sync" and self.sync_every != 1:
            raise ConfigurationError(
                f"sync_every={self.sync_every} has no effect with mode='sync', which averages gradients "
                "in each step. Set mode to local_sgd or diloco, or leave sync_every out."
            )

    @property
    def expected(self) -> int:
        """The number of replicas in all launches together."""
        return self.total_replicas or self.first_replica + self.replicas
