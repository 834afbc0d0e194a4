"""Create megatron's models by conversion or from a provider, and match them with optimizers."""

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
from accelerate_megatron.settings import MegatronLMPlugin, Sizes
from accelerate_megatron.split_checks import check_model


@dataclass
class LocalChunks:
    """This rank's part of a model, before data parallelism is added.

    Attributes:
        modules: one module for each virtual stage.
        sizes: how the run is split.
        conversion: how the model was converted from Transformers, or None.
        skeleton: the Transformers model without weights.
        names: original name of a parameter -> its global name. None keeps the names.
        plain: whether this is an ordinary module that every rank holds entirely.
        training: whether the model is in training mode.
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
    """The settings with which all models of a run are created.

    Attributes:
        dtype: dtype of the parameters: bf16, fp16 or fp32.
    """

    accelerator: AcceleratorView
    plugin: MegatronLMPlugin
    sizes: Sizes
    dtype: torch.dtype

    def of(self, num_layers: int | None) -> tuple[Sizes, dict[str, Any]]:
        """Return the sizes and `TransformerConfig` arguments of a model with `num_layers` layers."""
        sizes = self.sizes
        if num_layers is not None:
            sizes = sizes._replace(vp=self.plugin.virtual_stages(num_layers, sizes.pp))
        return sizes, {
            **self.plugin.transformer_options(sizes),
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "fp16": self.dtype == torch.float16,
            # Interleaved stages continue while they send, and gloo reads the tensors later.
            "deallocate_pipeline_outputs": sizes.vp == 1 or self.accelerator.device.type == "cuda",
        }


def convert_or_keep(model: nn.Module, run: Run) -> LocalChunks:
    """Convert a Transformers model, or use any other module if the run doesn't split models.

    Raises:
        PrepareError: the model would have to be split, but cannot be converted.
    """
    if models.is_convertible(model):
        return convert(model, run)
    if cuts(run.sizes):
        raise PrepareError(
            f"{type(model).__name__} cannot be split across tp {run.sizes.tp} x pp {run.sizes.pp} x ep "
            f"{run.sizes.ep} ranks. Only GPT-2, Llama and Mistral models of Transformers are converted "
            "automatically. Pass a provider instead, a function (pre_process, post_process, "
            "vp_stage=None) that returns a model of megatron-core."
        )
    names = {name: name for name, _ in model.named_parameters()}
    return LocalChunks([model], run.sizes, plain=True, names=names, training=model.training)


def convert(model: nn.Module, run: Run) -> LocalChunks:
    """Create this rank's chunks of a Transformers model, with its weights.

    Raises:
        PrepareError: the model's settings contradict the plugin, or megatron doesn't support them.
    """
    conversion = models.conversion_of(model, run.sizes.tp)
    sizes, options = run.of(conversion.transformer["num_layers"])
    settings: dict[str, Any] = {**conversion.transformer, **options}
    others = run.plugin.other_megatron_args or {}
    own = {**others, **{key: conversion.transformer.get(key, others[key]) for key in others}}
    if changed := [key for key in others if own[key] != others[key] and "dropout" not in key]:
        raise PrepareError(
            f"other_megatron_args sets {changed[0]}={others[changed[0]]!r}, but the "
            f"{type(model).__name__} has {own[changed[0]]!r}. Change the model's config, or leave it "
            "out."
        )
    check_model(settings, sizes)
    _check_alike(model)
    checkpoints = any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    if checkpoints and run.plugin.recompute_granularity is None:
        raise PrepareError(
            f"{type(model).__name__} has gradient checkpointing enabled, which has no effect on "
            "megatron-core's layers. Use MegatronLMPlugin(recompute_granularity='full', "
            "recompute_method='uniform', recompute_num_layers=1) instead, or disable it."
        )
    rotary = conversion.model.get("position_embedding_type") == "rope"
    run.plugin.check_positions(rotary, type(model).__name__)
    # Parameters are not initialised, because the weights are loaded afterwards.
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

    # Random numbers drawn here are not used, and their count differs between stages.
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
            f"The embedding of {type(model).__name__} is frozen and tied to its head. With a pipeline, "
            "the first and the last stage each have a copy, and megatron always reduces gradients "
            "between the copies. Train the embedding, or run without pp."
        )
    for name, parameter in models.parameters_of(chunks):
        parameter.requires_grad_(trained.get(name, True))
    return LocalChunks(
        chunks, sizes, conversion, model.to("meta"), names=names, training=model.training
    )


def _check_alike(model: nn.Module) -> None:
    """Compare some of the ranks' weights, because each rank copies its parts from its own model.

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
                f"{differs[0]!r} of {type(model).__name__} differs from rank {rank}, but each rank "
                "copies its parts from its own model. Call set_seed(seed) before you create the model, "
                "or load the same weights on every rank."
            )


