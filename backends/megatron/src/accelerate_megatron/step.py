"""How one micro-batch is run and its loss computed, where a script says so itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from accelerate_core.plugin import ConfigurationError
from accelerate_megatron.module import IGNORED, read_batch


class AbstractTrainStep(ABC):
    """A forward step of a script's own, given as `custom_train_step_class`.

    Args:
        name: for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return `get_batch(iterator)`, which gives what `forward_step` needs of a micro-batch.

        Args:
            megatron_dataset_flag: batches are those of megatron's own datasets.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return `forward_step(iterator, model)` -> (output, `loss_func(output)`).

        `loss_func` returns the loss, 0-d, and whatever else: `(loss, {...})`.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return `loss_func(loss_mask, output)`."""


class GPTTrainStep(AbstractTrainStep):
    """The step of GPT models, to be changed in part.

    Args:
        accelerator: the Accelerator.
        args: the `MegatronLMPlugin`, whose `custom_get_batch_function` and
            `custom_loss_function` are used.
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
        """Return tokens, labels, loss mask, attention mask and positions of a micro-batch."""

        def get_batch(iterator: Iterator[Any]) -> tuple[Any, ...]:
            read = read_batch(next(iterator), learned_positions=True)
            if read.labels is None:
                raise ConfigurationError("The batch has no labels.")
            loss_mask = (read.labels != IGNORED).float()
            if read.weights is not None:
                loss_mask = loss_mask * read.weights
            labels = read.labels.clamp(min=0)
            return read.tokens, labels, loss_mask, read.mask, read.positions

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the mean over tokens that count, of each token's loss."""

        def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, dict[str, Any]]:
            loss = (output.float() * loss_mask).sum() / loss_mask.sum()
            return loss, {"lm loss": loss.detach()}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step: the model gives each token's loss."""

        def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(iterator)
            output = model(tokens, positions, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class _Refused:
    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"{type(self).__name__} is not offered: BERT and T5 models come from a provider, with a "
            "custom_train_step_class derived from AbstractTrainStep."
        )


class BertTrainStep(_Refused):
    """Not offered: BERT models come from a provider."""


class T5TrainStep(_Refused):
    """Not offered: T5 models come from a provider."""


def own_step(accelerator: Any, plugin: Any) -> Callable[..., Any] | None:
    """Return the forward step that the script has given, None if it has not."""
    if plugin.custom_train_step_class is not None:
        options = plugin.custom_train_step_kwargs or {}
        made = plugin.custom_train_step_class(accelerator, plugin, **options)
        step: Callable[..., Any] = made.get_forward_step_func()
        return step
    if plugin.custom_get_batch_function is not None or plugin.custom_loss_function is not None:
        return GPTTrainStep(accelerator, plugin).forward_step
    return None
