"""One sequence on several ranks: DeepSpeed's Ulysses (ALST) around Transformers' attention."""

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
    """The ranks of `sp`: attention exchanges heads for tokens, batches are cut along the sequence.

    Ranks of one `sp` group read the same samples; each computes on its part of the tokens.
    """

    def __init__(self, sizes: ParallelismConfig, rank: int) -> None:
        self.size = sizes.size("sp")
        self.index = sizes.coordinates(rank)["sp"]
        self.handler: DeepSpeedSequenceParallelConfig = sizes.sp_handler
        #: Transformers' own attention, and the state of DeepSpeed's module, while it is laid around.
        self._before: tuple[Any, dict[str, Any]] | None = None

    def register(self, model: Any, config: HfDeepSpeedConfig, micro_batch: int | None) -> Any:
        """Lay Ulysses around the model's attention and return DeepSpeed's groups.

        Args:
            micro_batch: samples per rank and forward, where the config has none.
        """
        name = "train_micro_batch_size_per_gpu"
        there = config.get_value(name)
        batch = there if isinstance(there, int) else micro_batch
        if batch is None:
            raise ConfigurationError(
                "sp_size with DeepSpeed needs the batch size beforehand: prepare the loader "
                f"together with the model, or set {name} in the DeepSpeed config."
            )
        if importlib.util.find_spec("transformers") is None:
            raise ConfigurationError(
                "sp_size with DeepSpeed is laid around the attention of Transformers, which is not "
                "installed: pip install transformers, or use the backend fsdp2, which shares the "
                "sequence of any model."
            )
        its: Any = getattr(model, "config", None)
        text = getattr(its, "get_text_config", lambda: its)()
        if any("linear" in kind for kind in getattr(text, "layer_types", None) or ()):
            raise ConfigurationError(
                f"{type(model).__name__} has layers of linear attention, which carry a state along "
                "the sequence; with sp_size each rank would begin it anew. Use sp_size=1."
            )
        heads = getattr(its, "num_attention_heads", None)
        if heads is None or not hasattr(its, "_attn_implementation"):
            raise ConfigurationError(
                f"sp_size with DeepSpeed is for models of Transformers; {type(model).__name__} has "
                "no such config. The backend fsdp2 shares the sequence of any model."
            )
        if heads % self.size:
            raise ConfigurationError(
                f"sp_size={self.size} does not divide the model's {heads} attention heads."
            )
        asked = self.handler.sp_attn_implementation
        if its._attn_implementation != asked:
            raise ConfigurationError(
                f"sp_attn_implementation={asked!r}, and the model computes attention with "
                f"{its._attn_implementation!r}: load it with attn_implementation={asked!r}."
            )
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.close()  # a second model: around the attention as it was, not around the first one's
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
        """Give Transformers its attention back."""
        if self._before is None:
            return
        import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention, groups = self._before
        ALL_ATTENTION_FUNCTIONS[self.handler.sp_attn_implementation] = attention
        vars(state).update(groups)
        self._before = None

    def shard(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's part of each batch, with labels shifted before the cut.

        A batch is a mapping with `input_ids` and `position_ids` of shape (batch, sequence); other
        tensors with that second size are cut, too. `labels` become `shift_labels`, since the label
        of a part's last token is in the next part.
        """
        yield from map(self._part, batches)

    def _part(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise ConfigurationError(
                "With sp_size and DeepSpeed batches are mappings with input_ids; this one is a "
                f"{type(batch).__name__}."
            )
        if "position_ids" not in batch:
            raise ConfigurationError(
                "With sp_size and DeepSpeed each batch needs position_ids, which say where a part "
                "of a sequence lies: torch.arange(length) for each sample, starting anew at each "
                "document of a packed one."
            )
        length = batch["input_ids"].shape[1]
        if length % self.size:
            raise ConfigurationError(
                f"A sequence of {length} tokens cannot be shared by sp_size={self.size} ranks "
                "evenly: pad it."
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
