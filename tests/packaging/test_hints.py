"""The pip command in a hint matches how the core was installed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_core.plugins import catalog

ROOT = Path(__file__).parents[2]
ASK = "import sys; from accelerate_core.plugins.catalog import pip_command; print(pip_command(sys.argv[1]))"
INDEX = 'pip install "accelerate-core[wandb]"'


def hint(extra: str, *folders: Path) -> str:
    """Return the hint of a process that only sees these folders and no installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", ASK, extra],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def metadata(folder: Path, name: str, **direct_url: object) -> None:
    """Write the metadata that pip writes for a distribution."""
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    if direct_url:
        (info / "direct_url.json").write_text(json.dumps(direct_url))


STANDARD = ("ddp", "launch", "checkpoint", "tracking", "compile", "dispatch", "watch")


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        ({"url": "CORE", "dir_info": {"editable": True}}, f"pip install -e {ROOT}/trackers/wandb"),
        ({"url": "CORE", "dir_info": {}}, f"pip install {ROOT}/trackers/wandb"),
        ({"url": "file:///nowhere/core", "dir_info": {}}, INDEX),
        ({"url": "file:///dist/accelerate_core.whl", "archive_info": {}}, INDEX),
        ({}, INDEX),
    ],
)
def test_hint_installs_from_where_the_core_was_installed(
    tmp_path: Path, direct_url: dict[str, object], command: str
) -> None:
    if direct_url.get("url") == "CORE":
        direct_url = {**direct_url, "url": (ROOT / "core").as_uri()}
    metadata(tmp_path, "accelerate-core", **direct_url)
    for name in STANDARD:
        metadata(tmp_path, f"accelerate-{name}")
    source = Path(catalog.__file__).parents[2]
    assert hint("wandb", tmp_path, source) == command
    assert hint("warp", tmp_path, source) == 'pip install "accelerate-core[warp]"'


def test_hint_of_a_clone_installs_all_missing_packages(tmp_path: Path) -> None:
    clone, site = tmp_path / "my clone's", tmp_path / "site"
    for folder in ("core", "trackers/wandb", "extensions/tracking"):
        shutil.copytree(
            ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__", "tests")
        )
    for name in set(STANDARD) - {"tracking"}:
        metadata(site, f"accelerate-{name}")
    options = "--target {} --no-deps --no-build-isolation -q --disable-pip-version-check"
    pip = f"{shlex.quote(sys.executable)} -m pip"
    options = options.format(shlex.quote(str(site)))
    shell = shutil.which("zsh") or "sh"

    def install(command: str) -> None:
        words = command.replace("pip install", f"{pip} install {options}", 1)
        subprocess.run([shell, "-c", words], check=True, timeout=120)

    install(f"pip install {shlex.quote(str(clone / 'core'))}")
    command = hint("wandb", site)
    assert command.count("my clone") == 2
    install(command)
    names = {path.name.partition("-")[0] for path in site.glob("*.dist-info")}
    assert {"accelerate_wandb", "accelerate_tracking"} <= names
    assert hint("wandb", site) == INDEX
