"""Gradients that a compressing hook averages equal those without the hook, except for rounding."""

import torch

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs


def gradient(hook):
    handler = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    model = accelerator.prepare(model)
    data = torch.full((3, 2), float(accelerator.process_index + 1), device=accelerator.device)
    accelerator.backward(model(data).sum())
    return accelerator, next(model.parameters()).grad


def main():
    accelerator, plain = gradient(DDPCommunicationHookType.NO)
    for hook in (DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16):
        assert torch.allclose(gradient(hook)[1], plain, rtol=1e-2)
    accelerator.wait_for_everyone()
    accelerator.print("Hooks do not change the gradients.")


if __name__ == "__main__":
    main()
