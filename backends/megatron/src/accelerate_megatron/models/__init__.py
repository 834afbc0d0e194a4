"""Convert Transformers models to megatron-core and back."""

from accelerate_megatron.models.families import (
    Conversion,
    conversion_of,
    export,
    is_config,
    is_convertible,
    load,
    of_config,
    trained_names,
)
from accelerate_megatron.models.weights import parameters_of, reader

__all__ = [
    "Conversion",
    "conversion_of",
    "export",
    "is_config",
    "is_convertible",
    "load",
    "of_config",
    "parameters_of",
    "reader",
    "trained_names",
]