def _trained(model: nn.Module, names: Mapping[str, str]) -> dict[str, bool]:
    """Return which of megatron's parameters are trained, by name.

    Raises:
        PrepareError: only some of the parameters that are merged into one are frozen.
    """
    trained: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        now = names.get(name)
        if now is not None and trained.setdefault(now, parameter.requires_grad) != (
            parameter.requires_grad
        ):
            raise PrepareError(
                f"{name!r} becomes a part of {now!r}, another part of which is "
                f"{'frozen' if parameter.requires_grad else 'trained'}. Freeze all of its parts, or "
                "none."
            )
    return trained


def call_provider(provider: Callable[..., Any], run: Run) -> LocalChunks:
    """Call the user's provider for each of this rank's chunks.

    Raises:
        PrepareError: the provider doesn't return a model of megatron-core, or its config contradicts
            the run.
    """
    layers = getattr(provider, "num_layers", None)
    if run.plugin.num_layers_per_virtual_pipeline_stage is not None and layers is None:
        raise PrepareError(
            "num_layers_per_virtual_pipeline_stage needs the number of layers of the provider's model. "
            "Set it as an attribute of the function: provider.num_layers = ..."
        )
    sizes, options = run.of(layers)
    chunks = make_chunks(provider, sizes)
    for chunk in chunks:
        if not isinstance(chunk, imported("transformer.module").MegatronModule):
            raise PrepareError(
                f"The provider returned a {type(chunk).__name__}, but must return a MegatronModule, "
                "such as megatron.core.models.gpt.GPTModel."
            )
        _resolve_config(chunk.config, options)
    check_model(vars(chunks[0].config), sizes)
    return LocalChunks(chunks, sizes)


#: Options that are set in a provider's config. All others must already match the plugin.
_OF_THE_RUN = {
    "bf16", "fp16", "pipeline_dtype", "deallocate_pipeline_outputs", "overlap_p2p_comm",
    "batch_p2p_comm", "virtual_pipeline_model_parallel_size",
}  # fmt: skip


def _resolve_config(config: Any, options: Mapping[str, Any]) -> None:
    """Compare a provider's config with the run, and set the options that only the run determines.

    Raises:
        PrepareError: the config contradicts the run.
    """
    widths = (options["tensor_model_parallel_size"], options["expert_tensor_parallel_size"])
    if not config.perform_initialization and max(widths) > 1:
        raise PrepareError(
            "perform_initialization=False in the provider's config is not supported with tensor "
            "parallelism. Parameters would not be marked as split, so megatron would compute norms "
            "only from the first rank's part. Leave it out."
        )
    for name in options.keys() - _OF_THE_RUN:
        if getattr(config, name) != options[name]:
            raise PrepareError(
                f"The provider's TransformerConfig has {name}={getattr(config, name)!r}, but the run "
                f"has {options[name]!r}. Create the config with {name}={options[name]!r}."
            )
    for name in _OF_THE_RUN:
        if name in options:
            setattr(config, name, options[name])


def make_chunks(provider: Callable[..., Any], sizes: Sizes) -> list[nn.Module]:
    """Return this rank's chunks, one for each virtual stage."""
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


