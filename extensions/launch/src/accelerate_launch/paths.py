"""Paths of the command line's files, and of Accelerate's config file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from platformdirs import user_cache_path


def cache_directory() -> Path:
    """Return the cache directory of accelerate-core, on Linux `~/.cache/accelerate-core`."""
    return user_cache_path("accelerate-core", appauthor=False)


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the config file that is used if no other is named."""
    return Path(environ.get("ACCELERATE_CONFIG_HOME") or cache_directory()) / "config.yaml"


def accelerate_config_path(environ: Mapping[str, str]) -> Path:
    """Return the path of Accelerate's default config file."""
    # Accelerate uses these folders on every operating system.
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(environ.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    made, old = folder / "default_config.yaml", folder / "default_config.json"
    return old if old.is_file() and not made.is_file() else made
