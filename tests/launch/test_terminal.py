"""Output fits the terminal, is complete in a pipe, and has colours only where they are wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pool
import pytest
import support
from rich.cells import cell_len
from support import clean_environment
from warm_python import warm_python

COLUMNS = 80
LONG = "a_checkpoint_with_a_name_of_more_than_forty_characters_12000"
LISTINGS = (
    "--help",
    "launch --help",
    "test --help",
    "config --help",
    "plugins --help",
    "plugins check --help",
    "checkpoints --help",
    "runs --help",
    *(["deepspeed --help", "plugins why deepspeed"] if find_spec("accelerate_deepspeed") else []),
    "estimate-memory --help",
    "env",
    "config show",
    "plugins",
    "plugins --all",
    "plugins why torchrun",
    "plugins hooks",
    "plugins check jsonl --list",
    "estimate-memory model",
    "estimate-memory model --device_map auto --max_memory 0=2KB,cpu=1GB",
    "checkpoints list .",
    "checkpoints verify .",
    f"checkpoints show {LONG}",
    "runs show .",
    "launch --config_file config.yaml --num_processes 2 --mixed_precision bf16 --dry_run script.py",
    # Must be last, because the script replaces the process.
    "launch --explain --config_file config.yaml script.py",
)
#: Runs each argument as a command, all in one interpreter.
MAIN = """
import shlex, sys
from accelerate_launch.cli import cli
for line in sys.argv[1:]:
    print("#####", line, flush=True)
    try:
        cli.main(shlex.split(line), prog_name="accelerate-core", standalone_mode=False)
    except SystemExit:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
"""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Foreground and background colours, which NO_COLOR forbids. Bold and dim are allowed.
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, a run, a model and a config file."""
    root = tmp_path_factory.mktemp("terminal")
    code = f"""
import torch
from accelerate_core import Accelerator
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=".")
model = accelerator.prepare(torch.nn.Linear(64, 8))
accelerator.init_trackers("run")
for step in range(60):
    accelerator.log({{"validation/accuracy_of_the_second_head": step / 7, "loss": step * 1e5}}, step)
accelerator.save_state("{LONG}")
accelerator.save_model(model, "model")
accelerator.end_training()
"""
    pool.run(["-c", code], clean_environment(), 120, cwd=root).check_returncode()
    (root / "config.yaml").write_text("use_cpu: true\nnum_processes: 1\nmixed_precision: bf16\n")
    (root / "script.py").write_text("")
    return root


def environment(folder: Path, **more: str) -> dict[str, str]:
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    made = clean_environment(**home, **more)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        if name not in more:
            made.pop(name, None)
    return made


def on_terminal(
    folder: Path, code: str = MAIN, arguments: Sequence[str] = LISTINGS, **more: str
) -> str:
    """Run Python code, by default all listings, in a pseudo-terminal and return its output."""
    command = [str(warm_python()), "-c", code, *arguments]
    environ = environment(folder, TERM="xterm-256color", **more)
    return support.on_terminal(command, folder, environ, COLUMNS)


BAR = """
import time
from accelerate_checkpoint.progress import byte_bar
with byte_bar("Reading [a] " + "name" * 30, 9_000_000) as advance:
    for _ in range(8):
        time.sleep(0.3)
        advance(1_000_000)
"""


@pytest.mark.parametrize(("rank", "bar"), [("0", True), ("1", False)])
def test_only_one_rank_shows_a_progress_bar(tmp_path: Path, rank: str, bar: bool) -> None:
    said = ANSI.sub("", on_terminal(tmp_path, BAR, (), LOCAL_RANK=rank))
    if not bar:
        assert said == ""
        return
    lines = re.split(r"[\r\n]+", said)
    assert max(map(cell_len, lines)) == COLUMNS
    assert any(re.search(r"Reading \[a\] .*━ 8.0/9.0 MB \d.\d MB/s 0:00:0\d", one) for one in lines)


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    """Return the output of all listings in a terminal with NO_COLOR."""
    return on_terminal(folder, NO_COLOR="1")


def test_listings_fit_the_terminal_and_cut_nothing(shown: str) -> None:
    said = ANSI.sub("", shown)
    parts = dict(part.split("\r\n", 1) for part in said.split("##### ")[1:])
    assert [*parts] == [*LISTINGS]
    lines = [(what, line.split("\r")[-1]) for what in parts for line in parts[what].split("\r\n")]
    # The command of a dry run isn't wrapped, so that it can be copied.
    lines = [one for one in lines if " -m accelerate_launch.agent " not in one[1]]
    assert {what: line for what, line in lines if cell_len(line) > COLUMNS} == {}
    usage = re.compile(r"\]\.\.\.|SIZE,\.\.\.|num_items=\.\.\.")
    cut = {what: line for what, line in lines if "…" in line or "..." in usage.sub("", line)}
    assert {w: line for w, line in cut.items() if "newly installed" not in line} == {}
    listed = "".join(parts["checkpoints list ."].split())
    assert all(piece in listed for piece in (LONG[:20], LONG[-8:], "whole"))
    assert "accelerate-checkpoint 0." in parts["plugins"]


def test_no_color_turns_colours_off(folder: Path, shown: str) -> None:
    assert not COLOUR.search(shown)
    assert COLOUR.search(on_terminal(folder, arguments=["plugins"]))


def test_pipe_gets_complete_lines_without_escapes(folder: Path) -> None:
    environ = environment(folder, TERM="xterm-256color", COLUMNS="60")
    done = pool.run(["-c", MAIN, *LISTINGS], environ, 120, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "━" not in done.stderr  # a progress bar
    rows = [line.split() for line in done.stdout.splitlines()]
    tracker = next(row for row in rows if row[:2] == ["tracker", "jsonl"])
    assert "accelerate-tracking" in tracker
    assert tracker[6] == "log_with='all'"
    assert any(row[:2] == [LONG, "whole"] for row in rows)
    parts = dict(part.split("\n", 1) for part in done.stdout.split("##### ")[1:])
    for listing in ("env", "config show", "plugins", "plugins --all", "plugins hooks"):
        lines = parts[listing].splitlines()
        assert max(map(len, lines)) <= 120, listing
        assert not any(line.endswith(" ") for line in lines), listing


def test_dry_run_shows_complete_variable_names_and_no_internals(shown: str) -> None:
    said = ANSI.sub("", shown).split("--dry_run script.py\r\n")[1].split("##### ")[0]
    rows = [line.split() for line in said.split("\r\n")]
    assert ["ACCELERATE_MIXED_PRECISION", "bf16", "command", "line"] in [row[:4] for row in rows]
    assert "ACCELERATE_PROVENANCE" not in said
