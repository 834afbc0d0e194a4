"""A warning names the line of the script that caused it, however deep the call stack."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_core import Accelerator, ProfileKwargs
from accelerate_core.contract.capabilities import check_words
from accelerate_core.data.prepare_loader import override_even_batches
from accelerate_core.errors import warn
from accelerate_tracking import GeneralTracker, TrackerHub

ROOT = Path(__file__).parents[2]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):
        return iter(range(4))


class Picky(GeneralTracker):
    """Fails immediately."""

    name = "picky"
    requires_logging_directory = False

    def __init__(self, project: str = "") -> None:
        raise PermissionError("log in first")


class OfNextYear:
    api_version = (1, 9)


def older_argument(patch: pytest.MonkeyPatch, folder: Path) -> None:
    Accelerator(cpu=True, split_batches=False).end_training()


def near_miss(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEP", "2")
    Accelerator(cpu=True).end_training()


def disabled_plugin(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("ACCELERATE_DISABLED_PLUGINS", "nosuch")
    Accelerator(cpu=True).end_training()


def forgotten_parameters(patch: pytest.MonkeyPatch, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Accelerator(cpu=True) as accelerator:
        accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def note(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with Accelerator(cpu=True) as accelerator:
        accelerator.warn_once("noted")


def schedule(patch: pytest.MonkeyPatch, folder: Path) -> None:
    asked = ProfileKwargs(output_trace_dir=str(folder), schedule_option={"wait": 5, "active": 1})
    with Accelerator(cpu=True) as accelerator, accelerator.profile(asked):
        torch.ones(2).sum()


def running_stream(patch: pytest.MonkeyPatch, folder: Path) -> None:
    loader = torch.utils.data.DataLoader(Stream(), num_workers=1, persistent_workers=True)
    with Accelerator(cpu=True) as accelerator:
        prepared = [accelerator.prepare(loader)]
    with override_even_batches(prepared, False):
        pass


def newer_word(patch: pytest.MonkeyPatch, folder: Path) -> None:
    check_words(OfNextYear, ["later"], ["now"], "its declaration")


def tracker_that_raises(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with Accelerator(cpu=True, log_with=Picky) as accelerator:
        accelerator.init_trackers("p")


def value_of_no_kind(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with Accelerator(cpu=True, log_with="jsonl", project_dir=folder) as accelerator:
        accelerator.init_trackers("p")
        accelerator.log({"a": object()})


def cell_of_a_table(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with Accelerator(cpu=True, log_with="jsonl", project_dir=folder) as accelerator:
        accelerator.init_trackers("p")
        accelerator.log_table("t", columns=["a", "a"], data=[[1, {"b": 2}]])


def resumed_too_late(patch: pytest.MonkeyPatch, folder: Path) -> None:
    hub = TrackerHub("jsonl", folder)
    hub.init_trackers("p")
    hub.log({"a": 1})
    hub.load_state_dict({"runs": {"jsonl": "other"}})
    hub.finish()


def option_of_fsdp1(patch: pytest.MonkeyPatch, folder: Path) -> None:
    from accelerate_fsdp2 import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(limit_all_gathers=False)


def behind_a_decorator(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with Accelerator(cpu=True) as accelerator:
        accelerator.on_main_process(lambda: accelerator.warn_once("noted"))()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (older_argument, "is deprecated"),
        (near_miss, "is unknown and has no effect"),
        (disabled_plugin, "no installed plugin has this name"),
        (forgotten_parameters, "are in no optimizer"),
        (note, "noted"),
        (schedule, "reached no active step"),
        (running_stream, "even_batches cannot be overridden"),
        (newer_word, "newer accelerate-core"),
        (tracker_that_raises, "log in first"),
        (value_of_no_kind, "which none of your trackers accepts"),
        (cell_of_a_table, "must be a single value"),
        (resumed_too_late, "load_state was called after"),
        (option_of_fsdp1, "has no effect with FSDP2"),
        (behind_a_decorator, "noted"),
    ],
)
def test_warning_names_the_users_line(
    cause: Callable[[pytest.MonkeyPatch, Path], None],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause(monkeypatch, tmp_path)
    (one,) = (one for one in caught if expected in str(one.message))
    lines, first = inspect.getsourcelines(cause)
    assert one.filename == __file__
    assert first < one.lineno < first + len(lines)


def test_source_code_only_warns_through_our_warn_function() -> None:
    found = [
        str(path.relative_to(ROOT))
        for part in ("core", "backends", "extensions", "trackers")
        for path in (ROOT / part).rglob("src/**/*.py")
        if path.name != "errors.py" and re.search(r"warnings\.warn\b", path.read_text())
    ]
    assert found == []


def test_warning_without_a_user_frame_names_the_line_that_warns() -> None:
    """As in one of our threads, whose stack contains no line of the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = compile("warn('from within')", "within.py", "exec")
        names = {"__name__": "accelerate_within", "warn": warn}
        thread = threading.Thread(target=exec, args=(code, names))
        thread.start()
        thread.join()
    assert [one.filename for one in caught] == ["within.py"]


def test_warning_is_shown_once_per_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again", FutureWarning)
        warn("again", FutureWarning)
    assert [one.category for one in caught] == [FutureWarning] * 2
