"""Which loader the state describes, for every way in which a loop can end."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch.utils.data import DataLoader

from accelerate_core.data.prepare_loader import skip_first_batches
from accelerate_core.training.gradient_state import GradientState
from accelerate_drop_in.data_loader import prepare_data_loader


@pytest.fixture
def state():
    return GradientState(num_steps=1)  # without arguments this is the state of a live Accelerator


def loader_of(state, size, batch_size=2, world=2, rank=0, **options):
    plain = DataLoader(range(size), batch_size)
    return prepare_data_loader(plain, None, world, rank, gradient_state=state, **options)


def test_state_reports_the_end_and_the_remainder(state):
    seen = []
    for _ in loader_of(state, 9):
        seen.append((state.end_of_dataloader, state.metrics_cut()[0]))
    assert seen == [(False, 0), (False, 0), (True, 1)]
    assert not state.in_dataloader
    assert (state.metrics_cut()[0], state.remainder) == (0, -1)


def test_state_describes_the_innermost_running_loop(state):
    train, val = loader_of(state, 12), loader_of(state, 5)
    seen = []
    for _ in train:
        before = (state.active_dataloader is train, state.end_of_dataloader)
        inner = []
        for _ in val:
            assert state.active_dataloader is val
            inner.append((state.end_of_dataloader, state.metrics_cut()[0]))
        assert inner == [(False, 0), (True, 1)]
        after = (state.active_dataloader is train, state.end_of_dataloader)
        seen.append((before, after, state.metrics_cut()[0]))
    assert seen == [((True, end), (True, end), 0) for end in (False, False, True)]


def test_unused_iterator_does_not_affect_the_state(state):
    train, val = loader_of(state, 8, world=1), loader_of(state, 6, world=1)
    ends, kept = [], None
    for index, _ in enumerate(train):
        if index == 1:
            kept = iter(val)
            next(kept)
            assert state.active_dataloader is val
            continue
        ends.append((state.active_dataloader is train, state.end_of_dataloader))
    assert ends == [(True, False), (True, False), (True, True)]
    assert state.active_dataloader is val
    del kept


def test_loader_can_be_nested_in_itself(state):
    loader = loader_of(state, 8)
    ends = []
    for _ in loader:
        inner = []
        for _ in loader:
            inner.append(state.end_of_dataloader)
        assert inner == [False, True]
        ends.append((state.end_of_dataloader, loader.end_of_dataloader))
    assert ends == [(False, False), (True, True)]


def test_abandoned_loader_is_inactive_but_its_padding_is_still_removed(state):
    train, val = loader_of(state, 8), loader_of(state, 3)
    for _ in train:
        next(iter(val))
        assert state.metrics_cut()[0] == 3
        assert state.active_dataloader is train
    assert not state.in_dataloader


def test_padding_of_a_deleted_loader_is_still_removed(state):
    next(iter(loader_of(state, 3)))
    gc.collect()
    assert state.metrics_cut()[0] == 3
    assert not state.in_dataloader


def test_break_does_not_affect_the_next_loop(state):
    first, second = loader_of(state, 40), loader_of(state, 8)
    for _ in first:
        break
    assert not state.in_dataloader
    ends = []
    for _ in second:
        ends.append((state.end_of_dataloader, state.metrics_cut()[0]))
    assert ends == [(False, 0), (True, 0)]


def test_state_after_a_break_is_reset_by_the_next_batch(state):
    first, second = loader_of(state, 3), loader_of(state, 8)
    for _ in first:
        break
    assert state.metrics_cut()[0] == 3
    iterator = iter(second)
    next(iterator)
    assert state.metrics_cut()[0] == 0
    assert state.end_of_dataloader is False


def test_exception_closes_the_loop_even_if_its_traceback_is_kept(state):
    train, other = loader_of(state, 12), loader_of(state, 8)

    def fail():
        for _ in train:
            raise KeyError("inside")

    caught = None
    try:
        fail()
    except KeyError as error:
        caught = error  # its traceback keeps the loop alive
    iterator = iter(other)
    next(iterator)
    assert state.active_dataloader is other
    caught.__traceback__.tb_next.tb_frame.clear()
    del caught
    gc.collect()
    assert state.dataloader_references == [other]
    list(iterator)
    assert not state.in_dataloader


def test_iterators_of_one_loader_can_close_in_any_order(state):
    loader = loader_of(state, 12)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(second)
    next(second)
    assert state.end_of_dataloader
    first.close()
    assert state.end_of_dataloader
    second.close()
    assert not state.in_dataloader


def test_state_holds_loaders_weakly(state):
    loader = loader_of(state, 12)
    iterator = iter(loader)
    next(iterator)
    reference = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert reference() is None
    assert not state.in_dataloader
    assert state.active_dataloader is None


def test_no_padding_with_uneven_batches_or_on_one_process(state):
    for loader in (
        loader_of(state, 5, even_batches=False),
        loader_of(state, 5, world=1),
    ):
        for _ in loader:
            assert state.metrics_cut()[0] == 0


def test_skipping_loader_reports_its_end_and_remainder(state):
    seen = []
    for _ in skip_first_batches(loader_of(state, 9), 2):
        seen.append((state.end_of_dataloader, state.metrics_cut()[0]))
    assert seen == [(True, 1)]


def test_forget_resets_the_gradient_state(state):
    state.num_steps = 4
    assert state.plugin_kwargs["num_steps"] == 4
    assert state.sync_gradients is True
    iterator = iter(loader_of(state, 3))
    next(iterator)
    state.sync_gradients = False
    state.forget()
    assert (state.sync_gradients, state.metrics_cut()[0]) == (True, 0)
    assert "num_steps=4" in repr(state)
