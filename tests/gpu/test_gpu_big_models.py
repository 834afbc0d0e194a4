"""Models larger than the device: parts on the device, in host memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_big_model.tensors import offload_hook
from accelerate_core.utils import (
    cpu_offload,
    dispatch_model,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))


def place(device: torch.device) -> int | str:
    return "cpu" if device.type == "cpu" else 0


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return inputs, blocks()(inputs)


def test_a_model_can_be_split_over_device_host_and_disk(
    device: torch.device, tmp_path: Path
) -> None:
    inputs, outputs = expected()
    spread = {"0": place(device), "1": place(device), "2": "cpu", "3": "disk"}
    model = dispatch_model(blocks(), spread, main_device=place(device), offload_dir=tmp_path)
    with torch.no_grad():
        made = model(inputs)
    torch.testing.assert_close(made.cpu(), outputs, rtol=1e-4, atol=1e-5)
    assert next(model[0].parameters()).device == device
    assert next(model[3].parameters()).device.type == "meta"


def test_an_empty_model_is_loaded_from_a_checkpoint(device: torch.device, tmp_path: Path) -> None:
    inputs, outputs = expected()
    save_file(blocks().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = blocks()
    one = 256 * 256 * 4 + 256 * 4
    memory = {place(device): 2 * one + 1024, "cpu": 100 * one}
    if device.type == "cpu":
        memory = {"cpu": 100 * one}
    spread = infer_auto_device_map(model, memory)
    made = load_checkpoint_and_dispatch(model, tmp_path, device_map=spread)
    with torch.no_grad():
        torch.testing.assert_close(made(inputs).cpu(), outputs, rtol=1e-4, atol=1e-5)
    if device.type != "cpu":
        assert set(spread.values()) == {0, "cpu"}


def test_cpu_offload_moves_a_model_to_the_device_layer_by_layer(device: torch.device) -> None:
    inputs, outputs = expected()
    model = cpu_offload(blocks(), execution_device=device)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).cpu(), outputs, rtol=1e-4, atol=1e-5)
    assert next(model[0].parameters()).device.type == "meta"


def test_layers_on_disk_are_prefetched_to_the_device(device: torch.device, tmp_path: Path) -> None:
    inputs, outputs = expected()
    save_file(blocks().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = blocks()
    load_checkpoint_in_model(model, tmp_path, device_map={"": "disk"})
    made = dispatch_model(model, {"": "disk"}, main_device=place(device))
    with torch.no_grad():
        for _ in range(3):  # from the second time on, the order is known
            torch.testing.assert_close(made(inputs).cpu(), outputs, rtol=1e-4, atol=1e-5)
    begun = offload_hook(made[0][0]).ahead._begun
    assert begun
    for one in begun.values():
        read = one.result(timeout=60) if one else None
        if read is not None or device.type != "cpu":  # on the CPU, cached tensors are not awaited
            ready, _ = read
            assert {tensor.device for tensor in ready.values()} == {device}


@pytest.mark.device
def test_balanced_memory_leaves_a_tenth_of_a_single_accelerator_free(device: torch.device) -> None:
    free = get_max_memory()
    if sum(isinstance(key, int) for key in free) != 1:
        pytest.skip("this machine does not have exactly one accelerator")
    assert get_balanced_memory(blocks())[0] == pytest.approx(0.9 * free[0], rel=0.02)
    assert get_balanced_memory(blocks(), {0: 1000}) == {0: 1000}
