"""Cross-validation: train one model per fold, and let the models vote on the test set.

accelerate-core launch --num_processes 2 examples/by_feature/cross_validation.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset

from accelerate_core import Accelerator


def main(folds: int = 3, epochs: int = 3) -> dict[str, object]:
    accelerator = Accelerator()
    train_set, test_set = digits()
    labels = train_set.tensors[1]
    splits = StratifiedKFold(folds, shuffle=True, random_state=0).split(labels, labels)
    test_loader = accelerator.prepare(DataLoader(test_set, batch_size=64))
    votes, scores = [], []
    for chosen, held_out in splits:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loaders = [DataLoader(Subset(train_set, some), 32) for some in (chosen, held_out)]
        model, optimizer, train_loader, fold_loader = accelerator.prepare(
            model, optimizer, *loaders
        )
        for _ in range(epochs):
            for images, targets in train_loader:
                accelerator.backward(F.cross_entropy(model(images), targets))
                optimizer.step()
                optimizer.zero_grad()
        logits, targets = predict(accelerator, model, fold_loader)
        scores.append((logits.argmax(1) == targets).float().mean().item())
        logits, targets = predict(accelerator, model, test_loader)
        votes.append(logits.softmax(1))
        model, optimizer, train_loader, fold_loader = accelerator.free_memory(
            model, optimizer, train_loader, fold_loader
        )
    right = torch.stack(votes).mean(0).argmax(1) == targets
    accelerator.print(f"folds {scores}, together {right.float().mean():.3f}")
    accelerator.end_training()
    return {"folds": scores, "together": right.float().mean().item(), "tested": len(right)}


@torch.no_grad()
def predict(accelerator: Accelerator, model, loader) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and labels of a whole set, in the same order on every rank."""
    parts = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


if __name__ == "__main__":
    main()
