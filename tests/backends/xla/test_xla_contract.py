"""Calls for several devices, which cannot run here, are checked against torch_xla's signatures."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_core import ParallelismConfig
from accelerate_core.contract.topology import Process
from accelerate_core.data import rng
from accelerate_core.errors import ConfigurationError
from accelerate_xla import XLABackend, collectives, library

_BROKEN = """
raise ImportError("_XLAC.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE")
"""


def _error_of_xla(folder: Path, **environ: str) -> str:
    code = "from accelerate_core import Accelerator; Accelerator(backend='xla')"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PJRT_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": str(folder), **environ},
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    return done.stderr


def test_error_for_a_mismatched_torch_xla_has_the_install_command(tmp_path: Path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text(_BROKEN)
    info = tmp_path / "torch_xla-2.8.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.8.1\n")
    error = _error_of_xla(tmp_path)
    expected = f"torch_xla 2.8.1 is built for torch 2.8, but torch {torch.__version__} is installed"
    assert expected in error
    assert "pip install torch==2.8.1 torch_xla==2.8.1" in error


class Recorder:
    """Records calls, and checks their arguments against the signatures of torch_xla's functions."""

    def __init__(self, count: int) -> None:
        self.module = pytest.importorskip("torch_xla.core.xla_model")
        self.count = count
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(self.module, name))

        def call(*arguments: Any, **named: Any) -> Any:
            bound = dict(signature.bind(*arguments, **named).arguments)
            self.calls.append((name, bound))
            if name == "all_gather":
                return torch.cat([bound["value"]] * self.count)
            return bound.get("inputs", bound.get("value"))

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(4)
    monkeypatch.setattr(collectives, "_model", lambda: made)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 2)
    return made


def test_collectives_match_torch_xlas_signatures(recorder: Recorder) -> None:
    backend, x = XLABackend(), torch.arange(4.0)
    assert len(backend.gather(None, x, "world")) == 16
    for op, kind, scale in (("mean", "sum", 0.25), ("max", "max", 1.0)):
        backend.reduce(None, x, op, "world")
        name, bound = recorder.calls[-1]
        assert (name, bound["reduce_type"], bound["scale"]) == ("all_reduce", kind, scale)
        assert bound["inputs"] == [x], "a list is reduced in place"
    assert backend.broadcast(None, x, 3, "world") is x
    assert recorder.calls[-1][1]["root_ordinal"] == 3
    parts = [torch.full((2,), float(one)) for one in range(4)]
    assert backend.scatter(None, parts, parts[0], 0, "world").tolist() == [2.0, 2.0]
    backend.all_to_all(None, x, "world")
    assert recorder.calls[-1][1]["split_count"] == 4


def test_gradients_are_averaged_once_after_each_backward(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate_xla import backend as module

    syncs: list[int] = []
    modules = {"": SimpleNamespace(sync=lambda: syncs.append(1)), "core.xla_model": recorder}
    monkeypatch.setattr(module, "imported", lambda name="": modules[name])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = SimpleNamespace(clip_grad=lambda p, *_: torch.nn.utils.clip_grad_norm_(p, 1.0))
    view: Any = SimpleNamespace(
        num_processes=4, scaler=None, precision=precision, gradient_accumulation_steps=1
    )
    backend = XLABackend()
    for _ in range(2):
        backend.backward(view, model(torch.ones(1, 2)).sum(), {})
        backend.clip_grad(view, list(model.parameters()), 1.0, 2.0, None)
        backend.optimizer_step(view, optimizer, None)
    reduced = [bound for name, bound in recorder.calls if name == "all_reduce"]
    assert [(len(one["inputs"]), one["scale"]) for one in reduced] == [(2, 0.25)] * 2
    assert len(syncs) == 4, "after each backward and each step"


@pytest.mark.parametrize("seed", [7, 2**63 + 5])
def test_generator_sends_rank_0s_seed_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    seeds: dict[str, int] = {}
    monkeypatch.setattr(library, "imported", lambda _: module)
    module = SimpleNamespace(
        get_rng_state=lambda: seed, set_rng_state=lambda one: seeds.update(set=one)
    )
    XLABackend()
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    comm: Any = SimpleNamespace(size=4, device=torch.device("cpu"), broadcast=broadcast)
    rng.synchronize_rng_states(["xla"], None, comm)
    assert seeds == {"set": seed}
    assert sent[0].dtype == torch.uint8, "bytes can be summed exactly"


def test_process_group_of_devices_is_rejected() -> None:
    start = Process(0, 2, 0, 2, "", device=torch.device("cpu"), comm_backend="xla")
    with pytest.raises(ConfigurationError, match="Device tensors use torch_xla's own collectives"):
        XLABackend().init_process_group(None, start)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sizes", "devices"), [({}, 4), ({"dp_shard_size": 8}, 8)])
def test_device_count_is_the_mesh_size_or_the_number_of_processes(sizes: Any, devices: int) -> None:
    config = ParallelismConfig(**sizes)
    view: Any = SimpleNamespace(num_processes=4, parallelism_config=config)
    assert XLABackend().device_count(view) == devices
