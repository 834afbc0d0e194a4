"""The Accelerator for scripts that were written for Hugging Face Accelerate."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.hooks import RemovableHandle

from accelerate_core import AcceleratorState, GradientState, accelerator
from accelerate_core.accelerator.signature import ShowsPluginArguments
from accelerate_core.data.loader import CoreLoader
from accelerate_core.data.sources import IndexedSource, IndexIterator
from accelerate_core.plugin import (
    ConfigurationError,
    PrepareError,
    RuntimeConflictError,
    listing,
    look_ahead,
    origin_of,
    uncompiled,
    warn,
)
from accelerate_core.prepare.prepared import Prepared
from accelerate_drop_in import assignment, listed_models, private, replaced  # noqa: F401  (adds what clients assign to)
from accelerate_drop_in.data_loader import shown
from accelerate_drop_in.fp8 import FP8BackendType
from accelerate_drop_in.models import without_containers
from accelerate_drop_in.settings import ParallelismConfig


class _DrawnOnDemand(IndexIterator):
    """Draws the indices of a batch only when the loader needs them."""

    _held = False

    def draw(self) -> None:
        if self._batches is None:
            super().draw()
            self._held = True

    def __next__(self) -> Any:
        self.draw()
        if not self._held:
            self._next = next(self._batches)  # type: ignore[arg-type]
        elif self.exhausted:
            raise StopIteration
        self._held = False
        self.count += 1
        return self._next


class _ReadAhead(IndexedSource):
    """Reads each batch one step ahead, as loaders for an accelerator device do anyway.

    Datasets and samplers that use the global random generator then draw the same numbers as with
    Accelerate. Reading one batch ahead also shows which batch is the last, so indices don't have to be
    drawn even earlier.
    """

    def _items(self, iterator: Iterator[Any], index: Any) -> Iterator[Any]:
        for batch, following, failure in look_ahead(iterator):
            last = following is None and failure is None
            yield batch, last, self._real(batch) if last else None, None


def _refuse_offloaded(model: Any) -> None:
    """Refuse a quantized model with parts on the CPU or disk.

    Raises:
        ConfigurationError: the model is quantized and partly offloaded.
    """
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    for bits in (8, 4):
        if places & {"cpu", "disk"} and getattr(model, f"is_loaded_in_{bits}bit", False):
            raise ConfigurationError(
                f"The model is loaded in {bits} bits and uses CPU or disk offload, so it cannot be "
                f"trained. Its device map has {listing(sorted(places))}."
            )


#: Arguments that only Accelerate accepts by position, after the first six, which the core accepts too.
_BY_POSITION = (
    *("deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types"),
    *("log_with", "project_dir", "project_config", "gradient_accumulation_plugin"),
    *("step_scheduler_with_optimizer", "kwargs_handlers", "dynamo_backend", "dynamo_plugin"),
    *("deepspeed_plugins", "parallelism_config"),
)
_FIRST = 6


#: The Accelerators of this process that were pickled or copied, by key.
_pickled: WeakValueDictionary[str, Accelerator] = WeakValueDictionary()


def _same(key: str) -> Accelerator:
    """Return the Accelerator that was pickled.

    Raises:
        RuntimeConflictError: it belongs to another process, or was deleted.
    """
    found = _pickled.get(key)
    if found is None:
        raise RuntimeConflictError(
            "This pickle contains an Accelerator of another process, or one that was deleted. An "
            "Accelerator uses the process group, threads and files of its process. Pickle the objects "
            "that it prepared instead (see unwrap_model and save_state), and create an Accelerator in "
            "the process that loads them."
        )
    return found


#: The position of the argument `split_batches`.
_SPLIT_BATCHES = 1


def _without_split_batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Remove `split_batches` from the arguments, because Accelerate accepts it but ignores it."""
    asked = kwargs.pop("split_batches", None)
    if len(args) > _SPLIT_BATCHES:
        asked = args[_SPLIT_BATCHES]
        args = (*args[:_SPLIT_BATCHES], None, *args[_SPLIT_BATCHES + 1 :])
    if asked:
        warn(
            f"Accelerator(split_batches={asked!r}) has no effect, as in Accelerate 1.15: each process "
            "uses the batch size of the loader. To divide it among the processes, pass "
            "dataloader_config=DataLoaderConfiguration(split_batches=True).",
        )
    return args


