"""Device maps equal those of Hugging Face Accelerate 1.15, which `maps.py` recorded in `maps.json`."""

from __future__ import annotations

import json
from pathlib import Path

import maps
import pytest

from accelerate_core.utils import check_device_map, get_balanced_memory, infer_auto_device_map

RECORDED = json.loads(Path(maps.__file__).with_suffix(".json").read_text())
#: Models for which some maps differ, with the reason.
DIFFERENT = {
    "block's buffer": "only here do buffers of a split module have a device",
    "declared": "only here is the model's own `_no_split_modules` used",
    "tied thrice": "only here do buffers tied to an offloaded module count as offloaded",
}


def device_map(line: str) -> dict[str, str]:
    return dict(entry.split("=") for entry in line.split() if entry != "warns")


@pytest.mark.parametrize("name", maps.MODELS)
def test_device_maps_equal_those_of_accelerate(name: str) -> None:
    found = maps.run(name, infer_auto_device_map, get_balanced_memory)
    assert found.keys() == RECORDED[name].keys()
    for case, line in found.items():
        if not case.startswith("balanced"):
            check_device_map(maps.MODELS[name](), device_map(line))
    # Any map is fine where Accelerate fails.
    wrong = {
        case: (line, found[case])
        for case, line in RECORDED[name].items()
        if line != found[case] and "Error" not in line
    }
    assert bool(wrong) == (name in DIFFERENT), wrong
