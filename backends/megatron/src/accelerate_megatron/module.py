"""The models that `prepare` returns, and how they read batches and compute the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from accelerate_core.plugin import ConfigurationError, listing
from accelerate_megatron.engine import Engine
from accelerate_megatron.library import imported

#: Labels with this value are ignored in the loss, as in Transformers.
IGNORED = -100


class CausalLMOutput(Mapping[str, Any]):
    """Loss and logits of a converted model, accessible by attribute, key or index.

    With tensor parallelism, logits are gathered when they are first read. All ranks of the group
    must read them.

    Attributes:
        loss: 0-d, or None without labels.
        logits: batch x sequence x vocabulary.
        local_logits: batch x sequence x this rank's part of the vocabulary, including padding.
    """

    def __init__(
        self,
        loss: torch.Tensor | None,
        local_logits: torch.Tensor | None,
        vocab_size: int = 0,
        logits: torch.Tensor | None = None,
    ) -> None:
        self.loss = loss
        self.local_logits = local_logits
        self._vocab_size = vocab_size
        self._logits = logits

    @property
    def logits(self) -> torch.Tensor | None:
        """The logits of the whole vocabulary, or None if a step doesn't return them."""
        if self._logits is None and self.local_logits is not None:
            gather = imported("tensor_parallel").gather_from_tensor_model_parallel_region
            self._logits = gather(self.local_logits)[..., : self._vocab_size]
        return self._logits

    def __iter__(self) -> Iterator[str]:
        return iter(("logits",) if self.loss is None else ("loss", "logits"))

    def __len__(self) -> int:
        return 1 + (self.loss is not None)

    def __getitem__(self, key: Any) -> Any:
        names = tuple(self)
        name = names[key] if isinstance(key, int) else key
        if name not in names:
            raise KeyError(key)
        return getattr(self, name)


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a GPT model, with the batch dimension first.

    Attributes:
        tokens: batch x sequence.
        positions: batch x sequence.
        mask: batch x 1 x sequence x sequence, True for positions that are not attended to. None is
            a causal mask.
        labels: batch x sequence, already shifted. `IGNORED` is ignored in the loss.
        weights: batch x sequence, weights of the tokens' losses. None weights all equally.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    labels: torch.Tensor | None
    weights: torch.Tensor | None = None


def read_batch(batch: Mapping[str, Any], learned_positions: bool) -> MicroBatch:
    """Read a batch in the format of Transformers (`input_ids`) or megatron (`tokens`).

    In Transformers' format, labels are shifted here. In megatron's format, labels are already the
    next tokens, and `loss_mask` weights their losses.

    Raises:
        ConfigurationError: the batch contains something that a converted model doesn't support.
    """
    known = {"input_ids", "tokens", "attention_mask", "position_ids", "labels", "loss_mask"}
    extra = [name for name, value in batch.items() if name not in known and value is not None]
    if extra or ("input_ids" in batch) == ("tokens" in batch):
        raise ConfigurationError(
            f"The batch has {listing(batch)}, but with megatron it must have either input_ids or "
            f"tokens. Supported keys are {listing(sorted(known))}."
        )
    shifted = "tokens" in batch
    tokens = batch["tokens" if shifted else "input_ids"]
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    given = batch.get("position_ids")
    if given is not None and learned_positions:
        positions = given.expand_as(tokens)
    elif given is not None and not torch.equal(given.expand_as(tokens), positions):
        raise ConfigurationError(
            "position_ids other than 0, 1, 2, ... are not supported with rotary embeddings, for which "
            "megatron computes positions itself. Leave position_ids out. For indexed data, leave "
            "reset_position_ids out."
        )
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if labels is not None and not shifted:
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    weights = None
    if labels is not None and batch.get("loss_mask") is not None:
        weights = batch["loss_mask"].float()
        labels = labels.masked_fill(weights == 0, IGNORED)
    return MicroBatch(tokens, positions, _mask(mask, tokens, shifted), labels, weights)


def _check_tokens(tokens: torch.Tensor, labels: torch.Tensor | None, vocab_size: int) -> None:
    """Check that tokens and labels are in the vocabulary.

    Otherwise tensor parallel ranks would treat them as tokens of another rank. On a CUDA device, an
    asynchronous assertion is used.

    Raises:
        ConfigurationError: a token or label is not in the vocabulary.
    """
    for name, values in (("token", tokens), ("label", labels)):
        if values is None or not values.numel():
            continue
        wrong = (values < 0) | (values >= vocab_size)
        if name == "label":
            wrong &= values != IGNORED
        if values.device.type != "cpu":
            torch._assert_async(~wrong.any())
        elif wrong.any():
            raise ConfigurationError(
                f"The batch has the {name} {int(values[wrong][0])}, but the vocabulary has "
                f"{vocab_size} tokens."
                f"{f' To ignore a label in the loss, set it to {IGNORED}.' if name == 'label' else ''}"
            )


