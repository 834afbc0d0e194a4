"""`accelerate-core completion`: complete commands and options in a shell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.schemas import COMPLETION

_PROGRAM = "accelerate-core"
#: zsh has no completion until `compinit` ran, which many ~/.zshrc files leave to a framework.
_ZSH_START = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--install", is_flag=True, help="Set it up for new shells instead of printing it.")
def command(shell: str, install: bool) -> None:
    """Print a script that completes commands and options in SHELL.

    To try it in this shell: eval "$(accelerate-core completion bash)". With --install, the script
    is written into a file, and your ~/.bashrc or ~/.zshrc reads it.
    """
    script = completion_script(shell)
    if not install:
        click.echo(script)
        return
    path, startup = _places(shell, os.environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script + "\n", encoding="utf-8")
        click.echo(f"Written: {path}")
        if startup is not None and _add_line(startup, f'source "{path}"'):
            click.echo(f"Changed: {startup}, so that new shells load it")
    except OSError as error:
        raise ConfigurationError(f"Cannot write {error.filename}: {error.strerror}.") from None
    click.echo(f"New {shell} shells complete {_PROGRAM}.")


def completion_script(shell: str) -> str:
    """Return the script for `bash`, `zsh` or `fish`.

    Raises:
        ConfigurationError: bash is too old.
    """
    cls = get_completion_class(shell)
    assert cls is not None
    # The script only needs the names of the program and of the variable.
    made = cls(click.Command(_PROGRAM), {}, _PROGRAM, COMPLETION).source()
    return f"{_ZSH_START}{made}" if shell == "zsh" else made


def _places(shell: str, environ: Mapping[str, str]) -> tuple[Path, Path | None]:
    """Return where the script goes, and the file that must read it if the shell does not find it."""
    home = Path.home()
    if shell == "fish":
        config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        return config / "fish" / "completions" / f"{_PROGRAM}.fish", None
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    startup = home / ".bashrc"
    if shell == "zsh":
        startup = Path(environ.get("ZDOTDIR") or home) / ".zshrc"
    return data / _PROGRAM / f"completion.{shell}", startup


def _add_line(path: Path, line: str) -> bool:
    """Append a line to a file; return False if the file has it already."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if line in text.splitlines():
        return False
    separator = "" if not text or text.endswith("\n") else "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{separator}\n# Completion of {_PROGRAM}\n{line}\n")
    return True
