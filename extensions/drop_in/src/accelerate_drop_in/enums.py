"""Accelerate's enumerations that only user code and config files use."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import ClassVar, Literal

from accelerate_core.config.enums import OpenEnum, ShownWithClass


class ComputeEnvironment(ShownWithClass):
    """Where the job runs, as written in config files."""

    _known: ClassVar[list[str]] = ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]
    _upper: ClassVar[bool] = True


class DynamoBackend(OpenEnum):
    """A compiler for `torch.compile`. Any name that torch accepts can be used; `NO` means none."""

    _known: ClassVar[list[str]] = ["NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS", "TVM"]
    _upper: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        # A plugin has the compiler's name in lower case, or None for no compiler.
        return (other is None and str.__eq__(self, "NO")) or (
            isinstance(other, str) and str.__eq__(self, str.upper(other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


#: Kinds of activity that a profiler records.
ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


class RNGType(OpenEnum):
    """A random number generator that can be synchronised between ranks.

    The type of any torch device is a valid value, too.
    """

    _known: ClassVar[list[str]] = ["torch", "generator"]


class SageMakerDistributedType(ShownWithClass):
    """How a SageMaker job is distributed, as written in config files."""

    _known: ClassVar[list[str]] = ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"]
    _upper: ClassVar[bool] = True


class EnumWithContains(EnumMeta):
    """A metaclass for enumerations that support `"a" in Words`."""

    def __contains__(cls, item: object) -> bool:
        return item in cls._value2member_map_


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration whose members are printed as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values."""
        return [str(one) for one in cls]
