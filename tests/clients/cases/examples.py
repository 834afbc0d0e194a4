"""Programs like Accelerate's examples: sentence pairs, images, and one program per feature."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import running
import torch
from accelerate import Accelerator, PartialState
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProfileKwargs,
    find_executable_batch_size,
    gather_object,
    set_seed,
)
from running import case
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Sentences, writer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)


class Pairs(torch.utils.data.Dataset[Any]):
    """Pairs of sentences of several lengths, labelled 1 if both have the same words."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for index in range(rows):
            length = int(torch.randint(3, 7, (), generator=made))
            one, other = torch.randint(5, 64, (2, length), generator=made)
            if same := index % 3 > 0:
                other = one[torch.randperm(length, generator=made)]
            self.rows.append((one, other, int(same)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Collate a batch, padded with 0 to the longest pair. Token 1 starts and 2 ends a sentence."""
    begin, end = torch.tensor([1]), torch.tensor([2])
    ids = [torch.cat([begin, one, end, other, end]) for one, other, _ in rows]
    kinds = [torch.arange(len(row)).gt(len(row) // 2).long() for row in ids]
    whole = pad_sequence(ids, batch_first=True)
    return {
        "input_ids": whole,
        "token_type_ids": pad_sequence(kinds, batch_first=True),
        "attention_mask": whole.ne(0).long(),
        "labels": torch.tensor([label for *_, label in rows]),
    }


def loader(rows: int, batch_size: int, seed: int = 0, **more: Any) -> DataLoader[Any]:
    return DataLoader(Pairs(rows, seed), batch_size, collate_fn=padded, **more)


def bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"vocab_size": 64, "intermediate_size": 32, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**sizes, **more, num_labels=2))


def parts(accelerator: Any, epochs: int = 2, batch_size: int = 4, rows: int = 44) -> list[Any]:
    """Return the prepared model, optimizer, training loader, evaluation loader and schedule."""
    set_seed(42)
    train = loader(rows, batch_size, shuffle=True, drop_last=True)
    model = bert().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train) * epochs)
    return list(accelerator.prepare(model, optimizer, train, loader(21, 8, seed=1), schedule))


def trained(
    accelerator: Any, model: Any, optimizer: Any, batches: Iterable[Any], schedule: Any
) -> list[float]:
    """Train on the batches, and return the losses averaged over the processes."""
    model.train()
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def score(guessed: torch.Tensor, truth: torch.Tensor) -> dict[str, Any]:
    hits = int((guessed * truth).sum())
    f1 = 2 * hits / max(int(guessed.sum() + truth.sum()), 1)
    return {"accuracy": guessed.eq(truth).double().mean().item(), "f1": f1, "rows": len(truth)}


def evaluated(accelerator: Any, model: Any, batches: Iterable[Any]) -> dict[str, Any]:
    model.eval()
    gathered = []
    for batch in batches:
        with torch.no_grad():
            guessed = model(**batch).logits.argmax(-1)
        gathered.append(accelerator.gather_for_metrics((guessed, batch["labels"])))
    return score(*(torch.cat(one) for one in zip(*gathered, strict=True)))


def run(accelerator: Any, epochs: int = 2) -> dict[str, Any]:
    """Train and evaluate as in most of the examples."""
    model, optimizer, train, held_out, schedule = parts(accelerator, epochs)
    found = []
    for _ in range(epochs):
        losses = trained(accelerator, model, optimizer, train, schedule)
        found.append({"losses": losses, **evaluated(accelerator, model, held_out)})
    rate, weights = schedule.get_last_lr(), running.weights(accelerator.unwrap_model(model))
    return {"epochs": found, "rate": rate, "weights": weights}


@case()
def pairs(folder: Path) -> Any:
    return run(Accelerator(cpu=True))


@case()
def pairs_in_bf16(folder: Path) -> Any:
    return run(Accelerator(cpu=True, mixed_precision="bf16"))


@case()
def images(folder: Path) -> Any:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    data = load_digits()
    pixels = torch.tensor(data.images[:150], dtype=torch.float32)[:, None]
    rows = TensorDataset(pixels, torch.tensor(data.target[:150]))
    train: Any = DataLoader(Subset(rows, range(110)), batch_size=8, shuffle=True)
    held_out: Any = DataLoader(Subset(rows, range(110, 150)), batch_size=12)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)
    )
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    mean, std = pixels.mean(), pixels.std()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2 / 25)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=2, steps_per_epoch=len(train)
    )
    model, optimizer, train, held_out, schedule = accelerator.prepare(
        model, optimizer, train, held_out, schedule
    )
    found = []
    for _ in range(2):
        model.train()
        total = torch.zeros(())
        for some, labels in train:
            loss = nn.functional.cross_entropy(model((some - mean) / std), labels)
            total += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = rows_seen = 0
        for some, labels in held_out:
            with torch.no_grad():
                guessed = model((some - mean) / std).argmax(-1)
            guessed, labels = accelerator.gather_for_metrics((guessed, labels))
            right, rows_seen = right + int((guessed == labels).sum()), rows_seen + len(labels)
        found.append([accelerator.reduce(total).item() / len(train), right, rows_seen])
    return {"epochs": found, "weights": running.weights(accelerator.unwrap_model(model))}


@case()
def checkpoints(folder: Path) -> Any:
    """Save every three steps and after each epoch, and resume from the middle of an epoch."""

    def once(begin: str | None) -> dict[str, Any]:
        accelerator = Accelerator(cpu=True, project_dir=str(folder))
        model, optimizer, train, held_out, schedule = parts(accelerator, epochs=3)
        first = skipped = step = 0
        if begin is not None:
            accelerator.load_state(str(folder / begin))
            step = int(begin.removeprefix("step_"))
            first, skipped = divmod(step, len(train))
        losses = []
        for epoch in range(first, 3):
            left = train
            if skipped and epoch == first:
                left = accelerator.skip_first_batches(train, skipped)
            for batch in left:
                losses += trained(accelerator, model, optimizer, [batch], schedule)
                step += 1
                if step % 3 == 0:
                    accelerator.save_state(str(folder / f"step_{step}"))
            accelerator.save_state(str(folder / f"epoch_{epoch}"))
        held = evaluated(accelerator, model, held_out)
        unwrapped = accelerator.unwrap_model(model)
        return {"losses": losses, "held out": held, "weights": running.weights(unwrapped)}

    whole = once(None)
    running.reset(dict(os.environ))
    names = sorted(path.name for path in folder.iterdir())
    middle = [name for name in names if name.startswith("step_")][-1]
    return {"whole": whole, "names": names, "from": middle, "resumed": once(middle)}


@case()
def accumulation(folder: Path) -> Any:
    return run(Accelerator(cpu=True, gradient_accumulation_steps=3))


@case()
def batch_size_found_and_accumulated(folder: Path) -> Any:
    """Simulate full memory above 5 rows, and accumulate to the requested batch size."""
    accelerator = Accelerator(cpu=True)
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def inner(batch_size: int) -> list[float]:
        tried.append(batch_size)
        accelerator.free_memory()
        if batch_size > 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        accelerator.gradient_accumulation_steps = 16 // batch_size
        model, optimizer, train, _, schedule = parts(accelerator, batch_size=batch_size)
        return trained(accelerator, model, optimizer, train, schedule)

    losses = inner()
    return {"losses": losses, "tried": tried, "steps": accelerator.gradient_accumulation_steps}


@case()
def accumulation_by_tokens(folder: Path) -> Any:
    """Divide a language model's loss by the number of tokens in all accumulated batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model: Any = writer()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train: Any = DataLoader(Sentences(50), 4, shuffle=True)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    batches, losses = iter(train), []
    while some := [batch for _, batch in zip(range(3), batches)]:
        for number, batch in enumerate(some):  # with different numbers of tokens
            batch["labels"] = batch["input_ids"].clone()
            batch["labels"][:, : number + 1] = -100
        here = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in some)
        tokens = int(accelerator.gather(here).sum())
        for number, batch in enumerate(some):
            last = number == len(some) - 1 or accelerator.num_processes == 1
            with nullcontext() if last else model.no_sync():
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
                labels = batch["labels"][:, 1:].flatten()
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                accelerator.backward(loss * 3 * accelerator.num_processes / tokens)
            losses.append(loss.item() / tokens)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": running.weights(accelerator.unwrap_model(model))}


@case()
def early_stopping(folder: Path) -> Any:
    """Stop all processes when the loss of one hasn't fallen for four batches."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, train, _, schedule = parts(accelerator, epochs=5)
    lowest, waited, steps = float("inf"), 0, 0
    for _ in range(5):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps += 1
            lowest, waited = (loss.item(), 0) if loss.item() < lowest else (lowest, waited + 1)
            if waited == 4:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                return {"steps": steps, "again": accelerator.check_trigger()}
    return {"steps": steps}


@case()
def local_sgd(folder: Path) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, train, held_out, schedule = parts(accelerator, rows=60)
    losses = []
    for _ in range(2):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
            for batch in train:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    local.step()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "held out": evaluated(accelerator, model, held_out)}


@case()
def profiled(folder: Path) -> Any:
    handler = ProfileKwargs(
        activities=["cpu"], record_shapes=True, output_trace_dir=str(folder / "traces")
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model, optimizer, train, _, schedule = parts(accelerator)
    with accelerator.profile() as profile:
        losses = trained(accelerator, model, optimizer, train, schedule)
    accelerator.wait_for_everyone()
    counts = {one.key: one.count for one in profile.key_averages()}
    names = ("aten::addmm", "aten::embedding", "aten::cross_entropy_loss")
    traces = sorted(path.name for path in (folder / "traces").iterdir())
    return {"losses": losses, "counts": {name: counts[name] for name in names}, "traces": traces}


class Averaged(torch.optim.SGD):
    """Evaluates with the mean of all weights so far, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0
        self.kept: list[torch.Tensor] = []

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        made = super().step(closure)
        self.steps += 1
        for p in self._all():
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.detach(), 1 / self.steps)
        return made

    def eval(self) -> None:
        self.kept = [p.detach().clone() for p in self._all()]
        for p in self._all():
            p.data.copy_(self.state[p]["mean"])

    def train(self) -> None:
        for p, kept in zip(self._all(), self.kept):
            p.data.copy_(kept)


