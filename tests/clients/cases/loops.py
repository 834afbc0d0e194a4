"""Trainers that are based on `Accelerator`: those of pytorch-accelerated and fastai."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from fastai.basics import DataLoader as FastaiLoader
from fastai.basics import DataLoaders, Learner, Recorder, accuracy
from fastai.callback import schedule  # noqa: F401  (adds fit_one_cycle)
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.distributed import DistributedDL, num_distrib
from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    get_default_callbacks,
)
from pytorch_accelerated.finetuning import ModelFreezer
from pytorch_accelerated.schedulers import CosineLrScheduler
from running import case
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler


def digits(rows: slice) -> torch.utils.data.TensorDataset:
    data = load_digits()
    return torch.utils.data.TensorDataset(
        torch.tensor(data.images[rows], dtype=torch.float32)[:, None] / 8 - 1,
        torch.tensor(data.target[rows]),
    )


def network(norm: nn.Module) -> nn.Module:
    set_seed(6)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 10),
    )


def history(trainer: Any) -> dict[str, list[float]]:
    kept = trainer.run_history
    return {
        name: list(map(float, kept.get_metric_values(name))) for name in kept.get_metric_names()
    }


class Classifier(Trainer):
    """Records every loss, and counts correct results over all processes.

    Its evaluation joins uneven inputs, which Accelerate only does on accelerators. So the number of rows is
    even and the models have no buffers, because torch broadcasts these from different ranks.
    """

    def training_run_start(self) -> None:
        self.seen: list[float] = []

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        made = super().calculate_train_batch_loss(batch)
        self.seen.append(made["loss"].item())
        return made

    def eval_epoch_start(self) -> None:
        super().eval_epoch_start()
        self.right, self.rows = 0, 0

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        made = super().calculate_eval_batch_loss(batch)
        guessed = self.gather(made["model_outputs"].argmax(-1), padding_value=-1)
        truth = self.gather(batch[1], padding_value=-2)
        self.right += int((guessed == truth).sum())
        self.rows += int((truth >= 0).sum())
        return made

    def eval_epoch_end(self) -> None:
        self.run_history.update_metric("right", self.right)
        self.run_history.update_metric("rows", self.rows)


def trainer(folder: Path, kind: Any = Classifier, **more: Any) -> Any:
    model = network(nn.GroupNorm(2, 4))
    return kind(
        model=model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
        callbacks=(
            *get_default_callbacks(),
            SaveBestModelCallback(
                save_path=str(folder / "best.pt"), watch_metric="eval_loss_epoch"
            ),
            EarlyStoppingCallback(early_stopping_patience=5),
        ),
        **more,
    )


def fitted(made: Any, **more: Any) -> dict[str, Any]:
    made.train(
        train_dataset=digits(slice(0, 90)),
        eval_dataset=digits(slice(90, 138)),
        per_device_batch_size=8,
        train_dataloader_kwargs={"num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
        **{"num_epochs": 2, **more},
    )
    config = made.run_config
    return {
        "seen": made.seen,
        "history": history(made),
        "run": [config.num_processes, config.num_update_steps_per_epoch, config.is_distributed],
        "weights": running.weights(made._accelerator.unwrap_model(made.model)),
    }


@case()
def pytorch_accelerated(folder: Path) -> Any:
    made = trainer(folder)
    found = {"fitted": fitted(made)}
    made.evaluate(
        dataset=digits(slice(138, 170)),
        per_device_batch_size=8,
        dataloader_kwargs={"num_workers": 0},
    )
    found["evaluated"] = history(made)
    made.save_checkpoint(folder / "all.pt", save_per_node=False)
    again = trainer(folder)
    again.load_checkpoint(folder / "all.pt")
    found["loaded"] = running.weights(again.get_model())
    return found


@case()
def pytorch_accelerated_schedule(folder: Path) -> Any:
    """Use a schedule that counts steps, gradient accumulation and clipping."""
    one_cycle = partial(
        lr_scheduler.OneCycleLR,
        max_lr=0.01,
        epochs=TrainerPlaceholderValues.NUM_EPOCHS,
        steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    )
    made = trainer(folder)
    found = fitted(
        made,
        create_scheduler_fn=one_cycle,
        gradient_accumulation_steps=3,
        gradient_clip_value=0.05,
    )
    return {**found, "lr": made.optimizer.param_groups[0]["lr"]}


@case()
def pytorch_accelerated_resume(folder: Path) -> Any:
    """Save the trainer's whole state, and resume from it."""
    cosine = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, warmup_starting_lr=1e-6)
    made = trainer(folder)
    first = fitted(made, create_scheduler_fn=cosine)
    made.save_training_state(folder / "state", {"note": 3})
    again = trainer(folder)
    more = {"create_scheduler_fn": cosine, "num_epochs": 3, "resume_from": folder / "state"}
    return {"first": first, "again": fitted(again, **more)}


