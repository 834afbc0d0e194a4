"""Precisions: what `mixed_precision` means. Each is a plugin; these four are built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_core.contract.members import PreparePlanView
    from accelerate_core.contract.view import AcceleratorView


class Precision:
    """Base of a precision plugin.

    A subclass states how forward is entered (`autocast`), whether the loss is
    scaled (`scaler`), and may implement stage hooks such as `convert`, and broadcast hooks:
    `on_save(accelerator, directory)` and `on_load` keep what it has beside the models' state
    (scaling factors, say) in a subdirectory of a checkpoint that is its own. Every rank is
    called; what differs between ranks goes into files that have the rank in their name.

    It is made with `settings`, an instance of the plugin's `Settings` (None without such a class), and
    `handlers`, the kwargs handlers that were given for it.
    """

    name: ClassVar[str]
    #: Of the contract it was written for; every plugin says its own.
    api_version: ClassVar[tuple[int, int]]
    #: What this precision needs of a backend: words of `contract.capabilities.NEEDS`. An instance
    #: may have its own.
    needs: frozenset[str] = frozenset()
    #: `mesh` (dimensions it runs with, or None for all) and `compile`.
    supports: Mapping[str, Any] = {}
    #: dtype of `torch.autocast`; None enters no autocast.
    dtype: ClassVar[torch.dtype | None] = None
    #: Settings class, made with `settings`: environment, config file, `kwargs_handlers`.
    Settings: ClassVar[type[object] | None] = None
    #: Classes of `kwargs_handlers` this precision takes, besides `Settings`: those that were given
    #: are its second argument.
    handlers: ClassVar[tuple[type, ...]] = ()

    def __init__(self, settings: Any = None, handlers: Sequence[object] = ()) -> None:
        self.settings = settings
        self.given_handlers = tuple(handlers)

    @property
    def mixes(self) -> bool:
        """Whether forward runs inside `autocast`."""
        return self.dtype is not None or type(self).autocast is not Precision.autocast

    def check(self, accelerator: AcceleratorView) -> None:
        """Refuse a device or a setup this precision cannot run on, with the way out in the text.

        `accelerator` has its device and ranks, and nothing prepared yet.
        """

    def prepare(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Change the objects of one `prepare` call: replace an optimizer, say.

        Called after the stages and before the backend; parameters that were replaced are rebound by
        name afterwards (`plan.rename` says new names).
        """

    def scaler(
        self, accelerator: AcceleratorView, options: dict[str, Any]
    ) -> torch.amp.GradScaler | None:
        """Return a gradient scaler, None where losses are not scaled.

        `options`: what the script's `GradScalerKwargs` says.
        """
        return None

    def autocast(
        self, accelerator: AcceleratorView, model: torch.nn.Module | None, options: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """Return the context of a forward of `model`, None where the script enters it by itself.

        Args:
            options: `enabled` and `cache_enabled`.
        """
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(accelerator.device.type, dtype=self.dtype, **options)

    def clip_grad(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> torch.Tensor | None:
        """Clip gradients by their norm or element by element, as the hook of that name says.

        A library whose gradients are no plain tensors has its own way. A backend that clips by itself
        does not ask.

        `max_norm`: the largest norm that is left as it is, None to clip by value.
        `norm_type`: which norm: 2 is the Euclidean one.
        `clip_value`: the largest absolute value of an element, None to clip by norm.
        """
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return None
        assert max_norm is not None  # one of both is given
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def recompute(self, accelerator: AcceleratorView) -> Callable[..., Any] | None:
        """Return what stands for `torch.utils.checkpoint.checkpoint`, None where that will do.

        Whoever checkpoints activations asks, and calls `recompute(function, *args, **kwargs)` in
        forward: it returns what the function does and calls it again in backward. A format whose
        scaling factors move in forward has to know which of both it is in.
        """
        return None

    @property
    def compute_dtype(self) -> torch.dtype:
        """What layers compute in; nobody looks a precision's name up."""
        return torch.float32 if self.dtype is None else self.dtype

    def plain_state(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state as that of the unconverted model: its keys and dtypes, and plain
        strided tensors that can be read without this precision's library.
        """
        return state


class FullPrecision(Precision):
    """Everything as it is."""

    name = "no"
    api_version = API_VERSION


class Float16(Precision):
    """fp16 autocast with a `torch.amp.GradScaler`."""

    name = "fp16"
    api_version = API_VERSION
    needs = frozenset({"autocast", "loss_scaling"})
    dtype = torch.float16

    def scaler(
        self, accelerator: AcceleratorView, options: dict[str, Any]
    ) -> torch.amp.GradScaler | None:
        """Return torch's scaler for the device."""
        return torch.amp.GradScaler(accelerator.device.type, **options)


class BFloat16(Precision):
    """bf16 autocast."""

    name = "bf16"
    api_version = API_VERSION
    needs = frozenset({"autocast"})
    dtype = torch.bfloat16

    def check(self, accelerator: AcceleratorView) -> None:
        """Refuse CUDA devices that have no bf16 at all."""
        device = accelerator.device
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=True):
            raise ConfigurationError(
                f"{torch.cuda.get_device_name(device)} has no bfloat16; use mixed_precision='fp16' or 'no'."
            )


class DowncastBFloat16(BFloat16):
    """bf16 autocast whose models hold their floating buffers and parameters in bf16 too."""

    name = "downcast_bf16"
    needs = frozenset({"autocast", "parameters"})

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cast floating point parameters and buffers to bf16."""
        return model.to(torch.bfloat16)
