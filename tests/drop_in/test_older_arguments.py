"""Arguments of earlier versions of Accelerate are replaced by current ones, with a warning."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_core import DataLoaderConfiguration
from accelerate_core.errors import ConfigurationError
from accelerate_drop_in.accelerator import Accelerator
from accelerate_drop_in.older_arguments import TorchTensorParallelPlugin, replace_older


@pytest.mark.parametrize(
    ("older", "name", "current"),
    [
        ({"fp16": True}, "mixed_precision", "fp16"),
        ({"fp16": False}, "mixed_precision", "no"),
        ({"fp16": True, "mixed_precision": "bf16"}, "mixed_precision", "bf16"),
        ({"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=4)}, "tp_size", 4),
        ({"even_batches": False}, "even_batches", False),
        ({"dispatch_batches": True}, "dispatch_batches", True),
    ],
)
def test_older_arguments_are_replaced_with_a_warning(
    older: dict[str, Any], name: str, current: object
) -> None:
    given = dict(older)
    with pytest.warns(
        FutureWarning, match=rf"Accelerator\({next(iter(older))}=...\) is deprecated"
    ):
        replace_older(given)
    for one in ("dataloader_config", "parallelism_config"):
        given |= vars(given.pop(one)) if one in given else {}
    assert given[name] == current


def test_older_arguments_reach_the_accelerator() -> None:
    with pytest.warns(FutureWarning, match="even_batches"):
        accelerator = Accelerator(cpu=True, even_batches=False)
    assert accelerator.even_batches is False
    accelerator.end_training()


def test_contradicting_and_wrong_older_arguments_are_refused() -> None:
    both = {"even_batches": True, "dataloader_config": DataLoaderConfiguration()}
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigurationError, match="'even_batches' and a"),
    ):
        replace_older(both)
    with pytest.raises(ConfigurationError, match="takes a TorchTensorParallelPlugin, not int"):
        replace_older({"torch_tp_plugin": 4})


def test_argument_given_by_position_and_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"also got by name: 'mixed_precision'"):
        Accelerator(True, None, "no", mixed_precision="bf16")
