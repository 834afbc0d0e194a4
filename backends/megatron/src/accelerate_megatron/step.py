"""Custom training steps: how a script defines the forward and the loss of a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from accelerate_core.plugin import ConfigurationError
from accelerate_megatron.module import IGNORED, read_batch


class AbstractTrainStep(ABC):
    """Base class of a script's own forward step, passed as `custom_train_step_class`.

    Args:
        name: a name for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function `get_batch(iterator)` that returns the inputs of `forward_step`.

        Args:
            megatron_dataset_flag: whether batches come from megatron's own datasets.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function `forward_step(iterator, model)` that returns `(output, loss_func)`.

        `loss_func(output)` returns `(loss, {...})` with a 0-d loss. The second value is ignored.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return a function `loss_func(loss_mask, output)`."""


class GPTTrainStep(AbstractTrainStep):
    """The forward step of GPT models. Parts of it can be replaced.

    Args:
        accelerator: the Accelerator.
        args: the `MegatronLMPlugin`. Its `custom_get_batch_function` and `custom_loss_function`
            replace the methods of this class.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        if args.custom_get_batch_function is not None:
            self.get_batch = args.custom_get_batch_function
        if args.custom_loss_function is not None:
            self.loss_func = args.custom_loss_function

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that returns tokens, labels, loss mask, attention mask and positions."""

        def get_batch(iterator: Iterator[Any]) -> tuple[Any, ...]:
            read = read_batch(next(iterator), learned_positions=True)
            if read.labels is None:
                raise ConfigurationError("The batch has no labels, which training needs.")
            loss_mask = (read.labels != IGNORED).float()
            if read.weights is not None:
                loss_mask = loss_mask * read.weights
            labels = read.labels.clamp(min=0)
            return read.tokens, labels, loss_mask, read.mask, read.positions

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return a function that computes the mean loss over tokens with a label."""

        def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
            loss = (output.float() * loss_mask).sum() / loss_mask.sum()
            return loss, {"lm loss": loss.detach()}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step. The model returns each token's loss."""

        def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(iterator)
            output = model(tokens, positions, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class _Refused:
    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"{type(self).__name__} is not supported. Create BERT and T5 models in a provider "
            "function, and pass a custom_train_step_class that is derived from AbstractTrainStep."
        )


class BertTrainStep(_Refused):
    """Not supported. Create BERT models in a provider function."""


class T5TrainStep(_Refused):
    """Not supported. Create T5 models in a provider function."""


def own_step(accelerator: Any, plugin: Any) -> Callable[..., Any] | None:
    """Return the script's own forward step, or None if it has none."""
    if plugin.custom_train_step_class is not None:
        options = plugin.custom_train_step_kwargs or {}
        made = plugin.custom_train_step_class(accelerator, plugin, **options)
        step: Callable[..., Any] = made.get_forward_step_func()
        return step
    if plugin.custom_get_batch_function is not None or plugin.custom_loss_function is not None:
        return GPTTrainStep(accelerator, plugin).forward_step
    return None
