"""What a tracker must do: open a run, store everything that is logged, and close it."""

from __future__ import annotations

import os
import pkgutil
import struct
import warnings
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate_core.plugin import listing
from accelerate_testing.checks import check
from accelerate_testing.context import CheckContext
from accelerate_testing.suites.leaving import Lives

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
#: A number that nothing else writes, and that float32 represents exactly.
NUMBER = 27182.75
#: Values that are searched for later: key -> value and step. Nothing else writes these words.
MARKS: dict[str, tuple[Any, int | None]] = {
    "suite_number": (NUMBER, 0),
    "suite_text": ("a_text_of_the_suite", 1),
    "suite_flag": (True, 2),
    "suite_negative": (-1.5, 3),
    "suite_zero": (0.0, 3),
    "suite_large": (1e9, 3),
    "suite_letters": ("Größe 大", 4),
    "suite_unstepped": (0.25, None),
}


@check("tracker", alone=True)
def declarations(ctx: CheckContext) -> str:
    """It has everything that a tracker needs, and knows without imports whether it can run here."""
    cls = ctx.found
    said = isinstance(getattr(cls, "requires_logging_directory", None), bool)
    assert said, "requires_logging_directory must be True or False"
    ctx.equal(callable(getattr(cls, "log", None)), True, "it has a method log")
    ctx.equal("tracker" in dir(cls), True, "it has a property tracker")
    why = cls.unusable(dict(os.environ))
    ctx.equal(why is None or isinstance(why, str), True, "unusable returns None or a string")
    verbs = ", ".join(sorted(cls.supports))
    return f"verbs: {verbs or 'none'}" + (f"; {why}" if why else "")


@contextmanager
def _in(ctx: CheckContext, name: str) -> Iterator[dict[str, Any]]:
    """Work in a separate directory, because libraries write to the working directory.

    Yields the arguments of an Accelerator that logs there.
    """
    folder = ctx.scratch(name)
    folder.mkdir(exist_ok=True)
    with chdir(folder):
        if why := ctx.found.unusable(dict(os.environ)):
            ctx.skip(why)
        yield {"log_with": ctx.name, "project_dir": str(folder / "logs")}


@contextmanager
def _run(ctx: CheckContext, name: str, resume: str = "") -> Iterator[Any]:
    """Open a run in a separate directory, or resume that of a checkpoint.

    Warnings about the tracker are failures.
    """
    with _in(ctx, name) as arguments, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = ctx.accelerator(**arguments)
        if resume:
            accelerator.load_state(resume)
        accelerator.init_trackers("suite", CONFIG, _init(ctx))
        _runs(ctx, accelerator, "init_trackers", caught)
        yield accelerator
        accelerator.flush_trackers()
        _runs(ctx, accelerator, "what was logged", caught)
        accelerator.end_training()


def _init(ctx: CheckContext) -> dict[str, Any]:
    return {ctx.name: dict(ctx.options.get("init", {}))}


def _runs(ctx: CheckContext, accelerator: Any, after: str, caught: list[Any]) -> None:
    said = [str(one.message) for one in caught if ctx.name in str(one.message)]
    on = type(accelerator.get_tracker(ctx.name)).__name__ != "BlankTracker"
    assert on, f"it was switched off after {after}: {' '.join(said) or 'without a reason'}"


@check("tracker", alone=True)
def values(ctx: CheckContext) -> None:
    """Numbers, strings and nested values are logged, with and without steps, and the run is closed."""
    import torch

    with _run(ctx, "values") as accelerator:
        for step in range(STEPS):
            _log_series(accelerator, step)
        accelerator.log({"tensor": torch.tensor(2.5), "word": "fine", "flag": True}, step=STEPS)
        accelerator.log({"not_finite": float("nan"), "beside_it": float("inf")}, step=STEPS + 1)
        accelerator.log({"without_a_step": 1})
        own = accelerator.get_tracker(ctx.name, unwrap=True)
        ctx.equal(own is not None, True, "get_tracker(unwrap=True) returns the library's object")


