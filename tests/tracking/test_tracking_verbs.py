"""Which trackers `log_with` chooses, and what the methods for media accept and refuse."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError, MissingPluginError, TrackerError
from accelerate_tracking import (
    GeneralTracker,
    TrackerHub,
    choice,
    get_available_trackers,
    register_tracker_class,
)


class Everything(GeneralTracker):
    """Records each call with its arguments, and supports every verb."""

    name = "everything"
    requires_logging_directory = False
    packages = ()

    def __init__(self, project_name: str = "") -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.threads: set[str] = set()

    @property
    def tracker(self) -> Any:
        return self.calls

    def _keep(self, verb: str, **arguments: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((verb, arguments))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._keep("log", values=values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._keep("images", values=values, step=step, **kwargs)

    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None
    ) -> None:
        self._keep("table", table_name=table_name, columns=columns, data=data, step=step)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        self._keep("figure", name=name, figure=figure, step=step)

    def log_artifact(self, path: str, name: str) -> None:
        self._keep("artifact", path=path, name=name)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        self._keep("text", name=name, text=text, step=step)

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        self._keep("histogram", name=name, values=values, step=step)


class Numbers(GeneralTracker):
    """Supports only `log`."""

    name = "numbers"
    requires_logging_directory = False

    def __init__(self, project_name: str = "") -> None:
        super().__init__()

    @property
    def tracker(self) -> Any:
        return None


@pytest.fixture
def everything() -> Everything:
    return Everything()


@pytest.fixture
def hub(everything: Everything) -> Iterator[TrackerHub]:
    made = TrackerHub(everything)
    made.init_trackers("project")
    yield made
    made.finish()


def only_call(hub: TrackerHub, everything: Everything) -> dict[str, Any]:
    hub.flush_trackers()
    ((_, arguments),) = everything.calls
    return arguments


# --- images ---------------------------------------------------------------------------------------

IMAGE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
CONVENTIONS = {
    "H W C": (IMAGE, False, IMAGE[None]),
    "N H W C": (np.stack([IMAGE, IMAGE]), False, np.stack([IMAGE, IMAGE])),
    "C H W": (torch.from_numpy(IMAGE).permute(2, 0, 1), True, IMAGE[None]),
    "N C H W": (torch.from_numpy(IMAGE).permute(2, 0, 1)[None], True, IMAGE[None]),
    "float": (IMAGE / 255.0, False, IMAGE[None]),
    "bfloat16": (torch.ones(2, 3, 1, dtype=torch.bfloat16), False, np.full((1, 2, 3, 1), 255)),
    "list": ([IMAGE, IMAGE], False, np.stack([IMAGE, IMAGE])),
    "list of tensors": ([torch.from_numpy(IMAGE)] * 2, False, np.stack([IMAGE, IMAGE])),
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_images_in_every_layout_arrive_as_uint8_batches(
    hub: TrackerHub, everything: Everything, convention: str
) -> None:
    given, channels_first, wanted = CONVENTIONS[convention]
    hub.log_images(values={"x": given}, channels_first=channels_first, step=3)
    found = only_call(hub, everything)
    assert found["step"] == 3
    assert found["values"]["x"].dtype == np.uint8
    assert np.array_equal(found["values"]["x"], wanted)


WRONG = {
    "channels first without the flag": (np.zeros((3, 8, 9)), False, "pass channels_first=True"),
    "two dimensions": (np.zeros((8, 9)), False, "A grayscale image has the shape H W 1"),
    "integers": (np.zeros((8, 9, 3), dtype=np.int64), False, "must be uint8, or float"),
    "above one": (np.full((8, 9, 3), 255.0), False, r"values from 0 to 255.*in \[0, 1\]"),
    "not a number": (np.full((8, 9, 3), np.nan), False, r"in \[0, 1\]"),
    "several shapes": ([np.zeros((8, 9, 3)), np.zeros((7, 9, 3))], False, "have the same shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_images_are_refused_by_name(hub: TrackerHub, case: str) -> None:
    given, channels_first, text = WRONG[case]
    with pytest.raises(ConfigurationError, match=text) as caught:
        hub.log_images(values={"sample": given}, channels_first=channels_first)
    assert "'sample'" in str(caught.value)


def test_in_place_changes_do_not_change_logged_values(
    hub: TrackerHub, everything: Everything
) -> None:
    image = torch.zeros(2, 2, 1)
    values = np.zeros(3)
    hub.log_images(values={"x": image})
    hub.log_histogram(name="h", values=values)
    image.fill_(1.0)
    values[:] = 7
    hub.flush_trackers()
    (_, images), (_, histogram) = everything.calls
    assert images["values"]["x"].max() == 0
    assert histogram["values"].max() == 0


# --- other media ----------------------------------------------------------------------------------


def test_table_cells_are_converted_to_plain_values(hub: TrackerHub, everything: Everything) -> None:
    hub.log_table(
        table_name="t",
        columns=["a", "b"],
        data=[[np.float32(0.5), torch.tensor(2)], [None, Path("x")]],
        step=1,
    )
    found = only_call(hub, everything)
    assert found["columns"] == ["a", "b"]
    assert found["data"] == [[0.5, 2], [None, "x"]]
    with pytest.raises(ConfigurationError, match=r"row 1 has 1 values for 2 columns \(a, b\)"):
        hub.log_table(table_name="t", columns=["a", "b"], data=[[1, 2], [3]])
    with pytest.raises(ConfigurationError, match="columns= and data="):
        hub.log_table(table_name="t", columns=["a"])


def test_data_frame_is_logged_as_a_table(hub: TrackerHub, everything: Everything) -> None:
    pandas = pytest.importorskip("pandas")
    hub.log_table(table_name="t", dataframe=pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}))
    found = only_call(hub, everything)
    assert (found["columns"], found["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])


def test_histograms_texts_and_artifacts_are_logged(
    hub: TrackerHub, everything: Everything, tmp_path: Path
) -> None:
    file = tmp_path / "model.bin"
    file.write_text("x")
    hub.log_histogram(
        name="h", values=torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True), step=1
    )
    hub.log_text(name="t", text=5, step=1)  # type: ignore[arg-type]
    hub.log_artifact(path=file)
    hub.flush_trackers()
    (_, histogram), (_, text), (_, artifact) = everything.calls
    assert histogram["values"].tolist() == [1.0] * 4
    assert text["text"] == "5"
    assert artifact["name"] == Path(artifact["path"]).name == "model.bin"
    with pytest.raises(ConfigurationError, match="no file or directory"):
        hub.log_artifact(path=tmp_path / "absent")


def test_warns_once_that_a_tracker_does_not_support_a_verb(everything: Everything) -> None:
    hub = TrackerHub([everything, Numbers])
    hub.init_trackers("project")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hub.log_text(name="t", text="a")
        hub.log_text(name="t", text="b")
        hub.finish()
    (one,) = [str(each.message) for each in caught]
    assert one == "log_text is skipped for trackers that do not support it: 'numbers'."
    assert [arguments["text"] for _, arguments in everything.calls] == ["a", "b"]


def test_verbs_in_the_wrong_order_are_errors(everything: Everything) -> None:
    hub = TrackerHub([everything])
    with pytest.raises(TrackerError, match=r"log_text: the trackers.*not started"):
        hub.log_text(name="t", text="a")
    hub.init_trackers("project")
    hub.finish()
    with pytest.raises(TrackerError, match="log_images: the run has ended"):
        hub.log_images(values={"x": IMAGE})


def test_one_thread_makes_all_calls_in_order(hub: TrackerHub, everything: Everything) -> None:
    for step in range(300):
        hub.log({"a": step}, step=step)
        if step % 100 == 0:
            hub.log_text(name="t", text=str(step), step=step)
    hub.flush_trackers()
    assert everything.threads == {"tracker-everything"}
    assert [arguments["step"] for _, arguments in everything.calls] == sorted(
        [*range(300), 0, 100, 200]
    )


def test_slow_tracker_does_not_block_the_step() -> None:
    class Sleepy(Everything):
        name = "sleepy"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            time.sleep(0.05)
            super().log(values, step)

    sleepy, quick = Sleepy(), Everything()
    hub = TrackerHub([sleepy, quick])
    hub.init_trackers("project")
    begun = time.perf_counter()
    for step in range(20):
        hub.log({"a": 1.0}, step=step)
    waited = time.perf_counter() - begun
    hub.finish()
    assert waited < 0.5  # the delivery takes a second
    assert len(sleepy.calls) == len(quick.calls) == 20


def test_device_read_ignores_later_in_place_changes(
    hub: TrackerHub, everything: Everything
) -> None:
    from accelerate_tracking.tracker_threads import DeviceRead

    # Also runs without an accelerator. With one, `values` waits for copies on a stream.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    one = torch.tensor([1.5], device=device)
    read = DeviceRead({"a": one, "b": torch.tensor(2, device=device), "c": one[0]})
    one.fill_(9)
    assert read.values() == {"a": 1.5, "b": 2, "c": 1.5}


# --- which trackers are chosen --------------------------------------------------------------------


class NeedsAccount(Everything):
    name = "needs_account"

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        return None if environ.get("TOKEN_OF_TESTS") else "it needs an account: set TOKEN_OF_TESTS"


class NoLibrary(Everything):
    name = "no_library"
    library = "surely-not-installed>=1.0"


class OldLibrary(Everything):
    name = "old_library"
    library = "numpy>=99"


class NeedsDirectory(Everything):
    name = "needs_directory"
    requires_logging_directory = True


OFFERED = {cls.name: cls for cls in (NeedsAccount, NoLibrary, OldLibrary, NeedsDirectory, Numbers)}


def choose(log_with: Any, logging_dir: str | None = None) -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(choice, "tracker_class", OFFERED.__getitem__)
        patch.setattr(choice, "available_names", lambda: list(OFFERED))
        hub = TrackerHub(log_with, logging_dir)
    return hub.names, [str(each.message) for each in caught]


def test_all_chooses_usable_trackers_and_warns_about_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names, texts = choose("all")
    assert names == ["numbers"]
    why = {text.split("'")[3]: text.split(": ", 1)[1] for text in texts}
    assert why == {
        "needs_account": "it needs an account: set TOKEN_OF_TESTS.",
        "no_library": "its library is not installed: pip install 'surely-not-installed>=1.0'.",
        "old_library": f"numpy {np.__version__} is installed, but the tracker needs numpy>=99: "
        "pip install -U 'numpy>=99'.",
        "needs_directory": "it needs a directory to write to, but no logging_dir is set.",
    }
    monkeypatch.setenv("TOKEN_OF_TESTS", "1")
    names, texts = choose("all", str(tmp_path))
    assert names == ["needs_account", "needs_directory", "numbers"]
    assert len(texts) == 2


def test_tracker_that_writes_files_refuses_a_url() -> None:
    with pytest.raises(ConfigurationError, match="logging_dir is 's3://bucket/run'"):
        choose("needs_directory", "s3://bucket/run")
    _, texts = choose("all", "s3://bucket/run")
    assert "'needs_directory': it writes to a local directory" in "".join(texts)


def test_all_can_be_combined_with_instances_and_names() -> None:
    mine = Everything()
    names, _ = choose(["all", mine])
    assert sorted(names) == ["everything", "numbers"]
    assert choose(["all", "numbers", Numbers])[0] == ["numbers"]


@pytest.mark.parametrize(
    ("name", "text"), [("no_library", "is not installed"), ("old_library", "needs numpy>=99")]
)
def test_name_with_a_missing_or_old_library_is_an_error(name: str, text: str) -> None:
    with pytest.raises(MissingPluginError, match=text):
        choose(name)


def test_registered_class_is_found_by_name_and_included_in_all() -> None:
    @register_tracker_class
    class Mine(Everything):
        name = "mine_of_tests"

    try:
        assert "mine_of_tests" in [str(one) for one in get_available_trackers()]
        assert "mine_of_tests" in choice.available_names()
        accelerator = Accelerator(cpu=True, log_with="mine_of_tests")
        accelerator.init_trackers("project")
        accelerator.log({"a": 1})
        accelerator.log_text("t", "text")
        accelerator.flush_trackers()
        assert [verb for verb, _ in accelerator.get_tracker("mine_of_tests").calls] == [
            "log",
            "text",
        ]
        accelerator.end_training()

        class Other(Everything):
            name = "mine_of_tests"

        with pytest.warns(UserWarning, match=r"'mine_of_tests' now belongs to .*replaces .*Mine"):
            register_tracker_class(Other)
    finally:
        choice._registered.pop("mine_of_tests")


def test_invalid_class_cannot_be_registered() -> None:
    with pytest.raises(ConfigurationError, match="subclass of GeneralTracker, not 3"):
        register_tracker_class(3)  # type: ignore[arg-type]

    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(ConfigurationError, match="needs a class attribute such as name"):
        register_tracker_class(Nameless)

    class Taken(Everything):
        name = "jsonl"

    with pytest.raises(ConfigurationError, match="already has the name 'jsonl'"):
        register_tracker_class(Taken)
