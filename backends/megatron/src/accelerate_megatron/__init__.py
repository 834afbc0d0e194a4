"""Megatron for accelerate-core. Importing this package doesn't import megatron."""

from accelerate_megatron.backend import MegatronBackend
from accelerate_megatron.data import MegatronLMDummyDataLoader, build_datasets
from accelerate_megatron.models.norms import layer_spec
from accelerate_megatron.scheduler import MegatronLMDummyScheduler
from accelerate_megatron.settings import MegatronLMPlugin

__all__ = [
    "MegatronBackend",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "build_datasets",
    "layer_spec",
]
