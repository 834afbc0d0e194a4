"""How models become megatron's: converted or made by a provider, wrapped, matched with optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core.plugin import AcceleratorView, ConfigurationError, PrepareError
from accelerate_megatron import models
from accelerate_megatron.engine import Engine, cuts, is_expert
from accelerate_megatron.library import imported, interleave
from accelerate_megatron.models.norms import layer_spec
from accelerate_megatron.module import GPT, MegatronModel
from accelerate_megatron.settings import MegatronLMPlugin, Sizes, check_model


@dataclass
class Made:
    """A model that is this rank's part, before data parallelism.

    Attributes:
        modules: one for each virtual stage.
        conversion: how it came from Transformers.
        skeleton: that model without its weights.
        names: name of a parameter before -> global name now; None: as they are.
    """

    modules: list[Any]
    sizes: Sizes
    conversion: Any = None
    skeleton: Any = None
    names: dict[str, str] | None = None
    plain: bool = False
    training: bool = True


@dataclass(frozen=True)
class Run:
    """What every model of a run is made with.

    Attributes:
        dtype: of the parameters: bf16, fp16, or fp32.
    """

    accelerator: AcceleratorView
    plugin: MegatronLMPlugin
    sizes: Sizes
    dtype: torch.dtype

    def of(self, num_layers: int | None) -> tuple[Sizes, dict[str, Any]]:
        """Return sizes and `TransformerConfig` arguments of a model with so many layers."""
        sizes = self.sizes
        if num_layers is not None:
            sizes = sizes._replace(vp=self.plugin.virtual_stages(num_layers, sizes.pp))
        return sizes, {
            **self.plugin.transformer_options(sizes),
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "fp16": self.dtype == torch.float16,
            # Interleaved stages send while they go on, and gloo reads what it sends later.
            "deallocate_pipeline_outputs": sizes.vp == 1 or self.accelerator.device.type == "cuda",
        }


def built(model: nn.Module, run: Run) -> Made:
    """Convert a Transformers model, or take any module where each rank holds the whole.

    Raises:
        PrepareError: it would have to be cut, and nobody says how.
    """
    if models.is_convertible(model):
        return converted(model, run)
    if cuts(run.sizes):
        raise PrepareError(
            f"{type(model).__name__} is cut over tp {run.sizes.tp} x pp {run.sizes.pp} x ep "
            f"{run.sizes.ep} ranks, and only GPT-2, Llama and Mistral models of Transformers are "
            "converted by themselves. Pass a provider, a function (pre_process, post_process, "
            "vp_stage=None) that returns a model of megatron-core."
        )
    names = {name: name for name, _ in model.named_parameters()}
    return Made([model], run.sizes, plain=True, names=names, training=model.training)


def converted(model: nn.Module, run: Run) -> Made:
    """Make this rank's chunks of a Transformers model, with its weights."""
    conversion = models.conversion_of(model, run.sizes.tp)
    sizes, options = run.of(conversion.transformer["num_layers"])
    settings: dict[str, Any] = {**conversion.transformer, **options}
    others = run.plugin.other_megatron_args or {}
    own = {**others, **{key: conversion.transformer.get(key, others[key]) for key in others}}
    if changed := [key for key in others if own[key] != others[key] and "dropout" not in key]:
        raise PrepareError(
            f"other_megatron_args sets {changed[0]}={others[changed[0]]!r}, and the "
            f"{type(model).__name__} has {own[changed[0]]!r}: make the model so, or leave it out."
        )
    check_model(settings, sizes)
    _check_alike(model)
    checkpoints = any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    if checkpoints and run.plugin.recompute_granularity is None:
        raise PrepareError(
            f"{type(model).__name__} has gradient checkpointing enabled, and layers of megatron-core "
            "recompute by the plugin: MegatronLMPlugin(recompute_granularity='full', "
            "recompute_method='uniform', recompute_num_layers=1), or disable it."
        )
    rotary = conversion.model.get("position_embedding_type") == "rope"
    run.plugin.check_positions(rotary, type(model).__name__)
    # What is read over it need not be initialised.
    config = imported("transformer.transformer_config").TransformerConfig(
        perform_initialization=False, use_cpu_initialization=True, **settings
    )

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        return imported("models.gpt").GPTModel(
            config,
            layer_spec(config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **conversion.model,
        )

    # What is drawn is read over, and differs from stage to stage.
    with torch.random.fork_rng(devices=[]):
        chunks = make_chunks(provider, sizes)
    with ExitStack() as opened:
        models.load(chunks, conversion, models.reader(model, opened))
    names = models.trained_names(conversion)
    trained = _trained(model, names)
    tied = conversion.model.get("share_embeddings_and_output_weights")
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    if tied and sizes.pp > 1 and not embeddings.weight.requires_grad:
        raise PrepareError(
            f"The embedding of {type(model).__name__} is frozen and tied to its head, of which the first "
            "and the last stage have a copy each, and megatron reduces between them: train it, or run "
            "without pp."
        )
    for name, parameter in models.parameters_of(chunks):
        parameter.requires_grad_(trained.get(name, True))
    return Made(chunks, sizes, conversion, model.to("meta"), names=names, training=model.training)


def _check_alike(model: nn.Module) -> None:
    """Compare some of the ranks' weights: each takes its parts from its own.

    Raises:
        PrepareError: they differ.
    """
    sample = {
        name: parameter.detach().reshape(-1)[:4].tolist()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and not parameter.is_nested
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sample)
    for rank, other in enumerate(everyone):
        if differs := [name for name in sample if sample[name] != other.get(name)]:
            raise PrepareError(
                f"{differs[0]!r} of {type(model).__name__} has other values here than on rank {rank}, "
                "and each rank takes its parts from its own. Call set_seed(seed) before the model is "
                "made, or load the same weights on every rank."
            )


def _trained(model: nn.Module, names: Mapping[str, str]) -> dict[str, bool]:
    """Return which of megatron's parameters are trained, by name.

    Raises:
        PrepareError: of several that become one, some are frozen.
    """
    trained: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        now = names.get(name)
        if now is not None and trained.setdefault(now, parameter.requires_grad) != (
            parameter.requires_grad
        ):
            raise PrepareError(
                f"{name!r} becomes a part of {now!r}, of which another part is "
                f"{'frozen' if parameter.requires_grad else 'trained'}: freeze all of them or none."
            )
    return trained


def made_by_provider(provider: Callable[..., Any], run: Run) -> Made:
    """Call the user's provider for each of this rank's chunks.

    Raises:
        PrepareError: what it returns is no model of megatron-core, or made for another run.
    """
    layers = getattr(provider, "num_layers", None)
    if run.plugin.num_layers_per_virtual_pipeline_stage is not None and layers is None:
        raise PrepareError(
            "num_layers_per_virtual_pipeline_stage needs to know how many layers a provider's model "
            "has: give the provider an attribute num_layers."
        )
    sizes, options = run.of(layers)
    chunks = make_chunks(provider, sizes)
    for chunk in chunks:
        if not isinstance(chunk, imported("transformer.module").MegatronModule):
            raise PrepareError(
                f"The provider returned a {type(chunk).__name__}; it returns a MegatronModule, such "
                "as megatron.core.models.gpt.GPTModel."
            )
        _resolve_config(chunk.config, options)
    check_model(vars(chunks[0].config), sizes)
    return Made(chunks, sizes)


#: What a provider's config need not say; all else of the plugin's has to be in it.
_OF_THE_RUN = {
    "bf16", "fp16", "pipeline_dtype", "deallocate_pipeline_outputs", "overlap_p2p_comm",
    "batch_p2p_comm", "virtual_pipeline_model_parallel_size",
}  # fmt: skip


def _resolve_config(config: Any, options: Mapping[str, Any]) -> None:
    """Compare a provider's config with the run's, and set what is the run's to know.

    Raises:
        PrepareError: they contradict each other.
    """
    widths = (options["tensor_model_parallel_size"], options["expert_tensor_parallel_size"])
    if not config.perform_initialization and max(widths) > 1:
        raise PrepareError(
            "perform_initialization=False leaves parameters unmarked, and megatron then takes norms "
            "of the first tensor parallel rank's alone: leave it out of the provider's config."
        )
    for name in options.keys() - _OF_THE_RUN:
        if getattr(config, name) != options[name]:
            raise PrepareError(
                f"The provider's TransformerConfig has {name}={getattr(config, name)!r}, and the run "
                f"has {options[name]!r}: make it with {name}={options[name]!r}."
            )
    for name in _OF_THE_RUN:
        if name in options:
            setattr(config, name, options[name])


def make_chunks(provider: Callable[..., Any], sizes: Sizes) -> list[nn.Module]:
    """Return this rank's chunks: one for each virtual stage."""
    interleave(sizes.vp)
    state = imported("parallel_state")
    found = []
    for stage in range(sizes.vp):
        vp_stage = stage if sizes.vp > 1 else None
        arguments: dict[str, Any] = {
            "pre_process": state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        }
        if vp_stage is not None or "vp_stage" in inspect.signature(provider).parameters:
            arguments["vp_stage"] = vp_stage
        found.append(provider(**arguments))
    return found


def wrapped(made: Made, run: Run) -> MegatronModel:
    """Put a model's chunks on the device, into its precision and under data parallelism."""
    half_module = imported("transformer.module").Float16Module
    data = imported("distributed")
    config = _plain_config(run.of(None)[1]) if made.plain else made.modules[0].config
    defaults = imported("tensor_parallel").set_defaults_if_not_set_tensor_model_parallel_attributes
    for chunk in made.modules:
        for parameter in chunk.parameters():
            defaults(parameter)
            if is_expert(parameter):  # a bias is marked for what tensor ranks hold alike
                parameter.sequence_parallel = False
        chunk.to(run.accelerator.device)
    if config.hidden_dropout or config.attention_dropout:
        _check_generators(run.sizes)
    half = config.bf16 or config.fp16
    inner = [half_module(config, chunk) if half else chunk for chunk in made.modules]
    settings = data.DistributedDataParallelConfig(
        grad_reduce_in_fp32=half, **run.plugin.ddp_options()
    )
    chunks = [
        data.DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(inner)
    ]
    for chunk in chunks:  # schedules ask
        chunk.model_type = imported("enums").ModelType.encoder_or_decoder
        if made.plain:
            chunk.set_input_tensor = _no_input
    group = imported("parallel_state").get_data_parallel_group()
    first = dist.get_process_group_ranks(group)[0]
    for module, chunk in zip(made.modules, chunks, strict=True):
        chunk.broadcast_params()
        for buffer in module.buffers():  # which megatron leaves as each rank has them
            dist.broadcast(buffer.detach(), first, group)
    engine = Engine(made.modules, chunks, config, made.sizes, made.plain)
    if made.plain:
        model = MegatronModel(engine)
        model.training = made.training  # modules inside of it keep their own modes
        return model
    if made.conversion is None:
        engine.vocab_size = int(getattr(made.modules[-1], "vocab_size", 0))
        return GPT(engine)
    rank = imported("parallel_state").get_tensor_model_parallel_rank()
    engine.vocab_size = made.conversion.vocab_size
    padding = made.conversion.padded(rank)
    converted = GPT(engine, padding=padding, skeleton=made.skeleton, conversion=made.conversion)
    return converted.train(made.training)


def _no_input(_: Any) -> None:
    """A module without stages before it is given nothing by them."""


def _check_generators(sizes: Sizes) -> None:
    """Refuse dropout that would differ between ranks which hold the same activations.

    Raises:
        ConfigurationError: torch's generators of one tensor parallel group are not alike.
    """
    if sizes.tp == 1:
        return
    state = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    group = imported("parallel_state").get_tensor_model_parallel_group()
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, bytes(state.tolist()), group)
    if len(set(found)) > 1:
        raise ConfigurationError(
            "The ranks of one tensor parallel group would draw different dropout for the same "
            "activations: their generators differ. Call set_seed(seed) without device_specific."
        )


