"""Where the command line keeps its files, and where another tool keeps the ones we read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from platformdirs import user_cache_path


def cache_directory() -> Path:
    """Return the user's cache directory of ours: on Linux `~/.cache/accelerate-core`."""
    return user_cache_path("accelerate-core", appauthor=False)


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Return where the launcher looks for a config file when none is named."""
    return Path(environ.get("ACCELERATE_CONFIG_HOME") or cache_directory()) / "config.yaml"


def peers_config(environ: Mapping[str, str]) -> Path:
    """Return where the tool whose files we read keeps its default configuration."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # on every system
    folder = Path(environ.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    made, old = folder / "default_config.yaml", folder / "default_config.json"
    return old if old.is_file() and not made.is_file() else made
