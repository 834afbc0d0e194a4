"""Cases on the fake device. `test_fake_device.py` runs them in a process of their own."""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelerate_core
from accelerate_core import Accelerator
from accelerate_core.data.device_feed import feed
from accelerate_testing import fake_device

DEVICE = torch.device("fake", 0)


@pytest.fixture(autouse=True)
def accelerators():
    yield
    from accelerate_core.distributed import process

    while (left := process.current_user()) is not None:
        left.end_training()
    gc.collect()


def trainer(**settings):
    """Return an Accelerator and a prepared model, optimizer, loader and scheduler."""
    torch.manual_seed(0)
    accelerator = Accelerator(**settings)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    loader = DataLoader(data, batch_size=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, clip=1.0):
    """Train for one epoch, with everything that a usual loop does."""
    for x, y in loader:
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


# ---- the device itself ----


def test_memory_is_counted_and_released():
    gc.collect()
    before = torch.accelerator.memory_allocated(0)
    tensor = torch.empty(1000, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) - before == 4000
    del tensor
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.memory_reserved(0) >= before + 4000
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == torch.accelerator.memory_allocated(0)


def test_memory_limit_raises_out_of_memory():
    torch.accelerator.empty_cache()
    fake_device.set_memory_limit(torch.accelerator.memory_reserved(1) + 1000, 1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 40000 bytes"):
            torch.empty(10_000, device="fake:1")
        torch.empty(200, device="fake:1")
    finally:
        fake_device.set_memory_limit(0, 1)


def test_mixed_devices_are_refused():
    on_device = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        on_device + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        on_device + torch.ones(3, device="fake:1")


def test_a_read_is_recorded_with_its_line():
    loss = torch.ones(3, device=DEVICE).sum()
    with fake_device.record() as log:
        loss.item()
        loss.cpu()
        torch.accelerator.synchronize()
    assert [entry.kind for entry in log.host_waits] == ["read", "download", "synchronize"]
    assert all("on_the_device.py" in entry.where for entry in log.host_waits)


def test_a_stream_that_does_not_wait_is_a_race():
    host = torch.ones(3).pin_memory()
    side = torch.Stream(DEVICE)
    with fake_device.record() as log:
        with side:
            copied = host.to(DEVICE, non_blocking=True)
        copied + 1
        torch.accelerator.current_stream().wait_stream(side)
        copied + 1
    assert len(log.races) == 1
    assert "reads memory before another stream has written it" in log.races[0].name


@pytest.mark.parametrize(
    ("care", "races"), [("none", 1), ("wait_stream", 0), ("record_stream", 0), ("empty_cache", 0)]
)
def test_freed_memory_that_another_stream_uses_is_a_race_when_it_is_reused(care, races):
    """The rule of torch's caching allocators: freed memory belongs to the stream that allocated it."""
    side = torch.Stream(DEVICE)
    main = torch.accelerator.current_stream()
    freed = torch.ones(1234, device=DEVICE)
    place = freed.data_ptr()
    side.wait_stream(main)
    with fake_device.record() as log:
        with side:
            freed + 1
        if care == "record_stream":
            freed.record_stream(side)
        del freed
        if care == "wait_stream":
            main.wait_stream(side)
        if care == "empty_cache":
            torch.accelerator.empty_cache()  # torch waits for the device before it returns memory
        reused = torch.empty(1234, device=DEVICE)
        assert care == "empty_cache" or reused.data_ptr() == place
        reused.fill_(2)
        reused.fill_(3)
    assert len(log.races) == races, [*map(str, log.races)]
    if races:
        assert log.races[0].name.startswith("aten::fill_ reuses freed memory")


def test_generators_of_devices_are_independent():
    torch.manual_seed(3)
    state = torch.fake.get_rng_state("fake:1")
    first = torch.rand(4, device="fake:1").cpu()
    torch.rand(4, device=DEVICE)
    torch.fake.set_rng_state(state, "fake:1")
    assert torch.equal(torch.rand(4, device="fake:1").cpu(), first)


# ---- loaders ----


def test_next_batch_is_copied_before_the_current_one_is_computed():
    accelerator, model, optimizer, loader, scheduler = trainer()
    with fake_device.record() as log:
        train(accelerator, model, optimizer, loader, scheduler)
    assert not log.races
    assert not log.of("blocking_upload")
    copies = log.of("upload")
    assert len(copies) == 2 * len(loader)  # two tensors for each batch
    side = {entry.stream for entry in copies}
    assert len(side) == 1
    assert side != {0}
    computed = 0
    copied = 0
    for entry in log.entries:
        copied += entry.kind == "upload"
        if entry.kind == "kernel" and entry.name == "aten::_log_softmax":
            computed += 1
            assert copied == 2 * min(computed + 1, len(loader))
    assert computed == len(loader)


def test_feeding_costs_at_most_25_python_calls():
    def calls(device):
        batches = [{"x": torch.ones(2), "y": torch.ones(2)} for _ in range(14)]
        names: Counter[str] = Counter()

        def profile(frame, event, _):
            if event == "call":
                names[frame.f_code.co_qualname] += 1

        feeding = feed(iter(batches), device)
        next(feeding), next(feeding)
        sys.setprofile(profile)
        try:
            for _ in range(10):
                next(feeding)
        finally:
            sys.setprofile(None)
        return sum(names.values()) / 10

    assert calls(DEVICE) - calls(torch.device("cpu")) <= 25


# ---- steps ----


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_step_never_waits_for_the_device(precision):
    prepared = trainer(mixed_precision=precision)
    train(*prepared)  # the first steps create the optimizer's state
    with fake_device.record() as log:
        train(*prepared)
    waits = [entry for entry in log.host_waits if "grad_scaler.py" not in entry.where]
    if precision == "fp16":
        assert len(log.of("read")) == len(prepared[3]), [*map(str, log.host_waits)]
        assert all(entry.kind == "read" for entry in log.host_waits)
    else:
        assert not waits, [*map(str, waits)]
    assert not log.races


def test_fp16_overflow_skips_the_step_and_lowers_the_scale():
    accelerator, model, optimizer, loader, _ = trainer(mixed_precision="fp16")
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    scale = accelerator.scaler.get_scale()
    x, y = next(iter(loader))
    assert x.device == DEVICE
    loss = nn.functional.cross_entropy(model(x), y) * 1e6  # the scaled gradient exceeds 65504
    accelerator.backward(loss)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == scale / 2
    assert all(map(torch.equal, weights, model.parameters()))


def test_clipping_does_not_read_the_norm():
    accelerator, model, *_ = trainer()
    model(torch.randn(2, 8, device=DEVICE)).sum().backward()
    with fake_device.record() as log:
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    assert norm.device == DEVICE
    assert not log.host_waits


def test_accumulated_items_do_not_wait_for_the_device():
    accelerator, model, optimizer, loader, _ = trainer(gradient_accumulation_steps=2)

    def epoch():
        for x, y in loader:
            with accelerator.accumulate(model, num_items=len(x)):
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    epoch()
    with fake_device.record() as log:
        epoch()
    assert not log.host_waits, [*map(str, log.host_waits)]


def check_compiled(compiler):
    """Train with a compiler like without one, and don't wait for the device."""
    prepared = trainer()
    train(*prepared)
    expected = [parameter.detach().cpu() for parameter in prepared[1].parameters()]
    prepared[0].end_training()
    prepared = trainer(dynamo_backend=compiler)
    train(*prepared)
    found = [parameter.detach().cpu() for parameter in prepared[1].parameters()]
    assert all(map(torch.allclose, found, expected))
    with fake_device.record() as log:
        train(*prepared)
    assert not log.host_waits, [*map(str, log.host_waits)]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_model_trains_without_waiting(compiler):
    check_compiled(compiler)


def test_model_compiled_by_inductor_trains_without_waiting():
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device("fake") is None:
        pytest.skip(
            "torch's inductor has no code generator for the device. It has them for cpu, cuda, xpu, mps "
            "and mtia, and for devices that are registered with "
            "torch._inductor.codegen.common.register_backend_for_device."
        )
    check_compiled("inductor")


# ---- state ----


def test_checkpoint_restores_the_generator_of_the_device(tmp_path):
    accelerator, *_ = trainer()
    torch.rand(3, device=DEVICE)
    path = accelerator.save_state(str(tmp_path / "state"))
    drawn = torch.rand(5, device=DEVICE).cpu()
    torch.manual_seed(99)
    accelerator.load_state(path)
    assert torch.equal(torch.rand(5, device=DEVICE).cpu(), drawn)


def test_checkpoint_restores_weights_on_the_device(tmp_path):
    prepared = trainer()
    train(*prepared)
    accelerator, model = prepared[:2]
    path = accelerator.save_state(str(tmp_path / "state"))
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    train(*prepared)
    accelerator.load_state(path)
    assert all(parameter.device == DEVICE for parameter in model.parameters())
    assert all(map(torch.equal, weights, (p.cpu() for p in model.parameters())))


def test_states_of_accelerates_checkpoints_are_restored():
    from accelerate_checkpoint.rng_state import capture_rng_state, restore_rng_state

    state = capture_rng_state()
    state["torch_fake_manual_seed"] = [torch.fake.get_rng_state(f"fake:{i}") for i in range(2)]
    drawn = torch.rand(3, device="fake:1").cpu()
    assert restore_rng_state(state) == []
    assert torch.equal(torch.rand(3, device="fake:1").cpu(), drawn)
    state["torch_nosuch_manual_seed"] = state["torch_fake_manual_seed"]
    assert restore_rng_state(state) == ["nosuch:0", "nosuch:1"]


def test_free_memory_releases_the_device():
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved(0)
    accelerator, model, optimizer, loader, scheduler = trainer()
    train(accelerator, model, optimizer, loader, scheduler)
    assert torch.accelerator.memory_reserved(0) > before
    freed = accelerator.free_memory(model, optimizer, loader, scheduler)
    assert freed == [None] * 4
    del model, optimizer, loader, scheduler
    accelerator.free_memory()
    assert torch.accelerator.memory_reserved(0) <= before + 64


def test_batch_size_shrinks_when_the_device_is_full():
    torch.accelerator.empty_cache()
    fake_device.set_memory_limit(torch.accelerator.memory_reserved(0) + 100_000, 0)
    tried = []

    @accelerate_core.find_executable_batch_size(starting_batch_size=128)
    def run(batch_size):
        tried.append(batch_size)
        return torch.empty(batch_size, 1000, device=DEVICE).shape[0]

    try:
        assert run() < 26
    finally:
        fake_device.set_memory_limit(0, 0)
    assert tried[0] == 128


# ---- big models ----


def test_device_map_respects_the_memory_of_devices():
    from accelerate_big_model.device_map import infer_auto_device_map
    from accelerate_big_model.dispatch import dispatch_model

    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(6)])  # 40 kB each
    torch.accelerator.empty_cache()
    fake_device.set_memory_limit(torch.accelerator.memory_reserved(0) + 110_000, 0)
    fake_device.set_memory_limit(torch.accelerator.memory_reserved(1) + 110_000, 1)
    try:
        places = infer_auto_device_map(model)
        assert {0, 1} <= {*places.values()}, places
        assert "cpu" in places.values(), places
        x = torch.randn(2, 100)
        with torch.no_grad():
            expected = model(x)
            dispatched = dispatch_model(model, places)
            result = dispatched(x.to(DEVICE))
        assert torch.allclose(result.cpu(), expected, atol=1e-6)
    finally:
        fake_device.set_memory_limit(0, 0)
        fake_device.set_memory_limit(0, 1)


# ---- tracking ----


def test_logging_a_tensor_does_not_make_the_step_wait(tmp_path):
    from accelerate_tracking import GeneralTracker

    class Kept(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.seen = []

        @property
        def tracker(self):
            return self.seen

        def start(self):
            pass

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))

    kept = Kept()
    accelerator, model, *_ = trainer(log_with=kept)
    accelerator.init_trackers("run")
    loss = model(torch.randn(2, 8, device=DEVICE)).sum()
    with fake_device.record() as log:
        accelerator.log({"loss": loss.detach()}, step=1)
    # The tracker's thread waits for the copy, the script does not.
    assert all("in thread" in entry.where for entry in log.host_waits), [*map(str, log.host_waits)]
    expected = loss.item()
    accelerator.end_training()
    assert kept.seen == [(1, {"loss": pytest.approx(expected)})]
