"""One command releases one distribution. These tests use real git repositories and real builds."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

TAG = "accelerate-ddp-v0.2.0"


def release(clone: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/release.py", *map(str, arguments)]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=120)


def git(clone: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=clone, text=True).strip()


def refused(clone: Path, message: str, *arguments: str) -> None:
    """Check that `cut` fails with a message, and leaves commits, tags and files unchanged."""
    look = ("status", "--porcelain"), ("rev-parse", "HEAD"), ("tag",)
    before = [git(clone, *command) for command in look]
    done = release(clone, "cut", *arguments)
    assert done.returncode == 1, done.stdout
    assert message in done.stderr
    assert [git(clone, *command) for command in look] == before


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.timeout(300)
def test_release_makes_one_commit_one_tag_and_reproducible_files(
    clone: Path, tmp_path: Path
) -> None:
    log = clone / "backends/ddp/CHANGELOG.md"
    text = log.read_text()
    log.write_text(re.sub("^(## .*)$", r"\1\n\n### Added", text, count=1, flags=re.MULTILINE))
    git(
        clone, "commit", "--all", "--message", "Add a heading, which git must not drop as a comment"
    )
    dry = release(clone, "cut", "accelerate-ddp", "0.2.0", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert '+version = "0.2.0"' in dry.stdout
    assert f"tag {TAG}" in dry.stdout
    assert not git(clone, "tag")
    assert not git(clone, "status", "--porcelain")

    done = release(clone, "cut", "accelerate-ddp", "0.2.0", "--out", tmp_path / "first")
    assert done.returncode == 0, done.stderr
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert git(clone, "diff", "--name-only", "HEAD~1", TAG).split() == [
        "backends/ddp/CHANGELOG.md",
        "backends/ddp/pyproject.toml",
        "backends/ddp/src/accelerate_ddp/__init__.py",
    ]
    changes = git(clone, "diff", "-U0", "HEAD~1", TAG).splitlines()
    added = [line for line in changes if line.startswith("+") and not line.startswith("+++")]
    assert added == [f"+## 0.2.0 ({today})", '+version = "0.2.0"', '+__version__ = "0.2.0"']
    message = git(clone, "tag", "--list", "--format=%(contents)", TAG)
    assert message.startswith("accelerate-ddp 0.2.0")
    assert "\n- `DDPBackend`: " in message
    (wheel,) = (tmp_path / "first").glob("*.whl")
    assert b'"0.2.0"' in zipfile.ZipFile(wheel).read("accelerate_ddp/__init__.py")
    assert zipfile.ZipFile(wheel).getinfo("accelerate_ddp/py.typed").date_time[0] == int(today[:4])

    other = tmp_path / "elsewhere"
    git(tmp_path, "clone", "--quiet", "--branch", TAG, str(clone), str(other))
    again = release(other, "build", TAG, "--out", tmp_path / "second")
    assert again.returncode == 0, again.stderr
    assert hashes(tmp_path / "first") == hashes(tmp_path / "second")

    refused(clone, f"The tag {TAG} already exists", "accelerate-ddp", "0.2.0")
    refused(clone, "0.1.9 is not newer than 0.2.0", "accelerate-ddp", "0.1.9")
    refused(clone, f"but starts with '## 0.2.0 ({today})'", "accelerate-ddp", "0.3.0")
    (clone / "README.md").write_text("changed\n")
    refused(clone, "The working tree has changes", "accelerate-ddp", "0.3.0")
    moved = release(clone, "build", TAG)
    assert f"The working tree is not at {TAG}" in moved.stderr


@pytest.mark.timeout(300)
def test_release_of_the_core_updates_the_citation(clone: Path, tmp_path: Path) -> None:
    entry, page = clone / "CITATION.cff", clone / "docs/citation.md"
    before = {path: path.read_text().splitlines() for path in (entry, page)}
    for version in ("0.2.0", "0.3.0"):
        log = clone / "core/CHANGELOG.md"
        log.write_text(f"# Changelog\n\n## {version} (unreleased)\n\n- A change.\n")
        git(clone, "commit", "--all", "--message", "Plan")
        done = release(clone, "cut", "accelerate-core", version, "--out", tmp_path / version)
        assert done.returncode == 0, done.stderr
    assert not git(clone, "status", "--porcelain")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    added = {
        path: [line for line in path.read_text().splitlines() if line not in lines]
        for path, lines in before.items()
    }
    assert added[entry] == ["version: 0.3.0", f"date-released: {today}"]
    years = [f"  year = {{{today[:4]}}},"] if today[:4] != "2026" else []
    assert [line for line in added[page] if "year" in line] == years
    assert "  note = {Version 0.3.0}" in added[page]
    assert any(line.endswith("Version 0.3.0,") for line in added[page])
    # The checks of the citation hold after a release, too.
    command = [sys.executable, "-m", "pytest", "-q", "tests/packaging/test_citation.py"]
    checked = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout

    entry.write_text(entry.read_text().replace("version: 0.3.0", "versions: 0.3.0"))
    log.write_text("# Changelog\n\n## Unreleased\n\n- A change.\n")
    git(clone, "commit", "--all", "--message", "Break")
    refused(clone, "CITATION.cff must have one line", "accelerate-core", "0.4.0")


def test_invalid_releases_are_refused(clone: Path) -> None:
    refused(clone, "Did you mean 'accelerate-ddp'?", "acelerate-dpp", "0.2.0")
    refused(clone, "'two' is not a version", "accelerate-ddp", "two")
    refused(clone, "Write 0.2.0rc1", "accelerate-ddp", "0.2.0-rc1")
    refused(clone, "0.0.9 is older than 0.1.0", "accelerate-ddp", "0.0.9")
    note = release(clone, "cut", "accelerate-core", "0.2.0", "--dry-run").stdout
    assert "accelerate-launch requires accelerate-core==0.1.*, which excludes 0.2.0" in note
    for key, value in (("tag.gpgSign", "true"), ("gpg.program", "false")):
        git(clone, "config", key, value)
    refused(clone, "git tag", "accelerate-ddp", "0.2.0")  # fails after the build and the commit
    (clone / ".git/info/exclude").write_text("*.secret\n")
    hidden = clone / "backends/ddp/src/accelerate_ddp/key.secret"
    hidden.write_text("")
    refused(clone, "key.secret", "accelerate-ddp", "0.2.0")
    hidden.unlink()
    log = clone / "backends/ddp/CHANGELOG.md"
    log.write_text("# Changelog\n\n## 0.3.0 (unreleased)\n\n- A thing.\n")
    git(clone, "commit", "--all", "--message", "Plan")
    newer = "'## 0.3.0 (unreleased)', which is newer than 0.2.0"
    refused(clone, newer, "accelerate-ddp", "0.2.0")
    log.write_text("# Changelog\n\n## 0.1.0 (unreleased)\n\n### Added\n\n## 0.0.1\n\n- A thing.\n")
    (clone / "backends/fsdp2/README.md").unlink()  # its pyproject.toml names this file
    git(clone, "commit", "--all", "--message", "Break")
    empty = "The section '## 0.1.0 (unreleased)' in backends/ddp/CHANGELOG.md is empty"
    refused(clone, empty, "accelerate-ddp", "0.2.0")
    refused(clone, "README", "accelerate-fsdp2", "0.2.0")
