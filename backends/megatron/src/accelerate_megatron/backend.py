"""The megatron backend: megatron-core's tensor and pipeline parallelism, schedules and optimizers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate_core.plugin import (
    AcceleratorView,
    Backend,
    Claim,
    ConfigurationError,
    GradScalerKwargs,
    ParallelismConfig,
    PrepareError,
    Request,
    ScheduleResult,
    ScheduleStep,
    SetupView,
    did_you_mean,
    listing,
)
from accelerate_megatron import checkpoint, library, models
from accelerate_megatron.alternatives import alternative
from accelerate_megatron.data import IndexedLoader, MegatronLMDummyDataLoader, place_loaders
from accelerate_megatron.engine import Engine, build_optimizer
from accelerate_megatron.make_models import (
    LocalChunks,
    Run,
    assign,
    call_provider,
    convert_or_keep,
    multiplied,
    wrap,
)
from accelerate_megatron.module import GPT, CausalLMOutput, MegatronModel
from accelerate_megatron.schedule import run
from accelerate_megatron.scheduler import MegatronLMDummyScheduler, build_scheduler
from accelerate_megatron.settings import MegatronLMPlugin, Sizes
from accelerate_megatron.split_checks import check_sizes
from accelerate_megatron.step import own_step

_OPTIONS = {"load_optimizer", "save_optimizer", "strict"}
#: Filters trainable parameters in C, because clipping does it in every step.
_REQUIRES_GRAD = attrgetter("requires_grad")


class MegatronBackend(Backend):
    """Train GPT models over tensor, pipeline and data parallel ranks."""

    name = "megatron"
    api_version = (1, 0)
    #: From an object store, each machine only fetches the shards of its own ranks.
    shards_on_demand = True
    reduces_gradients = "step"
    supports: ClassVar[Mapping[str, Any]] = {
        "accepts": (),
        "precisions": ("bf16", "fp16"),
        "mesh": ("pp", "dp_replicate", "dp_shard", "tp"),
        "devices": None,
        "no_sync": True,
        "join": False,
        "compile": False,
        "gradients": "same_layout",
        "several_models": True,
    }
    owns: ClassVar[frozenset[str]] = frozenset(
        {"precision", "device_placement", "optimizer", "checkpoint"}
    )
    needs_group = True
    compile_at = "own"
    Settings = MegatronLMPlugin
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tensor and pipeline": ("weights", "gradients", "optimizer")
    }
    handlers = (MegatronLMPlugin, GradScalerKwargs)

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        super().__init__(settings or MegatronLMPlugin(), handlers)
        self.plugin: MegatronLMPlugin = self.settings
        self.sizes: Sizes = self.plugin.sizes()
        self.engines: list[Engine] = []
        #: Id of a prepared optimizer of torch -> the engine that steps it.
        self._stepped_by: dict[int, Engine] = {}
        self._step: Any = None
        self._seed = 0
        given = [handler for handler in handlers if isinstance(handler, GradScalerKwargs)]
        self._scaling = given[0] if given else GradScalerKwargs()
        if not self._scaling.enabled:
            raise ConfigurationError(
                "GradScalerKwargs(enabled=False) is not supported, because megatron's optimizer always "
                "scales the loss in fp16. Leave it out, or use bf16."
            )

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run if Megatron or a mesh with a pipeline was requested."""
        if request.arguments.get("megatron_lm_plugin") is not None:
            return Claim(60, "megatron_lm_plugin was passed")
        if request.env_flag("ACCELERATE_USE_MEGATRON_LM"):
            return Claim(60, "ACCELERATE_USE_MEGATRON_LM is set")
        if request.config is not None and "megatron_lm_config" in request.config:
            return Claim(35, request.config.where("megatron_lm_config"))
        config = request.arguments.get("parallelism_config")
        if getattr(config, "pp_size", 1) > 1:
            return Claim(60, "parallelism_config has pp_size")
        size = request.environ.get("PARALLELISM_CONFIG_PP_SIZE", "1")
        if request.env_flag("ACCELERATE_USE_PARALLELISM_CONFIG") and size != "1":
            return Claim(60, f"PARALLELISM_CONFIG_PP_SIZE={size}")
        return None

    def core_defaults(self) -> Mapping[str, Any]:
        """Return the mesh of the plugin's degrees. Schedulers move once per optimizer step."""
        layout = self.plugin.sizes()
        return {
            "parallelism_config": ParallelismConfig(tp_size=layout.tp, pp_size=layout.pp),
            "scheduler_steps": "per_step",
        }

    def check(self, setup: SetupView) -> None:
        """Compare the plugin's degrees with the sizes of the mesh.

        Raises:
            ConfigurationError: they contradict each other.
        """
        sizes = setup.parallelism_config
        assert sizes is not None  # `core_defaults` has one
        wanted = self.plugin.sizes()
        for name in ("tp", "pp"):
            degree = getattr(wanted, name)
            size = sizes.size(name)
            if degree not in (1, size):
                raise ConfigurationError(
                    f"{name}_degree={degree} of MegatronLMPlugin contradicts {name}_size={size} of "
                    "parallelism_config. Remove one of them."
                )
        tp = sizes.size("tp")
        etp = self.plugin.expert_tensor_parallel_size or tp
        self.sizes = wanted._replace(tp=tp, pp=sizes.size("pp"), etp=etp)

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return `MEGATRON_LM`."""
        return "MEGATRON_LM"

    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Provide `megatron_lm_plugin`."""
        return {"megatron_lm_plugin": self.plugin}

    # --- start --------------------------------------------------------------------------------

    def on_start(self, accelerator: AcceleratorView) -> None:
        """Create megatron's groups.

        Raises:
            ConfigurationError: the CPU was requested although there is a CUDA device, or the sizes
                don't match the number of ranks.
        """
        instead = partial(alternative, accelerator.parallelism_config, self.sizes, "cpu")
        if accelerator.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigurationError(
                "megatron-core only supports CUDA devices, but the CPU was requested. Leave cpu=True "
                f"out, or {instead()}."
            )
        check_sizes(self.plugin, self.sizes, accelerator.num_processes)
        seed = torch.tensor(torch.initial_seed() % 2**31, device=accelerator.device)
        torch.distributed.broadcast(seed, 0)  # tensor parallel ranks need the same seed
        self._seed = int(seed)
        attention = self.plugin.attention_backend
        library.start(self.sizes, self._seed, accelerator.group_timeout, attention, instead=instead)
        self._step = own_step(accelerator, self.plugin)

    def on_free(self, accelerator: AcceleratorView) -> None:
        """Drop the references to all models."""
        self.engines.clear()
        self._stepped_by.clear()

    def on_end(self, accelerator: AcceleratorView) -> None:
        """Drop the references to all models. Groups are destroyed with the process group."""
        self.engines.clear()
        self._stepped_by.clear()

    def on_seed(self, accelerator: AcceleratorView, seed: int) -> None:
        """Seed megatron's generators."""
        library.seed_generators(seed)

    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the state of megatron's generators on this rank."""
        return dict(library.generators().get_states())

    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Set the state of megatron's generators."""
        if state:
            library.generators().set_states(dict(state))

    # --- prepare ------------------------------------------------------------------------------

    def classify(self, accelerator: AcceleratorView, obj: Any) -> str | None:
        """Recognise placeholders, Transformers configs and providers.

        A provider is a function with parameters `pre_process` and `post_process`.
        """
        if isinstance(obj, MegatronLMDummyScheduler):
            return "scheduler"
        if isinstance(obj, MegatronLMDummyDataLoader):
            return "loader"
        if models.is_config(obj):
            return "model"
        if isinstance(obj, nn.Module | type) or not callable(obj):
            return None
        try:
            names = inspect.signature(obj).parameters
        except (TypeError, ValueError):
            return None
        return "model" if {"pre_process", "post_process"} <= names.keys() else None

    def make_model(self, accelerator: AcceleratorView, obj: Any) -> nn.Module:
        """Create a model from a provider or from a Transformers config."""
        if isinstance(obj, nn.Module):
            return obj
        if models.is_config(obj):
            return models.of_config(obj, self._seed)
        return self._wrapped(accelerator, call_provider(obj, self._run(accelerator)))

    def prepare(self, accelerator: AcceleratorView, plan: Any) -> None:
        """Convert models, add megatron's data parallelism, and create its optimizers."""
        plan.rebind()
        jobs = assign(plan, self.engines)
        for job in jobs:
            if job.entry is not None and not isinstance(job.entry.value, MegatronModel):
                local = convert_or_keep(job.entry.value, self._run(accelerator))
                job.entry.value = self._wrapped(accelerator, local)
                job.engine = job.entry.value.engine
                job.names = local.names
        for job in jobs:
            if job.optimizer is None:
                continue
            others = [one for one in self.engines if one.optimizer is not None]
            if others and accelerator.mixed_precision == "fp16":
                raise ConfigurationError(
                    "Several trained models are not supported with fp16, because megatron has a "
                    "separate loss scale for each optimizer. Train one model, or use bf16."
                )
            options = self.plugin.optimizer_options()
            build_optimizer(job.engine, job.optimizer.value, job.groups(), options, self._scaling)
            self._stepped_by[id(job.optimizer.value)] = job.engine
        place_loaders(accelerator, plan, self.plugin)
        if self.plugin.multiply_batch:
            plan.each("loader", lambda loader, _: self._multiplied(loader))
        for entry in plan.of_kind("scheduler"):
            self._follow(accelerator, plan, entry)

    def _follow(self, accelerator: AcceleratorView, plan: Any, entry: Any) -> None:
        """Connect a scheduler with its prepared optimizer, and replace a placeholder by megatron's."""
        scheduler = entry.value
        meant = getattr(scheduler, "optimizer", None)
        for one in plan.of_kind("optimizer"):
            one.value = accelerator.wrap_optimizer(one.value)
        mine = [e.value for e in plan.of_kind("optimizer") if e.original is meant]
        mine += [one for one in accelerator.optimizers if meant in (one, one.optimizer)]
        if not mine:
            raise PrepareError(
                f"The {type(scheduler).__name__} belongs to an optimizer that is not prepared. Pass "
                "both in the same call of prepare."
            )
        if isinstance(scheduler, MegatronLMDummyScheduler):
            if accelerator.scheduler_steps == "per_process":
                raise ConfigurationError(
                    "scheduler_steps='per_process' is only supported for torch's schedulers, not for "
                    "megatron's, which MegatronLMDummyScheduler represents. Leave scheduler_steps out."
                )
            _, count = accelerator.hooks.data_shard()
            scheduler = build_scheduler(
                self.plugin,
                mine[0].optimizer,
                scheduler,
                data_ranks=1 if accelerator.split_batches else count,
                samples_per_step=self._samples(accelerator, plan, count),
            )
        entry.value = accelerator.wrap_scheduler(scheduler, mine[:1])

    def _multiplied(self, loader: Any) -> Any:
        if isinstance(loader, IndexedLoader):
            return loader
        return multiplied(loader, self.plugin.num_micro_batches or 1)

    def _samples(self, accelerator: AcceleratorView, plan: Any, ranks: int) -> int | None:
        """Return the number of samples per optimizer step on all ranks, or None if unknown."""
        parts = 1 if accelerator.split_batches else ranks
        for loader in [*plan.values("loader"), *accelerator.loaders]:
            whole = getattr(loader, "total_batch_size", None)  # only prepared loaders have it
            if whole is None and getattr(loader, "batch_size", None) is not None:
                whole = loader.batch_size * parts
            if whole is not None:
                return int(whole) * accelerator.gradient_accumulation_steps
        return None

    def _run(self, accelerator: AcceleratorView) -> Run:
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = halves.get(accelerator.mixed_precision, torch.float32)
        return Run(accelerator, self.plugin, self.sizes, dtype)

    def _wrapped(self, accelerator: AcceleratorView, local: LocalChunks) -> MegatronModel:
        model = wrap(local, self._run(accelerator))
        self.engines.append(model.engine)
        if self.plugin.forward_runs_step:
            model.run_step = partial(self._forward, accelerator, weakref.ref(model))
        return model

    def _forward(self, accelerator: AcceleratorView, reference: Any, batch: Any) -> CausalLMOutput:
        """Run a whole step when the model is called, like Hugging Face Accelerate."""
        model = reference()
        cycle = accelerator.gradient_accumulation_steps
        training = model.training and torch.is_grad_enabled()
        step = ScheduleStep(
            training, accelerator.gradient_state.sync_gradients, lambda loss: loss / cycle
        )
        result = self.run_schedule(accelerator, model, batch, step)
        return CausalLMOutput(result.loss, None, logits=result.outputs)

    def unwrap_model(self, accelerator: AcceleratorView, model: nn.Module) -> nn.Module:
        """Return the original plain module. Converted models and provider's models are unchanged."""
        if isinstance(model, MegatronModel) and model.engine.plain:
            plain: nn.Module = model.engine.modules[0]
            return plain
        return model

    # --- step ---------------------------------------------------------------------------------

    def autocast(
        self, accelerator: AcceleratorView, model: nn.Module | None, settings: Any
    ) -> AbstractContextManager[Any]:
        """Return an empty context, because parameters already have the precision."""
        return nullcontext()

    def backward(
        self, accelerator: AcceleratorView, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run backward. Gradients are accumulated in megatron's buffers and not reduced yet."""
        if self.plugin.forward_runs_step:
            return
        if self.sizes.pp > 1:
            raise ConfigurationError(
                f"accelerator.backward(loss) is not supported with {self.sizes.pp} pipeline ranks. "
                "accelerator.train_step(batch) runs forward and backward together, so leave it out."
            )
        for engine in self.engines:
            engine.begin()
        for engine in self.engines:
            if engine.balances:
                cycle = accelerator.gradient_accumulation_steps
                engine.scale_balance(torch.ones((), device=loss.device) / cycle)
        for engine in self.engines:
            if engine.config.fp16 and engine.optimizer is not None:
                loss = engine.optimizer.scale_loss(loss)
                break
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def scale_gradients(
        self, accelerator: AcceleratorView, models: Sequence[nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply the accumulated gradients by `factor`."""
        for model in models:
            if isinstance(model, MegatronModel):
                if model.engine.balances:
                    raise ConfigurationError(
                        "num_items divides gradients by the number of tokens, but the losses of "
                        "routers (moe_aux_loss_coeff, moe_z_loss_coeff) are already means. Leave "
                        "num_items out, or both coefficients."
                    )
                model.engine.scale(factor)

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Clip gradients by the norm over all parts of the model, or by value."""
        engine = self._engine_of(parameters)
        if not accelerator.gradient_state.sync_gradients:
            return None if clip_value is not None else torch.zeros(())
        if clip_value is not None:
            return engine.clip_value(clip_value)
        assert max_norm is not None
        return engine.clip_norm(max_norm, norm_type)

    def _engine_of(self, parameters: Sequence[torch.Tensor]) -> Engine:
        given = set(map(id, parameters))
        for engine in self.engines:
            # A pipeline stage may be entirely frozen, but must still take part in the norm.
            own = list(filter(_REQUIRES_GRAD, engine.listed)) or engine.listed
            here = len(given.intersection(map(id, own)))
            if here and here < len(own):
                raise ConfigurationError(
                    f"Clipping received {here} of {len(own)} parameters, but megatron can only clip a "
                    "whole model. Pass model.parameters()."
                )
            if here:
                if engine.optimizer is None:
                    raise ConfigurationError(
                        "Clipping needs the model's optimizer. Pass it to prepare too."
                    )
                return engine
        raise ConfigurationError(
            "Clipping received no parameter of a prepared model. Pass model.parameters() of the model "
            "that prepare returned."
        )

    def optimizer_step(
        self, accelerator: AcceleratorView, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Reduce gradients, unless clipping did, and step. Returns False if gradients overflowed."""
        engine = self._stepped_by.get(id(optimizer))
        if engine is None:
            return super().optimizer_step(accelerator, optimizer, closure)
        if closure is not None:
            raise ConfigurationError(
                "optimizer.step(closure) is not supported with Megatron. Call backward before step."
            )
        if not engine.begun:
            accelerator.warn_once(
                "optimizer.step() has no effect, because no backward has run since the last step."
            )
            return True
        return engine.step()

    def zero_grad(self, accelerator: AcceleratorView, optimizer: Any, set_to_none: bool) -> None:
        """Clear megatron's gradient buffers."""
        engine = self._stepped_by.get(id(optimizer))
        if engine is None:
            super().zero_grad(accelerator, optimizer, set_to_none)
        else:
            engine.clear()

    def run_schedule(
        self, accelerator: AcceleratorView, model: nn.Module, batch: Any, step: ScheduleStep
    ) -> ScheduleResult:
        """Split a batch into `num_micro_batches` parts and run megatron's schedule."""
        if not isinstance(model, MegatronModel):
            raise ConfigurationError(
                f"train_step received a {type(model).__name__}. Pass a model that prepare returned."
            )
        if step.training and model.engine.optimizer is None:
            raise ConfigurationError(
                "train_step needs the model's optimizer. Pass it to prepare too."
            )
        count = self.plugin.num_micro_batches or 1
        keep = bool(self.plugin.return_logits)
        return run(model, batch, step, count, keep_logits=keep, own_step=self._step)

    # --- checkpoints --------------------------------------------------------------------------

    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write the parts of all ranks."""
        if later:
            accelerator.warn_once(
                "blocking=False has no effect on checkpoints of the backend megatron, which cannot be "
                "written in the background."
            )
        _known("save_state", options)
        optimizers = options.get("save_optimizer", not self.plugin.no_save_optim)
        checkpoint.save(self.engines, directory, optimizers=bool(optimizers))
        return None

    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read a checkpoint, which may have been saved with a different layout."""
        _known("load_state", options)
        for engine in self.engines:
            engine.clear()
        optimizers = options.get("load_optimizer", not self.plugin.no_load_optim)
        strict = bool(options.get("strict", True))
        checkpoint.load(self.engines, directory, optimizers=bool(optimizers), strict=strict)

    def pending_gradients(
        self, accelerator: AcceleratorView, model: nn.Module, parameters: Collection[torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return megatron's gradient buffers."""
        if not isinstance(model, MegatronModel):
            return super().pending_gradients(accelerator, model, parameters)
        return model.engine.pending_gradients()

    def load_pending_gradients(
        self,
        accelerator: AcceleratorView,
        model: nn.Module,
        gradients: Mapping[str, torch.Tensor],
        factor: float | None,
    ) -> None:
        """Fill megatron's gradient buffers."""
        if isinstance(model, MegatronModel):
            model.engine.load_pending_gradients(gradients)
        else:
            super().load_pending_gradients(accelerator, model, gradients, factor)

    def consolidate(self, accelerator: AcceleratorView, model: nn.Module) -> dict[str, Any]:
        """Return the whole state dict on rank 0. Converted models have Transformers' names."""
        if not isinstance(model, MegatronModel) or model.engine.plain:
            return super().consolidate(accelerator, model)
        if not isinstance(model, GPT) or model.conversion is None:
            raise PrepareError(
                "Only the weights of models converted from Transformers can be gathered. Save a "
                "provider's model with accelerator.save_state."
            )
        return dict(models.export(model.engine.modules, model.conversion))


def _known(what: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"{what}({name}=...) is not supported with Megatron. It supports "
                f"{listing(sorted(_OPTIONS))}."
                f"{did_you_mean(name, _OPTIONS)}"
            )
