"""A third-party backend that divides the layers over `pp`, and shards each stage with fsdp2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from worker import PG_TIMEOUT, RANK, SIZE, case, run_cases

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.plugin import AcceleratorView, PreparePlanView, ScheduleResult, ScheduleStep
from accelerate_fsdp2 import FSDP2Backend

STEPS, ROWS, WIDTH = 5, 8, 8


class PipelinedFSDP2(FSDP2Backend):
    name = "pipelined_fsdp2"
    api_version = (1, 0)
    supports: ClassVar[Mapping[str, Any]] = {**FSDP2Backend.supports, "mesh": ("pp", "dp_shard")}

    def prepare(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Remove the layers of other stages, and then shard what is left."""
        for entry in plan.of_kind("model"):
            plan.drop(entry.value, self.cut(entry.value))
        super().prepare(accelerator, plan)

    def cut(self, model: Any) -> list[str]:
        """Replace the layers of other stages, and return the names of their parameters."""
        pp = self.sub_mesh("pp")
        dropped: list[str] = []
        for index, layer in enumerate(model):
            if index * pp.size() // len(model) != pp.get_local_rank():
                dropped += [f"{index}.{name}" for name, _ in layer.named_parameters()]
                model[index] = nn.Identity()
        return dropped

    def clip_grad(
        self,
        accelerator: AcceleratorView,
        parameters: Sequence[torch.Tensor],
        max_norm: float | None,
        norm_type: float,
        clip_value: float | None,
    ) -> Any:
        """Clip by the norm over all stages; only the Euclidean norm."""
        assert max_norm is not None
        assert norm_type == 2
        own = super().clip_grad(accelerator, parameters, float("inf"), norm_type, None)
        total = own.square()
        dist.all_reduce(total, group=self.sub_mesh("pp").get_group())
        total.sqrt_()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1).item())
        return total

    def run_schedule(
        self, accelerator: AcceleratorView, model: nn.Module, batch: Any, step: ScheduleStep
    ) -> ScheduleResult:
        pp = self.sub_mesh("pp")
        rank, last = pp.get_local_rank(), pp.size() - 1
        stage = PipelineStage(model, rank, pp.size(), accelerator.device, group=pp.get_group())
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, y: step.divide(mse_loss(out, y)))
        losses: list[torch.Tensor] = []
        target = batch[1] if rank == last else None
        schedule.step(*batch[: rank == 0], target=target, losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, group_src=last, group=pp.get_group())
        return ScheduleResult(loss)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(5)
    return [
        (torch.randn(ROWS, WIDTH, generator=source), torch.randn(ROWS, WIDTH, generator=source))
        for _ in range(STEPS)
    ]


def plain(max_norm: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in one process; return losses, norms and weights."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for x, y in batches():
        loss = mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@case
def stages_train_like_one_process() -> None:
    losses, norms, weights = plain(0.1)
    shards = SIZE // 2
    with Accelerator(
        cpu=True,
        backend="pipelined_fsdp2",
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=shards),
        process_group_timeout=PG_TIMEOUT,
    ) as accelerator:
        whole = net()
        model, optimizer = accelerator.prepare(
            whole, torch.optim.AdamW(whole.parameters(), lr=0.01)
        )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in model.parameters()}
        assert len(held) == 4  # two layers with a weight and a bias each
        assert all(isinstance(p, DTensor) for p in held)
        index, count = accelerator.hooks.data_shard()
        assert count == shards
        for number, (x, y) in enumerate(batches()):
            result = accelerator.train_step((x.chunk(count)[index], y.chunk(count)[index]))
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            mean = accelerator.gather(result.loss).mean().item()
            assert abs(mean - losses[number]) < 1e-6, (number, mean, losses, RANK)
            assert abs(norm.item() - norms[number]) < 1e-5 * norms[number]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.full_tensor(), weights[name], rtol=0, atol=1e-5)


if __name__ == "__main__":
    run_cases()
