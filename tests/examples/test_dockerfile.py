"""The Dockerfile of the Docker guide: its syntax and its paths are checked; no image is built."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from test_guides import blocks

ROOT = Path(__file__).parents[2]
KNOWN = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"}


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    (dockerfile,) = (block for block in blocks("how_to/docker.md") if block.title == "Dockerfile")
    lines = [line for line in dockerfile.code.splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_instructions_are_known_and_start_from_an_image(
    instructions: list[tuple[str, str]],
) -> None:
    names = [name for name, _ in instructions]
    assert names[0] == "FROM"
    assert set(names) <= KNOWN


def test_commands_are_valid_shell(instructions: list[tuple[str, str]]) -> None:
    for name, text in instructions:
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", text], check=True)


def test_installed_folders_are_the_packages_of_standard(
    instructions: list[tuple[str, str]],
) -> None:
    words = [word for name, text in instructions if name == "RUN" for word in shlex.split(text)]
    folders = {word for word in words if word.startswith("./")}
    names = {project(folder)["name"] for folder in folders}
    standard = project("./core")["optional-dependencies"]["standard"]
    assert names == {"accelerate-core", *(one.split("=")[0].split(">")[0] for one in standard)}
    assert (ROOT / words[words.index("-c") + 1]).exists()


def test_entrypoint_is_a_list_so_signals_reach_the_launcher(
    instructions: list[tuple[str, str]],
) -> None:
    (entrypoint,) = (text for name, text in instructions if name == "ENTRYPOINT")
    assert json.loads(entrypoint) == ["accelerate-core", "launch"]
    assert "accelerate-core" in project("./core")["scripts"]


def project(folder: str) -> dict[str, dict[str, list[str]]]:
    text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, list[str]]] = tomllib.loads(text)["project"]
    return table
