"""Values are normalised once and sent to all trackers, and a failing tracker never ends a run."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import collect_warnings

from accelerate_core.errors import (
    AccelerateError,
    ConfigurationError,
    MissingPluginError,
    TrackerError,
)
from accelerate_tracking import (
    BlankTracker,
    GeneralTracker,
    IncompleteTrackerError,
    Reporter,
    TrackerHub,
    choice,
    normalise_config,
    normalise_log_with,
    normalise_values,
    on_main_process,
)


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self, project_name: str = "", *, entity: str = "") -> None:
        super().__init__()
        self.project_name, self.entity = project_name, entity
        self.rows: list[tuple[int | None, dict[str, Any], dict[str, Any]]] = []
        self.events: list[str] = []
        self.config: dict[str, Any] | None = None

    @property
    def tracker(self) -> Any:
        return self.rows

    def start(self) -> None:
        self.events.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values, kwargs))

    def finish(self) -> None:
        self.events.append("finish")

    def finish_failed(self) -> None:
        self.events.append("failed")


class Directory(Memory):
    name = "directory"
    requires_logging_directory = True

    def __init__(self, project_name: str, logging_dir: str) -> None:
        super().__init__(project_name)
        self.logging_dir = logging_dir


class EveryRank(Memory):
    name = "every_rank"
    main_process_only = False


class Broken(Memory):
    name = "broken"
    where = "log"

    def _maybe(self, stage: str) -> None:
        if stage == self.where:
            raise OSError(f"no disk in {stage}")

    def start(self) -> None:
        super().start()
        self._maybe("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._maybe("store_init_configuration")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)
        self._maybe("log")

    def finish(self) -> None:
        super().finish()
        self._maybe("finish")


class Chart:
    """A media object of a tracker's library."""


INSTALLED: dict[str, type[GeneralTracker]] = {
    kind.name: kind for kind in (Memory, Directory, EveryRank)
}


def resolve(name: str) -> type[GeneralTracker]:
    if name not in INSTALLED:
        raise MissingPluginError(f"pip install {name}")
    return INSTALLED[name]


@pytest.fixture(autouse=True)
def only_these_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "tracker_class", resolve)
    monkeypatch.setattr(choice, "available_names", lambda: list(INSTALLED))


def make_hub(log_with: object, *, main: bool = True, logging_dir: str | None = None) -> TrackerHub:
    return TrackerHub(log_with, logging_dir, is_main=main)


# --- the base class -------------------------------------------------------------------------------


