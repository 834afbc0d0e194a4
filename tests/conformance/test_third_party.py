"""Third-party plugins from wheels: one of each kind that an Accelerator uses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
from support import clean_environment, run_workers
from warm_python import warm_python

from accelerate_testing.scaffold import write_repository

ROOT = Path(__file__).parents[2]
DILOCO = ROOT / "examples" / "third_party" / "accelerate-diloco"
FSSPEC = ROOT / "examples" / "third_party" / "accelerate-fsspec"
RECORDS = ROOT / "examples" / "third_party" / "accelerate-records"
HERE = Path(__file__).parent
SCRIPT = HERE / "third_party.py"

#: 160 steps are 20 meetings: too few for the momentum of 0.9 that long runs like.
STEPS = 160
OUTER = {"ACCELERATE_DILOCO_OUTER_LR": "0.5", "ACCELERATE_DILOCO_OUTER_MOMENTUM": "0.7"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels built from their repositories, installed in addition to ours."""
    folder = tmp_path_factory.mktemp("third_party")
    sources = []
    for own in (DILOCO, FSSPEC, RECORDS):
        sources.append(folder / own.name)
        shutil.copytree(own, sources[-1])
    for name, kind in (("grid", "precision"), ("plain", "launcher")):
        write_repository(name, kind, folder / f"accelerate-{name}")
        sources.append(folder / f"accelerate-{name}")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    how = ["--no-deps", "--no-build-isolation"]
    for source in sources:
        wheel = [*pip, "wheel", *how, "--wheel-dir", str(folder / "wheels"), str(source)]
        subprocess.run(wheel, check=True, timeout=120, capture_output=True)
    wheels = sorted(str(path) for path in (folder / "wheels").glob("*.whl"))
    assert len(wheels) == 5
    install = [*pip, "install", *how, "--target", str(folder / "site"), *wheels]
    subprocess.run(install, check=True, timeout=120, capture_output=True)
    return folder / "site"


