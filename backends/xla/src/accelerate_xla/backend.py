"""The xla backend: one device per process, or one process for a mesh of all devices (SPMD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from accelerate_core.plugin import (
    GENERATORS,
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    ParallelismConfig,
    Process,
    Request,
    RuntimeView,
    SetupView,
    Topology,
    host_group,
    look_ahead,
    map_tensors,
    send_to_device,
)
from accelerate_xla import guards, library
from accelerate_xla.collectives import XLACollectives
from accelerate_xla.library import imported
from accelerate_xla.metrics import Compilations, report
from accelerate_xla.settings import XLAPlugin
from accelerate_xla.spmd import Sharding

_MESH = ("dp_replicate", "dp_shard", "tp")


class XLABackend(XLACollectives, Backend):
    """Train on XLA devices, with one device per process or all devices in one process.

    XLA records operations and runs them as one graph at each `sync`. The backend calls `sync` when
    the script takes a batch, after each backward, and after each optimizer step. The graphs are
    therefore the same for accumulation cycles of any length.
    """

    name = "xla"
    api_version = (1, 0)
    #: From an object store, each machine only fetches the shards of its own ranks.
    shards_on_demand = True
    reduces_gradients = "step"
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "": (),
        "spmd": ("weights", "gradients", "optimizer"),
    }
    supports: ClassVar[Mapping[str, Any]] = {
        "accepts": ("autocast", "parameters"),
        "mesh": _MESH,
        "own_mesh": True,
        "devices": ("xla",),
        "no_sync": True,
        "compile": True,
        "several_models": True,
    }
    Settings = XLAPlugin

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or XLAPlugin(), handlers)
        GENERATORS["xla"] = library.Generator()
        if self.settings.state_dict_type == "SHARDED_STATE_DICT":
            self.owns = frozenset({"checkpoint"})  # type: ignore[misc]
        self._sharding: Sharding | None = None
        self._compilations: Compilations | None = None
        self._reduced: set[int] = set()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if XLA was requested, or if torch_xla is installed and there is a TPU."""
        if request.arguments.get("xla_plugin") is not None:
            return Claim(80, "xla_plugin was passed")
        if request.env_flag("ACCELERATE_XLA_SPMD"):
            return Claim(80, "ACCELERATE_XLA_SPMD is set")
        if request.cpu:
            return None
        # Higher than backends for a mesh, because no other backend supports these devices.
        if kind := library.named_device(request.environ):
            return Claim(70, f"PJRT_DEVICE={kind}")
        return Claim(70, "a TPU was found") if library.has_tpu(request.environ) else None

    def core_defaults(self) -> Mapping[str, Any]:
        """Use all devices for data parallelism if SPMD is on without a mesh."""
        if not self.settings.spmd:
            return {}
        return {"parallelism_config": ParallelismConfig(dp_replicate_size=library.spmd_devices())}

    def check(self, setup: SetupView) -> None:
        """Reject `downcast_bf16` without bf16.

        Raises:
            ConfigurationError: `mixed_precision` is not bf16.
        """
        fitting = setup.mixed_precision in ("bf16", "downcast_bf16")
        if self.settings.downcast_bf16 and not fitting:
            raise ConfigurationError(
                "downcast_bf16 needs mixed_precision='bf16', but mixed_precision is "
                f"{setup.mixed_precision!r} (from {setup.provenance['mixed_precision'].origin})."
            )

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `XLA`."""
        return "XLA"

    # --- start ------------------------------------------------------------------------------------

    def device(self, setup: SetupView, topology: Topology, cpu: bool) -> torch.device:
        """Return this process's device. With SPMD, it represents all devices."""
        guards.refuse_unconnected_group()
        library.refuse_unconnected_processes(topology.num_processes)
        guards.refuse_device_tensors()
        sizes = self._sizes(setup)
        if sizes:
            library.start_spmd(sizes)
        device: torch.device = imported().device()
        return device

    def _sizes(self, setup: SetupView) -> dict[str, int]:
        config = setup.parallelism_config
        every = {} if config is None else {name: config.size(name) for name in _MESH}
        return {name: size for name, size in every.items() if size > 1}

    def init_process_group(self, setup: SetupView, start: Process) -> None:
        """Create a group in host memory, which is never used for XLA tensors."""
        if start.comm_backend not in (None, "gloo"):
            raise ConfigurationError(
                f"InitProcessGroupKwargs(backend={start.comm_backend!r}) is not supported with XLA. "
                "Device tensors use torch_xla's own collectives, and the process group in host "
                "memory uses gloo. Leave it out."
            )
        super().init_process_group(setup, replace(start, comm_backend="gloo"))

    def device_count(self, accelerator: AcceleratorView) -> int:
        """Return the number of devices in the mesh, or of processes if there is no mesh."""
        # Without a mesh, all sizes are 1, even with several processes.
        sizes = self._sizes(accelerator)
        return math.prod(sizes.values()) if sizes else int(accelerator.num_processes)

    def mesh(self, runtime: RuntimeView) -> Any | None:
        """Create the shardings of the mesh. Returns None, because torch has no mesh here."""
        sizes = self._sizes(runtime)
        if not sizes:
            library.refuse_after_spmd()
        elif self._sharding is None:
            mesh = library.start_spmd(sizes)
            self._sharding = Sharding(mesh, sizes, runtime.num_processes)
        if self._compilations is None:
            self._compilations = Compilations(runtime.warn_once)
            library.register_compiler(runtime.dynamo_plugin)
        return None

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `xla_mesh`, and `is_xla_gradients_synced` as Accelerate does."""
        mesh = None if self._sharding is None else self._sharding.mesh
        return {"xla_mesh": mesh, "is_xla_gradients_synced": not self._apart(accelerator)}

    def new_group(
        self, accelerator: AcceleratorView, ranks: Sequence[int] | None, device_type: str | None
    ) -> Any | None:
        """Return a group in host memory, or None for a group of devices."""
        if accelerator.num_processes == 1 or device_type != "cpu":
            return None
        return host_group(ranks, accelerator.group_timeout)

    def data_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        """Return this process and the number of processes. SPMD splits the data further."""
        return runtime.process_index, runtime.num_processes

    loss_shard = data_shard

    def fixed_batch(self, accelerator: AcceleratorView) -> int | None:
        """Return the number of parts of a batch.

        Short batches are padded, because a batch with another shape would need another graph.
        """
        parts = 1 if self._sharding is None else self._sharding.data_parallel
        return max(parts // accelerator.num_processes, 1)

    # --- prepare ----------------------------------------------------------------------------------

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Convert the model to bf16 if requested, and shard its parameters over the mesh."""
        if self.settings.downcast_bf16:
            model = model.to(torch.bfloat16)
        if self._sharding is not None:
            handler = getattr(accelerator.parallelism_config, "tp_handler", None)
            plan = handler if isinstance(handler, Mapping) else getattr(handler, "plan", None)
            self._sharding.place(model, plan)
        elif self._apart(accelerator):
            imported("core.xla_model").broadcast_master_param(model)
        imported().sync()
        if self._compilations is not None:
            self._compilations.begin(accelerator.gradient_accumulation_steps)
        return model

    def feed_device(
        self, accelerator: AcceleratorView, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Move batches to the device one ahead, and sync each time a batch is taken."""
        sync = imported().sync
        device = accelerator.device
        sharding = self._sharding
        compilations = self._compilations
        assert compilations is not None
        if sharding is None:
            moved = (send_to_device(batch, device) for batch in batches)
        else:
            moved = (sharding.put(batch, device) for batch in batches)
        for batch, _, _ in look_ahead(moved):
            sync()
            before = compilations.total
            yield batch
            compilations.watch(batch, before)
        sync()

    # --- the step ---------------------------------------------------------------------------------

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run backward and sync, so that each micro-batch is the same graph."""
        super().backward(accelerator, loss, kwargs)
        self._reduced.clear()
        if accelerator.gradient_accumulation_steps > 1:
            # Change each gradient in place. Otherwise its memory cannot be donated in a cycle of one
            # batch, which would make another graph. XLA removes the multiplication.
            models = [list(model.parameters()) for model in accelerator.models]
            gradients = [p.grad for every in models for p in every if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, 1.0)
        imported().sync()

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Reduce the gradients over ranks, then clip them."""
        self._reduce(accelerator, parameters)
        return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Reduce gradients that were not reduced yet, step, and sync."""
        groups = optimizer.param_groups
        self._reduce(accelerator, [one for group in groups for one in group["params"]])
        taken = super().optimizer_step(accelerator, optimizer, closure)
        imported().sync()
        return taken

    def _apart(self, accelerator: AcceleratorView) -> bool:
        return self._sharding is None and bool(accelerator.num_processes > 1)

    def _reduce(self, accelerator: AcceleratorView, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients over processes, once after each backward. SPMD doesn't need this."""
        if not self._apart(accelerator):
            return
        new = [p for p in parameters if p.grad is not None and id(p) not in self._reduced]
        if new:
            gradients = [parameter.grad for parameter in new]
            scale = 1.0 / accelerator.num_processes
            imported("core.xla_model").all_reduce("sum", gradients, scale=scale)
            self._reduced.update(id(parameter) for parameter in new)

    # --- state ------------------------------------------------------------------------------------

    def model_state(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state in host memory. Tied tensors stay tied."""
        # Imported here because this module is also imported for runs with another backend.
        from accelerate_xla import checkpoint

        with library.synced():
            return checkpoint.on_host(accelerator.unwrap_model(model).state_dict(keep_vars=True))

    def load_model_state(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load the state, and shard it as before."""
        super().load_model_state(accelerator, model, state, strict)
        if self._sharding is not None:
            self._sharding.again(accelerator.unwrap_model(model))
        imported().sync()

    def optimizer_state(self, accelerator: AcceleratorView, optimizer: Any) -> dict[str, Any]:
        """Return the whole state in host memory."""
        with library.synced():
            state: dict[str, Any] = map_tensors(lambda one: one.cpu(), optimizer.state_dict())
        return state

    def load_optimizer_state(
        self, accelerator: AcceleratorView, optimizer: Any, state: Mapping[str, Any]
    ) -> None:
        """Load the state, and shard it like the parameters."""
        super().load_optimizer_state(accelerator, optimizer, state)
        if self._sharding is not None:
            self._sharding.place_state(optimizer)
        imported().sync()

    consolidate = model_state

    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the next seed of XLA's generator."""
        return {"xla": imported("core.xla_model").get_rng_state()}

    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Restore the seed of XLA's generator."""
        if "xla" in state:
            imported("core.xla_model").set_rng_state(int(state["xla"]))

    def on_seed(self, accelerator: AcceleratorView, seed: int) -> None:
        """Seed XLA's generator."""
        imported("core.xla_model").set_rng_state(seed)

    def save_state(
        self,
        accelerator: AcceleratorView,
        directory: Path,
        options: Mapping[str, Any],
        later: bool,
    ) -> Callable[[], Mapping[str, Any] | None] | None:
        """Write shards if the settings ask for them, else a whole checkpoint."""
        if not self.owns:
            return super().save_state(accelerator, directory, options, later)
        from accelerate_xla import checkpoint

        with library.synced():
            return checkpoint.save(accelerator, directory, later)

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read shards. They may have been written with a different mesh."""
        if self.owns:
            from accelerate_xla import checkpoint

            optimizers, strict = options.get("load_optimizer", True), options.get("strict", True)
            checkpoint.load(accelerator, directory, optimizers=optimizers, strict=strict)

    # --- reports ----------------------------------------------------------------------------------

    def explain(self, accelerator: AcceleratorView) -> str:
        """Return the devices, the shardings and, with `metrics`, torch_xla's counters."""
        kind = library.device_kind()
        lines = [f"XLA on {kind}: {self.device_count(accelerator)} device(s)"]
        if self._sharding is not None:
            lines += self._sharding.table()
        if self.settings.metrics:
            lines += report()
        return "\n".join(lines)

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Forget the models."""
        if self._sharding is not None:
            self._sharding.forget()
