"""Restoring the position in the data: persistent workers, ends of epochs, and changed data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

EPOCHS, BATCHES = 3, 4


class Run:
    def __init__(self, folder: Path, samples: int = 12, **loader: Any) -> None:
        set_seed(7)
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        data = TensorDataset(torch.arange(samples))
        self.loader = self.accelerator.prepare(DataLoader(data, 3, shuffle=True, **loader))

    def read(self, loaders: list[Any], save_at: tuple[int, ...] = ()) -> list[list[int]]:
        """Return the samples of each epoch, and save after some batches."""
        epochs, seen = [], 0
        for loader in loaders:
            epochs.append([])
            for (batch,) in loader:
                epochs[-1] += batch.tolist()
                seen += 1
                if seen in save_at:
                    self.accelerator.save_state()
        return epochs

    def end(self) -> None:
        """Delete the loader and its persistent workers.

        If the garbage collector deletes the loader later, torch waits five seconds for each
        worker, because their queues are closed before they are asked to exit.
        """
        del self.loader
        self.accelerator.free_memory()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("own", [False, True], ids=["global", "own generator"])
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_resumes_with_loader_workers(tmp_path: Path, persistent: bool, own: bool) -> None:
    def make(name: str) -> Run:
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
        if own:
            options["generator"] = generator()
        return Run(tmp_path / name, **options)

    points = (2, BATCHES, BATCHES + 1, 2 * BATCHES, 2 * BATCHES + 2)
    run = make("whole")
    whole = run.read([run.loader] * EPOCHS, points)
    run.end()
    for number, at in enumerate(points):
        resumed = make("resumed")
        set_seed(99)
        resumed.accelerator.load_state(tmp_path / "whole" / "checkpoints" / f"checkpoint_{number}")
        first = (at - 1) // BATCHES
        rest = resumed.read([resumed.loader] * (EPOCHS - first))
        done = (at - first * BATCHES) * 3
        resumed.end()
        assert rest == [whole[first][done:], *whole[first + 1 :]], at


def test_skipping_no_batches_after_the_end_of_an_epoch_starts_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path)
    whole = run.read([run.loader] * EPOCHS, tuple(range(1, EPOCHS * BATCHES)))
    for at in range(1, EPOCHS * BATCHES):
        resumed = Run(tmp_path / "resumed")
        set_seed(99)
        resumed.accelerator.load_state(tmp_path / "checkpoints" / f"checkpoint_{at - 1}")
        first, skip = divmod(at, BATCHES)
        part = resumed.accelerator.skip_first_batches(resumed.loader, skip)
        rest = resumed.read([part, *[resumed.loader] * (EPOCHS - first - 1)])
        assert rest == [whole[first][skip * 3 :], *whole[first + 1 :]], at


def test_loading_a_new_checkpoint_does_not_disturb_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path)
    seen: list[int] = []
    for number, (batch,) in enumerate(run.loader):
        seen += batch.tolist()
        if number == 1:
            run.accelerator.save_state()
            run.accelerator.load_state()
    assert sorted(seen) == list(range(12))
    ((again),) = run.read([run.loader])
    assert sorted(again) == list(range(12)), "a whole epoch, not the rest of the last one"


def test_position_is_not_restored_for_other_data(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in run.loader:
        run.accelerator.save_state()
        break
    other = Run(tmp_path, samples=7)
    with pytest.warns(UserWarning, match="Loader 0 had 12 samples .* but has 7 now"):
        other.accelerator.load_state()
    assert sorted(other.read([other.loader])[0]) == list(range(7))
    more = Run(tmp_path)
    more.accelerator.prepare(DataLoader(TensorDataset(torch.arange(3))))
    with pytest.warns(UserWarning, match="positions of 1 loaders, but this run has prepared 2"):
        more.accelerator.load_state()


def test_warns_if_a_script_also_skips_batches_itself(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, torch.nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        net = torch.nn.Linear(1, 1)
        data = DataLoader(torch.arange(12.0)[:, None], 2)
        return accelerator, *accelerator.prepare(net, data)

    def loop(start: int, stop: int) -> int:
        """Return the number of steps. The script itself skips the batches before `start`."""
        done = 0
        for step, batch in enumerate(loader):
            if step < start:
                continue
            accelerator.backward(net(batch).sum())
            done += 1
            if step + 1 == stop:
                break
        return done

    accelerator, net, loader = make()
    assert loop(0, 4) == 4
    accelerator.save_state(tmp_path / "s")
    accelerator, net, loader = make()
    accelerator.load_state(tmp_path / "s")
    with pytest.warns(UserWarning, match="to batch 4 .* No backward followed") as caught:
        assert loop(4, 6) == 0, "skipped twice"
    (one,) = caught
    assert (one.filename, one.lineno) == (__file__, loop.__code__.co_firstlineno + 3)
    # It warns only if the number of skipped batches differs from the position.
    for skipped, warned in ((4, 0), (3, 1)):
        accelerator.load_state(tmp_path / "s")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            left = accelerator.skip_first_batches(loader, skipped)
            (accelerator.backward(net(batch).sum()) for batch in left)
        assert len(caught) == warned, [str(one.message) for one in caught]
        assert [one.filename for one in caught] == [__file__] * warned
    accelerator.load_state(tmp_path / "s")
    assert loop(0, 6) == 2, "without skipping, resuming is exact"
    # With restore_positions=False, the script may skip batches itself.
    config = DataLoaderConfiguration(restore_positions=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    net, loader = accelerator.prepare(net, DataLoader(torch.arange(12.0)[:, None], 2))
    accelerator.load_state(tmp_path / "s")
    assert loop(4, 6) == 2