def launch(
    site: Path, folder: Path, *options: str, script: Path = SCRIPT, **environ: str
) -> list[dict[str, Any]]:
    """Launch a script on two ranks with our command; return what each rank reported."""
    env = clean_environment(
        PYTHONPATH=f"{site}", ACCELERATE_TESTING_RESULTS=str(folder), OMP_NUM_THREADS="1", **environ
    )
    command = [warm_python(), "-m", "accelerate_core", "launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, *options, str(script)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.dist
def test_option_of_launch_selects_a_wheel(site: Path, tmp_path: Path) -> None:
    first, second = launch(site, tmp_path, "--backend", "diloco", ACCELERATE_DILOCO_SYNC_EVERY="4")
    assert first["backend"] == second["backend"] == "diloco"
    assert "backend = 'diloco'  (command line --backend)" in first["explain"]
    assert "diloco.sync_every = 4" in first["explain"]
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] / 2


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "diloco"])
def test_precision_and_launcher_work_with_any_backend(
    site: Path, tmp_path: Path, backend: str
) -> None:
    options = ["--launcher", "plain", "--mixed_precision", "grid", "--backend", backend]
    first, second = launch(site, tmp_path, *options, ACCELERATE_GRID_BITS="6")
    assert (first["backend"], first["precision"]) == (backend, "grid")
    assert not first["agent"]  # it was not torch's that started this rank
    assert first["parent"] == "2"
    assert sum("GridLinear" in layer for layer in first["layers"]) == 2
    assert "grid.bits = 6  (environment variable ACCELERATE_GRID_BITS)" in first["explain"]
    if backend == "ddp":
        assert first["wrapper"] == "DistributedDataParallel"
    assert first["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] / 2


def test_option_of_an_inactive_precision_is_refused(site: Path) -> None:
    env = clean_environment(PYTHONPATH=f"{site}")
    command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", "--dry_run"]
    for more, status in (([], 2), (["--mixed_precision", "grid"], 0)):
        call = [*command, "--grid_bits", "6", *more, str(SCRIPT)]
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        said = " ".join(done.stderr.split())
        assert status == 0 or "the precision 'grid', which this launch does not use" in said
        assert status == 0 or "Add --mixed_precision grid" in said


class TestRepositories:
    """A class, so that another process of pytest can run these while this file's other tests run."""

    @pytest.mark.dist
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        ("repository", "tests"),
        [
            # The suite over DiLoCo is run below, for what it says.
            (DILOCO, "test_diloco.py"),
            (FSSPEC, "test_conformance.py"),
            (FSSPEC, "test_killed.py"),
            (FSSPEC, "test_fsspec.py test_storage.py"),
            (RECORDS, ""),
        ],
    )
    def test_repository_passes_its_own_tests(
        self, site: Path, repository: Path, tests: str
    ) -> None:
        env = clean_environment(OMP_NUM_THREADS="1", **forked_ranks.environment(site))
        files = [f"tests/{name}" for name in tests.split()] or ["tests"]
        plugins = ["-p", "no:cacheprovider", "-p", "forked_ranks"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *files]
        done = subprocess.run(
            command, cwd=repository, env=env, capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.dist
def test_diloco_passes_the_suite(site: Path) -> None:
    env = clean_environment(PYTHONPATH=str(site))
    command = [sys.executable, "-m", "accelerate_core", "plugins", "check", "diloco", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    made = json.loads(done.stdout)
    failed = [one for one in made["checks"] if one["state"] == "failed"]
    assert failed == []
    skipped = {one["name"] for one in made["checks"] if one["state"] == "skipped"}
    assert skipped == {
        "gradients_meet",
        "join",
        "parameters_unfrozen_later",
    }  # all else holds where a step is not one of one process, too
    assert not {"resume", "kill", "no_sync", "learning", "several_models"} & skipped


@pytest.mark.dist
def test_diloco_learns_nearly_like_ddp_with_an_eighth_of_the_communication(
    site: Path,
) -> None:
    worker = HERE / "char_gpt_worker.py"
    found = {}
    for backend in ("ddp", "diloco"):
        env = {"PYTHONPATH": str(site), **(OUTER if backend == "diloco" else {})}
        run = run_workers(worker, 2, [backend, STEPS], timeout=200, env=env)
        assert run.ok, run.story
        found[backend] = run.results[0]
    ours, theirs = found["diloco"], found["ddp"]
    assert ours["steps"] == theirs["steps"] == STEPS
    # The first reduction compares the ranks' shapes, too, which takes some hundred bytes.
    syncs = STEPS // 8
    # Each one sends a digest of the structure, and the first one is preceded by a small message.
    assert 0 <= ours["bytes"] - syncs * ours["model"] <= (syncs + 1) * 1024
    assert ours["bytes"] == pytest.approx(theirs["bytes"] / 8, rel=0.003)
    assert ours["loss"] < 1.05 * theirs["loss"]


@pytest.mark.dist
@pytest.mark.parametrize("source", ["environment", "config file"])
def test_configuration_selects_a_checkpointer_and_errors_name_it(
    site: Path, tmp_path: Path, source: str
) -> None:
    url = f"file://{tmp_path}/run"
    config = tmp_path / "config.yaml"
    config.write_text(f"checkpointer: fsspec\nfsspec_config:\n  url: {url}\n")
    environ, options = {}, ["--config_file", str(config)]
    if source == "environment":
        environ = {"ACCELERATE_CHECKPOINTER": "fsspec", "ACCELERATE_FSSPEC_URL": url}
        options = []
    script = HERE / "third_party_saving.py"
    for rank in launch(site, tmp_path, *options, script=script, **environ):
        assert rank["imported"]  # it was named, so it is made at once
        assert rank["where"] == f"{url}/step_1"
        assert rank["same"]
        assert not rank["here"]
        wanted = "ACCELERATE_FSSPEC_URL" if source == "environment" else str(config)
        told = {line.split(" = ")[0]: line for line in rank["explain"].splitlines()}
        assert wanted in told["checkpointer fsspec.url"]
        assert "'fsspec'" in told["checkpointer"]
        assert (
            rank["refused"] == f"There is no checkpoint at {url}/step_2: manifest.json is missing."
        )
        assert any(
            "'load_state' of plugin fsspec (accelerate-fsspec 0.1.0)" in n for n in rank["notes"]
        )
    assert (tmp_path / "run" / "step_1" / "manifest.json").is_file()


def test_selection_of_a_checkpointer_is_explained(site: Path) -> None:
    command = [sys.executable, "-m", "accelerate_core", "plugins", "why"]
    told = []
    for name in ("fsspec", "directory"):
        env = clean_environment(PYTHONPATH=str(site), ACCELERATE_CHECKPOINTER="fsspec")
        done = subprocess.run([*command, name], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        told.append(" ".join(done.stdout.split()))
    assert "fsspec: active, environment variable ACCELERATE_CHECKPOINTER" in told[0]
    assert "accelerate-fsspec 0.1.0, entry point accelerate_fsspec:FsspecCheckpointer" in told[0]
    assert "directory: available, not requested" in told[1]
    assert "chosen fsspec (accelerate-fsspec 0.1.0)" in told[1]


@pytest.mark.dist
@pytest.mark.parametrize("source", ["environment", "config file"])
def test_configuration_selects_a_loader_factory_and_errors_name_it(
    site: Path, tmp_path: Path, source: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("loaders: records\nrecords_config:\n  seed: 3\n")
    environ, options = {}, ["--config_file", str(config)]
    if source == "environment":
        environ, options = {"ACCELERATE_LOADERS": "records", "ACCELERATE_RECORDS_SEED": "3"}, []
    ranks = launch(site, tmp_path, *options, script=HERE / "third_party_reading.py", **environ)
    assert sorted(ranks[0]["seen"]) == list(range(10))
    for rank in ranks:
        assert rank["imported"]  # it was named, so it is made at once
        assert rank["kind"] == "RecordsLoader"
        assert rank["other"] == "DataLoaderShard"
        assert rank["seen"] == ranks[0]["seen"]
        assert rank["rest"] == rank["whole"][1:]
        wanted = "ACCELERATE_RECORDS_SEED" if source == "environment" else str(config)
        told = {line.split(" = ")[0]: line for line in rank["explain"].splitlines()}
        assert "'records'" in told["loaders"]
        assert wanted in told["loaders records.seed"]
        assert "batch_size=3 is not divisible by 2 ranks" in rank["refused"]
        blamed = "'make_loader' of plugin records (accelerate-records 0.1.0)"
        assert any(blamed in note for note in rank["notes"])


def test_selection_of_a_loader_factory_is_explained(site: Path) -> None:
    command = [sys.executable, "-m", "accelerate_core", "plugins", "why", "records"]
    told = []
    for environ in ({"ACCELERATE_LOADERS": "records"}, {}):
        env = clean_environment(PYTHONPATH=str(site), **environ)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        told.append(" ".join(done.stdout.split()))
    assert "records: active, environment variable ACCELERATE_LOADERS" in told[0]
    assert (
        "accelerate-records 0.1.0, entry point accelerate_records:RecordsLoaderFactory" in told[0]
    )
    assert "records: available, not requested" in told[1]
    assert "none; the core does it itself" in told[1]