@case()
def pytorch_accelerated_fine_tuning(folder: Path) -> Any:
    model = network(nn.GroupNorm(2, 4))
    made = Classifier(
        model=model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        callbacks=(
            *get_default_callbacks(),
            ModelEmaCallback(decay=0.9, save_path=str(folder / "ema.pt")),
        ),
    )
    freezer = ModelFreezer(model)
    freezer.freeze(to_index=-1)
    freezer.unfreeze(from_index=-1)
    return fitted(made, num_epochs=1)


def learner(folder: Path, **more: Any) -> Any:
    train = FastaiLoader(digits(slice(0, 90)), bs=8, shuffle=True, num_workers=0)
    valid = FastaiLoader(digits(slice(90, 138)), bs=8, num_workers=0)
    loaders = DataLoaders(train, valid, device=torch.device("cpu"))
    set_seed(6)
    return Learner(
        loaders,
        network(nn.BatchNorm2d(4)),
        loss_func=nn.CrossEntropyLoss(),
        metrics=[accuracy],
        path=folder,
        **more,
    )


def results(made: Any) -> dict[str, Any]:
    kept: Recorder = made.recorder
    return {
        "values": [list(map(float, row)) for row in kept.values],
        "losses": list(map(float, kept.losses)),
        "weights": running.weights(made.model),
    }


@case()
def fastai(folder: Path) -> Any:
    """Use `distrib_ctx`. fastai's loaders can only broadcast on an accelerator, so this is replaced."""

    def broadcast(self: Any, values: Any, rank: int) -> Any:
        made = torch.tensor(values)
        torch.distributed.broadcast(made, rank)
        return made.tolist()

    DistributedDL._broadcast = broadcast
    made = learner(folder)
    with made.no_bar(), made.no_logging():
        if num_distrib() > 1:
            with made.distrib_ctx(sync_bn=False, in_notebook=False, cpu=True):
                made.fit_one_cycle(2, 1e-2)
        else:
            made.fit_one_cycle(2, 1e-2)
    return results(made)


@case()
def fastai_by_hand(folder: Path) -> Any:
    """Use fastai's model and loss in a plain loop with `Accelerator`."""
    made = learner(folder)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made.create_opt()
    optimizer = torch.optim.Adam(made.model.parameters(), lr=1e-2)
    train = torch.utils.data.DataLoader(digits(slice(0, 90)), batch_size=8, shuffle=True)
    model, optimizer, train = accelerator.prepare(made.model, optimizer, train)
    losses = []
    for images, labels in train:
        with accelerator.accumulate(model):
            loss = made.loss_func(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    made.model = accelerator.unwrap_model(model)
    loss, right = made.validate(dl=made.dls.valid)
    return {"losses": losses, "validated": [float(loss), float(right)]}


@case(1)
def fastai_alone(folder: Path) -> Any:
    made = learner(folder, cbs=[GradientAccumulation(16), GradientClip(0.1)])
    with made.no_bar(), made.no_logging():
        made.fit(1, 1e-2)
    return results(made)


running.main()