@case()
def without_a_schedule(folder: Path) -> Any:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    model = bert()
    optimizer: Any = Averaged(model.parameters(), lr=0.1)
    model, optimizer, train, held_out = accelerator.prepare(
        model, optimizer, loader(44, 4, shuffle=True), loader(21, 8, seed=1)
    )
    found = []
    for _ in range(3):
        model.train()
        optimizer.train()
        for batch in train:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        weights = running.weights(accelerator.unwrap_model(model))
        found.append({**evaluated(accelerator, model, held_out), "weights": weights})
    return {"epochs": found}


@case()
def metrics_gathered_by_hand(folder: Path) -> Any:
    """Gather results, and remove the repeated samples of the last batch without `gather_for_metrics`."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, train, held_out, schedule = parts(accelerator)
    losses = trained(accelerator, model, optimizer, train, schedule)
    model.eval()
    seen, gathered = 0, []
    for step, batch in enumerate(held_out):
        with torch.no_grad():
            guessed = model(**batch).logits.argmax(-1)
        guessed, truth = accelerator.gather((guessed, batch["labels"]))
        if accelerator.num_processes > 1 and step == len(held_out) - 1:
            left = len(held_out.dataset) - seen
            guessed, truth = guessed[:left], truth[:left]
        seen += len(truth)
        gathered.append((guessed, truth))
    whole = (torch.cat(one) for one in zip(*gathered, strict=True))
    return {"losses": losses, **score(*whole)}


@case()
def cross_validation(folder: Path) -> Any:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    rows, test = Pairs(48), loader(13, 4, seed=1)
    labels = [label for *_, label in rows.rows]
    found, total = [], torch.zeros(13, 2)
    for chosen, others in StratifiedKFold(n_splits=3).split(labels, labels):
        model: Any = bert()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
        make: Any = partial(DataLoader, batch_size=4, collate_fn=padded)
        train, held_out = make(Subset(rows, chosen), shuffle=True), make(Subset(rows, others))
        schedule: Any = get_linear_schedule_with_warmup(optimizer, 2, len(train))
        model, optimizer, train, held_out, schedule, tested = accelerator.prepare(
            model, optimizer, train, held_out, schedule, test
        )
        losses = trained(accelerator, model, optimizer, train, schedule)
        found.append({"losses": losses, **evaluated(accelerator, model, held_out)})
        guessed = []
        for batch in tested:
            with torch.no_grad():
                guessed.append(accelerator.gather_for_metrics(model(**batch).logits))
        total += torch.cat(guessed)
        model, optimizer, train, held_out, schedule = accelerator.free_memory(
            model, optimizer, train, held_out, schedule
        )
    return {"folds": found, "mean": total / 3}


@case(2)
def communication_hook(folder: Path) -> Any:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return run(Accelerator(cpu=True, kwargs_handlers=[hook]))


@case()
def inference(folder: Path) -> Any:
    """Divide prompts among the processes, and gather the generated text."""
    state = PartialState(cpu=True)
    model = writer().eval()
    prompts = Sentences(7).ids[:, :4].tolist()
    written = []
    with state.split_between_processes(prompts, apply_padding=True) as some:
        for prompt in some:
            with torch.no_grad():
                made = model.generate(
                    torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0
                )
            written.append(made[0].tolist())
    return {"mine": len(written), "written": gather_object(written)[: len(prompts)]}


@case()
def tracked(folder: Path) -> Any:
    """Log to a tracker. This must be the last case, because ending training ends the process group."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder))
    accelerator.init_trackers("pairs", config={"lr": 5e-3, "epochs": 2, "kind": "bert"})
    model, optimizer, train, held_out, schedule = parts(accelerator)
    for epoch in range(2):
        losses = trained(accelerator, model, optimizer, train, schedule)
        line = {"train_loss": sum(losses) / len(losses), "epoch": epoch}
        accelerator.log({**evaluated(accelerator, model, held_out), **line}, step=epoch)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return {}
    events = EventAccumulator(str(folder / "pairs")).Reload()
    tags = sorted(events.Tags()["scalars"])
    return {tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in tags}


if __name__ == "__main__":
    running.main()
