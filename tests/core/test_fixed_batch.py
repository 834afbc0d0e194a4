"""A backend that compiles for one batch size always gets it, and metrics ignore the padding."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core import Accelerator, Backend
from accelerate_core.errors import ConfigurationError
from accelerate_drop_in.data_loader import prepare_data_loader


class Compiled(Backend):
    """Like a compiler that would recompile for every new shape."""

    name = "compiled"
    api_version = (1, 0)
    reduces_gradients = "never"
    shapes: list[torch.Size]

    def fixed_batch(self, accelerator):
        return 4

    def prepare_model(self, accelerator, model, evaluation_mode):
        model.register_forward_pre_hook(lambda _, inputs: self.shapes.append(inputs[0].shape))
        return model


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0).view(10, 1))


@pytest.fixture
def accelerator():
    Compiled.shapes = []
    made = Accelerator(backend=Compiled, cpu=True)
    yield made
    made.end_training()


@pytest.mark.parametrize(
    ("data", "size", "shape"),
    [
        (torch.arange(10.0).view(10, 1), 4, 4),
        (torch.arange(10.0).view(10, 1), 8, 8),
        (torch.arange(10.0).view(10, 1), 3, 4),
        (Stream(), 4, 4),
        (torch.arange(1.0).view(1, 1), 4, 4),
    ],
)
def test_every_batch_is_padded_and_metrics_drop_the_padding(accelerator, data, size, shape):
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(data, batch_size=size))
    kept, objects = [], []
    for batch in loader:
        model(batch)
        assert len(batch) % 4 == 0
        kept += accelerator.gather_for_metrics(batch).flatten().tolist()
        objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    wanted = [float(number) for number in range(10 if len(kept) > 1 else 1)]
    assert kept == wanted
    assert [one for [one] in objects] == wanted
    assert {each[0] for each in Compiled.shapes} <= {shape, 4}


def test_all_tensors_of_a_nested_batch_are_padded(accelerator):
    rows = [{"x": torch.tensor([float(i)]), "name": f"row {i}"} for i in range(5)]
    loader = accelerator.prepare(DataLoader(rows, batch_size=4))
    last = list(loader)[-1]
    assert last["x"].flatten().tolist() == [4.0] * 4
    assert last["name"] == ["row 4"] * 4


def test_run_resumes_after_a_padded_batch(accelerator):
    loader = accelerator.prepare(DataLoader(torch.arange(10.0), batch_size=4))
    batches, state = [], None
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 2:
            state = loader.state_dict()
    again = accelerator.prepare(DataLoader(torch.arange(10.0), batch_size=4))
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == batches[2:] == [[8.0, 9.0, 8.0, 9.0]]


def test_several_ranks_only_pad_at_the_end_of_an_epoch():
    for rank in range(2):
        loader = prepare_data_loader(DataLoader(range(10), 4), None, 2, rank, fixed_batch=4)
        assert [len(batch) for batch in loader] == [4, 4]
    with pytest.raises(ConfigurationError, match="Use a batch size of 4 per rank"):
        prepare_data_loader(DataLoader(range(10), 3), None, 2, 0, fixed_batch=4)
    uneven = prepare_data_loader(
        DataLoader(range(10), 4), None, 2, 0, even_batches=False, fixed_batch=4
    )
    with pytest.raises(ConfigurationError, match="even_batches=True or drop_last=True"):
        list(uneven)


def test_batches_are_not_padded_by_default():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))
    assert [len(batch) for batch in loader] == [4, 4, 2]
    accelerator.end_training()
