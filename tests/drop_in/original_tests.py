"""Run Accelerate's own tests on the drop-in, with `make soak` or directly.

    python tests/drop_in/original_tests.py [FOLDER] [--python DROP_IN] [--original ORIGINAL] [--only NAME ...]

FOLDER is Accelerate's unpacked source distribution, which pip downloads by default. DROP_IN is an
interpreter that has the drop-in installed but not Accelerate. If ORIGINAL, an interpreter with Accelerate,
is given, the tests that pass there are recorded in `original_tests.json`. Otherwise, the existing record is
used. Test files run one after the other, each in its own process and its own copy of the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
VERSION = "1.15.0"
#: The time limits for a test and for a test file, in seconds.
LIMIT, FILE_LIMIT = 240, 1500
_WORDS = "it compares whole sentences of errors or warnings, which are worded differently here"
_REGIONS = "regions are compiled in place, not in a copy"
#: Tests that are expected to fail, by the beginning of their names, with the reason.
EXPECTED: dict[str, str] = {
    "test_accelerator::AcceleratorTester::test_accelerator_state_after_reset": _WORDS,
    "test_accelerator::AcceleratorTester::test_partial_state_after_reset": (
        "reading a state that was reset raises RuntimeConflictError, which is not an AttributeError"
    ),
    "test_cli::AccelerateLauncherTester::test_cpu_launch_sets_kmp_env": (
        "Intel's OpenMP would then pin the threads of all ranks on a machine to the same cores"
    ),
    "test_cli::LaunchArgTester::test_duplicate_entities": (
        "the help of launch also spells options with dashes, such as --num-processes"
    ),
    "test_cli::ModelEstimatorTester::test_gated": "it replaces a function inside the command",
    "test_cli::ModelEstimatorTester::test_invalid_model_name": (
        "the command prints that the model does not exist, and exits with status 2"
    ),
    "test_compile::RegionalCompilationRebindTester::test_instance_bound_methods_are_rebound": _REGIONS,
    "test_compile::RegionalCompilationRebindTester::test_no_instance_bound_methods_is_a_no_op": _REGIONS,
    "test_dataclasses::TestParallelismConfig::test_cp_torch_handler": _WORDS,
    "test_dataclasses::TestParallelismConfig::test_sp_deepspeed_handler": _WORDS,
    "test_hooks::HooksModelTester::test_add_and_remove_hooks": (
        "hooks use torch's own, so a module keeps its forward and has no _old_forward, which would keep "
        "a deleted model in memory"
    ),
    "test_hooks::HooksModelTester::test_append_and_remove_hooks": "see test_add_and_remove_hooks",
    "test_modeling_utils::ModelingUtilsTester::test_set_module_tensor_checks_shape": _WORDS,
    "test_sagemaker::SageMakerLaunch::test_args_convert": "SageMaker jobs are not supported",
    "test_tracking::TensorBoardTrackingTest::test_project_dir": _WORDS,
    "test_utils::UtilsTester::test_honor_type": _WORDS,
}


def source(folder: Path | None, work: Path) -> Path:
    """Return the folder with the original's tests."""
    if folder is None:
        command = f"pip download -q --no-deps --no-binary :all: -d {work} accelerate=={VERSION}"
        subprocess.run([sys.executable, "-m", *command.split()], check=True)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        folder = next(work.glob("accelerate-*/"))
    return folder / "tests"


def run(python: str, tests: Path, work: Path, only: list[str]) -> dict[str, str]:
    """Run each file and return a result per test: "" if it passed, "skipped", or its error."""
    said: dict[str, str] = {}
    for file in sorted(tests.glob("test_*.py")):
        if only and file.stem not in only:
            continue
        place = work / "run"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tests, place / "tests")
        report = work / "report.xml"
        environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="80")
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
        command = f"-m pytest -q -p no:cacheprovider --timeout {LIMIT} --junitxml {report}"
        with open(work / f"{file.stem}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [python, *command.split(), f"tests/{file.name}"],
                cwd=place,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(FILE_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(place)
        if report.exists():
            said.update(read(report, file.stem))
            report.unlink()
        else:
            tail = (work / f"{file.stem}.log").read_text(encoding="utf-8").splitlines()[-1:]
            said[file.stem] = f"ended with {process.returncode}: {''.join(tail)}"
        counted = [text for name, text in said.items() if name.split("::")[0] == file.stem]
        print(f"{file.stem}: {counted.count('')} of {len(counted)} pass", flush=True)
    return said


def read(report: Path, file: str) -> dict[str, str]:
    said: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        inside = str(case.get("classname")).rpartition(file)[2].strip(".")
        name = "::".join(part for part in (file, inside, case.get("name")) if part)
        text = ""
        for found in case:
            if found.tag in ("failure", "error"):
                text = " ".join((found.get("message") or found.text or "failed").split())[:300]
            elif found.tag == "skipped":
                text = text or "skipped"
        said[name] = said.get(name) or text
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--original")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.keep or Path(temporary)
        work.mkdir(exist_ok=True)
        tests = source(given.folder, work)
        if given.original:
            theirs = run(given.original, tests, work, given.only)
            passing = sorted(name for name, text in theirs.items() if not text)
            RECORD.write_text(json.dumps(passing, indent=1) + "\n", encoding="utf-8")
            return 0
        passing = json.loads(RECORD.read_text(encoding="utf-8"))
        passing = [name for name in passing if not given.only or name.split("::")[0] in given.only]
        ours = run(given.python, tests, work, given.only)
    rest = {name: ours.get(name, "not collected") for name in passing}
    rest = {name: text for name, text in rest.items() if text}
    expected = {
        name: why for name in rest for start, why in EXPECTED.items() if name.startswith(start)
    }
    print(
        f"\n{len(passing)} tests pass with Accelerate, and {len(passing) - len(rest)} of these here"
    )
    print(f"{len(expected)} are expected to fail")
    for name, text in rest.items():
        print(f"  {name}\n      {(expected.get(name) and 'expected: ' + expected[name]) or text}")
    return int(len(rest) > len(expected))


if __name__ == "__main__":
    raise SystemExit(main())
