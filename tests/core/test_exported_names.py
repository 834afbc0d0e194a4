"""Names that other packages export raise an error with the pip command if a package is missing."""

from __future__ import annotations

from pathlib import Path

import pool
import pytest
from support import clean_environment

#: Hides all entry points, as in an environment with only accelerate-core.
ALONE = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
"""


@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    [
        (
            "from accelerate_core import find_executable_batch_size",
            {},
            "find_executable_batch_size comes with a plugin that is not installed. "
            'Install it with: pip install "accelerate-core[drop-in]"',
        ),
        ("from accelerate_core.utils import tqdm", {}, '"accelerate-core[drop-in]"'),
        ("from accelerate_core.utils import release_memory", {}, '"accelerate-core[drop-in]"'),
        ("from accelerate_core import clear_device_cache", {}, '"accelerate-core[drop-in]"'),
        ("from accelerate_core import LocalSGD", {}, '"accelerate-core[ddp]"'),
        (
            "from accelerate_core import Accelerator; Accelerator(cpu=True)",
            {"ACCELERATE_CPU_AFFINITY": "true"},
            "Environment variable ACCELERATE_CPU_AFFINITY asks for a plugin that is not installed. "
            'Install it with: pip install "accelerate-core[launch]"',
        ),
    ],
)
def test_error_for_an_exported_name_gives_the_install_command(
    code: str, variables: dict[str, str], expected: str
) -> None:
    done = pool.run(["-c", f"{ALONE}\n{code}"], clean_environment(**variables), 60)
    assert done.returncode == 1
    assert expected in done.stderr


#: An environment with everything except accelerate-drop-in.
NO_DROP_IN = """
import importlib.metadata
others = (one for one in importlib.metadata.distributions() if one.name != "accelerate-drop-in")
kept = [point for one in others for point in one.entry_points]
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(kept)
from accelerate_core import utils
try:
    utils.release_memory
except ImportError:
    pass
else:
    raise AssertionError("the drop-in is there")
"""


@pytest.mark.parametrize(
    ("head", "library", "answer"),
    [
        *((head, "rich", True) for head in (ALONE, NO_DROP_IN)),
        *((head, "tensorboard", None) for head in (ALONE, NO_DROP_IN)),
        (ALONE, "sagemaker", False),
        (NO_DROP_IN, "cuda", None),
        (NO_DROP_IN, "bf16", True),
        (NO_DROP_IN, "bnb", None),
    ],
)
def test_availability_checks_work_without_the_drop_in(
    head: str, library: str, answer: bool | None
) -> None:
    name = f"is_{library}_available"
    code = f"{head}\nfrom accelerate_core.utils import {name}\nprint('said', {name}())"
    done = pool.run(["-c", code], clean_environment(), 60)
    assert done.returncode == 0, done.stderr
    said = {f"said {answer}"} if answer is not None else {"said True", "said False"}
    assert done.stdout.strip() in said


@pytest.mark.parametrize("brought", [False, True])
def test_namespace_package_is_available_only_if_a_distribution_owns_it(
    tmp_path: Path, brought: bool
) -> None:
    (tmp_path / "sagemaker" / "core").mkdir(parents=True)
    (tmp_path / "sagemaker" / "core" / "__init__.py").touch()
    if brought:
        info = tmp_path / "sagemaker_core-3.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: sagemaker-core\nVersion: 3.0\n"
        )
        (info / "RECORD").write_text("sagemaker/core/__init__.py,,\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{path}\nfrom accelerate_core.utils import is_sagemaker_available as there"
    done = pool.run(["-c", f"{code}\nprint(there())"], clean_environment(), 60)
    assert done.stdout.strip() == str(brought), done.stderr
