"""What a tracker keeps: a run is opened, gets all that is logged, and is closed."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate_core.errors import listing
from accelerate_core.testing.checks import check
from accelerate_core.testing.lab import Lab
from accelerate_core.tracking.fanout import JOURNAL_FOLDER

CONFIG = {
    "lr": 0.125,
    "name": "suite",
    "flag": True,
    "seed": None,
    "layers": [16, 8],
    "optimizer": {"kind": "sgd"},
    "suite_note": "kept_in_the_config",
}
STEPS = 5
#: What is logged to be found again: key -> value and step, words that nobody else writes.
MARKS: dict[str, tuple[Any, int | None]] = {
    "suite_number": (0.5, 0),
    "suite_text": ("a_text_of_the_suite", 1),
    "suite_flag": (True, 2),
    "suite_negative": (-1.5, 3),
    "suite_zero": (0.0, 3),
    "suite_large": (1e9, 3),
    "suite_letters": ("Größe 大", 4),
    "suite_unstepped": (0.25, None),
}


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
        accelerator.log({"not_finite": float("nan"), "beside_it": float("inf")}, step=STEPS + 1)
        accelerator.log({"without_a_step": 1})
        own = accelerator.get_tracker(lab.name, unwrap=True)
        lab.equal(own is not None, True, "the library's own run object is reached")
    return None


def _log_marks(accelerator: Any) -> None:
    for key, (value, step) in MARKS.items():
        accelerator.log({key: value}, step=step)


def _lost(folder: Path, words: Iterable[str]) -> list[str]:
    """Return the words of which there is no trace in the files of a directory."""
    own: list[Path] = []
    for here, folders, names in os.walk(folder):
        if JOURNAL_FOLDER in folders:
            folders.remove(JOURNAL_FOLDER)  # which another rank may be removing
        own += [path for name in names if (path := Path(here, name)).is_file()]
    texts = [path.read_bytes() for path in own]
    return [word for word in words if not any(word.encode() in text for text in texts)]


def _skip_elsewhere(lab: Lab) -> None:
    if lab.options.get("elsewhere", False):
        lab.skip("options say that it writes elsewhere")


@check("tracker", place="alone")
def kept(lab: Lab) -> str | None:
    """Numbers, texts, bools, what has no step, and the config leave traces in the run's directory."""
    _skip_elsewhere(lab)
    with _run(lab, "kept") as accelerator:
        _log_marks(accelerator)
    words = {*MARKS, str(MARKS["suite_text"][0]), *_config_words()}
    lost = _lost(lab.scratch("kept"), sorted(words))
    if len(lost) == len(words) and not lab.found.requires_logging_directory:
        lab.skip("it declares that it needs no directory, and there is nothing in it")
    if lost:
        raise AssertionError(
            f"no trace of {listing(lost)} in the files of the run's directory; where it writes "
            'somewhere else, or packed, say so by the option {"elsewhere": true}'
        )
    return f"{len(words)} words"


def _config_words() -> list[str]:
    return ["suite_note", str(CONFIG["suite_note"])]


@check("tracker", place="alone")
def flushed(lab: Lab) -> str | None:
    """After `flush` a crash loses nothing: it is in the files, unless `flush` says False."""
    _skip_elsewhere(lab)
    answers: list[Any] = []
    with _run(lab, "flushed") as accelerator:
        tracker = accelerator.get_tracker(lab.name)
        own = tracker.flush

        def flush() -> Any:
            answers.append(own())
            return answers[-1]

        tracker.flush = flush
        accelerator.log({"suite_number": 0.5}, step=0)
        accelerator.flush_trackers()
        lost = _lost(lab.scratch("flushed"), ["suite_number"])
    if _lost(lab.scratch("flushed"), ["suite_number"]):
        lab.skip("what it writes is packed, or elsewhere")
    if lost and answers[-1:] != [False]:
        raise AssertionError(
            "what was logged is in no file after flush, and is there after finish: bring it to the "
            "disk in flush(), or let it return False"
        )
    return "only at the end of a run, as it says" if lost else None


