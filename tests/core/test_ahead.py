"""A prefetching thread that reads one result ahead, and never while its caller reads."""

from __future__ import annotations

import threading

import pytest

from accelerate_dispatch.prefetch import Prefetcher


def test_results_arrive_in_order_with_a_callback_after_each():
    made, events = iter(range(5)), []
    worker = Prefetcher(lambda: next(made), lambda: events.append("then"))
    for expected in range(5):
        worker.start()
        assert worker.take() == expected
        worker.rest()
        assert events == ["then"] * (expected + 1)
    worker.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dispatch"]


def test_take_raises_the_error_of_the_prefetched_call():
    def fails():
        raise OSError("disk")

    worker = Prefetcher(fails, lambda: None)
    worker.start()
    with pytest.raises(OSError, match="disk"):
        worker.take()
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_worker_thread_is_replaced():
    def dies():
        raise RuntimeError("breaks the contract")

    worker = Prefetcher(lambda: 1, dies)
    for _ in range(3):
        worker.start()
        assert worker.take() == 1
        worker.rest()
        worker._thread.join()
    worker.close()


def test_close_waits_for_a_pending_result_and_drops_it():
    gate, done = threading.Event(), []

    def slow():
        gate.wait(10)
        done.append(True)

    worker = Prefetcher(slow, lambda: None)
    worker.start()
    threading.Timer(0.05, gate.set).start()
    worker.close()
    assert done
    worker.close()  # closing twice is harmless
