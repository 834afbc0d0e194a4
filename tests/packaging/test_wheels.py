"""Wheels and sdists are complete and reproducible, and the wheels work in an empty environment."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from addresses import addresses  # noqa: E402

ADDRESSES = addresses()
MEMBERS = [
    "core",
    *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("*/*/pyproject.toml")),
]
MEMBERS = [
    member
    for member in MEMBERS
    if member.split("/")[0] in ("core", "backends", "trackers", "extensions")
]

#: The distributions in `accelerate-core[standard]`.
SMALL = ("core", "ddp", "launch", "checkpoint", "tracking", "compile", "dispatch", "watch")

SCRIPT = """
import torch
from accelerate_core import Accelerator

accelerator = Accelerator(cpu=True, process_group_timeout=60)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
SAVING
accelerator.print(accelerator.backend.name, accelerator.num_processes, loss.item() < 0.05)
accelerator.end_training()
"""

SAVING = """
accelerator.save_state("state", blocking=False)
accelerator.wait_for_checkpoint()
accelerator.load_state("state")
"""
#: Code that needs more than the core -> a part of the error message.
MISSING = {
    "Accelerator(cpu=True, log_with='all')": "needs a tracking plugin",
    "Accelerator(cpu=True, project_config=ProjectConfiguration('.', automatic_checkpoint_naming=True))": (
        "no checkpointer plugin is installed"
    ),
    "Accelerator(cpu=True).save_state('here')": "no checkpointer plugin is installed",
    "Accelerator(cpu=True).profile()": "profile comes with a plugin",
    "accelerate_core.notebook_launcher": "notebook_launcher",
    "accelerate_core.load_checkpoint_and_dispatch": "load_checkpoint_and_dispatch",
}


def run(*command: str | Path, timeout: int = 300, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--wheels")
    if given:
        return Path(given).resolve()
    out = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "tools/release.py", "wheels", "--out", out, timeout=600)
    return out


def test_every_member_has_a_wheel_with_its_types_and_no_tests(wheels: Path) -> None:
    found = sorted(wheels.glob("*.whl"))
    assert len(found) == len(MEMBERS)
    licence = (ROOT / "LICENSE").read_bytes()
    for wheel in found:
        archive = zipfile.ZipFile(wheel)
        names = archive.namelist()
        assert any(name.endswith("/py.typed") for name in names), wheel.name
        (text,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(text) == licence, wheel.name
        about = BytesParser().parsebytes(archive.read(text.replace("licenses/LICENSE", "METADATA")))
        assert about["License-Expression"] == "Apache-2.0", wheel.name
        assert about["Requires-Python"] == ">=3.11", wheel.name
        urls = dict(one.split(", ", 1) for one in about.get_all("Project-URL"))
        assert urls["Documentation"] == f"{ADDRESSES.site}/"
        assert urls["Changelog"].startswith(ADDRESSES.repository)
        assert set(urls) == {"Documentation", "Source", "Changelog", "Issues"}
        links = re.findall(r"\]\(([^)]+)\)", about.get_payload())
        assert [link for link in links if not link.startswith("https://")] == [], wheel.name
        tests = [name for name in names if "test_" in Path(name).name]
        # The drop-in includes scripts of Accelerate's `test_utils`, which people launch.
        assert not [name for name in tests if "/served/" not in name], wheel.name


def test_every_member_has_an_sdist_and_twine_accepts_both(wheels: Path) -> None:
    found = sorted(wheels.glob("*.tar.gz"))
    assert len(found) == len(MEMBERS)
    for sdist in found:
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names, sdist.name
        assert any(name.endswith("/py.typed") for name in names), sdist.name
    run(sys.executable, "-m", "twine", "check", "--strict", *found, *wheels.glob("*.whl"))


def test_builds_in_another_folder_are_identical(
    wheels: Path, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    release = (sys.executable, "tools/release.py", "wheels", "--out", tmp_path / "out")
    run(*release, timeout=600, cwd=clone)
    first, second = (
        {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        for folder in (wheels, tmp_path / "out")
    )
    assert first == second


# Only `make dist` runs this test, so that `make test` doesn't have to create an environment.
@pytest.mark.soak
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_wheels_in_an_empty_environment_train(wheels: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    install = (venv / "bin" / "python", "-m", "pip", "-q", "install", "--no-compile")
    pip = (*install, "-c", ROOT / "constraints.txt")
    run(*pip, "torch", timeout=600)
    found = sorted(wheels.glob("*.whl"))
    # Without accelerate-tracking, because its tracker needs no library.
    trackers = [w for w in found if _is_tracker(w) and "accelerate_tracking" not in w.name]
    # Installed together, so that pip only uses these wheels for our own packages.
    small = [wheel for name in SMALL for wheel in wheels.glob(f"accelerate_{name}-*.whl")]
    script = tmp_path / "train.py"
    core_alone(venv, next(wheels.glob("accelerate_core-*.whl")), pip, tmp_path)
    script.write_text(SCRIPT.replace("SAVING", SAVING))
    run(*pip, *small, timeout=600)
    launch = venv / "bin" / "accelerate-core"
    for processes, backend in ((1, "single"), (2, "ddp")):
        out = run(
            launch, "launch", "--cpu", "--num_processes", str(processes), script, cwd=tmp_path
        )
        assert f"{backend} {processes} True" in out
    assert "numpy" not in run(venv / "bin" / "python", "-m", "pip", "list")
    # The XLA backend needs another torch.
    others = [w for w in found if w not in trackers and "accelerate_xla" not in w.name]
    run(*pip, *others, timeout=600)
    out = run(
        launch,
        "launch",
        "--cpu",
        "--num_processes",
        "2",
        "--backend",
        "fsdp2",
        script,
        cwd=tmp_path,
    )
    assert "fsdp2 2 True" in out
    # The libraries of the trackers take a gigabyte. Without them, each tracker says what it needs.
    run(*pip, "--no-deps", *trackers)
    rows = {row["name"]: row for row in json.loads(run(launch, "plugins", "--json"))}
    for wheel in trackers:
        (name,) = [name for name in rows if wheel.name.startswith(f"accelerate_{name}-")]
        assert rows[name]["state"] == "passed over"
        assert "its library is not installed: pip install" in rows[name]["reason"]


def core_alone(venv: Path, wheel: Path, pip: tuple[Any, ...], tmp_path: Path) -> None:
    """Check that the core alone trains on one process, and that errors name missing packages."""
    run(*pip, wheel, timeout=600)
    python = venv / "bin" / "python"
    found = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    assert [one["name"] for one in found if "accelerate" in one["name"]] == ["accelerate-core"]
    script = tmp_path / "alone.py"
    script.write_text(SCRIPT.replace("SAVING", ""))
    done = subprocess.run([python, script], capture_output=True, text=True, timeout=120)
    assert "single 1 True" in done.stdout, done.stderr
    assert "This run cannot be saved" in done.stderr  # warns before hours of training
    head = "import accelerate_core\nfrom accelerate_core import Accelerator, ProjectConfiguration\n"
    for code, message in MISSING.items():
        done = subprocess.run(
            [python, "-c", head + code], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode, code
        assert message in last, last
        assert 'pip install "accelerate-core[' in last, last
    command = venv / "bin" / "accelerate-core"
    done = subprocess.run([command, "launch"], capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert 'pip install "accelerate-core[standard]"' in done.stderr


def _is_tracker(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        (points,) = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
        return "[accelerate_core.trackers]" in archive.read(points).decode()