def _mask(mask: torch.Tensor | None, tokens: torch.Tensor, megatrons: bool) -> torch.Tensor | None:
    """Convert a mask of Transformers (1 is attended to) to megatron's (True is not), made causal.

    A mask with four dimensions, batch x 1 x sequence x sequence, is not made causal. In Transformers'
    format, it contains bools (True is attended to) or numbers that are added to scores.
    """
    if mask is None:
        return None
    if mask.dim() == 4 and mask.dtype == torch.bool:
        return mask if megatrons else ~mask
    if mask.dim() == 4 and mask.is_floating_point() and not megatrons:
        return mask < 0
    if mask.dim() != 2:
        raise ConfigurationError(
            f"attention_mask has the shape {list(mask.shape)} and {mask.dtype}. With megatron, it "
            "must be batch x sequence (1 is attended to), or batch x 1 x sequence x sequence with "
            f"{'bools (True is not attended to)' if megatrons else 'bools or numbers added to scores'}."
        )
    size = tokens.size(1)
    future = torch.ones(size, size, dtype=torch.bool, device=tokens.device).triu(1)
    return future | (mask == 0)[:, None, None, :]


def causal_loss(
    logits: torch.Tensor, read: MicroBatch, *, total: bool, items: Any = None
) -> torch.Tensor:
    """Return the cross entropy of logits that are split across tensor parallel ranks.

    Megatron computes it in place, so float32 logits are overwritten.

    Args:
        logits: batch x sequence x this rank's part of the vocabulary.
        read: the batch, with labels.
        total: return the sum over tokens instead of the mean.
        items: divide the sum by this number instead of the number of tokens.
    """
    labels: Any = read.labels
    counted = labels != IGNORED
    loss = imported("tensor_parallel").vocab_parallel_cross_entropy(
        logits.float(), labels.masked_fill(~counted, 0)
    )
    if read.weights is not None:
        counted = counted * read.weights
    summed: torch.Tensor = (loss * counted).sum()
    if total:
        return summed
    if items is None:
        found = counted.sum()
        items = torch.where(found == 0, 1, found)  # in case all labels are ignored
    divided: torch.Tensor = summed / items
    return divided


class MegatronModel(nn.Module):
    """This rank's part of a model that trains with megatron.

    Without a pipeline, it can be called like the original model. With a pipeline, use
    `accelerator.train_step(batch)`.

    Attributes:
        run_step: runs a whole step when the model is called (`forward_runs_step`).
        call: calls the model on one rank. None calls the only chunk.
    """

    run_step: Callable[[Any], Any] | None = None
    call: Callable[..., Any] | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(engine.chunks)
        self._engine = [engine]  # in a list, so that it isn't registered as a submodule

    @property
    def engine(self) -> Engine:
        """The engine of this model."""
        return self._engine[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            ConfigurationError: there is a pipeline, so a single rank cannot call the model.
        """
        if self.run_step is not None:
            return self.run_step(kwargs if not args else args[0])
        engine = self._engine[0]
        if engine.sizes.pp > 1:
            self._refuse()
        engine.called = torch.is_grad_enabled()
        call = self.call or engine.chunks[0]
        return call(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including megatron's buffers."""
        super().zero_grad(set_to_none)
        self.engine.clear()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"The model's layers are on {self.engine.sizes.pp} pipeline ranks, so a single rank "
            "cannot call it. Replace `model(batch)` and `accelerator.backward(loss)` by `loss = "
            "accelerator.train_step(batch).loss`. In evaluation, use accelerator.eval_step(batch)."
        )

    def check(self, batch: Any, training: bool) -> None:
        """Check a batch. Every rank calls this before a step."""

    def run_chunk(self, chunk: nn.Module, batch: Any, keep: bool) -> tuple[Any, Callable[..., Any]]:
        """Run one chunk on one micro-batch.

        Args:
            keep: whether to return logits.

        Returns:
            The output, and a function `(output, total) -> (loss, logits)` for the last stage.
        """
        if isinstance(batch, Mapping):
            output = chunk(**batch)
        else:
            output = chunk(*batch) if isinstance(batch, list | tuple) else chunk(batch)

        def loss(output: Any, total: bool) -> tuple[torch.Tensor, Any]:
            found = output["loss"] if isinstance(output, Mapping) else output
            found = getattr(found, "loss", found)
            if not isinstance(found, torch.Tensor) or found.dim():
                raise ConfigurationError(
                    "train_step needs a model that returns a 0-d loss, or an output with such a loss "
                    "under 'loss'. For other models, call the model and accelerator.backward(loss)."
                )
            return found, None

        return output, loss