@check("tracker", place="alone")
def read_back(lab: Lab) -> str | None:
    """What was logged is read back from what the tracker wrote: values, steps, order, config."""
    read = str(lab.options.get("read", ""))
    if not read:
        lab.skip("options have no 'read', a function `module:name` of a directory")
    with _run(lab, "read_back") as accelerator:
        for step in range(STEPS):
            accelerator.log({"loss": 1.0 / (step + 1), "nested": {"value": step}}, step=step)
    got = _read(read, lab.scratch("read_back"))
    for key, expected in (
        ("loss", [[s, 1.0 / (s + 1)] for s in range(STEPS)]),
        ("nested/value", [[s, float(s)] for s in range(STEPS)]),
    ):
        pairs = [[step, _number(value)] for step, value in got.get(key, [])]
        lab.close(pairs, expected, key, 1e-6)
    seen = [f"{STEPS} steps"]
    with _run(lab, "read_marks") as accelerator:
        _log_marks(accelerator)
    try:
        got = _read(read, lab.scratch("read_marks"))
    except Exception as error:  # a reader of numbers with steps, perhaps: the traces have to do
        got = {}
        seen.append(f"nothing more ({type(error).__name__}: {error})")
    for key in set(MARKS) & set(got):  # of the others `kept` has to find traces
        _is_mark(lab, key, got[key])
        seen.append(key)
    read_config = lab.options.get("read_config")
    if read_config:
        _is_config(lab, dict(_function(read_config)(lab.scratch("read_marks"))))
        seen.append("config")
    return ", ".join(sorted(seen))


def _is_mark(lab: Lab, key: str, pairs: list[list[Any]]) -> None:
    value, step = MARKS[key]
    lab.equal(len(pairs), 1, f"entries of {key}")
    ((its_step, its_value),) = pairs
    if step is not None:
        lab.equal(int(its_step), step, f"step of {key}")
    if isinstance(value, str):
        lab.equal(str(its_value), value, key)
    else:
        lab.close(_number(its_value), float(value), key, 1e-6)


def _is_config(lab: Lab, config: dict[str, Any]) -> None:
    for key, value in (("lr", CONFIG["lr"]), ("suite_note", CONFIG["suite_note"])):
        lab.equal(str(config.get(key)), str(value), f"{key} of the config")


def _function(name: object) -> Any:
    module, _, function = str(name).partition(":")
    return getattr(importlib.import_module(module), function)


def _read(name: str, directory: Path) -> dict[str, list[list[Any]]]:
    """Call the author's reader."""
    return {k: [list(pair) for pair in pairs] for k, pairs in _function(name)(directory).items()}


def _number(value: Any) -> float:
    """Return a number as a reader has it, who may have read a text."""
    words = {"true": 1.0, "false": 0.0}
    return words[text] if (text := str(value).lower()) in words else float(value)


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
    """A second run in one process works as the first, and leaves what the first one wrote."""
    words = ("suite_first", "suite_second")
    for word in words:
        with _run(lab, "once_more") as accelerator:
            accelerator.log({word: 0.5}, step=0)
    lost = _lost(lab.scratch("once_more"), words)
    if lab.options.get("overwrites", False):
        return "options say that a run replaces the one before"
    if "suite_first" in lost and "suite_second" not in lost:
        raise AssertionError(
            "a second run into the same directory has removed what the first wrote"
        )
    return None


@check("tracker")
def two_processes(lab: Lab) -> str | None:
    """Several processes log; only the main one has a run, unless every rank is to have one."""
    from accelerate_core.testing.suites.precisions import some_backend
    from accelerate_core.tracking.opening import is_for_every_rank

    some_backend()
    with _in(lab, "two_processes") as folder:
        accelerator = lab.accelerator(log_with=lab.name, project_dir=str(folder / "logs"))
        accelerator.init_trackers("suite", CONFIG, _init(lab))
        word = f"suite_of_rank_{accelerator.process_index}"
        accelerator.log({word: 0.5}, step=0)
        everywhere = is_for_every_rank(lab.found, _init(lab))
        without = type(accelerator.get_tracker(lab.name)).__name__ == "BlankTracker"
        expected = not (everywhere or accelerator.is_main_process)
        seen = accelerator.communicator.gather_object((without, expected))
        lab.equal([one for one, _ in seen], [one for _, one in seen], "ranks without a run")
        accelerator.end_training()
        if (
            not without
            and not lab.options.get("elsewhere")
            and lab.found.requires_logging_directory
        ):
            lab.equal(_lost(folder, [word]), [], "what this rank logged, and is in no file")
    return "a run per rank" if everywhere else None
