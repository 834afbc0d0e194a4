"""The order of copies and batches when feeding a device, with simulated streams."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from accelerate_core.data.device_feed import feed


class Streams:
    """Records calls of a device's streams. Has the names of torch.cuda's API."""

    def __init__(self):
        self.events = []
        self.copies = 0

    def Stream(self, device):
        return "side"

    def Event(self):
        number, events = self.copies, self.events
        self.copies += 1

        class Event:
            def record(self, stream):
                events.append(("copied", number, stream))

            def __repr__(self):
                return f"event {number}"

        return Event()

    @contextmanager
    def stream(self, stream):
        self.events.append(("on", stream))
        yield
        self.events.append(("off", stream))

    def current_stream(self, device):
        events = self.events

        class Current:
            def wait_event(self, event):
                events.append(("waits for", repr(event)))

        return Current()


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: streams.events.append("pinned") or tensor
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: streams.events.append("kept")
    )
    return streams


def test_next_batch_is_copied_before_the_current_one_is_yielded(streams):
    batches = ({"x": torch.full((2,), i)} for i in range(3))
    seen = []
    for batch in feed(batches, torch.device("meta"), streams=streams):
        seen.append(batch)
        streams.events.append("worked on")
    assert len(seen) == 3
    assert all(batch["x"].device.type == "meta" for batch in seen)
    copy = lambda i: [("on", "side"), "pinned", ("copied", i, "side"), ("off", "side")]  # noqa: E731
    hand = lambda i: [("waits for", f"event {i}"), "kept", "worked on"]  # noqa: E731
    assert streams.events == [*copy(0), *copy(1), *hand(0), *copy(2), *hand(1), *hand(2)]


def test_error_is_raised_after_the_previous_batch_was_yielded(streams):
    def batches():
        yield torch.zeros(1)
        raise OSError("disk")

    feeding = feed(batches(), torch.device("meta"), streams=streams)
    assert next(feeding).device.type == "meta"
    with pytest.raises(OSError, match="disk"):
        next(feeding)


def test_without_streams_batches_are_moved_one_at_a_time():
    drawn = []

    def batches():
        for i in range(3):
            drawn.append(i)
            yield torch.tensor([i])

    feeding = feed(batches(), torch.device("cpu"))
    assert next(feeding).tolist() == [0]
    assert drawn == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_feed_on_a_real_device():
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [{"x": torch.randn(1 << 16), "n": [i]} for i in range(20)]
    for fed, batch in zip(feed(iter(batches), device), batches, strict=True):
        total = fed["x"].double().sum()
        assert fed["x"].device == device
        assert fed["n"] == batch["n"]
        assert torch.allclose(total.cpu(), batch["x"].double().sum())