def test_error_for_an_incomplete_class_names_the_missing_attributes() -> None:
    class NoName(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(IncompleteTrackerError, match=r"NoName.*lacks `name` and `tracker`"):
        NoName()
    assert issubclass(IncompleteTrackerError, NotImplementedError)
    assert issubclass(IncompleteTrackerError, AccelerateError)


def test_invalid_declaration_fails_when_the_class_is_defined() -> None:
    with pytest.raises(IncompleteTrackerError, match="name must be a string"):
        type("Bad", (GeneralTracker,), {"name": 3})
    with pytest.raises(IncompleteTrackerError, match="must be True or False"):
        type("Bad", (GeneralTracker,), {"main_process_only": "yes"})
    with pytest.raises(IncompleteTrackerError, match="must be True or False"):
        type("Bad", (GeneralTracker,), {"resumes": "yes"})
    for flag, near in (("resume", "resumes"), ("count_steps", "counts_steps")):
        match = f"'{flag}', which has no effect. Did you mean '{near}'"
        with pytest.raises(TrackerError, match=match):
            type("Bad", (GeneralTracker,), {flag: True})
    type("Own", (GeneralTracker,), {"resume": True, "not_hooks": ("resume",)})


def test_hub_checks_instances_that_skipped_the_base_constructor() -> None:
    class Lazy(GeneralTracker):
        name = "lazy"
        requires_logging_directory = False

        def __init__(self) -> None:
            pass

    with pytest.raises(IncompleteTrackerError, match="lacks `tracker`"):
        make_hub(Lazy())


def test_validation_does_not_access_the_run_object() -> None:
    class OpensLate(Memory):
        @property
        def tracker(self) -> Any:
            raise AssertionError("accessed too early")

    make_hub(OpensLate()).init_trackers("p")


@pytest.mark.parametrize(("rank", "ran"), [("0", True), ("1", False)])
def test_on_main_process_reads_the_rank_without_starting_a_group(
    monkeypatch: pytest.MonkeyPatch, rank: str, ran: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Other tests in this process may have started a runtime, which has its own rank.
    monkeypatch.setattr("accelerate_tracking.tracker.running", lambda: None)

    class Guarded(Memory):
        done = False

        @on_main_process
        def mark(self, value: int) -> int:
            self.done = True
            return value

    class Everywhere(Guarded):
        main_process_only = False

    tracker, everywhere = Guarded(), Everywhere()
    assert tracker.mark(3) == (3 if ran else None)
    assert tracker.done is ran
    assert everywhere.mark(3) == 3
    assert not torch.distributed.is_initialized()


def test_blank_tracker_ignores_every_call() -> None:
    blank = BlankTracker("x")
    blank.log({"a": 1})
    blank.log_images({"a": [1]}, step=3)
    blank.writer.add_images("a", torch.ones(1)).flush()
    with blank.tracker.run(nested=True) as run:
        run.summary["best"] = 1
    assert blank.name == "x"


# --- values of log_with ---------------------------------------------------------------------------


class Name(str, enum.Enum):  # noqa: UP042  Accelerate's enums look like this
    MEMORY = "memory"


def test_log_with_accepts_names_enums_classes_instances_and_lists() -> None:
    instance = Memory()
    assert normalise_log_with(None) == []
    assert normalise_log_with("memory") == ["memory"]
    assert normalise_log_with(Name.MEMORY) == ["memory"]
    assert normalise_log_with(Memory) == [Memory]
    assert normalise_log_with(("ALL", instance, "memory", "memory")) == ["all", instance, "memory"]


@pytest.mark.parametrize(
    ("wrong", "named"), [(3, "int"), ([Chart()], "Chart"), (Chart, "class Chart")]
)
def test_log_with_refuses_other_types_and_names_them(wrong: object, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        normalise_log_with(wrong)


# --- normalisation --------------------------------------------------------------------------------

SCALARS: list[tuple[Any, Any]] = [
    (1, 1),
    (0.5, 0.5),
    (True, True),
    ("text", "text"),
    (np.float32(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.int8(3), 3),
    (np.uint64(3), 3),
    (np.bool_(True), True),
    (np.str_("text"), "text"),
    (np.array(0.5), 0.5),
    (np.array([[7]]), 7),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([[0.5]], requires_grad=True), 0.5),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(0.5, dtype=torch.float16), 0.5),
    (torch.tensor(0.5, dtype=torch.float64), 0.5),
    (torch.tensor(0.5).to(torch.float8_e4m3fn), 0.5),
    (torch.tensor(3, dtype=torch.uint8), 3),
    (torch.tensor(3), 3),
    (torch.tensor([True]), True),
    (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
    (Name.MEMORY, "memory"),
    (Path("a") / "b", str(Path("a") / "b")),
]


@pytest.mark.parametrize(("value", "expected"), SCALARS, ids=lambda value: type(value).__name__)
def test_scalars_of_every_library_become_python_numbers(value: Any, expected: Any) -> None:
    plain, other = normalise_values({"x": value}, Reporter())
    assert plain == {"x": expected}
    assert type(plain["x"]) is type(expected)
    assert other == {}


def test_nested_keys_are_joined() -> None:
    values = {"loss": {"train": 1.0, "eval": {"a": torch.tensor(2)}}, 3: 4}
    assert normalise_values(values, Reporter())[0] == {"loss/train": 1.0, "loss/eval/a": 2, "3": 4}


def test_warns_about_two_entries_with_the_same_name() -> None:
    with pytest.warns(UserWarning, match="'a/b'.*two entries"):
        plain, _ = normalise_values({"a": {"b": 1}, "a/b": 2}, Reporter())
    assert plain == {"a/b": 1}


@dataclasses.dataclass
class Optim:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


def test_configs_are_converted_to_plain_python() -> None:
    class Model:
        def to_dict(self) -> dict[str, Any]:
            return {"layers": 2}

    config = {
        "optim": Optim(),
        "args": argparse.Namespace(seed=np.int64(1), none=None),
        "model": Model(),
        "paths": [Path("x"), None, {"deep": np.float32(0.5)}],
        "kind": Name.MEMORY,
        "names": {"b", "a"},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "weights": torch.tensor([1, 2]),
        "activation": torch.nn.functional.relu,
        "cls": Optim,
        "empty": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = normalise_config(config, Reporter())
    assert plain == {
        "optim/lr": 0.1,
        "optim/betas": [0.9, 0.99],
        "args/seed": 1,
        "args/none": None,
        "model/layers": 2,
        "paths": ["x", None, {"deep": 0.5}],
        "kind": "memory",
        "names": ["a", "b"],
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "weights": [1, 2],
        "activation": "torch.nn.functional.relu",
        "cls": f"{__name__}.Optim",
        "empty": {},
    }


def test_warns_about_config_values_that_cannot_be_stored() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    config = {"ok": 1, "object": Chart(), "big": torch.zeros(5000), "loop": loop, "list": [Chart()]}
    with collect_warnings() as texts:
        assert normalise_config(config, Reporter()) == {"ok": 1}
    assert len(texts) == 4
    for key in ("object", "big", "loop/self", "list"):
        assert any(f"'{key}" in text for text in texts)


def test_normalising_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\n"
        "from accelerate_tracking.normalise import *\n"
        "normalise_values({'a': 1.0, 'b': object()}, Reporter())\n"
        "normalise_config({'a': [1, None], 'b': {'c': 2}}, Reporter())\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the hub --------------------------------------------------------------------------------------


def test_a_run_from_init_to_finish(tmp_path: Path) -> None:
    mine = Memory()
    logs = str(tmp_path / "logs")
    hub = make_hub([mine, "directory"], logging_dir=logs)
    assert hub.trackers == []
    hub.init_trackers("project", {"lr": np.float32(0.5)}, {"directory": {}, "absent": {"x": 1}})
    hub.log({"loss": torch.tensor(1.5)}, step=np.int64(3), log_kwargs={"memory": {"commit": True}})
    hub.log({"note": "text"})
    hub.finish()
    hub.finish()
    assert mine.events == ["start", "finish"]
    assert mine.config == {"lr": 0.5}
    assert mine.rows == [(3, {"loss": 1.5}, {"commit": True}), (None, {"note": "text"}, {})]
    directory = hub.get_tracker("directory")
    assert (directory.project_name, directory.logging_dir) == ("project", logs)
    assert directory.rows[0] == (3, {"loss": 1.5}, {})
    assert hub.get_tracker("memory", unwrap=True) is mine.rows


def test_init_kwargs_are_passed_to_the_constructor_and_checked() -> None:
    hub = make_hub("memory")
    with pytest.raises(ConfigurationError, match=r"'memory'.*entty.*Did you mean 'entity'"):
        hub.init_trackers("p", init_kwargs={"memory": {"entty": "me"}})
    hub.init_trackers("p", init_kwargs={"memory": {"entity": "me"}})
    assert hub.get_tracker("memory").entity == "me"


def test_each_tracker_gets_its_own_dict() -> None:
    class Greedy(Memory):
        name = "greedy"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            values.clear()

    mine = Memory()
    hub = make_hub([Greedy(), mine])
    hub.init_trackers("p")
    hub.log({"a": 1})
    hub.flush_trackers()
    assert mine.rows[0][1] == {"a": 1}


def test_all_adds_every_usable_tracker_to_the_instances() -> None:
    mine = Memory()
    with pytest.warns(UserWarning, match="skips the tracker 'directory'.*logging_dir"):
        hub = make_hub(["all", mine])
    hub.init_trackers("p")
    assert hub.names == ["memory", "every_rank"]
    assert hub.trackers[0] is mine
    assert make_hub("all", logging_dir="x").names == list(INSTALLED)


def test_all_skips_a_broken_plugin_and_warns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> type[GeneralTracker]:
        raise OSError("libfoo is missing")

    monkeypatch.setattr(choice, "tracker_class", broken)
    monkeypatch.setattr(choice, "available_names", lambda: ["foo"])
    with collect_warnings() as texts:
        hub = TrackerHub(["all"])
    assert "libfoo is missing" in texts[0]
    assert "found no usable tracker" in texts[1]
    hub.log({"a": 1})


def test_missing_tracker_is_an_error_on_every_rank() -> None:
    for main in (True, False):
        with pytest.raises(MissingPluginError, match="pip install nope"):
            make_hub(["memory", "nope"], main=main)


def test_missing_required_directory_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"'directory'.*logging_dir"):
        make_hub("directory")


@pytest.mark.parametrize("stage", ["start", "store_init_configuration", "log", "finish"])
def test_tracker_that_raises_is_named_once_and_the_others_continue(stage: str) -> None:
    bad, mine = Broken(), Memory()
    bad.where = stage
    hub = make_hub([bad, mine])
    with collect_warnings() as texts:
        hub.init_trackers("p", {"a": 1})
        hub.log({"x": 1}, step=0)
        hub.log({"x": 2}, step=1)
        hub.flush_trackers()
        assert isinstance(hub.get_tracker("broken"), BlankTracker) is (stage != "finish")
        hub.finish()
    assert len(texts) == 1
    assert f"RuntimeWarning: The tracker 'broken' raised in {stage}" in texts[0]
    assert f"OSError: no disk in {stage}" in texts[0]
    assert [row[1]["x"] for row in mine.rows] == [1, 2]
    assert mine.events == ["start", "finish"]
    # A tracker that fails later is still closed, once, so it can write what it holds.
    assert bad.events.count("finish") == (0 if stage == "start" else 1)


@pytest.mark.parametrize("stage", ["start", "store_init_configuration", "log", "flush", "finish"])
def test_tracker_that_exits_the_process_is_named_and_the_others_continue(stage: str) -> None:
    def leave(*_: Any, **__: Any) -> None:
        raise SystemExit("no licence")

    class Leaves(Memory):
        name = "leaves"

    setattr(Leaves, stage, leave)
    mine = Memory()
    hub = make_hub([Leaves(), mine])
    with collect_warnings() as texts:
        hub.init_trackers("p", {"a": 1})
        hub.log({"x": 1}, step=0)
        hub.log({"x": 2}, step=1)
        assert hub.flush_trackers(20.0) == []
        hub.finish()
    assert len(texts) == 1
    assert f"RuntimeWarning: The tracker 'leaves' raised in {stage}" in texts[0]
    assert "SystemExit: no licence" in texts[0]
    assert [row[1]["x"] for row in mine.rows] == [1, 2]


def test_failing_constructor_only_causes_a_warning_that_names_the_distribution() -> None:
    class NoAccount(Memory):
        name = "no_account"

        def __init__(self, project_name: str) -> None:
            raise PermissionError("log in first")

    NoAccount.__module__ = "numpy.something"
    hub = make_hub([NoAccount, "memory"])
    with pytest.warns(RuntimeWarning, match=r"'no_account' \(numpy \d.*PermissionError: log in"):
        hub.init_trackers("p")
    hub.log({"a": 1})
    hub.flush_trackers()
    assert len(hub.get_tracker("memory").rows) == 1


def test_failed_script_calls_finish_failed() -> None:
    mine = Memory()
    hub = make_hub(mine)
    hub.init_trackers("p")
    hub.finish(failed=True)
    assert mine.events == ["start", "failed"]


def test_calls_in_the_wrong_order_are_errors() -> None:
    hub = make_hub("memory")
    with pytest.raises(TrackerError, match="Call init_trackers"):
        hub.log({"a": 1})
    with pytest.raises(TrackerError, match="Call init_trackers"):
        hub.get_tracker("memory")
    hub.init_trackers("p")
    with pytest.raises(TrackerError, match="already started"):
        hub.init_trackers("p")
    hub.finish()
    with pytest.raises(TrackerError, match="has ended"):
        hub.log({"a": 1})
    hub.init_trackers("second run")
    hub.log({"a": 1})


def test_init_trackers_may_be_called_on_the_main_rank_only() -> None:
    other = make_hub("memory", main=False)
    other.log({"a": 1})
    other.log_text("a", "b")
    assert isinstance(other.get_tracker("memory"), BlankTracker)
    other.finish()
    with pytest.raises(TrackerError, match="Call init_trackers"):  # it would run on this rank
        make_hub("every_rank", main=False).log({"a": 1})


def test_without_trackers_every_call_does_nothing() -> None:
    hub = make_hub(None)
    hub.log({"a": 1})
    hub.init_trackers("p")
    hub.init_trackers("p")
    hub.get_tracker("anything").log({"a": 1})
    hub.finish()
    hub.log({"a": 1})
    assert hub.trackers == []


def test_unknown_tracker_name_lists_the_known_ones() -> None:
    hub = make_hub("memory")
    hub.init_trackers("p")
    with pytest.raises(ValueError, match=r"no tracker 'memry'\. .* are 'memory'.*Did you mean"):
        hub.get_tracker("memry")


@pytest.mark.parametrize("step", [1.5, "3", True])
def test_step_must_be_an_integer(step: Any) -> None:
    hub = make_hub("memory")
    hub.init_trackers("p")
    with pytest.raises(ConfigurationError, match="must be an integer"):
        hub.log({"a": 1}, step=step)
    with pytest.raises(ConfigurationError, match="needs a dict"):
        hub.log([1])  # type: ignore[arg-type]


def test_warns_once_per_key_about_values_that_no_tracker_accepts() -> None:
    mine = Memory()
    hub = make_hub(mine)
    hub.init_trackers("p")
    with collect_warnings() as texts:
        for step in range(3):
            hub.log({"ok": step, "vector": torch.ones(3), "none": None, "list": [1]}, step=step)
    assert len(texts) == 3
    assert any("'vector'" in text and "(3,)" in text for text in texts)
    assert any("'none'" in text for text in texts)
    assert any("'list'" in text for text in texts)
    hub.flush_trackers()
    assert [row[1] for row in mine.rows] == [{"ok": 0}, {"ok": 1}, {"ok": 2}]


def test_media_objects_go_to_the_trackers_that_accept_them() -> None:
    class NumbersOnly(Memory):
        name = "numbers"

        def accepts(self, value: object) -> bool:
            return False

    chart, mine, numbers = Chart(), Memory(), NumbersOnly()
    hub = make_hub([mine, numbers])
    hub.init_trackers("p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hub.log({"a": 1, "chart": chart, "many": [chart]})
    hub.flush_trackers()
    assert mine.rows[0][1] == {"a": 1, "chart": chart, "many": [chart]}
    assert numbers.rows[0][1] == {"a": 1}


def test_other_ranks_are_blank_unless_the_tracker_is_for_every_rank() -> None:
    mine = Memory()
    hub = make_hub([mine, "every_rank"], main=False)
    hub.init_trackers("p", {"a": 1})
    hub.log({"a": torch.tensor(1.0)})
    assert mine.events == []
    assert mine.rows == []
    assert [tracker.name for tracker in hub.trackers] == ["memory", "every_rank"]
    hub.get_tracker("memory").log_images([])
    hub.get_tracker("memory", unwrap=True).log_artifact("x")
    hub.flush_trackers()
    assert hub.get_tracker("every_rank").rows == [(None, {"a": 1.0}, {})]
    assert hub.get_tracker("every_rank").config == {"a": 1}
    hub.finish()


def test_rank_with_blank_trackers_reads_no_tensors() -> None:
    hub = make_hub("memory", main=False)
    hub.init_trackers("p")
    # Reading a meta tensor would raise, and reading a device tensor would make the step wait.
    hub.log({"a": torch.empty((), device="meta")})


def test_keyboard_interrupt_in_a_writer_thread_does_not_block_finish() -> None:
    class Interrupts(Memory):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    hub = make_hub(Interrupts())
    hub.init_trackers("p")
    hub.log({"a": 1})
    with pytest.warns(RuntimeWarning, match="KeyboardInterrupt"):
        hub.finish()


def test_tracker_for_a_newer_contract_may_have_unknown_methods() -> None:
    class Newer(Memory):
        api_version = (1, 7)

        def log_imagess(self) -> None: ...

    assert Newer.api_version > (1, 0)
