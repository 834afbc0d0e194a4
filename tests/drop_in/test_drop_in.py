"""The import name `accelerate`, served from accelerate-core."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pool
import pytest
import yaml

from accelerate_drop_in.accelerator import Accelerator

ROOT = Path(__file__).parents[2]

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
assert type(a).__module__ == "accelerate_drop_in.accelerator"
print("served", sys.argv[1:], accelerate.__version__)
"""


def python(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=own_environment() | environ,
    )


def forked(code: str, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fork of a warm interpreter. It must not depend on which modules are imported."""
    return forked_command("-c", code, *arguments, **environ)


def forked_command(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in such a fork."""
    return pool.run(command, own_environment() | environ, 120)


def own_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}


def test_modules_and_names_can_be_imported_after_install() -> None:
    start = "import sys, accelerate_drop_in as d; d.install(); d.install();"
    start += "assert 'torch' not in sys.modules"
    done = python("-c", start + USES)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


def test_script_runs_with_the_import_name_accelerate(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\n" + USES)
    done = forked_command("-m", "accelerate_drop_in", script, "--lr", "3")
    assert "served ['--lr', '3']" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import accelerate_core; import accelerate", "No module named 'accelerate'"),
        (
            "import sys, types; sys.modules['accelerate'] = types.ModuleType('accelerate');"
            "import accelerate_drop_in as d; d.install()",
            "is already imported",
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
            "from importlib import metadata; metadata.entry_points = lambda **_: metadata.EntryPoints();"
            "import accelerate_drop_in as d; d.install();"
            "from accelerate.utils import install_xla; print(install_xla.__name__);"
            "install_xla()",
            'pip install "accelerate-core[xla]"',
        ),
        (
            "import accelerate_drop_in as d; d.install(); import accelerate.no_such",
            "No module named 'accelerate.no_such'",
        ),
        (
            "import accelerate_drop_in as d; d.install(); import accelerate.utils.no_such",
            "No module named 'accelerate.utils.no_such'",
        ),
    ],
)
def test_unavailable_names_and_modules_raise_import_errors(code: str, said: str) -> None:
    done = forked(code)
    assert done.returncode == 1
    assert said in done.stderr


ALL = """
import importlib, importlib.metadata, os, sys
from accelerate_drop_in.absent import LEFT_OUT
from accelerate_drop_in.serving import names

served = importlib.metadata.version("accelerate")
assert served == importlib.import_module("accelerate").__version__ == "1.15.0.post1"
missing = []
for module, known in names().items():
    made = importlib.import_module(f"accelerate.{module}".rstrip("."))
    assert os.path.exists(made.__file__)
    for name in known:
        try:
            getattr(made, name)
        except AttributeError as error:
            if name not in LEFT_OUT or LEFT_OUT[name] not in str(error):
                missing.append(f"{module}.{name}")
print(*missing)
from accelerate.utils import *
from accelerate import *
assert Accelerator and set_seed and is_xpu_available
import accelerate
assert accelerate.utils.tqdm is tqdm and accelerate.memory_utils

import accelerate.big_modeling
from accelerate_big_model import dispatch
before = dispatch.check_device_map
accelerate.big_modeling.check_device_map = len
assert dispatch.check_device_map is accelerate.utils.check_device_map is len
del accelerate.big_modeling.check_device_map
assert dispatch.check_device_map is accelerate.big_modeling.check_device_map is before
"""


def test_every_module_of_accelerate_is_served_and_assignments_take_effect() -> None:
    done = forked("import accelerate_drop_in as d; d.install()\n" + ALL)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), "missing"


def test_child_processes_can_import_accelerate_too() -> None:
    code = "import accelerate_drop_in as d, subprocess, sys; d.install();"
    code += (
        "subprocess.run([sys.executable, '-c', 'import accelerate; print(accelerate.__version__)'])"
    )
    assert forked(code).stdout == "1.15.0.post1\n"


def test_wheel_provides_the_distribution_accelerate(tmp_path: Path) -> None:
    pip = ("-m", "pip", "-q", "--disable-pip-version-check")
    how = ("--no-deps", "--no-build-isolation")
    project = ROOT / "extensions/drop_in/accelerate"
    assert not python(*pip, "wheel", *how, "--wheel-dir", tmp_path, project).returncode
    (wheel,) = tmp_path.glob("accelerate-1.15.0.post1-*.whl")
    target = tmp_path / "site"
    assert not python(*pip, "install", *how, "--target", target, wheel).returncode
    done = forked(ALL, PYTHONPATH=str(target))
    assert done.returncode == 0, done.stderr
    command = forked_command(target / "bin" / "accelerate-launch", "--help", PYTHONPATH=str(target))
    assert "--num_processes" in command.stdout, command.stderr
    refused = (
        "import accelerate_drop_in as d; d.install(); import accelerate; print(accelerate.__file__)"
    )
    assert "accelerate" in forked(refused, PYTHONPATH=str(target)).stdout


