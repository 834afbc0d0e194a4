"""Comparing the weights of ranks."""

from __future__ import annotations

import torch

from accelerate_checkpoint.weight_sums import first_difference, weight_sums


def test_weights_that_differ_in_one_bit_are_detected() -> None:
    ranks = []
    for rank in range(3):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).bfloat16())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
            if rank == 2:
                model[1].weight[0, 1] = 0.502
        ranks.append(weight_sums(model.named_parameters()))
    assert first_difference(ranks) == (2, "1.weight", 1)
    assert first_difference(ranks[:2]) is None


def test_large_models_are_compared_in_parts() -> None:
    model = torch.nn.Linear(8, 4)
    named = [*model.named_parameters()]
    turns = [weight_sums(named, turn, limit=20) for turn in range(4)]
    assert [[*sums] for sums in turns] == [["weight"], ["bias"], ["weight"], ["bias"]]