def wrap(local: LocalChunks, run: Run) -> MegatronModel:
    """Move a model's chunks to the device, convert their precision, and add data parallelism."""
    half_module = imported("transformer.module").Float16Module
    data = imported("distributed")
    config = _plain_config(run.of(None)[1]) if local.plain else local.modules[0].config
    defaults = imported("tensor_parallel").set_defaults_if_not_set_tensor_model_parallel_attributes
    for chunk in local.modules:
        for parameter in chunk.parameters():
            defaults(parameter)
            if is_expert(parameter):  # megatron marks a bias as shared between tensor ranks
                parameter.sequence_parallel = False
        chunk.to(run.accelerator.device)
    if config.hidden_dropout or config.attention_dropout:
        _check_generators(run.sizes)
    half = config.bf16 or config.fp16
    inner = [half_module(config, chunk) if half else chunk for chunk in local.modules]
    settings = data.DistributedDataParallelConfig(
        grad_reduce_in_fp32=half, **run.plugin.ddp_options()
    )
    chunks = [
        data.DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(inner)
    ]
    for chunk in chunks:  # schedules read these attributes
        chunk.model_type = imported("enums").ModelType.encoder_or_decoder
        if local.plain:
            chunk.set_input_tensor = _no_input
    group = imported("parallel_state").get_data_parallel_group()
    first = dist.get_process_group_ranks(group)[0]
    for module, chunk in zip(local.modules, chunks, strict=True):
        chunk.broadcast_params()
        for buffer in module.buffers():  # megatron only broadcasts parameters
            dist.broadcast(buffer.detach(), first, group)
    engine = Engine(local.modules, chunks, config, local.sizes, local.plain)
    if local.plain:
        model = MegatronModel(engine)
        model.training = local.training  # submodules keep their own modes
        return model
    if local.conversion is None:
        engine.vocab_size = int(getattr(local.modules[-1], "vocab_size", 0))
        return GPT(engine)
    rank = imported("parallel_state").get_tensor_model_parallel_rank()
    engine.vocab_size = local.conversion.vocab_size
    padding = local.conversion.padded(rank)
    converted = GPT(engine, padding=padding, skeleton=local.skeleton, conversion=local.conversion)
    return converted.train(local.training)


def _no_input(_: Any) -> None:
    """Do nothing, because a plain module has no earlier stage that sends it tensors."""


def _check_generators(sizes: Sizes) -> None:
    """Check that ranks with the same activations would draw the same dropout.

    Raises:
        ConfigurationError: torch's generators differ within a tensor parallel group.
    """
    if sizes.tp == 1:
        return
    state = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    group = imported("parallel_state").get_tensor_model_parallel_group()
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, bytes(state.tolist()), group)
    if len(set(found)) > 1:
        raise ConfigurationError(
            "The random generators differ between ranks of the same tensor parallel group, which would "
            "draw different dropout for the same activations. Call set_seed(seed) without "
            "device_specific."
        )


def _plain_config(options: Mapping[str, Any]) -> Any:
    """Return a `TransformerConfig` for a plain module. Its sizes are never read."""
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
    """Return a loader whose batches are `count` times as large as those of the given loader.

    Raises:
        PrepareError: the loader has no batch size.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise PrepareError(
            f"multiply_batch multiplies a loader's batch size by num_micro_batches={count}, but this "
            f"{type(loader).__name__} has no batch size. Leave multiply_batch out."
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
    """One model with its optimizer."""

    entry: Any = None
    engine: Any = None
    optimizer: Any = None
    #: Names of the optimizer's parameters, by group, before conversion.
    held: list[list[str]] = field(default_factory=list)
    names: dict[str, str] | None = None

    def groups(self) -> list[list[str]]:
        """Return the global names of each group's parameters.

        Raises:
            PrepareError: parameters that are merged into one are in different groups.
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
                        f"{name!r} and {other!r} become one parameter, {now!r}, but are in different "
                        "groups of the optimizer. Put them into the same group."
                    )
                if now not in groups[-1]:
                    groups[-1].append(now)
        return groups


def assign(plan: Any, engines: Sequence[Engine]) -> list[Job]:
    """Match the plan's optimizers with its models, or with models prepared before.

    Raises:
        PrepareError: an optimizer has parameters of several models, or of none.
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
                    f"The {kind} has a parameter of shape {tuple(parameter.shape)} that is in no "
                    "prepared model. Pass model and optimizer in the same call, prepare(model, "
                    "optimizer), or create the optimizer from the model that prepare(model) returned."
                )
            job, name = owner[id(parameter)]
            held[-1].append(name)
            if all(job is not one for one in mine):
                mine.append(job)
    if len(mine) != 1:
        raise PrepareError(
            f"The {kind} has parameters of {len(mine)} models, but megatron needs one optimizer per "
            "model. Create one for each."
        )
    (job,) = mine
    if job.optimizer is not None or (job.engine is not None and job.engine.optimizer is not None):
        raise ConfigurationError(
            f"The model of this {kind} already has an optimizer, and megatron supports only one per "
            "model. Use one optimizer with several parameter groups."
        )
    job.optimizer = entry
    job.held = held