def test_install_is_refused_if_accelerate_is_installed(tmp_path: Path) -> None:
    there = tmp_path / "accelerate-1.15.0.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.0\n")
    done = forked("import accelerate_drop_in as d; d.install()", PYTHONPATH=str(tmp_path))
    assert "Accelerate 1.15.0 is also installed" in done.stderr
    assert "pip uninstall accelerate" in done.stderr


NAMES = """
import pickle, sys
import torch
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.optimizer import move_to_device
from accelerate.state import PartialState, do_nothing, is_initialized
from accelerate.utils import TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, TORCH_DYNAMO_MODES
from accelerate.utils.dataclasses import BaseEnum, get_module_class_from_name
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from accelerate.utils.modeling import get_non_persistent_buffers
from accelerate.utils.operations import ConvertOutputsToFp32
from accelerate.utils.versions import torch_version

assert not is_initialized() and do_nothing(1) is None
PartialState(cpu=True)
assert is_initialized()
assert "MULTI_CPU" in TORCH_DISTRIBUTED_OPERATION_TYPES and torch_version.major >= 2
assert FSDP_AUTO_WRAP_POLICY and "default" in TORCH_DYNAMO_MODES

class Word(BaseEnum):
    A = "a"

assert "a" in Word and str(Word.A) == "a" and Word.list() == ["a"]
net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
net[1].register_buffer("left_out", torch.ones(1), persistent=False)
assert get_module_class_from_name(net, "Linear") is torch.nn.Linear
assert get_module_class_from_name(net, "Conv2d") is None
assert get_parameters_from_modules("0", net, "cpu") == set(net[0].parameters())
assert get_non_persistent_buffers(net, recurse=True, fqns=True) == {"1.left_out"}
assert pickle.loads(pickle.dumps(ConvertOutputsToFp32(torch.sigmoid)))(
    torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
half = torch.nn.Linear(2, 2).to(torch.bfloat16)
half.forward = convert_outputs_to_fp32(half.forward)
for one in (half, pickle.loads(pickle.dumps(half))):
    assert one(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
pickle.dumps(extract_model_from_parallel(half, keep_fp32_wrapper=False))
assert move_to_device({"a": torch.ones(1)}, "meta")["a"].is_meta
assert default_config_file.endswith(".yaml")
read = load_config_from_file(sys.argv[1])
assert (read.num_processes, read.mixed_precision) == (2, "no")
launch_command(launch_command_parser().parse_args(["--cpu", "--dry_run", sys.argv[2], "--lr", "1"]))
print("all")
"""


