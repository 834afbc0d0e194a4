"""A model whose layers are on disk can be saved into the folder that they are read from."""

from __future__ import annotations

import copy
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_core import Accelerator
from accelerate_core.errors import CheckpointError
from accelerate_core.utils import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_module,
)

#: The first layer is in memory. The last two layers share a weight.
MAP = {"0": "cpu", "1": "disk", "2": "disk", "3": "disk"}
INPUT = torch.linspace(-1, 1, 3 * 32).reshape(3, 32)


def layers(width: int = 32, count: int = 4) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    model[-1].weight = model[-2].weight
    return model.eval()


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return layers()


def load(folder: Path, device_map: dict[str, str] = MAP) -> nn.Module:
    with init_empty_weights():
        empty = layers()
    return load_checkpoint_and_dispatch(empty, folder, device_map=device_map)


def answer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(INPUT)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("second", ["5KB", "10GB"])
@pytest.mark.parametrize("first", ["5KB", "10GB"])
@pytest.mark.parametrize("used", [False, True])
def test_model_is_saved_over_the_files_that_it_is_read_from(
    model: nn.Module, tmp_path: Path, used: bool, first: str, second: str, safe: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path, first, safe)
    loaded = load(tmp_path)
    if used:
        answer(loaded)
    with torch.no_grad():
        for one in (model, loaded):
            one[0].bias.add_(1)
    for safely in (safe, not safe, safe):
        accelerator.save_model(loaded, tmp_path, second, safely)
        assert torch.equal(answer(loaded), answer(model))
        assert torch.equal(answer(load(tmp_path, {"": "cpu"})), answer(model))
        assert torch.equal(answer(copy.deepcopy(loaded)), answer(model))
    dispatch_model(loaded, MAP | {"1": "cpu"})
    assert torch.equal(answer(loaded), answer(model))
    remove_hook_from_module(loaded, recurse=True)
    assert torch.equal(answer(loaded), answer(model))


def test_model_saved_elsewhere_is_still_read_from_its_own_files(
    model: nn.Module, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    accelerator.save_model(loaded, tmp_path / "second")
    for file in (tmp_path / "second").iterdir():
        file.unlink()
    assert torch.equal(answer(loaded), answer(model))


def test_files_replaced_by_another_model_are_refused(model: nn.Module, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    loaded = load(tmp_path)
    answer(loaded)
    accelerator.save_model(layers(), tmp_path)
    with pytest.raises(CheckpointError, match="has changed since"):
        accelerator.save_model(loaded, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@contextmanager
def address_space_limited_to(more: int) -> Iterator[None]:
    """Allow this process to map only `more` bytes in addition to what it has mapped now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("safe", [True, False])
def test_saving_needs_memory_for_one_shard_only(tmp_path: Path, safe: bool) -> None:
    width, count = 2048, 8  # 16 MiB per layer
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    accelerator.save_model(model, tmp_path, "20MB", safe)
    with init_empty_weights():
        loaded = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    load_checkpoint_and_dispatch(loaded, tmp_path, device_map={"": "disk"})
    x = torch.ones(1, width)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    # `model` must stay alive, because its freed memory could be used in addition to the limit.
    with address_space_limited_to(80 << 20):
        accelerator.save_model(loaded, tmp_path, "20MB", safe)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
