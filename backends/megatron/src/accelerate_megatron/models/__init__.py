"""Models of Transformers as models of megatron-core, and back."""

from accelerate_megatron.models.families import (
    Conversion,
    conversion_of,
    export,
    is_convertible,
    load,
    trained_names,
)
from accelerate_megatron.models.weights import parameters_of, reader

__all__ = [
    "Conversion",
    "conversion_of",
    "export",
    "is_convertible",
    "load",
    "parameters_of",
    "reader",
    "trained_names",
]
