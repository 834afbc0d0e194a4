"""The deepspeed backend. DeepSpeed's engine does reduction, clipping and the optimizer step."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate_compile import compile_model
from accelerate_core.plugin import (
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    GradScalerKwargs,
    ParallelismConfig,
    PrepareError,
    Request,
    SetupView,
    Sources,
    did_you_mean,
    listing,
    resolve_settings,
    wrap_forward,
)
from accelerate_deepspeed import accumulated, automatic, checkpoint, library
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.engines import (
    DeepSpeedEngineWrapper,
    Engines,
    TrainedEngine,
    use_smallest_scale,
)
from accelerate_deepspeed.layer_order import LayerOrder
from accelerate_deepspeed.make_engines import (
    Job,
    assign,
    check_storage,
    has_parameters,
    make_engine,
    micro_batch,
    trains_something,
)
from accelerate_deepspeed.optimizers import DummyOptim, DummyScheduler
from accelerate_deepspeed.sequence import TransformersUlysses
from accelerate_deepspeed.settings import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    tell_transformers,
)

#: Filters trainable parameters in C, because clipping does it in every step.
_REQUIRES_GRAD = attrgetter("requires_grad")


class DeepSpeedBackend(Backend):
    """Train models in DeepSpeed engines, with ZeRO stages 0 to 3."""

    name = "deepspeed"
    api_version = (1, 0)
    reduces_gradients = "engine"
    supports: ClassVar[Mapping[str, Any]] = {
        "accepts": ("autocast", "modules"),
        "precisions": ("fp16",),
        "mesh": ("dp_shard", "tp", "sp"),
        "devices": None,
        "no_sync": False,
        "join": False,
        "compile": True,
        "gradients": "same_layout",
        "several_models": True,
    }
    owns: ClassVar[frozenset[str]] = frozenset({"device_placement", "optimizer", "checkpoint"})
    needs_group = True
    compile_at = "own"
    Settings = DeepSpeedPlugin
    several_settings = True
    more_settings = (DeepSpeedSequenceParallelConfig,)
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "ZeRO-1": ("optimizer",),
        "ZeRO-2": ("gradients", "optimizer"),
        "ZeRO-3": ("weights", "gradients", "optimizer"),
    }
    handlers = (DeepSpeedPlugin, GradScalerKwargs)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or DeepSpeedPlugin(), handlers)
        self._scaling = next((h for h in handlers if isinstance(h, GradScalerKwargs)), None)
        self._several = isinstance(self.settings, dict)
        self.plugins: dict[str, DeepSpeedPlugin] = (
            self.settings if self._several else {"default": self.settings}
        )
        for plugin in self.plugins.values():
            automatic.resolve_fields(plugin)
        self._selected = next(iter(self.plugins))
        #: The engines that train.
        self.engines = Engines()
        self._deepspeed: Any = None
        self._ulysses: TransformersUlysses | None = None

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The plugin for the models that are prepared next."""
        return self.plugins[self._selected]

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if DeepSpeed was requested."""
        for name in ("deepspeed_plugin", "deepspeed_plugins"):
            if request.arguments.get(name) is not None:
                return Claim(60, f"{name} was passed")
        if request.env_flag("ACCELERATE_USE_DEEPSPEED"):
            return Claim(60, "ACCELERATE_USE_DEEPSPEED is set")
        if request.config is not None and "deepspeed_config" in request.config:
            return Claim(35, request.config.where("deepspeed_config"))
        return None

    def core_defaults(self) -> Mapping[str, Any]:
        """Return accumulation steps, precision and parallel dimensions from DeepSpeed's config.

        The default for schedulers is to move once per optimizer step.
        """
        config = self.plugin.hf_ds_config
        # With DeepSpeed, schedules are usually defined in optimizer steps.
        found: dict[str, Any] = {"scheduler_steps": "per_step"}
        if (steps := automatic.accumulation_of(config)) is not None:
            found["gradient_accumulation_steps"] = steps
        if (own := automatic.own_precision(config)) is not None:
            found["mixed_precision"] = own[0]
        tensor = config.get_value("tensor_parallel.autotp_size")
        if isinstance(tensor, int) and tensor > 1:
            found["parallelism_config"] = ParallelismConfig(tp_size=tensor)
        return found

    def check(self, setup: SetupView) -> None:
        """Check the plugins' configs against the settings of the Accelerator.

        Raises:
            ConfigurationError: they contradict each other, or DeepSpeed does not support them.
        """
        steps = setup.provenance["gradient_accumulation_steps"]
        precision = setup.mixed_precision
        origin = setup.provenance["mixed_precision"].origin
        own_precision: set[bool] = set()
        for plugin in self.plugins.values():
            config = plugin.hf_ds_config
            own_precision.add(automatic.resolve_precision(config, precision, origin, self._scaling))
            automatic.check_accumulation(config, steps)
            self._check_parallel(setup.parallelism_config, config)
        if len(own_precision) > 1:
            raise ConfigurationError(
                "Some DeepSpeed plugins use DeepSpeed's own fp16 or bf16, and others don't. Use the "
                "same settings of fp16 and bf16 in all their configs."
            )
        if True in own_precision:
            self.owns = frozenset({*self.owns, "precision"})  # type: ignore[misc]

    def _check_parallel(self, sizes: Any, config: HfDeepSpeedConfig) -> None:
        tensor, name = sizes.tp_size, "tensor_parallel.autotp_size"
        there = config.get_value(name)
        if isinstance(there, int) and there > 1 and there != tensor:
            raise ConfigurationError(
                f"tp_size={tensor} in parallelism_config contradicts {config.shown(name)}. Remove "
                "one of them."
            )
        if tensor > 1:
            config.set_value(name, tensor, "tp_size of parallelism_config")
            if sizes.tp_handler is not None and sizes.tp_handler.plan is not None:
                raise ConfigurationError(
                    "The plan in TorchTensorParallelConfig is for torch's tensor parallelism. With "
                    "DeepSpeed, set tensor_parallel.partition_config in its config instead."
                )
        handler = sizes.sp_handler
        if handler is None and sizes.sp_size > 1:
            sources = Sources.of(os.environ)
            handler, _ = resolve_settings(DeepSpeedSequenceParallelConfig, None, sources)
            sizes.sp_handler = handler
        if handler is not None and not isinstance(handler, DeepSpeedSequenceParallelConfig):
            raise ConfigurationError(
                "With the backend deepspeed, sp_handler must be a DeepSpeedSequenceParallelConfig, "
                f"not a {type(handler).__name__}."
            )
        if sizes.sp_size == 1:
            return
        scatter = "zero_optimization.reduce_scatter"
        if config.stage == 3 and config.is_false(scatter):
            raise ConfigurationError(
                f"{config.shown(scatter)} gives wrong gradients with stage 3 and sp_size, because "
                "DeepSpeed then sums small buckets but averages large ones. Leave it out."
            )
        if tensor > 1:
            raise ConfigurationError(
                f"sp_size={sizes.sp_size} and tp_size={tensor} cannot be combined with DeepSpeed. Set "
                "one of them to 1."
            )
        if sizes.sp_backend not in (None, "deepspeed"):
            raise ConfigurationError(
                f"sp_backend={sizes.sp_backend!r} is for another backend. Leave it out."
            )

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `DEEPSPEED`."""
        return "DEEPSPEED"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide the plugins, and functions to select one."""
        trained = self.engines.trained
        wrapped = DeepSpeedEngineWrapper(trained[-1].engine) if trained else None
        return {
            "deepspeed_engine_wrapped": wrapped,
            "deepspeed_plugin": self.plugin,
            "deepspeed_plugins": self.plugins if self._several else self.plugin,
            "select_deepspeed_plugin": self.select,
            "get_deepspeed_plugin": self.get,
            # A prepared loader already splits batches along the sequence.
            "deepspeed_ulysses_dl_adapter": lambda loader, model=None: loader,
        }

    def select(self, name: str) -> None:
        """Use another plugin for models that are prepared from now on.

        Raises:
            ConfigurationError: there is no plugin with that name.
        """
        self.get(name)
        self._selected = name
        tell_transformers(self.plugin)

    def get(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by name.

        Raises:
            ConfigurationError: there is no plugin with that name.
        """
        if name not in self.plugins:
            raise ConfigurationError(
                f"There is no DeepSpeed plugin named {name!r}. The plugins are "
                f"{listing(self.plugins)}.{did_you_mean(str(name), self.plugins)}"
            )
        return self.plugins[name]

    # --- start --------------------------------------------------------------------------------

    def on_start(self, accelerator: AcceleratorView) -> None:
        """Import deepspeed, connect it to the process group, and validate configs with its own code.

        Raises:
            ConfigurationError: the device does not support fp16, or a config is invalid.
        """
        self._deepspeed = library.connect(accelerator)
        device = self._deepspeed.accelerator.get_accelerator()
        if accelerator.mixed_precision == "fp16" and not device.is_fp16_supported():
            raise ConfigurationError(
                f"mixed_precision='fp16' (from {accelerator.provenance['mixed_precision'].origin}) "
                f"is not supported by DeepSpeed on this {accelerator.device.type}. Use 'bf16' or "
                "'no'."
            )
        for plugin in self.plugins.values():
            library.check_sections(plugin.hf_ds_config)
            library.check_disks(plugin.hf_ds_config)
        tell_transformers(self.plugin)
        sizes = accelerator.parallelism_config
        if sizes is not None and sizes.size("sp") > 1:
            self._ulysses = TransformersUlysses(sizes, accelerator.process_index)

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Destroy the engines, which their hooks would otherwise keep alive."""
        self.engines.destroy()

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Remove the engines' hooks, and restore the environment and Transformers."""
        self.engines.end()
        library.disconnect()
        tell_transformers(None)
        if self._ulysses is not None:
            self._ulysses.close()

    def feed_device(
        self, accelerator: AcceleratorView, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Move batches to the device. With `sp_size`, split them along the sequence."""
        if self._ulysses is None and accelerator.device.type == "cpu":
            return batches  # they are already on the device
        moved = super().feed_device(accelerator, batches, non_blocking)
        return moved if self._ulysses is None else self._ulysses.shard(moved)

    def init_model_context(self, accelerator: AcceleratorView) -> AbstractContextManager[Any]:
        """With stage 3 and `zero3_init_flag`, shard parameters while models are created."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.plugin.is_zero3_init_enabled():
            config = self.plugin.hf_ds_config.known_by_now().config
            context = self._deepspeed.zero.Init(config_dict_or_path=config)
        return context

    def classify(self, accelerator: AcceleratorView, obj: Any) -> str | None:
        """Recognise `DummyOptim` and `DummyScheduler`."""
        if isinstance(obj, DummyOptim):
            return "optimizer"
        return "scheduler" if isinstance(obj, DummyScheduler) else None

    # --- prepare ------------------------------------------------------------------------------

    def prepare(self, accelerator: AcceleratorView, plan: Any) -> None:
        """Create an engine for each model that trains."""
        plan.rebind()
        jobs = assign(plan)
        sizes = self._sizes(accelerator, plan)
        for job in jobs:
            if not self._needs_engine(accelerator, job):
                if job.model.on_device:
                    job.model.value = job.model.value.to(accelerator.device)
                if "precision" in self.owns and accelerator.mixes_precision:
                    settings = accelerator.autocast_handler
                    context = partial(super().autocast, accelerator, job.model.value, settings)
                    wrap_forward(job.model.value, context, accelerator.upcast_outputs)
                continue
            groups = None
            if self._ulysses is not None:
                config = self.plugin.hf_ds_config
                groups = self._ulysses.register(job.model.value, config, sizes.micro_batch)
            check_storage(job.model.value)
            engine = make_engine(accelerator, self._deepspeed, self.plugin, job, sizes, groups)
            if accelerator.dynamo_plugin.enabled:
                _compile(engine, accelerator.dynamo_plugin)
            self.engines.add(engine, self.plugin)
            if engine.zero_optimization_partition_weights() and accelerator.num_processes > 1:
                offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
                LayerOrder(accelerator, offload, engine.module)

    def _needs_engine(self, accelerator: AcceleratorView, job: Job) -> bool:
        model, config = job.model.value, self.plugin.hf_ds_config
        if isinstance(model, self._deepspeed.DeepSpeedEngine):
            raise PrepareError("The model is already a DeepSpeedEngine. Pass its .module instead.")
        to_train = trains_something(model) and not job.model.evaluation_mode
        if job.optimizer is not None or (to_train and config.has("optimizer")):
            return True
        if to_train:
            accelerator.warn_once(
                f"{type(model).__name__} was prepared without an optimizer, so DeepSpeed does not "
                "train it. Pass both in the same call: prepare(model, optimizer)."
            )
        # Stage 3 shards all models, but DeepSpeed can't make an engine of one without parameters.
        return config.is_zero3() and has_parameters(model)

    def _sizes(self, accelerator: AcceleratorView, plan: Any) -> automatic.RunSizes:
        _, count = accelerator.hooks.data_shard()
        loaders = [*plan.values("loader"), *accelerator.loaders]
        parts = count if accelerator.split_batches else 1
        origin = accelerator.provenance["gradient_accumulation_steps"].origin
        there = automatic.accumulation_of(self.plugin.hf_ds_config)
        if there is not None:
            origin = self.plugin.hf_ds_config.where("gradient_accumulation_steps")
        return automatic.RunSizes(
            data_ranks=count,
            # DeepSpeed knows the groups of Ulysses, but counts each rank of a tensor parallel group.
            all_ranks=count if self._ulysses is not None else accelerator.num_processes,
            accumulation=there or accelerator.gradient_accumulation_steps,
            accumulation_origin=origin,
            micro_batch=micro_batch(loaders, self.plugin.is_train_batch_min, parts),
        )

    def unwrap_model(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Return the module inside the engine."""
        if self._deepspeed is not None and isinstance(model, self._deepspeed.DeepSpeedEngine):
            inner: nn.Module = model.module
            return inner
        return model

    # --- step ---------------------------------------------------------------------------------

    def autocast(
        self, accelerator: AcceleratorView, model: nn.Module | None, settings: Any
    ) -> AbstractContextManager[Any]:
        """Return the core's autocast, unless the engine handles precision itself."""
        if "precision" in self.owns:
            return nullcontext()
        return super().autocast(accelerator, model, settings)

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run backward through the engines on which the loss depends. It is already divided."""
        found = self.engines.of_loss(loss)
        if not found:
            super().backward(accelerator, loss, kwargs)
            return
        if not kwargs.get("scale_wrt_gas", True):
            # We never divide. Callers that pass False, such as Transformers' Trainer, have divided.
            del kwargs["scale_wrt_gas"]
        if unknown := kwargs.keys() - {"retain_graph"}:
            raise ConfigurationError(
                f"backward({min(unknown)}=...) is not supported with DeepSpeed. It only supports "
                "retain_graph and scale_wrt_gas=False."
            )
        if self._ulysses is not None and found[0].stage < 3:
            # Stages 0 to 2 sum the gradients of the parts of a sequence, but we need their mean, as
            # stage 3 computes it.
            loss = loss / self._ulysses.size
        if len(found) > 1:
            use_smallest_scale(found)
        for one in found:
            if one.reduced:
                one.begin_backward()
            one.dirty = True
            one.backward_ended = False
        # Only the first engine scales the loss.
        first, *others = found
        if others:
            first, *others = sorted(found, key=lambda one: one.stage)
        if first.stage == 0 and first.scales and first.loss_scale != 1.0:
            # With stage 0, DeepSpeed divides gradients by the scale without multiplying the loss.
            loss = loss.float() * first.loss_scale
        if not others:
            first.engine.backward(loss, scale_wrt_gas=False, **kwargs)
            state = getattr(first.engine.optimizer, "_backward_hook_state", None)
            if not first.backward_ended or (state is not None and state.backward_active_depth):
                first.finish_backward()
            return
        with ExitStack() as stack:
            for one in others:
                stack.enter_context(one.joined())
            first.engine.backward(loss, scale_wrt_gas=False, **kwargs)
            for one in found:
                one.finish_backward()

    def scale_gradients(
        self, accelerator: AcceleratorView, models: Sequence[nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply the gradients by `factor`."""
        for model in models:
            one = self.engines.of(model)
            if one is not None:
                one.scale(factor)

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Clip gradients in the next step, and return their norm over all ranks now."""
        what = "clip_grad_norm_" if clip_value is None else "clip_grad_value_"
        found = self._engines_of(what, parameters)
        if not found:
            return super().clip_grad(accelerator, parameters, max_norm, norm_type, clip_value)
        if max_norm is not None:
            return self._clip_norm(found, max_norm, norm_type)
        assert clip_value is not None
        for one in found:
            one.clamp(clip_value)
        return None

    def _clip_norm(
        self, found: Sequence[TrainedEngine], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        if norm_type not in (2, float("inf")):
            raise ConfigurationError(
                f"clip_grad_norm_(norm_type={norm_type}) is not supported with DeepSpeed. It only "
                "supports norm_type=2 and inf."
            )
        for one in found:
            there = one.configured_norm
            if there and there != float(max_norm):
                config = one.plugin.hf_ds_config
                raise ConfigurationError(
                    f"clip_grad_norm_(max_norm={max_norm}) contradicts gradient_clipping={there} "
                    f'({config.where("gradient_clipping")}). Remove one of them, or write "auto" '
                    "in the config."
                )
        each = []
        for one in found:  # a comprehension would add a call
            each.append(one.norm(float(norm_type)))
        total = each[0]
        if len(each) > 1:
            norms = torch.stack([norm.to(total.device) for norm in each])
            total = torch.linalg.vector_norm(norms, norm_type)
        if norm_type == 2:
            for one, norm in zip(found, each, strict=True):
                # Each engine clips to its share of the limit.
                share = float(norm / total.clamp(min=1e-12)) if len(each) > 1 else 1.0
                one.clip(max_norm * max(share, 1e-12))
        else:
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for one in found:
                one.scale(factor)
        return total

    def _engines_of(self, what: str, parameters: Sequence[torch.Tensor]) -> list[TrainedEngine]:
        given = set(map(id, parameters))
        found = []
        for one in self.engines.trained:
            own = list(filter(_REQUIRES_GRAD, one.parameters))
            here = len(given.intersection(map(id, own)))
            if here == 0:
                continue
            if here < len(own):
                raise ConfigurationError(
                    f"{what} received {here} of {len(own)} parameters of "
                    f"{type(one.engine.module).__name__}, but with DeepSpeed all gradients of a "
                    "model must be clipped together. Pass model.parameters()."
                )
            if not one.dirty:
                raise ConfigurationError(
                    f"{what} was called without a backward since the last step, so there are no "
                    "gradients."
                )
            found.append(one)
        return found

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the engine. Returns False if gradients overflowed."""
        one = self.engines.of(optimizer)
        if one is None:
            return super().optimizer_step(accelerator, optimizer, closure)
        if closure is not None:
            raise ConfigurationError(
                "optimizer.step(closure) is not supported with DeepSpeed. Call backward before step."
            )
        if not one.dirty:
            accelerator.warn_once(
                "optimizer.step() has no effect, because no backward has run since the last step."
            )
            return True
        return one.step()

    def zero_grad(self, accelerator: AcceleratorView, optimizer: Any, set_to_none: bool) -> None:
        """Drop gradients that no step has used. A step clears its own."""
        one = self.engines.of(optimizer)
        if one is None:
            super().zero_grad(accelerator, optimizer, set_to_none)
        elif one.dirty:
            one.drop()

    # --- checkpoints --------------------------------------------------------------------------

    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write engines with DeepSpeed's own writer, and models without an engine as tensors."""
        if later:
            accelerator.warn_once(
                "blocking=False has no effect on DeepSpeed's checkpoints, which cannot be written "
                "in the background."
            )
        checkpoint.save(accelerator, directory, options)
        return None

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read a checkpoint, which may have been saved with a different number of ranks."""
        for one in self.engines.trained:
            one.drop()
        checkpoint.load(accelerator, directory, options)

    def pending_gradients(
        self, accelerator: AcceleratorView, model: nn.Module, parameters: Collection[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return the gradients that the engine has accumulated on this rank."""
        one = self.engines.of(model)
        if one is None:
            return super().pending_gradients(accelerator, model, parameters)
        return accumulated.read(one)

    def load_pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: nn.Module,
        gradients: Mapping[str, torch.Tensor],
        factor: float | None,
    ) -> None:
        """Restore the gradients in the engine."""
        one = self.engines.of(model)
        if one is None:
            super().load_pending_gradients(accelerator, model, gradients, factor)
        else:
            accumulated.write(one, gradients)

    def consolidate(self, accelerator: AcceleratorView, model: nn.Module) -> dict[str, Any]:
        """Return the whole state dict. With stage 3, it is empty on all ranks but rank 0."""
        return checkpoint.whole_state(accelerator, model)


def _compile(engine: Any, dynamo: Any) -> None:
    if dynamo.use_regional_compilation:
        compile_model(engine.module, dynamo)
        return
    names = ("mode", "fullgraph", "dynamic", "options")
    options = {name: value for name in names if (value := getattr(dynamo, name)) is not None}
    engine.compile(backend=dynamo.backend, compile_kwargs=options)