def _marked(ctx: CheckContext) -> Path:
    """Return the directory of a run with a series and all marks, which two checks use."""
    folder = ctx.scratch("kept")
    if not folder.exists():
        with _run(ctx, "kept") as accelerator:
            for step in (*range(STEPS), None):
                _log_series(accelerator, step)
                for key, (value, its_step) in MARKS.items():
                    if its_step == step:
                        accelerator.log({key: value}, step=step)
    return folder


def _log_series(accelerator: Any, step: int | None) -> None:
    if step is not None:
        accelerator.log({"loss": 1.0 / (step + 1), "nested": {"value": step}}, step=step)


def _lost(folder: Path, words: Iterable[str]) -> list[str]:
    """Return the words that are not in any file of a directory."""
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return [word for word in words if not any(word.encode() in text for text in texts)]


def _has_number(folder: Path, number: float) -> bool:
    """Return whether a number is in the files of a directory, as a string, a double or a float."""
    forms = [str(number)[:-1].encode(), f"{number:e}"[:7].encode()]
    forms += [struct.pack(form, number) for form in ("<d", ">d", "<f", ">f")]
    texts = (path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return any(form in text for text in texts for form in forms)


def _skip_elsewhere(ctx: CheckContext) -> None:
    if ctx.options.get("elsewhere", False):
        ctx.skip("the option elsewhere is set")


@check("tracker", alone=True)
def kept(ctx: CheckContext) -> str:
    """Numbers, strings, bools, values without a step and the config are in the run's directory."""
    _skip_elsewhere(ctx)
    folder = _marked(ctx)
    reader = ctx.options.get("read")
    words = {*MARKS, str(MARKS["suite_text"][0]), "suite_note", str(CONFIG["suite_note"])}
    if reader:
        with suppress(Exception):  # `read_back` reports it
            words -= set(_read(ctx, folder))
    lost = _lost(folder, sorted(words))
    if reader and len(lost) == len(words):
        ctx.skip("its files are compressed or elsewhere; `read_back` uses the reader instead")
    assert not lost, (
        f"no trace of {listing(lost)} in the files of the run's directory. If it writes somewhere else, "
        "or compressed files, set the option 'read', a function `module:name` that reads the "
        'directory, or {"elsewhere": true}, to skip this check'
    )
    assert reader or _has_number(folder, NUMBER), (
        f"the name 'suite_number' is in the files of the run's directory, but its value {NUMBER} "
        "is not. The tracker wrote a different value, or packs its values. If it packs them, set the "
        "option 'read', a function `module:name` that reads the directory"
    )
    return f"{len(words)} words"


@check("tracker", alone=True)
def flushed(ctx: CheckContext) -> str | None:
    """After `flush` the files have everything that was logged, unless `flush` returns False."""
    _skip_elsewhere(ctx)
    answers: list[Any] = []
    with _run(ctx, "flushed") as accelerator:
        tracker = accelerator.get_tracker(ctx.name)
        own = tracker.flush

        def flush() -> Any:
            answers.append(own())
            return answers[-1]

        tracker.flush = flush
        accelerator.log({"suite_number": 0.5}, step=0)
        accelerator.flush_trackers()
        lost = _lost(ctx.scratch("flushed"), ["suite_number"])
    if _lost(ctx.scratch("flushed"), ["suite_number"]):
        ctx.skip("its files are compressed or elsewhere")
    assert not lost or answers[-1:] == [False], (
        "logged values are not in the files after flush, but they are after finish. Write them in flush(), "
        "or return False from it"
    )
    return "only at the end of a run, as flush returns False" if lost else None


#: A step whose number nothing else writes.
_STEP = 30_561_287


@check("tracker", alone=True)
def step_numbers(ctx: CheckContext) -> str:
    """The step in the run's files is the step that was logged, and not one beside it."""
    _skip_elsewhere(ctx)
    with _run(ctx, "step_numbers") as accelerator:
        accelerator.log({"suite_step": 0.5}, step=_STEP)
    folder = ctx.scratch("step_numbers")
    found = [step for step in (_STEP - 1, _STEP, _STEP + 1) if _has_integer(folder, step)]
    if not found:
        ctx.skip("its files have the step in another form; the option 'read' compares it")
    ctx.equal(found, [_STEP], f"steps in the files after log(..., step={_STEP})")
    return "as logged"


def _has_integer(folder: Path, number: int) -> bool:
    """Return whether an integer is in the files of a directory: as a string, or in four or eight bytes."""
    forms = [
        str(number).encode(),
        *(struct.pack(form, number) for form in ("<i", ">i", "<q", ">q")),
    ]
    texts = (path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return any(form in text for text in texts for form in forms)


@check("tracker", alone=True)
def read_back(ctx: CheckContext) -> str:
    """The reader finds the values, steps, order and config that were logged."""
    if not ctx.options.get("read"):
        ctx.skip("the option 'read', a function `module:name` that reads a directory, is not set")
    series = {
        "loss": [[step, 1.0 / (step + 1)] for step in range(STEPS)],
        "nested/value": [[step, float(step)] for step in range(STEPS)],
    }
    seen = [f"{STEPS} steps"]
    folder = _marked(ctx)
    try:
        got = _read(ctx, folder)
    except Exception as error:  # perhaps the reader only reads numbers with steps
        with _run(ctx, "read_back") as accelerator:
            for step in range(STEPS):
                _log_series(accelerator, step)
        got = _read(ctx, ctx.scratch("read_back"))
        seen.append(f"nothing more ({type(error).__name__}: {error})")
    for key, expected in series.items():
        pairs = [[step, _number(value)] for step, value in got.get(key, [])]
        ctx.equal([step for step, _ in pairs], [step for step, _ in expected], f"steps of {key}")
        values = [value for _, value in pairs]
        ctx.close(values, [value for _, value in expected], f"values of {key}", 1e-6)
    for key in set(MARKS) & set(got):  # `kept` searches for the others
        _is_mark(ctx, key, got[key])
        seen.append(key)
    if read_config := ctx.options.get("read_config"):
        config = dict(pkgutil.resolve_name(read_config)(folder))
        for key in ("lr", "suite_note"):
            ctx.equal(str(config.get(key)), str(CONFIG[key]), f"{key} of the config")
        seen.append("config")
    return ", ".join(sorted(seen))


def _read(ctx: CheckContext, folder: Path) -> dict[str, list[list[Any]]]:
    """Call the plugin author's reader."""
    got = pkgutil.resolve_name(str(ctx.options["read"]))(folder)
    return {key: [list(pair) for pair in pairs] for key, pairs in got.items()}


def _is_mark(ctx: CheckContext, key: str, pairs: list[list[Any]]) -> None:
    value, step = MARKS[key]
    ctx.equal(len(pairs), 1, f"entries of {key}")
    ((its_step, its_value),) = pairs
    if step is not None:
        ctx.equal(int(its_step), step, f"step of {key}")
    if isinstance(value, str):
        ctx.equal(str(its_value), value, key)
    else:
        ctx.close(_number(its_value), float(value), key, 1e-6)


def _number(value: Any) -> float:
    """Return the number that a reader returned, perhaps as text."""
    words = {"true": 1.0, "false": 0.0}
    text = str(value).lower()
    return words[text] if text in words else float(value)


@check("tracker", alone=True)
def verbs(ctx: CheckContext) -> str:
    """Each method that it supports accepts the documented arguments."""
    import torch

    supports = ctx.found.supports
    if not supports:
        ctx.skip("it supports no method besides log")
    with _run(ctx, "verbs") as accelerator:
        if "images" in supports:
            accelerator.log_images({"picture": torch.rand(2, 8, 8, 3)}, step=0)
        if "table" in supports:
            accelerator.log_table("table", columns=["word", "count"], data=[["x", 1]], step=0)
        if "text" in supports:
            accelerator.log_text("note", "several words", step=0)
        if "histogram" in supports:
            accelerator.log_histogram("weights", torch.linspace(-1, 1, 101), step=0)
        if "artifact" in supports:
            Path("model.txt").write_text("weights", encoding="utf-8")
            accelerator.log_artifact("model.txt")
    return ", ".join(sorted(supports - {"figure"}))


@check("tracker", alone=True)
def failed_run(ctx: CheckContext) -> str | None:
    """If the script raises, the run is closed and the exception is not changed."""
    with _in(ctx, "failed_run") as arguments:
        try:
            with ctx.accelerator(**arguments) as made:
                made.init_trackers("suite", CONFIG, _init(ctx))
                made.log({"loss": 1.0}, step=0)
                raise KeyError("of the script")
        except KeyError as error:
            ctx.equal(error.args, ("of the script",), "the exception")
    return ctx.found.failed_word or None


def _log_once(ctx: CheckContext, word: str) -> None:
    with _run(ctx, "once_more") as accelerator:
        accelerator.log({word: 0.5}, step=0)


@check("tracker", alone=True)
def once_more(ctx: CheckContext) -> str | None:
    """A second run works like the first, keeps its files, and leaves nothing else behind."""
    words = ("suite_first", "suite_second")
    place = ctx.scratch("once_more")
    if ctx.found.requires_logging_directory:
        place /= "logs"
    lives = Lives(ctx, places=[place], whose=ctx.found.__module__.partition(".")[0])
    for word in words:
        with lives.one():
            _log_once(ctx, word)
    lives.check()
    if ctx.options.get("overwrites", False):
        return "the option overwrites is set"
    gone = _lost(ctx.scratch("once_more"), words) == ["suite_first"]
    assert not gone, "a second run in the same directory removed the files of the first"
    return None


@check("tracker", alone=True)
def resumed(ctx: CheckContext) -> str:
    """If it declares that it resumes, it continues the run of a checkpoint and keeps its values."""
    if not ctx.found.resumes:
        ctx.skip("it does not declare that it resumes")
    if not ctx.options.get("resumes", True):
        ctx.skip("the option resumes is False")
    saved = str(ctx.scratch("resumed_checkpoint"))
    words = ("suite_before", "suite_after")
    runs = []
    for step, word in enumerate(words):
        with _run(ctx, "resumed", resume=saved if step else "") as accelerator:
            runs.append(accelerator.get_tracker(ctx.name).run_id)
            accelerator.log({word: 0.5}, step=step)
            if step == 0:
                accelerator.save_state(saved)
    assert runs[0], "it declares resumes = True, but has no run_id for the checkpoint"
    ctx.equal(runs[1], runs[0], "run_id of the resumed run")
    if ctx.options.get("read"):
        got = _read(ctx, ctx.scratch("resumed"))
        for step, word in enumerate(words):
            pairs = [[its, _number(value)] for its, value in got.get(word, [])]
            ctx.close(pairs, [[step, 0.5]], f"{word} of a resumed run", 1e-6)
    return str(runs[0])


@check("tracker")
def two_processes(ctx: CheckContext) -> str | None:
    """On several ranks only the main one has a run, unless the tracker wants one on every rank."""
    from accelerate_tracking import is_for_every_rank

    with _in(ctx, "two_processes") as arguments:
        accelerator = ctx.accelerator(**arguments)
        accelerator.init_trackers("suite", CONFIG, _init(ctx))
        word = f"suite_of_rank_{accelerator.process_index}"
        accelerator.log({word: 0.5}, step=0)
        everywhere = is_for_every_rank(ctx.found, _init(ctx))
        without = type(accelerator.get_tracker(ctx.name)).__name__ == "BlankTracker"
        expected = not (everywhere or accelerator.is_main_process)
        seen = accelerator.communicator.gather_object((without, expected))
        ctx.equal([one for one, _ in seen], [one for _, one in seen], "ranks without a run")
        accelerator.end_training()
        in_files = ctx.found.requires_logging_directory and not ctx.options.get("elsewhere")
        if in_files and not without:
            lost = _lost(ctx.scratch("two_processes"), [word])
            ctx.equal(lost, [], "values that this rank logged and that are in no file")
    return "a run per rank" if everywhere else None
