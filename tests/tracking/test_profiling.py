"""`Accelerator.profile` writes the trace of each rank to the configured directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_core import ProfileKwargs
from accelerate_core.errors import ConfigurationError
from accelerate_tracking.profiler import build_profiler, profile


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def names(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_profiles_without_settings() -> None:
    with profile(ProfileKwargs()) as profiler:
        work()
    assert "aten::mm" in {event.key for event in profiler.key_averages()}


def test_writes_the_trace_of_the_rank(tmp_path: Path) -> None:
    target = tmp_path / "new" / "traces"
    asked = ProfileKwargs(
        output_trace_dir=str(target), activities=["CPU"], record_shapes=True, with_flops=True
    )
    with profile(asked, process_index=3):
        work()
    assert [path.name for path in target.iterdir()] == ["profile_3.json"]
    assert "aten::mm" in names(target / "profile_3.json")


def test_writes_one_trace_per_cycle_of_the_schedule(tmp_path: Path) -> None:
    seen: list[Any] = []
    asked = ProfileKwargs(
        output_trace_dir=str(tmp_path),
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=seen.append,
    )
    with profile(asked) as profiler:
        for _ in range(7):
            work()
            profiler.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "profile_0.json",
        "profile_0_cycle1.json",
    ]
    assert len(seen) == 2
    assert "aten::mm" in names(tmp_path / "profile_0_cycle1.json")


def test_writes_the_trace_when_the_block_raises(tmp_path: Path) -> None:
    def fail() -> None:
        with profile(ProfileKwargs(output_trace_dir=str(tmp_path))):
            work()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "aten::mm" in names(tmp_path / "profile_0.json")


def test_warns_if_the_schedule_never_records(tmp_path: Path) -> None:
    asked = ProfileKwargs(output_trace_dir=str(tmp_path), schedule_option={"wait": 5, "active": 1})
    with pytest.warns(UserWarning, match="reached no active step"), profile(asked):
        work()
    assert list(tmp_path.iterdir()) == []


def test_warns_if_on_trace_ready_has_exported_the_trace(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    asked = ProfileKwargs(
        output_trace_dir=str(tmp_path), on_trace_ready=lambda p: p.export_chrome_trace(str(own))
    )
    with pytest.warns(UserWarning, match="already exported"), profile(asked):
        work()
    assert "aten::mm" in names(own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activities": ["cdua"]}, "has no activity 'cdua'.*Did you mean 'cuda'"),
        ({"schedule_option": {"active": 1, "warmpu": 1}}, "'warmpu'.*Did you mean 'warmup'"),
        ({"schedule_option": {"wait": 1}}, "missing.*'active'.*at least 1"),
    ],
)
def test_invalid_settings_are_named_in_the_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_profiler(ProfileKwargs(**fields))
