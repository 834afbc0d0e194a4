"""Every code block in tutorials, guides, concepts and the FAQ runs as printed, or says why it can't.

A page is run from top to bottom in one empty directory. Blocks with a title are files. `python` blocks
without a title run in one interpreter until the next commands, and `bash` blocks run in a shell. A `text`
block is the output of the previous block: its lines must appear in this order, but numbers may differ.
`...` matches the rest of a line, and lines may be left out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support import clean_environment
from warm_python import warm_python

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["faq.md"] + [
    page.relative_to(DOCS).as_posix()
    for folder in ("tutorials", "how_to", "concepts")
    for page in sorted((DOCS / folder).glob("*.md"))
]
TIMEOUT = 120

#: Reason in `<!-- not run: REASON -->` -> pages with such blocks.
NOT_RUN = {
    "it installs packages": {
        "how_to/adapters_on_shards.md",
        "how_to/object_stores.md",
        "how_to/survive_failures.md",
        "tutorials/install.md",
    },
    "its script is on another page": {"how_to/survive_failures.md"},
    # tests/clients/test_adapters_on_shards.py runs it.
    "it needs bitsandbytes": {"how_to/adapters_on_shards.md"},
    "it needs GPUs": {"how_to/sweeps.md", "tutorials/eight_gpus.md"},
    "it needs several machines": {
        "how_to/cloud_machines.md",
        "how_to/mpi.md",
        "how_to/survive_failures.md",
        "tutorials/eight_gpus.md",
    },
    # tests/watch/test_drift.py does the same.
    "it needs four ranks": {"how_to/guard_training.md"},
    "it needs an MPI": {"how_to/mpi.md"},
    "it needs a scheduler": {"how_to/resume.md"},
    "it needs a SLURM cluster": {"how_to/slurm.md"},
    "it needs Docker": {"how_to/docker.md"},
    "it needs a Ray cluster": {"how_to/ray.md"},
    "it needs a cluster": {"how_to/kubernetes.md"},
    "it rents machines": {"how_to/skypilot.md"},
    "mypy reads all of torch": {"how_to/type_checking.md"},
}

#: Command on a page -> command to run instead.
INSTEAD = {
    # Installs into the page's directory, not into the environment of the tests, and without an index.
    "pip install -e .": "pip install -q --no-index --no-deps --no-build-isolation --target installed .",
    # Without the checks that train, which tests/testing runs.
    "accelerate-core plugins check pace": "accelerate-core plugins check pace"
    " --only imports --only metadata --only api_version --only hooks --only selection --only settings",
}

# the same, from the pool of interpreters
for _script in ("before.py", "after.py"):
    INSTEAD[f"torchrun --standalone --nproc_per_node 2 {_script}"] = (
        f"python -m torch.distributed.run --standalone --nproc_per_node 2 {_script}"
    )

# These are in a folder of their own (see the Makefile). In the environment of the tests, transformers
# would import PEFT, and with it `accelerate`, which is missing there.
_GUIDES = Path(sys.prefix, "guides")
_DROP_IN = DOCS.parent / "extensions" / "drop_in" / "accelerate"
INSTEAD["pip install transformers peft"] = (
    f"{INSTEAD['pip install -e .'].removesuffix(' .')} {_DROP_IN}; ln -s {_GUIDES}/peft* installed/"
)

INSTEAD["pip install lightning-fabric"] = f"ln -s {_GUIDES} installed"

# Unlike the reader's environment, the environment of the tests has every backend.
_MISSING = """Accelerator(backend='deepspeed')" || echo "status $?\""""
INSTEAD[f'python -c "from accelerate_core import Accelerator; {_MISSING}'] = (
    'python -c "import dataclasses; from accelerate_core.plugins import discovery, selection; '
    "found = discovery.installed(); "
    "others = tuple(one for one in found.plugins if one.name != 'deepspeed'); "
    "without = dataclasses.replace(found, plugins=others); "
    "discovery.installed = selection.installed = lambda: without; "
    f"from accelerate_core import Accelerator; {_MISSING}"
)

#: Pages that cannot use the pool: those about failing ranks, which must be children of the launcher, and
#: those whose library starts interpreters itself.
REAL_INTERPRETERS = {"how_to/debug_a_hang.md", "how_to/ray.md", "how_to/ray_tune.md"}

#: Page -> marks with packages that it needs, apart from those of this repository.
MARKS = {
    "how_to/adapters_on_shards.md": [
        pytest.mark.needs("transformers"),
        pytest.mark.skipif(not _GUIDES.exists(), reason="peft is not installed"),
    ],
    "how_to/debugger.md": [pytest.mark.needs("debugpy")],
    "how_to/object_stores.md": [pytest.mark.needs("moto"), pytest.mark.needs("obstore")],
    "how_to/ray.md": [pytest.mark.needs("ray"), pytest.mark.soak],
    "how_to/ray_tune.md": [pytest.mark.needs("ray"), pytest.mark.soak],
    "how_to/sweeps.md": [pytest.mark.needs("optuna")],
    "tutorials/from_fabric.md": [
        pytest.mark.skipif(not _GUIDES.exists(), reason="lightning-fabric is not installed"),
        pytest.mark.soak,
    ],
    "tutorials/lora.md": [
        pytest.mark.needs("transformers"),
        pytest.mark.skipif(not _GUIDES.exists(), reason="peft is not installed"),
    ],
    "how_to/type_checking.md": [pytest.mark.needs("pyright")],
}

#: Languages of blocks that may have a title, and are written to that file.
FILES = ("python", "bash", "toml", "yaml", "json", "dockerfile")

pytestmark = pytest.mark.dist


class Block(NamedTuple):
    line: int
    language: str
    title: str
    code: str
    not_run: str


FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?"
    r"^```(?P<language>[^\s`]*)(?P<options>[^\n]*)\n(?P<code>.*?)^```$",
    re.M | re.S,
)


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page. An unknown kind of block is an error."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = re.fullmatch(r'(?: title="([^"]+)")?', match["options"])
        line = text.count("\n", 0, match.start()) + 1
        block = Block(
            line, match["language"], (title and title[1]) or "", match["code"], match["why"] or ""
        )
        known = title and (
            block.language in FILES if block.title else block.language in KINDS or block.not_run
        )
        assert known, f"{page}:{line}: unknown block ```{match['language']}{match['options']}"
        found.append(block)
    fences = len(re.findall(r"^ *(?:```|~~~)", text, re.M))
    assert fences == 2 * len(found), f"{page}: a fence is indented, uses ~~~, or is not closed"
    return found


KINDS = ("python", "bash", "text", "mermaid", "diff")


def typed(folder: Path, home: Path, programs: Path, *command: str) -> str:
    """Run a command as a reader would, and return its output.

    Args:
        programs: the folder with `python` and `accelerate-core`.
    """
    environ = clean_environment(
        ACCELERATE_USE_CPU="true",  # even if there are accelerators
        OMP_NUM_THREADS="1",
        PATH=os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        PYTHONPATH=str(folder / "installed"),
        PYTHONIOENCODING="utf-8",
        HOME=str(home),
        COLUMNS="80",
    )
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"still running after {TIMEOUT} s:\n{' '.join(command)}\n{printed}")
    assert process.returncode == 0, f"status {process.returncode}:\n{command[-1]}\n{printed}"
    return printed


def plain(line: str) -> str:
    """Return the words of a line, without the frames of tables and with `#` for each number."""
    words = re.sub(r"[\u2500-\u257f]", " ", line).split()
    return re.sub(r"-?\d+(?:[.,:]\d+)*(?:e-?\d+)?", "#", " ".join(words))


def compare(page: str, shown: list[Block], printed: str) -> None:
    """Compare the output on a page with the actual output."""
    rest = iter([plain(line) for line in printed.splitlines()])
    for block in shown:
        for line in map(plain, block.code.splitlines()):
            if line in ("", "..."):
                continue
            wanted = re.compile(".*".join(map(re.escape, line.split("..."))))
            where = f"{page}: the output at line {block.line}, starting with {line!r}, is not in:"
            assert any(wanted.fullmatch(one) for one in rest), f"{where}\n{printed}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [pytest.param(one, marks=MARKS.get(one, ())) for one in PAGES])
def test_page_runs_as_printed(page: str, tmp_path: Path, home: Path) -> None:
    programs = Path(sys.executable if page in REAL_INTERPRETERS else warm_python()).parent
    interpreter: list[Block] = []
    shown: list[Block] = []
    printed = ""

    def leave_the_interpreter() -> None:
        nonlocal printed
        if interpreter:
            script = tmp_path / f"line_{interpreter[0].line}.py"
            script.write_text("".join(block.code for block in interpreter), encoding="utf-8")
            compare(page, shown, typed(tmp_path, home, programs, "python", str(script)))
            interpreter.clear()
            shown.clear()
            printed = ""

    for block in blocks(page):
        if block.title:
            leave_the_interpreter()
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.not_run:
            assert page in NOT_RUN[block.not_run], f"{page}:{block.line}: {block.not_run}"
            if block.language == "python":
                compile(block.code, page, "exec")
            elif block.language == "bash":
                subprocess.run(["bash", "-n", "-c", block.code], check=True)
        elif block.language == "python":
            interpreter.append(block)
        elif block.language == "bash":
            leave_the_interpreter()
            code = re.sub(
                r"^.*$", lambda line: INSTEAD.get(line[0], line[0]), block.code, flags=re.M
            )
            printed = typed(tmp_path, home, programs, "bash", "-e", "-c", code)
        elif block.language == "text" and interpreter:
            shown.append(block)
        elif block.language == "text":
            assert printed, f"{page}:{block.line}: no block before this one has an output"
            compare(page, [block], printed)
    leave_the_interpreter()


def test_list_of_blocks_that_are_not_run_is_up_to_date() -> None:
    found = {(block.not_run, page) for page in PAGES for block in blocks(page) if block.not_run}
    assert found == {(why, page) for why, pages in NOT_RUN.items() for page in pages}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("concepts/")])
def test_concept_has_a_diagram(page: str) -> None:
    assert "mermaid" in [block.language for block in blocks(page)]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_a_title_working_links_and_a_readable_length(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert 60 <= len(text.splitlines()) <= 200
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (DOCS / page).parent.joinpath(target).exists(), f"{page}: no {target}"
