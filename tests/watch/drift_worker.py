"""Ranks that drift apart in one way each, and runs in which nothing drifts."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases

from accelerate_core import Accelerator, LocalSGD
from accelerate_core.data.loader import CoreLoader
from accelerate_core.utils import DataLoaderConfiguration
from accelerate_watch import DriftError, WatchConfiguration

BACKEND = sys.argv[1]
LAST = RANK == SIZE - 1
#: The steps of a run, and the one in which something goes wrong on the last rank.
STEPS, WRONG = 24, 4


class Run:
    """Trains on a small model, and keeps the warnings of this rank about ranks that drift apart.

    Args:
        change: called with this object and the step, before each step.
        mode: `WatchConfiguration.drift`.
        seconds: time to wait after the last step, for the watching thread.
    """

    def __init__(
        self,
        change: Callable[[Run, int], object] = lambda run, step: None,
        mode: Any = "warn",
        steps: int = STEPS,
        seconds: float = 0.0,
        **arguments: Any,
    ) -> None:
        self.told: list[str] = []
        self.error = ""
        self.steps_taken = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._train(change, mode, steps, seconds, arguments)
            except DriftError as error:
                self.error = str(error)
        self.told = [str(one.message) for one in caught if "drifted apart" in str(one.message)]

    def _train(
        self, change: Any, mode: Any, steps: int, seconds: float, arguments: dict[str, Any]
    ) -> None:
        watch = WatchConfiguration(drift=mode, hang_after=4)
        with Accelerator(
            cpu=True,
            backend=BACKEND,
            process_group_timeout=PG_TIMEOUT,
            kwargs_handlers=[watch],
            **arguments,
        ) as accelerator:
            self.accelerator = accelerator
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
            adam = torch.optim.AdamW(net.parameters(), lr=0.01)
            # Not prepared, so each rank steps it with its own metric.
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, factor=0.1)
            data = DataLoader(torch.randn(steps * SIZE * 2, 4), batch_size=2, shuffle=True)
            self.net = net
            self.model, self.optimizer, self.loader = accelerator.prepare(net, adam, data)
            for step, batch in enumerate(self.loader, 1):
                change(self, step)
                with accelerator.accumulate(self.model):
                    accelerator.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.steps_taken = step
            time.sleep(seconds)
            accelerator.end_training()

    def on_all_ranks(self, value: Any) -> list[Any]:
        with Accelerator(cpu=True, backend=BACKEND, process_group_timeout=PG_TIMEOUT) as other:
            return other.communicator.gather_object(value)


def check_one_warning(change: Callable[[Run, int], object], *words: str) -> None:
    """Check that a run prints one warning, which contains these words."""
    run = Run(change)
    told = [text for texts in run.on_all_ranks(run.told) for text in texts]
    assert len(told) == 1, told
    for word in words:
        assert word in told[0], (word, told[0])


#: The ranks of which the last one does not belong to.
OTHERS = "rank 0" if SIZE == 2 else f"ranks 0{'-' if SIZE > 3 else ', '}{SIZE - 2}"
FINAL = f"rank {SIZE - 1}"


@case
def learning_rate_set_on_one_rank_is_named() -> None:
    def change(run: Run, step: int) -> None:
        if step >= WRONG and LAST:
            run.optimizer.param_groups[0]["lr"] = 0.5

    check_one_warning(
        change,
        "After step 10 of optimizer 0 (",
        f"lr of group 0: 0.01 on {OTHERS}, 0.5 on {FINAL}",
        "hyperparameters",
        "scheduler",
    )


@case
def unprepared_scheduler_with_own_metrics_is_named() -> None:
    check_one_warning(
        lambda run, step: run.plateau.step(step if LAST else -step), "lr of group 0", f"on {FINAL}"
    )


@case
def order_of_one_rank_is_named() -> None:
    def change(run: Run, step: int) -> None:
        if step == WRONG:
            CoreLoader.order_digest = 7 if LAST else 5

    kept = CoreLoader.order_digest
    try:
        check_one_warning(
            change, "the order of the data differ", f"5 on {OTHERS}, 7 on {FINAL}", "set_seed"
        )
    finally:
        CoreLoader.order_digest = kept


@case
def optimizer_step_on_one_rank_only_is_named() -> None:
    def change(run: Run, step: int) -> None:
        if step == WRONG and LAST:
            run.optimizer.step()

    check_one_warning(
        change,
        "the steps differ",
        f"backward passes: 10 on {OTHERS}, 9 on {FINAL}",
        "optimizer.step()",
    )


@case
def difference_ends_the_run_on_all_ranks() -> None:
    def change(run: Run, step: int) -> None:
        if LAST:
            run.optimizer.param_groups[0]["lr"] = 0.5
        time.sleep(0.02)

    run = Run(change, mode="error", steps=400)
    for error, steps in run.on_all_ranks((run.error, run.steps_taken)):
        assert f"lr of group 0: 0.01 on {OTHERS}, 0.5 on {FINAL}" in error, error
        assert steps < 400, steps


@case
def difference_in_a_short_run_ends_it_on_all_ranks() -> None:
    def change(run: Run, step: int) -> None:
        if LAST:
            run.optimizer.param_groups[0]["lr"] = 0.5

    run = Run(change, mode="error", steps=3)
    for error in run.on_all_ranks(run.error):
        assert "lr of group 0" in error, error


@case
def difference_after_the_last_comparison_is_named_at_the_end() -> None:
    def change(run: Run, step: int) -> None:
        if step == 6 and LAST:
            run.optimizer.param_groups[0]["lr"] = 0.5

    run = Run(change, steps=7)
    told = [text for texts in run.on_all_ranks(run.told) for text in texts]
    assert len(told) == 1, told
    assert "After step 7 of optimizer 0 (" in told[0], told[0]


@case
def nothing_is_compared_if_it_is_off() -> None:
    def change(run: Run, step: int) -> None:
        if LAST:
            run.optimizer.param_groups[0]["lr"] = 0.5

    run = Run(change, mode="off")
    assert run.on_all_ranks(run.told) == [[]] * SIZE


# --- runs in which nothing drifts ---------------------------------------------------------------


def quiet(**arguments: Any) -> Accelerator:
    """Return an Accelerator that a false alarm would end."""
    watch = WatchConfiguration(drift="error", hang_after=4)
    return Accelerator(
        cpu=True,
        backend=BACKEND,
        process_group_timeout=PG_TIMEOUT,
        kwargs_handlers=[watch],
        **arguments,
    )


def parts(seed: int = 0, steps: int = STEPS) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(4, 2)
    data = DataLoader(torch.randn(steps * SIZE * 2, 4), batch_size=2, shuffle=True)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01), data


@case
def usual_runs_raise_no_alarm() -> None:
    assert Run(mode="error").error == ""
    assert Run(mode="error", gradient_accumulation_steps=3).error == ""
    with quiet(step_scheduler_with_optimizer=False) as accelerator:
        net, adam, data = parts()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0)
        model, optimizer, scheduler, loader = accelerator.prepare(net, adam, plateau, data)
        for epoch in range(2):
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                accelerator.gather_for_metrics(batch)
            scheduler.step(RANK + epoch)
        accelerator.end_training()


@case
def two_models_with_different_numbers_of_steps_raise_no_alarm() -> None:
    with quiet() as accelerator:
        (first, adam, data), (second, other, _) = parts(0), parts(1)
        first, adam, loader = accelerator.prepare(first, adam, data)
        second, other = accelerator.prepare(second, other)
        for step, batch in enumerate(loader):
            for model, optimizer in ((first, adam), (second, other)):
                if model is second or step % 5 == 0:
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.end_training()


@case
def uneven_inputs_raise_no_alarm() -> None:
    if BACKEND != "ddp":
        return
    with quiet(dataloader_config=DataLoaderConfiguration(even_batches=False)) as accelerator:
        net, adam, _ = parts()
        model, optimizer = accelerator.prepare(net, adam)
        for _ in range(3):
            with accelerator.join_uneven_inputs([model]):
                for step in range(5 + RANK):
                    accelerator.backward(model(torch.randn(2, 4)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.param_groups[0]["lr"] *= 0.9 + 0 * step
        accelerator.end_training()


@case
def ranks_with_their_own_numbers_of_micro_batches_raise_no_alarm() -> None:
    if BACKEND != "ddp":
        return
    with quiet() as accelerator:
        net, adam, data = parts()
        model, optimizer, loader = accelerator.prepare(net, adam, data)
        for batch in loader:
            for _ in range(RANK):
                with accelerator.no_sync(model):
                    accelerator.backward(model(batch).square().mean())
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()


@case
def local_steps_raise_no_alarm() -> None:
    if BACKEND != "ddp":
        return
    with quiet() as accelerator:
        net, adam, data = parts()
        model, optimizer, loader = accelerator.prepare(net, adam, data)
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        accelerator.end_training()


@case
def rates_that_may_differ_raise_no_alarm() -> None:
    with quiet(scheduler_metric="local") as accelerator:
        net, adam, data = parts()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0)
        model, optimizer, scheduler, loader = accelerator.prepare(net, adam, plateau, data)
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(step if LAST else -step)
        accelerator.end_training()


@case
def objects_that_are_prepared_again_raise_no_alarm() -> None:
    with quiet() as accelerator:
        for seed in range(2):
            net, adam, data = parts(seed, 12)
            adam.param_groups[0]["lr"] = 0.1 / (seed + 1)
            model, optimizer, loader = accelerator.prepare(net, adam, data)
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.free_memory()
            time.sleep(0.3 * RANK)
        accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases(sys.argv[2:])
