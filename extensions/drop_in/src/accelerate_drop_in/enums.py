"""Enumerations that only user code and config files speak of."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import ClassVar, Literal

from accelerate_core.config.enums import OpenEnum, ShownWithClass


class ComputeEnvironment(ShownWithClass):
    """Where the job runs, as written in config files."""

    _known: ClassVar[list[str]] = ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]
    _upper: ClassVar[bool] = True


class DynamoBackend(OpenEnum):
    """A compiler of `torch.compile`; any name it knows may be used, `NO` is none."""

    _known: ClassVar[list[str]] = ["NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS", "TVM"]
    _upper: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        # A plugin has the compiler's own name here, or None for none.
        return (other is None and str.__eq__(self, "NO")) or (
            isinstance(other, str) and str.__eq__(self, str.upper(other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


#: Kinds of work that a profiler looks at.
ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


class RNGType(OpenEnum):
    """A random number generator that can be synchronised between ranks.

    Besides these two, the type of any device torch knows is one.
    """

    _known: ClassVar[list[str]] = ["torch", "generator"]


class SageMakerDistributedType(ShownWithClass):
    """How a SageMaker job is spread, as written in config files."""

    _known: ClassVar[list[str]] = ["NO", "DATA_PARALLEL", "MODEL_PARALLEL"]
    _upper: ClassVar[bool] = True


class EnumWithContains(EnumMeta):
    """A class of enumerations in which values can be looked for: `"a" in Words`."""

    def __contains__(cls, item: object) -> bool:
        return item in cls._value2member_map_


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration whose members are written as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values."""
        return [str(one) for one in cls]