class GPT(MegatronModel):
    """A GPT model of megatron-core, converted from Transformers or created by the user's provider.

    Args:
        padding: number of columns that pad this rank's part of the vocabulary.
        skeleton: the original model without weights, for `save_pretrained` of a converted model.
        conversion: how the model was converted, or None for a provider's model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        padding: int = 0,
        skeleton: Any = None,
        conversion: Any = None,
    ) -> None:
        super().__init__(engine)
        self.conversion = conversion
        #: Number of tokens without padding, or 0 if a provider's model doesn't have the attribute.
        self.vocab_size = engine.vocab_size
        self.padding = padding
        self._skeleton = [skeleton]
        embedding = getattr(engine.modules[0], "position_embedding_type", "learned_absolute")
        self._learned_positions = embedding == "learned_absolute"

    @property
    def config(self) -> Any:
        """Transformers' config of a converted model, or else megatron's."""
        skeleton = self._skeleton[0]
        return self.engine.config if skeleton is None else skeleton.config

    def call(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Return loss and logits like Transformers' causal models, as a tuple if requested."""
        if args:
            skeleton = self._skeleton[0]
            names = (
                list(inspect.signature(skeleton.forward).parameters) if skeleton else ["input_ids"]
            )
            if len(args) > len(names):
                raise ConfigurationError(
                    f"The model was called with {len(args)} positional arguments. Pass them by name: "
                    "input_ids=..., attention_mask=..., labels=..."
                )
            kwargs |= dict(zip(names, args, strict=False))
        as_tuple = kwargs.pop("return_dict", None) is False
        kwargs.pop("use_cache", None)
        self.check(kwargs, False)
        batch = read_batch(kwargs, self._learned_positions)
        logits = self._logits(self.chunks[0], batch)
        loss = None
        if batch.labels is not None:
            used = logits.float() if logits.dtype != torch.float32 else logits.clone()
            loss = causal_loss(used, batch, total=False, items=num_items_in_batch)
        output = CausalLMOutput(loss, logits, self.vocab_size)
        if not torch.is_grad_enabled():
            output.logits  # noqa: B018  gather now, while all ranks are here
        return tuple(output.values()) if as_tuple else output

    def check(self, batch: Any, training: bool) -> None:
        """Check a batch.

        Raises:
            ConfigurationError: labels are missing in training, a token is not in the vocabulary, or
                the sequence length is not divisible by the number of ranks that split it.
        """
        if not isinstance(batch, Mapping):
            raise ConfigurationError(
                f"The batch is a {type(batch).__name__}, but with megatron it must be a mapping with "
                "input_ids, attention_mask and labels."
            )
        labels = batch.get("labels")
        if training and labels is None:
            raise ConfigurationError("train_step needs labels in the batch.")
        tokens = batch.get("tokens", batch.get("input_ids"))
        if tokens is None:
            return  # `read_batch` raises the error
        ranks = self.engine.sizes.tp
        length = tokens.size(1)
        if self.engine.config.sequence_parallel and length % ranks:
            raise ConfigurationError(
                f"A sequence length of {length} tokens is not divisible by tp_degree={ranks}, as "
                "sequence_parallelism requires. Pad the sequences, for example with "
                "pad_to_multiple_of of a collator."
            )
        if self.vocab_size:
            _check_tokens(tokens, labels, self.vocab_size)

    def _logits(self, chunk: nn.Module, batch: MicroBatch) -> Any:
        output = chunk(batch.tokens, batch.positions, batch.mask)
        return self._masked(output) if self._is_last(chunk) else output

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.padding:
            return logits
        columns = torch.arange(logits.size(-1), device=logits.device)
        return logits.masked_fill(columns >= logits.size(-1) - self.padding, float("-inf"))

    def _is_last(self, chunk: nn.Module) -> bool:
        module = self.engine.modules[list(self.chunks).index(chunk)]
        return bool(getattr(module, "post_process", True))

    def run_chunk(self, chunk: nn.Module, batch: Any, keep: bool) -> tuple[Any, Callable[..., Any]]:
        """Run one chunk on one micro-batch."""
        read = read_batch(batch, self._learned_positions)

        def loss(logits: torch.Tensor, total: bool) -> tuple[torch.Tensor, Any]:
            kept = logits.detach().clone() if keep else None
            if read.labels is None:
                return logits.new_full((), float("nan")), kept
            return causal_loss(logits, read, total=total), kept

        return self._logits(chunk, read), loss

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write a converted model in Transformers' format.

        Args:
            state_dict: the result of `accelerator.get_state_dict(model)`, called on every rank.

        Raises:
            ConfigurationError: the model was not converted, or `state_dict` is missing.
        """
        skeleton = self._skeleton[0]
        if skeleton is None:
            raise ConfigurationError(
                "save_pretrained only supports models converted from Transformers. Use "
                "accelerator.save_state for this model."
            )
        if state_dict is None:
            raise ConfigurationError(
                "With megatron, save_pretrained needs the weights of all ranks. Call "
                "save_pretrained(directory, state_dict=accelerator.get_state_dict(model), "
                "is_main_process=accelerator.is_main_process)."
            )
        if is_main_process:
            skeleton.save_pretrained(
                save_directory, is_main_process=True, state_dict=dict(state_dict), **options
            )
