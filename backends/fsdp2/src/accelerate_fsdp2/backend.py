"""The fsdp2 backend, which shards parameters, gradients and optimizer state with `fully_shard`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_checkpoint import scale_names
from accelerate_core.plugin import (
    NEEDS,
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    GradientReducer,
    PrepareError,
    Request,
    RuntimeView,
    SetupView,
    TrainableChange,
    listing,
    plain_keys,
    shorten,
    uncompiled,
)
from accelerate_fsdp2 import (
    accumulated,
    adopted,
    quantized,
    random_states,
    sequence,
    states,
    tensor_parallel,
    testing,
    units,
    weights,
)
from accelerate_fsdp2.gradients import (
    Layouts,
    average,
    clip_norm,
    local,
    scale,
    unscale,
)
from accelerate_fsdp2.mesh import mesh_of, sizes_of
from accelerate_fsdp2.muon import whole_matrices
from accelerate_fsdp2.reducer import use_reducer
from accelerate_fsdp2.settings import (
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    check_handlers,
)
from accelerate_fsdp2.sharded_model import ShardedModel, Synced, add_up
from accelerate_fsdp2.starting_weights import StartingWeights

#: Optimizers that need whole parameters. With shards, they would be wrong or fail inside torch.
_WHOLE_ONLY = ("LBFGS", "Adafactor")

_T = TypeVar("_T")
_OfModels = weakref.WeakKeyDictionary[nn.Module, _T]


class _Owns:
    """`Backend.owns` as a property, because a script can change `state_dict_type` later.

    On the class, it returns what every instance owns.
    """

    def __get__(self, backend: FSDP2Backend | None, cls: type) -> frozenset[str]:
        own = frozenset({"device_placement"})
        if backend is not None and backend.options.state_dict_type == "SHARDED_STATE_DICT":
            own |= {"checkpoint"}
        return own


class FSDP2Backend(Backend):
    """Shard models over a device mesh, together with tensor, context and sequence parallelism."""

    name = "fsdp2"
    api_version = (1, 0)
    #: From an object store, each machine only fetches the shards of its own ranks.
    shards_on_demand = True
    reduces_gradients = "backward"
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {"": ("weights", "gradients", "optimizer")}
    supports: ClassVar[Mapping[str, Any]] = {
        "accepts": tuple(word for word in NEEDS if word != "optimizer"),
        "mesh": ("dp_replicate", "dp_shard", "cp", "sp", "tp"),
        "devices": None,
        "no_sync": True,
        "join": False,
        "compile": True,
        "several_models": True,
    }
    needs_group = True
    owns: ClassVar[Any] = _Owns()
    Settings = FullyShardedDataParallelPlugin
    more_settings = (TorchContextParallelConfig,)
    handlers = (FullyShardedDataParallelPlugin,)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        if torch.__version__ < "2.11":
            raise ConfigurationError(
                f"The backend 'fsdp2' needs torch 2.11 or newer, but torch {torch.__version__} is "
                "installed. With that version, training would silently end with different weights. "
                "Run: pip install 'torch>=2.11'"
            )
        super().__init__(settings or FullyShardedDataParallelPlugin(), handlers)
        self.options: FullyShardedDataParallelPlugin = self.settings
        self._starting = StartingWeights(self.options)
        #: The sharded models in the order of `prepare`. A list, because weak containers cost calls
        #: in each step. Weak references, because torch's groups in each entry refer to the model.
        self._references: list[weakref.ref[ShardedModel]] = []
        #: Names of parameters whose gradients are partial sums on each rank of `tp`.
        self._added_names: _OfModels[list[str]] = weakref.WeakKeyDictionary()
        #: How each model was spread over ranks before `prepare`, if it was.
        self._adopted: _OfModels[adopted.Layout] = weakref.WeakKeyDictionary()
        #: The records of models without `fully_shard`, which have no state to attach them to.
        self._kept: _OfModels[ShardedModel] = weakref.WeakKeyDictionary()
        self._layouts = Layouts()
        #: Whether there are several copies of each shard (HSDP).
        self._replicates = False
        self._sharded = states.Sharded()
        self._loss_parallel: Any = None
        self._shards: Any = None
        self._aligned = False
        self._owners: Any = WeakIdKeyDictionary()

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if FSDP or a mesh was requested."""
        for name, priority in (("fsdp_plugin", 50), ("parallelism_config", 40)):
            if request.arguments.get(name) is not None:
                return Claim(priority, f"{name} was passed")
        for name, priority in (("FSDP", 50), ("PARALLELISM_CONFIG", 40)):
            if request.env_flag(f"ACCELERATE_USE_{name}"):
                return Claim(priority, f"ACCELERATE_USE_{name} is set")
        for section, priority in (("fsdp_config", 30), ("parallelism_config", 20)):
            if request.config is not None and section in request.config:
                return Claim(priority, request.config.where(section))
        return None

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `FSDP`."""
        return "FSDP"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `accelerator.fsdp_plugin`, `is_fsdp2` and `is_composable_parallelism_enabled`."""
        return {
            "fsdp_plugin": self.options,
            "is_fsdp2": True,
            "is_composable_parallelism_enabled": True,
        }

    # --- start --------------------------------------------------------------------------------

    def mesh(self, runtime: RuntimeView) -> DeviceMesh | None:
        """Create the mesh.

        Raises:
            ConfigurationError: ring attention on the CPU, for which torch has no kernel.
        """
        config = sizes_of(runtime)
        if config.cp_enabled and runtime.device.type == "cpu" and not testing.ring_runs_on_cpu():
            raise ConfigurationError(
                f"cp_size={config.cp_size} uses ring attention, which torch only supports on "
                "accelerators. On the CPU, use sp_size (Ulysses) instead. Tests can call "
                "accelerate_fsdp2.testing.enable_cpu_ring_attention()."
            )
        return super().mesh(runtime)

    def check(self, setup: SetupView) -> None:
        """Fill in the handlers of the mesh, and check them.

        Raises:
            ConfigurationError: a handler or option is for another backend, or is not supported.
        """
        config = sizes_of(setup)
        if config.sp_backend not in (None, "torch"):
            raise ConfigurationError(
                f"sp_backend={config.sp_backend!r} is for another backend. fsdp2 has its own "
                "implementation of Ulysses, so leave sp_backend out."
            )
        check_handlers(config)

    def _shard_mesh(self, accelerator: AcceleratorView) -> Any:
        """Return the mesh over which gradients are reduced, with the dimension of shards last."""
        if self._shards is None:
            config = sizes_of(accelerator)
            shards = "dp_shard_cp" if config.cp_enabled or config.sp_enabled else "dp_shard"
            if config.dp_replicate_enabled:
                with warnings.catch_warnings():
                    # Slicing is the only way to combine a flattened dimension with another one.
                    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
                    self._shards = mesh_of(accelerator)["dp_replicate", shards]
            else:
                self._shards = self.sub_mesh(shards)
        return self._shards

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Free the memory in which background saves copy the state."""
        self._sharded.release()

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Exit the context of loss_parallel, and free the memory of background saves."""
        self._sharded.release()
        if self._loss_parallel is not None:
            self._loss_parallel.__exit__(None, None, None)
            self._loss_parallel = None

    def init_model_context(self, accelerator: AcceleratorView) -> AbstractContextManager[Any]:
        """With `cpu_ram_efficient_loading`, create models on meta on all ranks but rank 0."""
        if self.options.cpu_ram_efficient_loading and not accelerator.is_main_process:
            return torch.device("meta")
        return nullcontext()

    # --- prepare ------------------------------------------------------------------------------

    def tensor_parallel(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Give all ranks the same weights, then split layers over `tp`.

        A model that is already sharded is only checked.

        Raises:
            PrepareError: the model is already a DistributedDataParallel, or sharded in another way
                than `parallelism_config` says.
        """
        if isinstance(model, DistributedDataParallel):
            raise PrepareError(
                "The model is already a DistributedDataParallel. Pass its .module instead."
            )
        config = sizes_of(accelerator)
        layout = adopted.layout_of(model)
        if layout is not None:
            adopted.check_layout(model, layout, config)
            adopted.correct_sizes(model)
            self._adopted[model] = layout
        quantized.check(model)
        weights.refuse_shared(model, self._owners)
        if not self._aligned:
            self._aligned = True
            random_states.align(accelerator)
        self._starting.make_equal(accelerator, model, self.scope_group("world"), self._adopted)
        if config.tp_enabled and layout is None:
            handler = config.tp_handler
            self._added_names[model] = tensor_parallel.parallelise(
                model, mesh_of(accelerator)["tp"], handler.plan
            )
            if handler.loss_parallel and self._loss_parallel is None:
                from torch.distributed.tensor.parallel import loss_parallel

                self._loss_parallel = loss_parallel()
                self._loss_parallel.__enter__()
        return model

    def activation_checkpointing(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Recompute the activations of each unit in backward, if requested."""
        if not self.options.activation_checkpointing or isinstance(model, FSDPModule):
            return model
        from torch.distributed._composable import checkpoint

        recompute = accelerator.precision.recompute(accelerator)
        for group in units.find_units(model, self.options) or [[model]]:
            for module in group:
                if self.options.activation_checkpointing_offload:
                    units.offload_saved(module, accelerator.device)
                if recompute is None:
                    checkpoint(module)
                else:
                    module.forward = partial(recompute, module.forward)
        return model

    def prepare_model(
        self, accelerator: AcceleratorView, model: nn.Module, evaluation_mode: bool
    ) -> nn.Module:
        """Shard the units and then the model, and fill the shards of a model that was on meta."""
        sizes = sizes_of(accelerator)
        if sizes.cp_enabled or sizes.sp_enabled:
            sequence.refuse_recurrent(model)
        layout = self._adopted.get(model)
        if layout is not None and (
            layout.fully_sharded or self._shard_mesh(accelerator).size() == 1
        ):
            return self._adopt(accelerator, model, layout)
        mesh = adopted.shard_mesh(model, self._shard_mesh(accelerator), sizes)
        reshard: Any = self.options.reshard_after_forward
        shards = mesh.size(mesh.ndim - 1)
        if not isinstance(reshard, bool | None) and shards % reshard:
            raise ConfigurationError(
                f"Parameters are sharded across {shards} ranks, which is not divisible by "
                f"reshard_after_forward={reshard}."
            )
        ignored = units.ignored_parameters(model, self.options.ignored_modules)
        for name, parameter in ignored.items():
            if isinstance(parameter, DTensor):
                raise PrepareError(
                    f"{name!r} is split by the tensor parallel plan, but is also in ignored_modules "
                    "or a scalar, which are not split. Remove it from one of them."
                )
        kept = quantized.kept_whole(model)
        if new := {name: one for name, one in kept.items() if name not in ignored}:
            accelerator.warn_once(quantized.warning(model, new))
            ignored |= new
        groups = units.find_units(model, self.options)
        units.check_groups(model, groups, set(ignored.values()))
        policy = self.options.precision_policy(accelerator.precision.compute_dtype)
        quantized.check_dtypes(model, policy.param_dtype)
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": policy,
            "offload_policy": self.options.offload_policy(accelerator.device),
            "ignored_params": set(ignored.values()),
        }
        for group in groups:
            unit: Any = group[0] if len(group) == 1 else group
            fully_shard(unit, reshard_after_forward=reshard, **arguments)
        if reshard is True or reshard is None:
            # Backward starts with the model's own parameters, so they are only freed if there is none.
            reshard = None if any(one.requires_grad for one in model.parameters()) else True
        fully_shard(model, reshard_after_forward=reshard, **arguments)
        if model in self._starting:
            self._starting.materialise(accelerator, model)
        quantized.finish(model)
        now = dict(model.named_parameters())
        whole = [now[name] for name in ignored]
        for parameter in whole:
            parameter.data = parameter.data.to(accelerator.device)
        trained = [parameter for parameter in whole if parameter.requires_grad]
        added = [now[name] for name in self._added_names.get(model, ())]
        self._replicates = sizes.dp_replicate_enabled
        self._remember(model, trained, added)
        if self.options.forward_prefetch:
            units.prefetch_forward([group[0] for group in groups], model)
        for method in self._methods(model):
            register_fsdp_forward_method(model, method)
        return model

    def _adopt(
        self, accelerator: AcceleratorView, model: nn.Module, layout: adopted.Layout
    ) -> nn.Module:
        """Record a model that was sharded before `prepare`, without sharding it again."""
        if ignored := adopted.ignored_options(self.options):
            accelerator.warn_once(
                f"{type(model).__name__} was sharded before prepare, so these options of the fsdp2 "
                f"backend have no effect: {listing(ignored)}. Set them where the model is sharded."
            )
        if model in self._starting:
            self._starting.materialise(accelerator, model)
        whole = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self._replicates = sizes_of(accelerator).dp_replicate_enabled
        if layout.fully_sharded:
            sharded = self._remember(model, whole)
            adopted.share_padding(sharded.groups)
            if not isinstance(model, FSDPModule):
                self._kept[model] = sharded
            for method in self._methods(model):
                register_fsdp_forward_method(model, method)
        else:
            sharded = self._remember(model)
            self._kept[model] = sharded
            sharded.summed_by_model = adopted.summed_by_transformers(model)
        return model

    def use_reducer(
        self, accelerator: AcceleratorView, model: nn.Module, reducer: GradientReducer
    ) -> None:
        """Replace the reduce-scatter of each unit by the reducer's.

        Parameters that are not sharded are averaged without it.

        Raises:
            ConfigurationError: gradients are also reduced over copies of the shards.
        """
        use_reducer(sizes_of(accelerator).dp_replicate_size or 1, model, reducer)

    def follow_trainable(
        self, accelerator: AcceleratorView, change: TrainableChange, loss: torch.Tensor | None
    ) -> bool:
        """Average unfrozen parameters that are not sharded. torch follows those that are.

        Raises:
            ConfigurationError: parameters were added, which no rank shards.
        """
        sharded = self._sharded_model(uncompiled(change.model))
        if sharded is None or self._shard_mesh(accelerator).size() == 1:
            return True
        if change.added:
            raise ConfigurationError(
                f"{shorten(change.added)} of {type(change.model).__name__} were added after prepare(), so "
                "they are not sharded. Add them before it, frozen if they should train later."
            )
        late: list[Any] = [p for p in change.unfrozen.values() if not isinstance(p, DTensor)]
        sharded.whole = list(dict.fromkeys([*sharded.whole, *late]))
        return True

    def _methods(self, model: nn.Module) -> list[str]:
        asked = list(self.options.forward_methods or [])
        for name in asked:
            if not callable(getattr(model, name, None)):
                raise ConfigurationError(
                    f"forward_methods names {name!r}, but {type(model).__name__} has no such method."
                )
        usual = ["generate"] if callable(getattr(model, "generate", None)) else []
        return list(dict.fromkeys([*usual, *asked]))

    def prepare_optimizer(self, accelerator: AcceleratorView, optimizer: Any) -> Any:
        """Shard the state that the optimizer already has.

        Raises:
            ConfigurationError: the optimizer needs whole parameters.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sharded = [p for p in parameters if isinstance(p, DTensor)]
        if not sharded:
            return optimizer
        kind = type(optimizer).__name__
        kinds = {base.__name__ for base in type(optimizer).__mro__}
        if kinds.intersection(_WHOLE_ONLY) and accelerator.num_processes > 1:
            raise ConfigurationError(
                f"{kind} needs whole parameters, but FSDP2 shards them. Use another optimizer, or "
                "the backend ddp."
            )
        if len({p.device_mesh for p in sharded}) > 1 or len(sharded) < len(parameters):
            # foreach and fused cannot mix tensors from several meshes.
            for option in ("foreach", "fused"):
                for group in optimizer.param_groups:
                    if option in group:
                        group[option] = False
                if optimizer.defaults.get(option):
                    accelerator.warn_once(
                        f"{kind}({option}=True) is disabled, because its parameters are on several "
                        "meshes."
                    )
        config, rank = sizes_of(accelerator), accelerator.process_index
        for parameter, values in getattr(optimizer, "state", {}).items():
            states.shard_state(parameter, values, config, rank)
        return optimizer

    # --- step ---------------------------------------------------------------------------------

    def no_sync(self, accelerator: AcceleratorView, model: Any) -> AbstractContextManager[Any]:
        """Keep unreduced gradients on their ranks."""
        sharded = self._sharded_model(model)
        return nullcontext() if sharded is None else Synced(sharded, False)

    def trigger_sync_in_backward(
        self, accelerator: AcceleratorView, model: Any
    ) -> AbstractContextManager[Any]:
        """Make the next backward reduce gradients, even if its forward ran under `no_sync`."""
        sharded = self._sharded_model(model)
        return nullcontext() if sharded is None else Synced(sharded, True)

    def _sharded_model(self, model: Any) -> ShardedModel | None:
        """Return the record of a model, or None if it is not sharded."""
        for sharded in self._models():
            if sharded.model is model:
                return sharded
        if not isinstance(model, FSDPModule):
            return None
        return self._remember(model)

    def _remember(self, model: Any, *kept: Sequence[nn.Parameter]) -> ShardedModel:
        sharded = ShardedModel(model, *kept)
        if isinstance(model, FSDPModule):  # kept as long as the model
            model._get_fsdp_state()._accelerate_sharded_model = sharded  # type: ignore[attr-defined]
        self._layouts.forget()
        self._references = [one for one in self._references if one() is not None]
        self._references.append(weakref.ref(sharded))
        return sharded

    def _models(self) -> list[ShardedModel]:
        """Return the records of all models that still exist, in the order of `prepare`."""
        found = []
        for reference in self._references:
            sharded = reference()
            if sharded is not None:
                found.append(sharded)
        return found

    def _unreduced(self, parameters: Iterable[torch.Tensor]) -> list[ShardedModel]:
        """Return the models with any of these parameters that have unreduced gradients."""
        found = [one for one in self._models() if one.has_unreduced]
        if not found:
            return found
        ids = {id(parameter) for parameter in parameters}
        return [one for one in found if one.model is not None and one.holds_any(ids)]

    def _refuse_unreduced(self, what: str, parameters: Iterable[torch.Tensor]) -> None:
        if self._unreduced(parameters):
            raise ConfigurationError(
                f"{what} would have no effect after a backward under no_sync, because the gradients "
                "are not reduced yet. Run the last backward of a cycle outside no_sync, or use "
                "accelerator.accumulate."
            )

    def zero_grad(self, accelerator: AcceleratorView, optimizer: Any, set_to_none: bool) -> None:
        """Clear all gradients, including unreduced ones."""
        optimizer.zero_grad(set_to_none=set_to_none)
        for sharded in self._models():
            if sharded.waiting:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if sharded.holds_any(held):
                    sharded.forget_gradients()

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Compute gradients, and average those of parameters that are not sharded."""
        models = self._models()
        if self._replicates and accelerator.gradient_state.sync_each_batch:
            # Reduce over shards in each batch, but over replicas only when the optimizer steps.
            all_reduce = accelerator.gradient_state.sync_gradients
            for sharded in models:
                for group in sharded.groups:
                    group.all_reduce_grads = all_reduce
        before: dict[nn.Parameter, torch.Tensor | None] = {}
        for sharded in models:
            if sharded.added:
                before.update(sharded.added_gradients())
        earlier = {parameter: parameter.grad for one in models for parameter in one.summed_by_model}
        for parameter in earlier:
            parameter.grad = None
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        for parameter, grad in earlier.items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        if before:
            add_up(before, mesh_of(accelerator)["tp"].get_group())
        for sharded in models:
            if sharded.waiting or not sharded.synced:
                sharded.look_for_unreduced()
            if sharded.whole and sharded.synced:
                average(sharded.whole, self._shard_mesh(accelerator))

    def scale_gradients(
        self, accelerator: AcceleratorView, models: Sequence[nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply all gradients by `factor` in place."""
        parameters = dict.fromkeys(p for model in models for p in model.parameters())
        scale([p.grad for p in parameters if p.grad is not None], factor)

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Clip by norm over all shards and meshes, or by value. Returns the norm as a plain tensor.

        Inside an accumulation cycle, nothing is clipped, because gradients are not reduced yet.
        """
        if accelerator.gradient_state.sync_gradients:
            self._refuse_unreduced("Clipping", parameters)
        elif self._unreduced(parameters):
            return None if max_norm is None else torch.zeros((), device=accelerator.device)
        if max_norm is not None:
            return clip_norm(parameters, max_norm, norm_type, self._layouts)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    local(parameter.grad).clamp_(-clip_value, clip_value)  # type: ignore[operator]
        return None

    def unscale_gradients(self, accelerator: AcceleratorView, optimizer: Any) -> None:
        """Unscale each shard, and share overflows with all ranks."""
        scaler: Any = accelerator.scaler
        if scaler is None:
            return
        unscale(optimizer, scaler)

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer.

        Raises:
            ConfigurationError: gradients are not reduced yet.
        """
        for sharded in self._models():
            if sharded.has_unreduced:
                held = (p for group in optimizer.param_groups for p in group["params"])
                self._refuse_unreduced("optimizer.step()", held)
                break
        scaler: Any = accelerator.scaler
        if scaler is not None and closure is None:
            entry = scaler._per_optimizer_states[id(optimizer)]
            if not entry["found_inf_per_device"]:  # not unscaled by clipping
                self.unscale_gradients(accelerator, optimizer)
                from torch.amp.grad_scaler import OptState

                scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        if not isinstance(optimizer, torch.optim.Muon):
            return super().optimizer_step(accelerator, optimizer, closure)
        with whole_matrices(sizes_of(accelerator), accelerator.process_index):
            return super().optimizer_step(accelerator, optimizer, closure)

    def context_parallel(
        self,
        accelerator: AcceleratorView,
        buffers: Sequence[torch.Tensor] | None,
        buffer_seq_dims: Sequence[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[Any]:
        """Split the sequences in the buffers over `cp` or `sp`, if the mesh has one of them."""
        config = sizes_of(accelerator)
        given = (buffers or (), buffer_seq_dims or (), no_restore_buffers or set())
        if config.cp_enabled:
            strategy = config.cp_handler.cp_comm_strategy
            return sequence.ring(mesh_of(accelerator)["cp"], strategy, *given)
        if config.sp_enabled:
            return sequence.ulysses(mesh_of(accelerator)["sp"], *given)
        return nullcontext()

    # --- checkpoints --------------------------------------------------------------------------

    def model_state(self, accelerator: AcceleratorView, model: nn.Module) -> dict[str, Any]:
        """Return the whole state dict on rank 0, and an empty one on other ranks."""
        return states.full_model(states.plain_state(accelerator, model))

    def load_model_state(
        self, accelerator: AcceleratorView, model: nn.Module, state: Mapping[str, Any], strict: bool
    ) -> None:
        """Load this rank's shards of a whole state dict."""
        config = sizes_of(accelerator)
        inner = accelerator.unwrap_model(model)
        scales = scale_names(inner)  # the checkpointer has restored them
        own = states.plain_state(accelerator, model)
        own = {name: value for name, value in own.items() if name not in scales}
        states.load_full_model(own, plain_keys(inner, state), config, strict, type(inner).__name__)

    def optimizer_state(self, accelerator: AcceleratorView, optimizer: Any) -> dict[str, Any]:
        """Return the whole state on rank 0, and an empty one on other ranks."""
        return states.full_optimizer(optimizer)

    def load_optimizer_state(
        self, accelerator: AcceleratorView, optimizer: Any, state: Mapping[str, Any]
    ) -> None:
        """Load this rank's shards of a whole state."""
        states.load_full_optimizer(optimizer, state, sizes_of(accelerator))

    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], Mapping[str, Any] | None] | None:
        """Write each rank's shards with torch.distributed.checkpoint, unless whole ones are set."""
        if "checkpoint" not in self.owns:
            return super().save_state(accelerator, directory, options, later)
        return self._sharded.save(*states.unwrapped(accelerator), directory, later)

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read shards, which may have been written by a different number of ranks or a different mesh."""
        for sharded in self._models():
            sharded.forget_gradients()
        if "checkpoint" in self.owns:
            strict = bool(options.get("strict", True))
            self._sharded.load(*states.unwrapped(accelerator), directory, strict)

    def pending_gradients(
        self, accelerator: AcceleratorView, model: nn.Module, parameters: Collection[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return reduced gradients as shards, and unreduced ones as whole tensors."""
        sharded = self._sharded_model(model)
        if sharded is None:
            return super().pending_gradients(accelerator, model, parameters)
        return accumulated.read(model, sharded.groups, parameters)

    def load_pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: nn.Module,
        gradients: Mapping[str, torch.Tensor],
        factor: float | None,
    ) -> None:
        """Restore the gradients, so that the next backward adds to them."""
        sharded = self._sharded_model(model)
        if sharded is None:
            super().load_pending_gradients(accelerator, model, gradients, factor)
            return
        accumulated.write(model, sharded.groups, gradients, factor)
        sharded.look_for_unreduced()

    def consolidate(self, accelerator: AcceleratorView, model: nn.Module) -> dict[str, Any]:
        """Return the whole state dict on rank 0, and an empty one on other ranks."""
        return self.model_state(accelerator, model)