class _Replaceable(replaced.WatchedClass, ShowsPluginArguments):
    """The metaclass of the Accelerator, whose methods clients replace."""


class Accelerator(accelerator.Accelerator, metaclass=_Replaceable):
    """The Accelerator of accelerate-core, with the behaviour that scripts for Accelerate rely on.

    All arguments of Accelerate's constructor may be given by position.

    Scripts for Accelerate skip the batches that they have already seen in an epoch. So `load_state`
    leaves loaders at the beginning of the epoch, unless `restore_positions` or
    `use_stateful_dataloader` is set.

    A copy or an unpickled copy is the same Accelerator. Unpickling one in another process is an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(_BY_POSITION, args[_FIRST:], strict=False))
        if kwargs.get("log_with") is not None:
            from accelerate_drop_in import tracking  # noqa: F401  (registers its classes)

        super().__init__(*_without_split_batches(args[:_FIRST], kwargs), **kwargs)
        vars(self)["_is_made"] = True
        replaced.connect(self)
        vars(self)["state"] = AcceleratorState(weakref.proxy(self))  # clients read it there
        config = kwargs.get("parallelism_config")
        if isinstance(config, ParallelismConfig):
            config.refuse_other_dimensions()
            config._validate_accelerator(self)
        self.dataloader_config = self.dataloader_config  # apply Accelerate's defaults
        if self.is_main_process:
            self.gradient_state.gradients_kept = _warn_of_kept_gradients
        for handler in self._setup.handlers.values():
            if type(handler).__name__ == "DistributedDataParallelKwargs":
                self.ddp_handler = handler
        if (plugin := self.megatron_lm_plugin) is not None:
            # In scripts for Accelerate, calling the model trains one step.
            for name in ("forward_runs_step", "multiply_batch"):
                if origin_of(plugin, name) == "default":
                    setattr(plugin, name, True)

    def __reduce__(self) -> Any:
        key = vars(self).setdefault("_pickled_as", uuid.uuid4().hex)
        _pickled[key] = self
        return _same, (key,)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__:
            if assignment.assign(self, "accelerator", name, value, assignment.ACCELERATOR):
                return
            if not (name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)):
                assignment.refuse_served(self, name)
        super().__setattr__(name, value)

    @property
    def ddp_handler(self) -> Any:
        """The `DistributedDataParallelKwargs` that were passed or assigned, else None."""
        return self.__dict__.get("_ddp_handler")

    @ddp_handler.setter
    def ddp_handler(self, value: Any) -> None:
        assignment.assign(self, "accelerator", "ddp_handler", value, assignment.ACCELERATOR)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8 bits; `NO` if there is none."""
        if self.mixed_precision != "fp8":
            return FP8BackendType.NO
        return FP8BackendType(self._plugin_attribute("fp8_backend", "Accelerator"))

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:  # type: ignore[override]
        """Prepare objects, and mark them as prepared in the same way as Accelerate."""
        assignment.check_compiler(self)
        for one in args:
            _refuse_offloaded(one)
        args = self._by_replaced_methods(args)
        step = replaced.STEPS.get(self.distributed_type)
        if step is None or device_placement is not None:
            made = super().prepare(*args, device_placement=device_placement)
        else:
            made = getattr(self, step)(*args)
            made = made[0] if len(args) == 1 else made
        for group in (self.models, self.optimizers, self.schedulers, self.loaders):
            for one in group:
                shown(one)._is_accelerate_prepared = True
        for loader in self.loaders:
            self._read_ahead(loader)
        return made

    def _prepare_step(self, *args: Any) -> tuple[Any, ...]:
        """Prepare objects. Clients replace this, by the names of Accelerate's steps."""
        made = super().prepare(*args)
        return (made,) if len(args) == 1 else tuple(made)

    _prepare_fsdp2 = _prepare_deepspeed = _prepare_megatron_lm = _prepare_step

    def _unused_step(self, *args: Any, **_: Any) -> tuple[Any, ...]:
        """Return the objects, because `prepare` does without this step of Accelerate."""
        return args

    _prepare_cp = _prepare_tp = _prepare_ao = _prepare_te = _prepare_msamp = _unused_step

    def _by_replaced_methods(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call methods such as `prepare_model` if a client or subclass has replaced them."""
        own = {name: getattr(type(self), name) for name in _ORIGINAL_METHODS}
        if own == _ORIGINAL_METHODS or self.__dict__.get("_in_replaced_method"):
            return args
        self.__dict__["_in_replaced_method"] = True
        try:
            return tuple(self._by_replaced_method(one, own) for one in args)
        finally:
            self.__dict__["_in_replaced_method"] = False

    def _by_replaced_method(self, one: Any, own: dict[str, Any]) -> Any:
        for name, kind in _PREPARED_BY.items():
            replaced_here = own[name] is not _ORIGINAL_METHODS[name]
            if replaced_here and isinstance(one, kind) and one not in self._prepared.objects:
                return getattr(self, name)(one)
        return one

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map distributes the model over several devices."""
        return Prepared.verify_device_map(self._prepared, model)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a prepared model."""
        return Prepared.get_state_dict(self._prepared, model, unwrap)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare one loader, so that data-parallel ranks read different data."""
        return self._read_ahead(
            shown(super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch))
        )

    def _read_ahead(self, made: Any) -> Any:
        if isinstance(made, CoreLoader) and not self.dataloader_config.restore_positions:
            source, device = made._source, made.options.device
            if type(source) is IndexedSource and (device is None or device.type == "cpu"):
                source.stream.iterator = _DrawnOnDemand
                made._source = _ReadAhead(source.base, source.stream, source.per_step)
        return made

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model.

        Raises:
            ConfigurationError: the model is quantized and has parts on the CPU or disk.
        """
        _refuse_split_layers(model)
        _refuse_offloaded(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's model inside a prepared one or inside one of torch's wrappers."""
        inner = without_containers(model)
        own = super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        return inner if keep_torch_compile and own is uncompiled(inner) else own

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` in `save_state`, with what Accelerate passes."""
        return super().register_save_state_pre_hook(listed_models.save_hook(self, hook))

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` in `load_state`, with what Accelerate passes."""
        return super().register_load_state_pre_hook(listed_models.load_hook(self, hook))


#: The methods with which Accelerate's `prepare` prepares a single object, by its class.
_PREPARED_BY = {
    "prepare_model": torch.nn.Module,
    "prepare_data_loader": torch.utils.data.DataLoader,
    "prepare_optimizer": torch.optim.Optimizer,
    "prepare_scheduler": torch.optim.lr_scheduler.LRScheduler,
}
_ORIGINAL_METHODS = {name: getattr(Accelerator, name) for name in _PREPARED_BY}

Accelerator.__init__.__wrapped__ = accelerator.Accelerator.__init__  # type: ignore[attr-defined]


def _warn_of_kept_gradients(state: GradientState) -> None:
    """Warn once that a result differs from Accelerate's."""
    state.gradients_kept = None
    warn(
        "optimizer.zero_grad() is called before backward in the last micro-batch of an accumulation "
        "cycle. Accelerate would clear the gradients of all earlier micro-batches of the cycle. Here they "
        "count, so losses differ from Accelerate's. To get the same results with both, call "
        "optimizer.zero_grad() after optimizer.step().",
    )


def _refuse_split_layers(model: torch.nn.Module) -> None:
    """Refuse the tensor parallel models of Transformers' Trainer, which would double their loss.

    The Trainer prepares a model that `from_pretrained(distributed_config=...)` sharded with this method.
    It expects `gather` to return one entry per rank, and divides by the size of `tp`. Here, ranks that
    share their samples have one entry.
    """
    size = getattr(model, "tp_size", None) or 1
    if getattr(model, "is_distributed_loading_by_transformers", False) and size > 1:
        raise PrepareError(
            f"Transformers split the layers of {type(model).__name__} over {size} ranks "
            f"(DistributedConfig(tp_size={size})). The drop-in does not train such a model in the "
            "Trainer. Use DistributedConfig(fsdp_size=...) there, or train it in a loop with "
            "accelerator.prepare(model, optimizer, loader), which supports tp_size."
        )
