"""`Precision`, the base class of precision plugins, and the four built-in precisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    from accelerate_core.contract.members import PreparePlanView
    from accelerate_core.contract.view import AcceleratorView, RuntimeView


class Precision:
    """Base class of precision plugins.

    A subclass defines the context of a forward pass (`autocast`) and whether the loss is scaled
    (`scaler`). It may implement stage hooks such as `convert`, and broadcast hooks. For state that is not
    part of the model, such as scaling factors, implement `on_save(accelerator, directory)` and `on_load`,
    which get a separate subdirectory of each checkpoint. They are called on every rank; if the state
    differs between ranks, put the rank into the file names.

    A precision is constructed with `settings`, an instance of the plugin's `Settings` (None if it has no
    such class), and `handlers`, the kwargs handlers that the script passed for it.
    """

    name: ClassVar[str]
    #: Version of the contract that it was written for. Every plugin declares this itself.
    api_version: ClassVar[tuple[int, int]]
    #: What this precision needs from a backend, as words of `contract.capabilities.NEEDS`. If it
    #: depends on the settings, set it in `__init__`.
    needs: frozenset[str] = frozenset()
    #: `mesh` (the mesh dimensions it works with, or None for all) and `compile`.
    supports: Mapping[str, Any] = {}
    #: dtype for `torch.autocast`; None means no autocast.
    dtype: ClassVar[torch.dtype | None] = None
    #: Settings class, declared with `settings`. Its values come from the environment, the config file and
    #: `kwargs_handlers`.
    Settings: ClassVar[type[object] | None] = None
    #: Classes of `kwargs_handlers` that this precision takes in addition to `Settings`. The
    #: constructor gets them as its second argument.
    handlers: ClassVar[tuple[type, ...]] = ()

    def __init__(self, settings: Any = None, handlers: Sequence[object] = ()) -> None:
        self.settings = settings
        self.given_handlers = tuple(handlers)

    @property
    def mixes(self) -> bool:
        """Whether forward runs inside `autocast`."""
        return self.dtype is not None or type(self).autocast is not Precision.autocast

    def check(self, runtime: RuntimeView) -> None:
        """Raise an error if this precision cannot run on the device or with the setup.

        Say in the message what the user can do instead.

        * `runtime`: the setup, the ranks and the device.
        """

    def prepare(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Change the objects of one `prepare` call, for example to replace an optimizer.

        Called after the stages and before the backend. Optimizers are then rebound to replaced parameters
        by name; report new names with `plan.rename`.
        """

    def scaler(self, runtime: RuntimeView, options: dict[str, Any]) -> torch.amp.GradScaler | None:
        """Return a gradient scaler, or None if losses are not scaled.

        * `runtime`: the setup, the ranks and the device.
        * `options`: the fields of the script's `GradScalerKwargs`.
        """
        return None

    def autocast(
        self, accelerator: AcceleratorView, model: torch.nn.Module | None, options: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """Return the context of a forward pass.

        * `model`: the model, or None if the script calls `accelerator.autocast()` itself.
        * `options`: `enabled` and `cache_enabled`.
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
        """Clip gradients by their norm or element by element, like the hook of the same name.

        Override this if gradients are not plain tensors. A backend with its own clipping doesn't call it.

        * `max_norm`: the largest norm that is not clipped, or None to clip by value.
        * `norm_type`: the kind of norm, such as 2 for the Euclidean norm.
        * `clip_value`: the largest absolute value of an element, or None to clip by norm.
        """
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return None
        assert max_norm is not None  # exactly one of the two is given
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def recompute(self, accelerator: AcceleratorView) -> Callable[..., Any] | None:
        """Return a replacement for `torch.utils.checkpoint.checkpoint`, or None if none is needed.

        Backends call the result as `recompute(function, *args, **kwargs)` in forward. It must return the
        result of the function and call it again in backward. A format that updates scaling factors in
        forward needs this, to distinguish the two calls.
        """
        return None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that layers compute in."""
        return torch.float32 if self.dtype is None else self.dtype

    def plain_state(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state in the form of the unconverted model.

        It has the original keys and dtypes, and plain strided tensors that can be read without this
        precision's library.
        """
        return state


class FullPrecision(Precision):
    """Full precision: nothing is changed."""

    name = "no"
    api_version = API_VERSION


class Float16(Precision):
    """fp16 autocast with a `torch.amp.GradScaler`."""

    name = "fp16"
    api_version = API_VERSION
    needs = frozenset({"autocast", "loss_scaling"})
    dtype = torch.float16

    def scaler(self, runtime: RuntimeView, options: dict[str, Any]) -> torch.amp.GradScaler | None:
        """Return torch's scaler for the device."""
        return torch.amp.GradScaler(runtime.device.type, **options)


class BFloat16(Precision):
    """bf16 autocast."""

    name = "bf16"
    api_version = API_VERSION
    needs = frozenset({"autocast"})
    dtype = torch.bfloat16

    def check(self, runtime: RuntimeView) -> None:
        """Raise an error for devices whose module says that they lack bf16, even emulated."""
        device = runtime.device
        supported = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
        if supported is not None and not supported():
            raise ConfigurationError(
                f"This {device.type} device lacks bfloat16; use mixed_precision='fp16' or 'no'."
            )


class DowncastBFloat16(BFloat16):
    """bf16 autocast that also converts floating point parameters and buffers of models to bf16."""

    name = "downcast_bf16"
    needs = frozenset({"autocast", "parameters"})

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cast floating point parameters and buffers to bf16."""
        return model.to(torch.bfloat16)