def _plain_config(options: Mapping[str, Any]) -> Any:
    """Return a `TransformerConfig` for a module that has none: its sizes are never read."""
    config = imported("transformer.transformer_config").TransformerConfig
    kept = {key: options[key] for key in ("bf16", "fp16", "params_dtype")}
    return config(
        num_layers=1,
        hidden_size=1,
        num_attention_heads=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **kept,
    )


def multiplied(loader: Any, count: int) -> Any:
    """Return a loader whose batches have the samples of `count` of the given one's.

    Raises:
        PrepareError: its batches are not made by a batch size.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise PrepareError(
            f"multiply_batch makes a batch of num_micro_batches={count} of a loader's, and this "
            f"{type(loader).__name__} has no batch size: leave multiply_batch out."
        )
    sampler: Any = (
        {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    )
    return DataLoader(
        loader.dataset,
        loader.batch_size * count,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **sampler,
    )


# --- models and optimizers ----------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """One model with the optimizer that is its own."""

    entry: Any = None
    engine: Any = None
    optimizer: Any = None
    #: Name of each parameter that the optimizer holds, in its groups, before conversion.
    held: list[list[str]] = field(default_factory=list)
    names: dict[str, str] | None = None

    def groups(self) -> list[list[str]]:
        """Return the global names of each group's parameters.

        Raises:
            PrepareError: parameters that became one are in different groups.
        """
        if self.names is None:
            return self.held
        groups: list[list[str]] = []
        place: dict[str, tuple[int, str]] = {}
        for index, held in enumerate(self.held):
            groups.append([])
            for name in held:
                now = self.names[name]
                where, other = place.setdefault(now, (index, name))
                if where != index:
                    raise PrepareError(
                        f"{name!r} and {other!r} are one parameter under megatron, {now!r}, and in "
                        "different groups of the optimizer: put them into one."
                    )
                if now not in groups[-1]:
                    groups[-1].append(now)
        return groups


def assign(plan: Any, engines: Sequence[Engine]) -> list[Job]:
    """Match the plan's optimizers with its models, or with those prepared before.

    Raises:
        PrepareError: an optimizer holds parameters of several models, or of none.
    """
    jobs = []
    owner: dict[int, tuple[Job, str]] = {}
    for entry in plan.of_kind("model"):
        job = Job(entry)
        jobs.append(job)
        if isinstance(entry.value, MegatronModel):
            job.engine = entry.value.engine
        else:
            for name, parameter in entry.value.named_parameters(remove_duplicate=False):
                owner.setdefault(id(parameter), (job, name))
    known = {id(job.engine) for job in jobs}
    jobs += [Job(engine=engine) for engine in engines if id(engine) not in known]
    for job in jobs:
        if job.engine is not None:
            for parameter in job.engine.parameters():
                owner[id(parameter)] = (job, job.engine.name(parameter))
    for entry in plan.of_kind("optimizer"):
        _match(entry, owner)
    return jobs


def _match(entry: Any, owner: Mapping[int, tuple[Job, str]]) -> None:
    optimizer, kind = entry.value, type(entry.value).__name__
    held: list[list[str]] = []
    mine: list[Job] = []
    for group in optimizer.param_groups:
        held.append([])
        for parameter in group["params"]:
            if id(parameter) not in owner:
                raise PrepareError(
                    f"The {kind} holds a parameter of shape {tuple(parameter.shape)} that is in no "
                    "prepared model: pass model and optimizer in one call, prepare(model, "
                    "optimizer), or make the optimizer of what prepare(model) returned."
                )
            job, name = owner[id(parameter)]
            held[-1].append(name)
            if all(job is not one for one in mine):
                mine.append(job)
    if len(mine) != 1:
        raise PrepareError(
            f"The {kind} holds parameters of {len(mine)} models, and megatron has an optimizer for "
            "each: make one for each."
        )
    (job,) = mine
    if job.optimizer is not None or (job.engine is not None and job.engine.optimizer is not None):
        raise ConfigurationError(f"The model of this {kind} has an optimizer already.")
    job.optimizer = entry
    job.held = held
