"""fp8 training for accelerate-core. Importing this package doesn't import any fp8 library."""

from accelerate_fp8.precision import FP8
from accelerate_fp8.settings import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

__all__ = ["FP8", "AORecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"]