def test_names_that_libraries_use_work(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 2\n")
    (tmp_path / "s.py").write_text("")
    start = "import accelerate_drop_in as d; d.install()\n"
    done = forked(start + NAMES, tmp_path / "c.yaml", tmp_path / "s.py")
    assert done.returncode == 0, done.stderr
    assert "s.py --lr 1" in " ".join(done.stdout.split())
    assert done.stdout.endswith("all\n")


RESUMES = """
import inspect, sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

seen = []
for options in ({}, {}, {"restore_positions": True}, {"use_stateful_dataloader": True}):
    a = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = a.prepare(torch.utils.data.DataLoader(torch.arange(6.0), 1))
    resume = 0
    if seen:
        a.load_state(sys.argv[1])
        resume = 4
    seen.append([])
    for step, batch in enumerate(loader):
        if step < resume and not any(options.values()):
            continue
        seen[-1].append(int(batch))
        a.backward(torch.ones(1, requires_grad=True).sum())
        if step == 3 and not resume:
            a.save_state(sys.argv[1])
            break
assert seen == [[0, 1, 2, 3], [4, 5], [4, 5], [4, 5]], seen
assert "mixed_precision" in inspect.signature(Accelerator).parameters
print("resumed")
"""


def test_positions_are_restored_only_on_request(tmp_path: Path) -> None:
    start = "import accelerate_drop_in as d; d.install()\n"
    done = forked(start + RESUMES, tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout
    assert "Warning" not in done.stderr, done.stderr


def test_config_file_of_accelerate_is_used(tmp_path: Path) -> None:
    theirs = tmp_path / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    script = tmp_path / "train.py"
    script.write_text("")
    home = {"HF_HOME": str(tmp_path), "ACCELERATE_CONFIG_HOME": str(tmp_path / "ours")}
    launch = "import accelerate_drop_in as d; d.install(); import accelerate.commands.launch as l;"
    launch += "l.main()"
    shown = forked(launch, "--dry_run", script, "--cpu", **home)
    assert "bf16" in shown.stdout, shown.stderr
    assert "bf16" not in forked(launch, "--cpu", "--dry_run", script, **home).stdout
    ask = "import accelerate_drop_in as d; d.install(); import accelerate.commands.config as c;"
    found = forked(ask + "print(c.default_config_file)", **home)
    assert found.stdout == f"{theirs}\n", found.stderr
    read = forked(ask + "print(c.load_config_from_file(None).mixed_precision)", **home)
    assert read.stdout == "bf16\n", read.stderr
    theirs.unlink()
    assert not forked(ask + "c.main()", "default", **home).returncode
    # Accelerate refuses a file without `distributed_type`.
    assert "num_machines" in theirs.read_text()
    assert yaml.safe_load(theirs.read_text())["distributed_type"] == "NO"


NOISY = """
import torch
from accelerate import Accelerator

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.rand(())

loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Noisy(), batch_size=1))
torch.manual_seed(0)
seen = [(batch.item(), torch.rand(()).item()) for batch in loader]
torch.manual_seed(0)
torch.empty((), dtype=torch.int64).random_()  # the worker seed, which every iteration draws
first, second, noise, third, more, last = torch.rand(6).tolist()
assert seen == [(first, noise), (second, more), (third, last)], seen
"""


def test_batches_are_read_one_ahead_as_in_accelerate() -> None:
    done = forked("import accelerate_drop_in as d; d.install()\n" + NOISY)
    assert done.returncode == 0, done.stderr


ZERO_GRAD = """
import warnings
import accelerate_drop_in as d; d.install()
import torch
from accelerate import Accelerator

def run(early):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x in (1.0, 10.0, 100.0, 1000.0):
            with accelerator.accumulate(model):
                if early:
                    optimizer.zero_grad()
                accelerator.backward(model(torch.tensor([[x]])).sum())
                optimizer.step()
                if not early:
                    optimizer.zero_grad()
    assert net.weight.item() == -555.5, net.weight
    return [str(one.message) for one in seen if "zero_grad" in str(one.message)]

assert run(False) == []
said = run(True)
assert len(said) == 1 and "differ from Accelerate" in said[0], said
"""


def test_zero_grad_that_keeps_micro_batches_is_one_warning() -> None:
    done = forked(ZERO_GRAD)
    assert done.returncode == 0, done.stderr


CLEARML = """
import accelerate_drop_in as d; d.install()
import numpy, pandas, pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, ClearMLTracker, filter_trackers

a = Accelerator(cpu=True, log_with="clearml")
quiet = {"auto_resource_monitoring": False, "auto_connect_streams": False}
a.init_trackers("digits", {"lr": 1}, {"clearml": quiet})
assert a.get_tracker("clearml", unwrap=True).name == "first"
a.log({"eval_loss": 1.0, "accuracy": 2.0, "test_a_b": 3.0}, step=4)
a.log({"best": 5.0})
a.log_images({"batch": numpy.zeros((2, 8, 8, 3), numpy.uint8)}, step=1)
tracker = a.get_tracker("clearml")
assert type(tracker) is ClearMLTracker is LOGGER_TYPE_TO_CLASS["clearml"]
assert filter_trackers("all", "logs").count("clearml") == 1
tracker.log_images({"train_grey": numpy.eye(8, dtype=numpy.uint8)}, step=1)
tracker.log_table("rows", data=[["A"], [1]], step=2)
tracker.log_table("named", columns=["A"], data=[[1]], step=2)
tracker.log_table("test_frame", dataframe=pandas.DataFrame({"A": [1]}))
with pytest.raises(ValueError, match="dataframe="):
    tracker.log_table("nothing")
a.end_training()
"""


def test_clearml_uses_accelerates_names_and_images(tmp_path: Path) -> None:
    pytest.importorskip("clearml")
    pytest.importorskip("pandas")
    environ = {name: str(tmp_path) for name in ("CLEARML_CACHE_DIR", "HOME")}
    done = forked(CLEARML, CLEARML_OFFLINE_MODE="1", CLEARML_TASK="first", **environ)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    assert {(e["metric"], e["variant"], e["value"]) for e in events if "value" in e} == {
        *(("loss", "eval", 1.0), ("accuracy", "train", 2.0), ("a_b", "test", 3.0)),
        ("Summary", "best", 5.0),
    }
    tables = {(e["metric"], e["variant"]) for e in events if "plot_str" in e}
    assert tables == {("rows", "train"), ("named", "train"), ("frame", "test")}
    images = {path.parent.name: path.suffix for path in file.parent.rglob("*.*g")}
    assert images == {"train": ".jpeg", "0": ".png", "1": ".png"}


PICKLED = """
import copy, pickle, sys
import accelerate_drop_in as d; d.install()
from accelerate import Accelerator
first, second = Accelerator(cpu=True), Accelerator(cpu=True)
if sys.argv[1] == "write":
    assert pickle.loads(pickle.dumps(first)) is copy.deepcopy([first])[0] is first
    assert pickle.loads(pickle.dumps(second)) is copy.copy(second) is second
    open(sys.argv[2], "wb").write(pickle.dumps({"trainer": first}))
else:
    pickle.load(open(sys.argv[2], "rb"))
"""


def test_pickled_accelerator_is_the_same_object_and_only_in_its_process(tmp_path: Path) -> None:
    done = forked(PICKLED, "write", tmp_path / "pickle")
    assert done.returncode == 0, done.stderr
    done = forked(PICKLED, "read", tmp_path / "pickle")
    assert "This pickle contains an Accelerator of another process" in done.stderr


#: The modules of Accelerate 1.15 that have a logger.
LOGGERS = """
accelerator big_modeling checkpointing commands.launch commands.to_fsdp2 data_loader state tracking utils.bnb
utils.dataclasses utils.environment utils.fsdp_utils utils.modeling utils.other
"""
LOGGING = """
import importlib, sys
from unittest import mock
import accelerate_drop_in; accelerate_drop_in.install()
for module in sys.argv[1].split():
    logger = importlib.import_module(f"accelerate.{module}").logger
    assert logger.name == f"accelerate.{module}", logger
    logger.setLevel("ERROR")
    assert logger is importlib.import_module(f"accelerate.{module}").logger
import accelerate.utils.environment as environment
with mock.patch("accelerate.utils.environment.logger") as replaced:
    environment.convert_dict_to_env_variables({"A;": "1"})
assert replaced.warning.called
from accelerate.utils import other
with mock.patch("accelerate.utils.other.logger") as replaced, mock.patch("platform.uname") as uname:
    uname.return_value = mock.Mock(system="Linux", release="3.1.0")
    other.check_os_kernel()
assert replaced.warning.called
try:
    importlib.import_module("accelerate.hooks").logger
except AttributeError:
    print("right")
"""


def test_loggers_of_accelerates_modules_exist_and_can_be_replaced() -> None:
    done = forked(LOGGING, LOGGERS)
    assert done.stdout == "right\n", done.stderr


PROBES = """
import inspect, json
import accelerate_drop_in; accelerate_drop_in.install()
import accelerate.utils, accelerate.utils.imports as probes
from accelerate_drop_in.serving import names
found = {}
for name in names()["utils.imports"]:
    if name.startswith("is_") and name.endswith("_available"):
        probe = getattr(probes, name)
        assert probe.__name__ == name
        assert probe() in (True, False)
        found[name] = list(inspect.signature(probe).parameters)
print(json.dumps({name: given for name, given in found.items() if given}))
for wrong in (lambda: probes.is_deepspeed_available(True), lambda: probes.is_xpu_available(no=1)):
    try:
        wrong()
    except TypeError:
        continue
    raise AssertionError
assert probes.is_numpy_available("1.0") and not probes.is_numpy_available(min_version="99")
assert probes.is_torch_xla_available(check_is_tpu=True) is False
accelerate.utils.is_deepspeed_available = len
assert probes.is_deepspeed_available is len
"""


def test_availability_functions_have_the_arguments_of_accelerate() -> None:
    done = forked(PROBES)
    assert done.returncode == 0, done.stderr
    devices = ("mlu", "musa", "neuron", "npu", "sdaa", "xpu")
    assert json.loads(done.stdout) == {
        "is_bf16_available": ["ignore_tpu"],
        "is_bnb_available": ["min_version"],
        "is_hpu_available": ["init_hccl"],
        "is_mps_available": ["min_version"],
        "is_numpy_available": ["min_version"],
        "is_torch_xla_available": ["check_is_tpu", "check_is_gpu"],
        **{f"is_{device}_available": ["check_device"] for device in devices},
    }


def test_methods_of_the_accelerator_have_no_positional_only_arguments() -> None:
    found = []
    for name, method in inspect.getmembers(Accelerator, inspect.isfunction):
        first, *_ = inspect.signature(method).parameters.values() or [None]
        if first is not None and first.kind is first.POSITIONAL_ONLY and name[0] != "_":
            found.append(name)
    assert not found
