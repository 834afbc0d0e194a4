"""Split a sequence over several ranks with DeepSpeed's Ulysses (ALST) in Transformers' attention."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelerate_core.plugin import ConfigurationError, ParallelismConfig
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.settings import DeepSpeedSequenceParallelConfig


class TransformersUlysses:
    """Ulysses for Transformers models.

    The ranks of an `sp` group read the same samples, and each computes with its part of the tokens.
    Around attention, ranks exchange heads for tokens.
    """

    def __init__(self, sizes: ParallelismConfig, rank: int) -> None:
        self.size = sizes.size("sp")
        self.index = sizes.coordinates(rank)["sp"]
        self.handler: DeepSpeedSequenceParallelConfig = sizes.sp_handler
        #: Transformers' own attention and the state of DeepSpeed's module, while they are replaced.
        self._before: tuple[Any, dict[str, Any]] | None = None

    def register(self, model: Any, config: HfDeepSpeedConfig, micro_batch: int | None) -> Any:
        """Replace the model's attention by Ulysses, and return DeepSpeed's groups.

        Args:
            micro_batch: samples per rank and forward, if the config doesn't have it.

        Raises:
            ConfigurationError: the model is not supported, or the batch size is unknown.
        """
        name = "train_micro_batch_size_per_gpu"
        there = config.get_value(name)
        batch = there if isinstance(there, int) else micro_batch
        if batch is None:
            raise ConfigurationError(
                f"sp_size={self.size} with DeepSpeed needs the batch size in advance. Prepare the "
                f"loader together with the model, or set {name} in the DeepSpeed config."
            )
        if importlib.util.find_spec("transformers") is None:
            raise ConfigurationError(
                f"sp_size={self.size} with DeepSpeed replaces the attention of Transformers, which "
                "is not installed. Run: pip install transformers. Or use the backend fsdp2, which "
                "supports any model."
            )
        its: Any = getattr(model, "config", None)
        text = getattr(its, "get_text_config", lambda: its)()
        if any("linear" in kind for kind in getattr(text, "layer_types", None) or ()):
            raise ConfigurationError(
                f"{type(model).__name__} has layers with linear attention, which carry a state along "
                f"the sequence. With sp_size={self.size}, the state would start over on each rank. "
                "Use sp_size=1."
            )
        heads = getattr(its, "num_attention_heads", None)
        if heads is None or not hasattr(its, "_attn_implementation"):
            raise ConfigurationError(
                f"sp_size={self.size} with DeepSpeed only supports Transformers models, and "
                f"{type(model).__name__} is not one. Use the backend fsdp2, which supports any model."
            )
        if heads % self.size:
            raise ConfigurationError(
                f"The model's number of attention heads, {heads}, is not divisible by "
                f"sp_size={self.size}."
            )
        asked = self.handler.sp_attn_implementation
        if its._attn_implementation != asked:
            raise ConfigurationError(
                f"sp_attn_implementation={asked!r}, but the model uses "
                f"{its._attn_implementation!r}. Load it with attn_implementation={asked!r}."
            )
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.close()  # for a second model, restore the original attention first
        groups = {
            name: copy.copy(value)
            for name, value in vars(state).items()
            if name.startswith(("_SEQUENCE", "_DATA"))
        }
        self._before = ALL_ATTENTION_FUNCTIONS[asked], groups
        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=asked,
            sequence_parallel_size=self.size,
            micro_batch_size=batch,
            seq_length=self.handler.sp_seq_length,
            seq_length_is_variable=self.handler.sp_seq_length_is_variable,
        )

    def close(self) -> None:
        """Restore Transformers' own attention."""
        if self._before is None:
            return
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention, groups = self._before
        ALL_ATTENTION_FUNCTIONS[self.handler.sp_attn_implementation] = attention
        vars(state).update(groups)
        self._before = None

    def shard(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's part of each batch.

        A batch is a mapping with `input_ids` and `position_ids` of shape (batch, sequence). Other
        tensors with the same size in dimension 1 are split too. `labels` are shifted before the
        split and become `shift_labels`, because the label of a part's last token is in the next
        part.
        """
        yield from map(self._part, batches)

    def _part(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise ConfigurationError(
                "With sp_size and DeepSpeed, each batch must be a mapping with input_ids, not a "
                f"{type(batch).__name__}."
            )
        if "position_ids" not in batch:
            raise ConfigurationError(
                "With sp_size and DeepSpeed, each batch needs position_ids, which give the position "
                "of each token. Use torch.arange(length) for each sample. If samples contain several "
                "documents, start at 0 for each document."
            )
        length = batch["input_ids"].shape[1]
        if length % self.size:
            raise ConfigurationError(
                f"A sequence length of {length} tokens is not divisible by sp_size={self.size}. Pad "
                "the sequences."
            )
        found = dict(batch)
        if "labels" in found:
            labels = torch.nn.functional.pad(found.pop("labels"), (0, 1), value=-100)
            found["shift_labels"] = labels[..., 1:].contiguous()
        each = length // self.size
        here = slice(each * self.index, each * (self.index + 1))
        return {
            name: value[:, here].contiguous()
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
            else value
            for name, value in found.items()
        }
