"""Every backend with every precision and tracker, ours and third-party ones, works or is refused.

What fits is read from what the plugins declare. A sample of it is trained, and read back from what
the trackers wrote.
"""

from __future__ import annotations

import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dummies
import pytest
from support import clean_environment, run_workers

from accelerate_core.contract.capabilities import NEEDS
from accelerate_core.plugins.discovery import installed
from accelerate_testing.scaffold import write_repository

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("matrix_worker.py")
#: Those of other people: from the kit, and the examples.
KIT = {"level": "backend", "grid": "precision", "diary": "tracker"}
EXAMPLES = {
    "ring": ROOT / "examples" / "ring_plugin",
    "diloco": ROOT / "examples" / "third_party" / "accelerate-diloco",
}
THEIRS = {"backend": {"level", *EXAMPLES}, "precision": {"grid"}, "tracker": {"diary"}}
OURS = {kind: {one.name for one in installed().of_kind(kind)} for kind in THEIRS}
OURS["backend"].discard("xla")  # of another torch
OURS["backend"] -= {"torchft", "torchft_fsdp2"}  # need a lighthouse; tests/backends/torchft
if find_spec("deepspeed") is None:
    OURS["backend"].discard("deepspeed")
#: Precisions that need one word each.
NEEDING = "from accelerate_core import Precision\n" + "".join(
    f"class {word}(Precision):\n"
    f"    name, api_version, needs = 'needs_{word}', (1, 0), frozenset({{'{word}'}})\n"
    for word in NEEDS
)

Said = dict[tuple[str, str, str], tuple[list[str], str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path on which processes find third-party plugins in addition to ours."""
    folder = tmp_path_factory.mktemp("site")
    for name, kind in KIT.items():
        write_repository(name, kind, folder / name)
    sources = [*(folder / name for name in KIT), *EXAMPLES.values()]
    for source in sources:
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        metadata = (
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        (info / "METADATA").write_text(metadata)
        lines = []
        for group, points in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
    points = {f"needs_{word}": word for word in NEEDS}
    dummies.distribution(folder, "needing", NEEDING, {"precisions": points})
    paths = [str(folder), *(str(source / "src") for source in sources)]
    return ":".join([*paths, clean_environment()["PYTHONPATH"]])


def ranks(path: str, count: int, *arguments: object) -> list[Any]:
    run = run_workers(WORKER, count, arguments, timeout=150, env={"PYTHONPATH": path})
    return run.checked().results


@pytest.fixture(scope="module")
def said(path: str) -> Said:
    """Backend, precision, tracker -> missing words, the result of a run, the row of `plugins`."""
    names = sorted(OURS["backend"] | THEIRS["backend"])
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda name: ranks(path, 1, "make", name)[0], names)
        return {
            (name, precision, tracker): rest
            for name, rows in zip(names, made, strict=True)
            for precision, tracker, *rest in rows
        }


@pytest.mark.dist
def test_every_combination_works_or_is_refused_by_both_names(said: Said) -> None:
    backends, precisions, trackers = (len(OURS[kind] | THEIRS[kind]) for kind in THEIRS)
    assert len(said) == backends * (precisions * trackers + len(NEEDS))
    for (backend, precision, _), (lacks, told, before) in said.items():
        assert bool(told) == bool(lacks), (backend, precision, told)
        assert told == before  # `plugins` says what a run would
        if lacks:
            both = f"Backend {backend!r} cannot run mixed_precision={precision!r} (from environment"
            assert told.startswith(both)
            needs = told.partition("which needs ")[2].partition(" (")[0]
            assert re.findall(r"'(\w+)'", needs) == lacks
            assert all(NEEDS[word] in told for word in lacks)
            # The way out: what the backend takes, or another backend.
            assert re.search(r"It accepts ('\w+'|\(none\) and implements '\w+')", told)
            assert told.endswith("Choose another precision or another backend.")
    told = {(b, p): said[b, p, t][1] for b, p, t in said}
    scaled = told.get(("deepspeed", "needs_loss_scaling"))
    assert scaled is None or "implements 'fp16' itself" in scaled


def test_refused_combinations_match_the_compatibility_page(said: Said) -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    header, _, _, *rows = [line for line in page.split("\n## ")[0].splitlines() if "|" in line]
    names = [re.findall(r"`(\w+)`", line) for line in header.split("|")]
    precisions = [found[0] for found in names if found]
    assert {*precisions} == OURS["precision"] | THEIRS["precision"]
    found = {}
    for row in rows:
        (backend, *cells) = [cell.strip() for cell in row.strip("|").split("|")]
        for precision, cell in zip(precisions, cells, strict=True):
            lacks = cell.removeprefix("no: ").split(", ") if cell != "yes" else []
            found[backend.strip("`"), precision] = lacks
    # The matrix starts one world of processes, so it leaves out torchft.
    away = {"xla", "torchft", "torchft_fsdp2"}
    if not find_spec("deepspeed"):
        away.add("deepspeed")
    here = {key: lacks for key, lacks in found.items() if key[0] not in away}
    assert here == {(b, p): lacks for (b, p, _), (lacks, *_) in said.items() if p in precisions}


def sample(said: Said) -> list[tuple[str, str, list[str]]]:
    """Return the combinations to train: each backend with each precision it accepts, and trackers.

    The third-party tracker is in all of them, with one of our two in turn, so that each backend
    and precision is combined with these. Third-party backends and precisions are combined with every
    tracker.
    """
    light = ["jsonl", "tensorboard"]
    found = []
    fit = {(b, p) for (b, p, _), (lacks, *_) in said.items() if not lacks and "needs_" not in p}
    for number, (backend, precision) in enumerate(sorted(fit)):
        trackers = ["diary", light[number % 2]]
        if (backend, precision) == ("level", "grid"):
            trackers = sorted(OURS["tracker"] | THEIRS["tracker"])
        found.append((backend, precision, trackers))
    return found


@pytest.mark.dist
def test_sample_of_combinations_trains_and_logs(said: Said, path: str, tmp_path: Path) -> None:
    chosen = sample(said)
    for kind, which in (("backend", 0), ("precision", 1)):
        assert {one[which] for one in chosen} == OURS[kind] | THEIRS[kind]
    assert {name for *_, names in chosen for name in names} == OURS["tracker"] | THEIRS["tracker"]
    backends = sorted({backend for backend, *_ in chosen})

    def trained(backend: str) -> tuple[list[Any], dict[str, Any]]:
        mine = [f"{b} {p} {','.join(names)}" for b, p, names in chosen if b == backend]
        folder = tmp_path / backend
        folder.mkdir()
        losses = ranks(path, 1 if backend == "single" else 2, "train", folder, *mine)
        return losses, ranks(path, 1, "read", folder, *mine)[0]

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(trained, backends))
    for losses, read in done:
        assert all(rank == losses[0] for rank in losses)
        for combination, its in losses[0].items():
            assert its[-1] < its[0], (combination, its)
            trackers = combination.split()[2].split(",")
            assert sorted(read[combination]) == sorted(trackers)
            for name, pairs in read[combination].items():
                got = [value for _, value in pairs]
                assert [step for step, _ in pairs] == list(range(len(its))), (combination, name)
                assert got == pytest.approx(its, rel=1e-6), (combination, name)
