"""Models are placed where Hugging Face Accelerate 1.15 places them.

`maps.json` is what `maps.py` recorded with the original.
"""

from __future__ import annotations

import json
from pathlib import Path

import maps
import pytest

from accelerate_core.utils import check_device_map, get_balanced_memory, infer_auto_device_map

RECORDED = json.loads(Path(maps.__file__).with_suffix(".json").read_text())
#: Models of which some maps differ, with the reason.
DIFFERENT = {
    "block's buffer": "buffers of a module that is split have a device; there they have none",
    "declared": "the model's own `_no_split_modules` are not split",
    "tied thrice": "buffers of what is tied to an offloaded module count as offloaded, too",
}


def device_map(line: str) -> dict[str, str]:
    return dict(entry.split("=") for entry in line.split() if entry != "warns")


@pytest.mark.parametrize("name", maps.MODELS)
def test_a_model_is_placed_as_by_the_original(name: str) -> None:
    found = maps.run(name, infer_auto_device_map, get_balanced_memory)
    assert found.keys() == RECORDED[name].keys()
    for case, line in found.items():
        if not case.startswith("balanced"):
            check_device_map(maps.MODELS[name](), device_map(line))
    # Where the original fails, any map will do.
    wrong = {
        case: (line, found[case])
        for case, line in RECORDED[name].items()
        if line != found[case] and "Error" not in line
    }
    assert bool(wrong) == (name in DIFFERENT), wrong
