"""megatron-core's indexed datasets, which are not offered yet."""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate_core.errors import ConfigurationError


class MegatronLMDummyDataLoader:
    """Not offered yet: holds the place of a loader of megatron-core's indexed datasets."""

    def __init__(self, **dataset_kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader is not offered yet: pass prepare a DataLoader of torch's; a "
            "GPTDataset of megatron-core's (megatron.core.datasets) may be what it reads."
        )
