"""`accelerate-core completion` works in real interactive shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from support import clean_environment

from accelerate_launch.cli import cli
from accelerate_launch.paths import cache_directory

BIN = Path(sys.executable).parent
#: How each shell is started without the machine's own settings, but with those in HOME.
SHELLS = {
    "bash": ["bash", "--noprofile", "-i"],
    "zsh": ["zsh", "-o", "NO_GLOBAL_RCS", "-i"],
    "fish": ["fish", "-i"],
}
STARTUP = {"bash": ".bashrc", "zsh": ".zshrc"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_directory().parent))  # plugins are read once
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def typed(shell: str, home: Path, keys: str) -> str:
    """Type keys into an interactive shell, then `exit`; return what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        environ = clean_environment(
            HOME=str(home), TERM="xterm", PATH=f"{BIN}:{os.environ['PATH']}"
        )
        os.execvpe(SHELLS[shell][0], SHELLS[shell], environ)
    shown, sent = "", False
    end = time.monotonic() + 90
    try:
        os.write(terminal, b"echo re''ady\n")
        while time.monotonic() < end and "the" + "end" not in shown:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
            if not sent and "ready" in shown:
                os.write(terminal, f"{keys}\necho the''end\n".encode())
                sent = True
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown


@pytest.mark.parametrize("shell", SHELLS)
def test_installed_completion_completes_what_is_typed(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    result = CliRunner().invoke(cli, ["completion", shell, "--install"])
    assert result.exit_code == 0, result.output
    # After two completions, Ctrl-A and `echo` make a command that shows the whole line.
    shown = typed(shell, home, "accelerate-core launch --mixed_prec\tbf\t\x01echo ")
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in shown.splitlines()]
    assert "accelerate-core launch --mixed_precision bf16" in lines, shown


@pytest.mark.parametrize("shell", STARTUP)
def test_installing_twice_changes_the_startup_file_once(shell: str, home: Path) -> None:
    startup = home / STARTUP[shell]
    startup.write_text("export MINE=1")
    first = CliRunner().invoke(cli, ["completion", shell, "--install"])
    assert f"Changed: {startup}" in first.output
    text = startup.read_text()
    assert text.startswith("export MINE=1\n\n# Completion of accelerate-core\nsource ")
    second = CliRunner().invoke(cli, ["completion", shell, "--install"])
    assert "Changed" not in second.output
    assert startup.read_text() == text


def test_script_is_printed(home: Path) -> None:
    result = CliRunner().invoke(cli, ["completion", "bash"])
    assert "_ACCELERATE_CORE_COMPLETE=bash_complete" in result.output
    assert list(home.iterdir()) == []


def test_directory_that_cannot_be_written_is_an_error(home: Path) -> None:
    (home / ".config").write_text("a file")
    result = CliRunner().invoke(cli, ["completion", "fish", "--install"])
    assert result.exit_code == 2
    assert "Cannot write" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelerate-core comp", {"plain,completion"}),
        ("accelerate-core completion f", {"plain,fish"}),
        ("accelerate-core launch --backend fs", {"plain,fsdp2"}),
        ("accelerate-core launch --fsdp_state_dict_type SH", {"plain,SHARDED_STATE_DICT"}),
        ("accelerate-core launch --config_file co", {"file,co"}),
        ("accelerate-core launch tr", {"file,tr"}),
        ("accelerate-core launch train.py --l", {"file,--l"}),
    ],
)
def test_values_are_completed(
    words: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    complete = BashComplete(cli, {}, "accelerate-core", "_ACCELERATE_CORE_COMPLETE")
    assert set(complete.complete().split()) == expected


def test_completing_does_not_import_torch() -> None:
    code = (
        "import sys; from accelerate_core.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    environ = clean_environment(
        _ACCELERATE_CORE_COMPLETE="bash_complete",
        COMP_WORDS="accelerate-core launch --num",
        COMP_CWORD="2",
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    *options, imported = done.stdout.split()
    assert "plain,--num_processes" in options
    assert imported == "False"
