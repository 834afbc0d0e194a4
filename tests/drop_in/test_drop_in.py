"""The import name of the peer, served when asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

USES = """
from accelerate import Accelerator, PartialState, init_empty_weights, notebook_launcher
from accelerate.utils import set_seed, gather, DataLoaderConfiguration, is_wandb_available
from accelerate.utils.dataclasses import GradScalerKwargs
from accelerate.state import DistributedType, GradientState
from accelerate.logging import get_logger
from accelerate.data_loader import skip_first_batches, prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.tracking import GeneralTracker
from accelerate.hooks import AlignDevicesHook
from accelerate.launchers import debug_launcher
from accelerate.local_sgd import LocalSGD
import accelerate.utils
a = accelerate.Accelerator(cpu=True)
assert type(a).__module__.startswith("accelerate_core.")
print("served", sys.argv[1:], accelerate.__version__)
"""


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")},
    )


def test_modules_and_names_are_served_after_install() -> None:
    start = "import sys, accelerate_drop_in as d; d.install(); d.install();"
    start += "assert 'torch' not in sys.modules"
    done = python("-c", start + USES)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


def test_a_script_runs_with_the_name_served(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\n" + USES)
    done = python("-m", "accelerate_drop_in", script, "--lr", "3")
    assert "served ['--lr', '3']" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import accelerate_core; import accelerate", "No module named 'accelerate'"),
        (
            "import sys, types; sys.modules['accelerate'] = types.ModuleType('accelerate');"
            "import accelerate_drop_in as d; d.install()",
            "imported already",
        ),
        (
            "import accelerate_drop_in as d; d.install(); import accelerate; d.uninstall();"
            "import accelerate",
            "No module named 'accelerate'",
        ),
        (
            "import accelerate_drop_in as d; d.install(); from accelerate import Acelerator",
            "cannot import name 'Acelerator'",
        ),
        (
            "import accelerate_drop_in as d; d.install(); from accelerate import MegatronLMPlugin",
            'pip install "accelerate-core[megatron]"',
        ),
        (
            "import accelerate_drop_in as d; d.install(); import accelerate.no_such",
            "No module named 'accelerate.no_such'",
        ),
    ],
)
def test_what_is_not_served_says_so(code: str, said: str) -> None:
    done = python("-c", code)
    assert done.returncode == 1
    assert said in done.stderr
