"""`ParallelismConfig`: the layout of the ranks on a device mesh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accelerate_core.config.schema import KwargsHandler, option, settings
from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@settings
class TorchTensorParallelPlugin(KwargsHandler):
    """Deprecated: use `ParallelismConfig(tp_size=...)`."""

    tp_size: int = option(default=1, help="ranks that compute one layer together", ge=1)
    torch_device_mesh: Any = option(default=None, help="ignored: the sizes define the mesh")


#: Combinations of dimensions that have a joint name.
JOINT: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp", "sp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
}


def _active(joint: str) -> Any:
    return property(lambda self: [name for name in JOINT[joint] if self.size(name) > 1])


def _enabled(name: str) -> Any:
    return property(lambda self: self.size(name) > 1)


def _size(what: str) -> Any:
    return option(default=1, help=what, ge=1)


@settings(
    env_prefix="PARALLELISM_CONFIG_",
    section="parallelism_config",
    argument="parallelism_config",
    yaml_prefix="parallelism_config_",
)
class ParallelismConfig(KwargsHandler):
    """The sizes of the dimensions of a device mesh. Their product is the number of processes.

    Ranks that differ only in `tp`, `cp` or `sp` get the same samples. Ranks that differ in
    `dp_replicate` or `dp_shard` get different ones. `cp` and `sp` can't be combined. `pp` is for pipeline
    parallelism. Each backend declares which dimensions it supports.

    Raises:
        ConfigurationError: both `cp_size` and `sp_size` are greater than 1.
    """

    dp_replicate_size: int | None = _size("ranks that hold copies of the same shards")
    dp_shard_size: int | None = _size("ranks over which parameters are sharded")
    tp_size: int | None = _size("ranks that compute one layer together (tensor parallel)")
    cp_size: int | None = _size("ranks that share a sequence by ring attention (context parallel)")
    cp_backend: Literal["torch"] | None = option(default=None, help="library of ring attention")
    sp_size: int | None = _size("ranks that share a sequence by exchanging heads (Ulysses)")
    sp_backend: str | None = option(
        default=None, help="library of Ulysses: torch, or the name of a backend"
    )
    # Their classes belong to the backends that use them.
    tp_handler: Any = option(default=None, help="options of tp")
    cp_handler: Any = option(default=None, help="options of cp")
    sp_handler: Any = option(default=None, help="options of sp")
    pp_size: int | None = _size("ranks that hold consecutive parts of the model (pipeline)")

    #: From outermost to innermost. Neighbours in the last dimension have consecutive ranks.
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")

    def __post_init__(self) -> None:
        for name in self.DIMENSIONS:
            if getattr(self, f"{name}_size") is None:
                setattr(self, f"{name}_size", 1)
        if self.cp_size != 1 and self.sp_size != 1:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split the sequence; "
                "set one of them to 1."
            )

    def size(self, dimension: str) -> int:
        """Return the size of a dimension by its name, such as `tp`."""
        return int(getattr(self, f"{dimension}_size"))

    @property
    def total_size(self) -> int:
        """The number of processes that the sizes need."""
        return math.prod(self.size(name) for name in self.DIMENSIONS)

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions with more than one rank, outermost first."""
        return [name for name in self.DIMENSIONS if self.size(name) > 1]

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, with different samples."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that get the same samples."""
        return self.total_size // self.data_parallel_size

    #: Dimensions whose ranks get different samples.
    dp_dim_names = _active("dp")
    #: Dimensions over which parameters are sharded.
    dp_shard_cp_dim_names = _active("dp_shard_cp")
    #: Dimensions over which a loss is averaged.
    dp_cp_dim_names = _active("dp_cp")

    #: Whether shards are replicated.
    dp_replicate_enabled = _enabled("dp_replicate")
    #: Whether parameters are sharded across ranks with different samples.
    dp_shard_enabled = _enabled("dp_shard")
    #: Whether layers are computed by several ranks.
    tp_enabled = _enabled("tp")
    #: Whether sequences are shared by ring attention.
    cp_enabled = _enabled("cp")
    #: Whether sequences are shared by exchanging heads.
    sp_enabled = _enabled("sp")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions whose ranks get the same samples."""
        return [name for name in self.active_mesh_dims if name not in self.dp_dim_names]

    def arithmetic(self) -> str:
        """Return the product of the sizes, written like `dp_shard 2 x tp 2 = 4`."""
        names = self.active_mesh_dims or ["dp_shard"]
        return f"{' x '.join(f'{n} {self.size(n)}' for n in names)} = {self.total_size}"

    def check(self, num_processes: int, origin: str = "") -> None:
        """Check that the sizes match the number of processes. 0 matches any sizes.

        Args:
            origin: the source of the sizes, for the error message.

        Raises:
            ConfigurationError: the product of the sizes is not the number of processes.
        """
        if num_processes in (0, self.total_size):
            return
        rest, remainder = divmod(num_processes, self.total_size // self.size("dp_shard"))
        way = (
            f" Set dp_shard_size={rest} to match."
            if not remainder
            else f" Start {self.total_size} processes, or change a size."
        )
        raise ConfigurationError(
            f"ParallelismConfig{f' (from {origin})' if origin else ''} needs {self.arithmetic()} "
            f"processes, but {num_processes} {'was' if num_processes == 1 else 'were'} started.{way}"
        )

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all processes, with `dp_shard` and all dimensions larger than 1.

        All ranks must call this, after the process group has started.

        Args:
            device_type: a torch device type, such as `cpu`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = [n for n in self.DIMENSIONS if self.size(n) > 1 or n == "dp_shard"]
        sizes = tuple(self.size(name) for name in names)
        return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))

    def flatten(self, mesh: DeviceMesh) -> dict[str, DeviceMesh]:
        """Return the flattened meshes of the joint dimensions `dp`, `dp_shard_cp` and `dp_cp`.

        All ranks must call this, once per mesh.
        """
        made = {}
        for name, dimensions in JOINT.items():
            names = tuple(one for one in dimensions if one in (mesh.mesh_dim_names or ()))
            part = mesh[names] if len(names) > 1 else mesh[names[0]]
            made[name] = part._flatten(name)
        return made

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index in every dimension."""
        found = {}
        for name in reversed(self.DIMENSIONS):
            rank, index = divmod(rank, self.size(name))
            found[name] = index
        return found

    def shard(self, rank: int, dimensions: tuple[str, ...]) -> tuple[int, int]:
        """Return a rank's index in some dimensions, flattened, and the product of their sizes."""
        at = self.coordinates(rank)
        index = 0
        count = 1
        for name in dimensions:
            index = index * self.size(name) + at[name]
            count *= self.size(name)
        return index, count

    def to_json(self) -> dict[str, Any]:
        """Return the sizes by name."""
        return {f"{name}_size": self.size(name) for name in self.DIMENSIONS}
