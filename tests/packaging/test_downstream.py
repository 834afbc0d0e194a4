"""Released plugins keep working with the current core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import downstream
import pytest

SCRIPT = Path(downstream.__file__)


def test_says_if_nothing_has_been_released(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(downstream, "last_tag", lambda: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert downstream.main() == 0
    assert "there is no tag" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_released_plugins_pass_the_suite_with_this_core() -> None:
    ref = downstream.last_tag() or "HEAD"
    only = ["ddp", "fsdp2", "tensorboard"]
    command = [sys.executable, str(SCRIPT), "--ref", ref, "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in only:
        assert f"{name} (accelerate-{name} " in done.stdout
