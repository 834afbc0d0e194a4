"""`accelerate config`, and the location of its file."""

from __future__ import annotations

from typing import Any

from accelerate_drop_in.commands import run
from accelerate_drop_in.commands.config_files import BaseConfig as BaseConfig
from accelerate_drop_in.commands.config_files import ClusterConfig as ClusterConfig
from accelerate_drop_in.commands.config_files import default_config
from accelerate_drop_in.commands.config_files import load_config_from_file as load_config_from_file


def main() -> None:
    """Run `accelerate-core config`."""
    run("config")


def __getattr__(name: str) -> Any:
    default = default_config()
    folders = {"cache_dir": default.parent, "hf_cache_home": default.parent.parent}
    if name in folders:
        return str(folders[name])
    if name == "default_config_file":
        return str(default)
    if name in ("default_yaml_config_file", "default_json_config_file"):
        return str(default.with_suffix(f".{name.split('_')[1]}"))
    raise AttributeError(name)
