"""The backend: one device per process, or one process over a mesh of all devices (SPMD)."""

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
    """Trains on XLA devices: one per process, or all of them from one process.

    What a script computes is collected, and run as one graph at each `sync`: when a batch is taken,
    after each backward, and after each step of an optimizer. So the graphs of a cycle of any length
    are the same few.
    """

    name = "xla"
    api_version = (1, 0)
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
        """Claim a run where torch_xla is installed and a device of it was named, or is a TPU."""
        if request.arguments.get("xla_plugin") is not None:
            return Claim(80, "xla_plugin was passed")
        if request.env_flag("ACCELERATE_XLA_SPMD"):
            return Claim(80, "ACCELERATE_XLA_SPMD is set")
        if request.cpu:
            return None
        # Above those who take a mesh: on these devices nobody else can.
        if kind := library.named_device(request.environ):
            return Claim(70, f"PJRT_DEVICE={kind}")
        return Claim(70, "a TPU is there") if library.has_tpu(request.environ) else None

    def core_defaults(self) -> Mapping[str, Any]:
        """Lay all devices out for data parallelism where SPMD is asked for without a mesh."""
        if not self.settings.spmd:
            return {}
        return {"parallelism_config": ParallelismConfig(dp_replicate_size=library.spmd_devices())}

    def check(self, setup: SetupView) -> None:
        """Refuse what XLA cannot do."""
        fitting = setup.mixed_precision in ("bf16", "downcast_bf16")
        if self.settings.downcast_bf16 and not fitting:
            raise ConfigurationError(
                f"downcast_bf16 is for mixed_precision='bf16', and it is {setup.mixed_precision!r} "
                f"({setup.provenance['mixed_precision'].origin})."
            )

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """`XLA`."""
        return "XLA"

    # --- start ------------------------------------------------------------------------------------

    def device(self, setup: SetupView, topology: Topology, cpu: bool) -> torch.device:
        """Take this process's device; under SPMD the one that stands for all."""
        guards.refuse_lonely_group()
        library.refuse_blind_processes(topology.num_processes)
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
        """Start a group in host memory; tensors of XLA never go over it."""
        if start.comm_backend not in (None, "gloo"):
            raise ConfigurationError(
                f"InitProcessGroupKwargs(backend={start.comm_backend!r}): under XLA tensors of devices go "
                "by torch_xla's own collectives, and the group in host memory is gloo's. Leave it out."
            )
        super().init_process_group(setup, replace(start, comm_backend="gloo"))

    def device_count(self, accelerator: AcceleratorView) -> int:
        """All devices of the mesh, or one per process."""
        # Without a mesh its sizes are all 1, however many processes there are.
        sizes = self._sizes(accelerator)
        return math.prod(sizes.values()) if sizes else int(accelerator.num_processes)

    def mesh(self, accelerator: AcceleratorView) -> Any | None:
        """Make the shardings of the mesh; torch has none of it."""
        sizes = self._sizes(accelerator)
        if not sizes:
            library.refuse_after_spmd()
        elif self._sharding is None:
            mesh = library.start_spmd(sizes)
            self._sharding = Sharding(mesh, sizes, accelerator.num_processes)
        if self._compilations is None:
            self._compilations = Compilations(accelerator.warn_once)
            library.register_compiler(accelerator.dynamo_plugin)
        return None

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Serve `xla_mesh`, and what Accelerate's scripts ask."""
        mesh = None if self._sharding is None else self._sharding.mesh
        return {"xla_mesh": mesh, "is_xla_gradients_synced": not self._apart(accelerator)}

    def new_group(
        self, accelerator: AcceleratorView, ranks: Sequence[int] | None, device_type: str | None
    ) -> Any | None:
        """Return a group in host memory, None for one of devices."""
        if accelerator.num_processes == 1 or device_type != "cpu":
            return None
        return host_group(ranks, accelerator.group_timeout)

    def data_shard(self, accelerator: AcceleratorView) -> tuple[int, int]:
        """Each process its own; under SPMD it deals them to its devices."""
        return accelerator.process_index, accelerator.num_processes

    loss_shard = data_shard

    def fixed_batch(self, accelerator: AcceleratorView) -> int | None:
        """As many as parts of a batch; short ones are filled, for another shape is another graph."""
        parts = 1 if self._sharding is None else self._sharding.data_parallel
        return max(parts // accelerator.num_processes, 1)

    # --- prepare ----------------------------------------------------------------------------------

    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Cast the model if asked, and place its parameters on the mesh."""
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
        """Move batches one ahead, from this thread; run what is pending when one is taken."""
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
        """Run backward, and all that is pending, so that each micro-batch is the same graph."""
        super().backward(accelerator, loss, kwargs)
        self._reduced.clear()
        if accelerator.gradient_accumulation_steps > 1:
            # A gradient that was never changed in place cannot give its memory back, which is another
            # graph: that of the step in a cycle of one. XLA leaves out what this computes.
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
        """Clip gradients that all ranks have alike."""
        self._reduce(accelerator, parameters)
        return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Reduce gradients that were not yet, step, and run it."""
        groups = optimizer.param_groups
        self._reduce(accelerator, [one for group in groups for one in group["params"]])
        taken = super().optimizer_step(accelerator, optimizer, closure)
        imported().sync()
        return taken

    def _apart(self, accelerator: AcceleratorView) -> bool:
        return self._sharding is None and bool(accelerator.num_processes > 1)

    def _reduce(self, accelerator: AcceleratorView, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients over the processes, once after each backward; SPMD has done it."""
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
        """Return the whole state in host memory; what is tied stays tied."""
        from accelerate_xla import checkpoint  # a mesh for another backend asks this one, too

        with library.synced():
            return checkpoint.on_host(accelerator.unwrap_model(model).state_dict(keep_vars=True))

    def load_model_state(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load it, and place it as before."""
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
        """Load it, and place it as the parameters are."""
        super().load_optimizer_state(accelerator, optimizer, state)
        if self._sharding is not None:
            self._sharding.place_state(optimizer)
        imported().sync()

    consolidate = model_state

    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the seed that XLA draws from next."""
        return {"xla": imported("core.xla_model").get_rng_state()}

    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Set it."""
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
    ) -> Callable[[], None] | None:
        """Write shards, where these were asked for."""
        if not self.owns:
            return super().save_state(accelerator, directory, options, later)
        from accelerate_xla import checkpoint

        with library.synced():
            return checkpoint.save(accelerator, directory, later)

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read shards of any mesh."""
        if self.owns:
            from accelerate_xla import checkpoint

            optimizers, strict = options.get("load_optimizer", True), options.get("strict", True)
            checkpoint.load(accelerator, directory, optimizers=optimizers, strict=strict)

    # --- what is told -----------------------------------------------------------------------------

    def explain(self, accelerator: AcceleratorView) -> str:
        """Tell the devices, where parameters lie, and, if asked, what was compiled."""
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
