"""The wheel of the distribution `accelerate`, which `make drop-in` builds."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import accelerate_drop_in

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    how = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    source = str(ROOT / "extensions/drop_in/accelerate")
    command = [sys.executable, "-m", "pip", "-q", "wheel", *how, source]
    subprocess.run(command, check=True, timeout=240)
    (built,) = folder.glob("accelerate-*.whl")
    return built


def distribution(folder: Path) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(name="accelerate", path=[str(folder)])
    return found


def check_home_page(metadata: importlib.metadata.PackageMetadata) -> None:
    """Check the metadata that sentence-transformers requires."""
    assert metadata["Name"] == "accelerate"
    assert "huggingface" in metadata["Home-page"]


def test_home_page_contains_huggingface_and_is_a_section_of_the_docs(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    metadata = distribution(tmp_path).metadata
    check_home_page(metadata)
    page, _, anchor = metadata["Home-page"].partition("#")
    source = ROOT / "docs" / Path(page).with_suffix(".md").name
    headings = re.findall("^#+ (.*)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert metadata["Version"] == accelerate_drop_in.VERSION


def test_record_of_the_wheel_has_the_digests_of_the_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = [*csv.reader(io.StringIO(archive.read(record).decode()))]
        for name, digest, size in rows:
            if name != record:
                content = archive.read(name)
                its = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
                assert (digest, size) == (f"sha256={its.decode()}", str(len(content)))
        assert sorted(archive.namelist()) == sorted(name for name, _, _ in rows)


def test_served_distribution_has_the_home_page_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    served = distribution(Path(accelerate_drop_in.__file__).with_name("served"))
    check_home_page(served.metadata)
    assert served.metadata["Home-page"] == distribution(tmp_path).metadata["Home-page"]
