"""What a tracker keeps: a run is opened, gets all that is logged, and is closed."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate_core.testing.checks import check
from accelerate_core.testing.lab import Lab

CONFIG = {
    "lr": 0.125,
    "name": "suite",
    "flag": True,
    "seed": None,
    "layers": [16, 8],
    "optimizer": {"kind": "sgd"},
}
STEPS = 5


@check("tracker", place="alone")
def declarations(lab: Lab) -> str | None:
    """It has all a tracker must have, and tells without an import whether it can run here."""
    cls = lab.found
    if not isinstance(getattr(cls, "requires_logging_directory", None), bool):
        raise AssertionError("requires_logging_directory is to be True or False")
    lab.equal(callable(getattr(cls, "log", None)), True, "it has a method log")
    lab.equal("tracker" in dir(cls), True, "it has a property tracker")
    why = cls.unusable(dict(os.environ))
    lab.equal(why is None or isinstance(why, str), True, "unusable gives None or a text")
    verbs = ", ".join(sorted(cls.supports))
    return f"verbs: {verbs or 'none'}" + (f"; {why}" if why else "")


@contextmanager
def _in(lab: Lab, name: str) -> Iterator[Path]:
    """Work in a directory of one's own: libraries write beside the script, and look around there."""
    folder = lab.scratch(name)
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        why = lab.found.unusable(dict(os.environ))
        if why:
            lab.skip(why)
        yield folder
    finally:
        os.chdir(before)


@contextmanager
def _run(lab: Lab, name: str) -> Iterator[Any]:
    """Open a run in a directory of its own; complaints about the tracker are failures."""
    with _in(lab, name) as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = lab.accelerator(log_with=lab.name, project_dir=str(folder / "logs"))
        accelerator.init_trackers("suite", CONFIG, _init(lab))
        _runs(lab, accelerator, "init_trackers", caught)
        yield accelerator
        accelerator.flush_trackers()
        _runs(lab, accelerator, "what was logged", caught)
        accelerator.end_training()


def _init(lab: Lab) -> dict[str, Any]:
    return {lab.name: dict(lab.options.get("init", {}))}


def _runs(lab: Lab, accelerator: Any, after: str, caught: list[Any]) -> None:
    if [tracker.name for tracker in accelerator.trackers] != [lab.name]:
        said = [str(one.message) for one in caught if lab.name in str(one.message)]
        raise AssertionError(f"it was switched off after {after}: {' '.join(said) or 'no reason'}")


@check("tracker", place="alone")
def values(lab: Lab) -> str | None:
    """Numbers, texts and nested values are logged, with steps and without, and the run is closed."""
    import torch

    with _run(lab, "values") as accelerator:
        for step in range(STEPS):
            accelerator.log({"loss": 1.0 / (step + 1), "nested": {"value": step}}, step=step)
        accelerator.log({"tensor": torch.tensor(2.5), "word": "fine", "flag": True}, step=STEPS)
        accelerator.log({"without_a_step": 1})
        own = accelerator.get_tracker(lab.name, unwrap=True)
        lab.equal(own is not None, True, "the library's own run object is reached")
    return None


@check("tracker", place="alone")
def kept(lab: Lab) -> str | None:
    """What was logged leaves a trace in the run's directory."""
    if lab.options.get("elsewhere", False):
        lab.skip("options say that it writes elsewhere")
    word = "a_word_nobody_else_writes"
    with _run(lab, "kept") as accelerator:
        accelerator.log({word: 0.5}, step=0)
    files = [path for path in lab.scratch("kept").rglob("*") if path.is_file()]
    if any(word.encode() in path.read_bytes() for path in files):
        return f"{len(files)} files"
    if not lab.found.requires_logging_directory:
        lab.skip("it declares that it needs no directory, and there is nothing in it")
    raise AssertionError(
        f"no trace of {word!r}, which was logged, in the {len(files)} files of the run's directory; "
        'where it writes somewhere else, or packed, say so by the option {"elsewhere": true}'
    )


@check("tracker", place="alone")
def read_back(lab: Lab) -> str | None:
    """What was logged is read back from what the tracker wrote, in order."""
    read = lab.options.get("read")
    if not read:
        lab.skip("options have no 'read', a function `module:name` of a directory")
    with _run(lab, "read_back") as accelerator:
        for step in range(STEPS):
            accelerator.log({"loss": 1.0 / (step + 1), "nested": {"value": step}}, step=step)
    module, _, function = str(read).partition(":")
    found = getattr(importlib.import_module(module), function)(lab.scratch("read_back"))
    got = {key: [list(pair) for pair in pairs] for key, pairs in found.items()}
    lab.close(got["loss"], [[s, 1.0 / (s + 1)] for s in range(STEPS)], "loss", 1e-6)
    lab.close(got["nested/value"], [[s, float(s)] for s in range(STEPS)], "nested/value", 1e-6)
    return f"{STEPS} steps"


@check("tracker", place="alone")
def verbs(lab: Lab) -> str | None:
    """Each verb it has takes what the documentation promises."""
    import torch

    supports = lab.found.supports
    if not supports:
        lab.skip("it has none of the verbs beside log")
    with _run(lab, "verbs") as accelerator:
        if "images" in supports:
            accelerator.log_images({"picture": torch.rand(2, 8, 8, 3)}, step=0)
        if "table" in supports:
            accelerator.log_table("table", columns=["word", "count"], data=[["x", 1]], step=0)
        if "text" in supports:
            accelerator.log_text("note", "several words", step=0)
        if "histogram" in supports:
            accelerator.log_histogram("weights", torch.linspace(-1, 1, 101), step=0)
        if "artifact" in supports:
            with open("model.txt", "w", encoding="utf-8") as file:
                file.write("weights")
            accelerator.log_artifact("model.txt")
    return ", ".join(sorted(supports - {"figure"}))


@check("tracker", place="alone")
def failed_run(lab: Lab) -> str | None:
    """A script that raises ends its run, and its exception is seen."""
    with _in(lab, "failed_run") as folder:
        try:
            with lab.accelerator(log_with=lab.name, project_dir=str(folder / "logs")) as made:
                made.init_trackers("suite", CONFIG, _init(lab))
                made.log({"loss": 1.0}, step=0)
                raise KeyError("of the script")
        except KeyError as error:
            lab.equal(error.args, ("of the script",), "the exception")
    return lab.found.failed_word or None


@check("tracker", place="alone")
def once_more(lab: Lab) -> str | None:
    """A second run in one process works as the first."""
    for name in ("first", "second"):
        with _run(lab, name) as accelerator:
            accelerator.log({"loss": 0.5}, step=0)
    return None


@check("tracker")
def two_processes(lab: Lab) -> str | None:
    """Two processes log; only the main one has a run, unless every rank is asked to have one."""
    from accelerate_core.testing.suites.precisions import _some_backend

    _some_backend()
    with _in(lab, "two_processes") as folder:
        accelerator = lab.accelerator(log_with=lab.name, project_dir=str(folder / "logs"))
        accelerator.init_trackers("suite", CONFIG, _init(lab))
        accelerator.log({"loss": 0.5}, step=0)
        own = type(accelerator.get_tracker(lab.name)).__name__
        seen = accelerator.communicator.gather_object(own == "BlankTracker")
        lab.equal(seen, [False, True], "ranks without a run")
        accelerator.end_training()
    return None
