"""A mock of the public API of MS-AMP, written after its source code. It computes in plain torch.

Like the library, it has the same names, arguments and errors, it replaces the same objects, its
weights are not tensors, and DDP ignores them. Its numbers are not those of MS-AMP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

opt_levels = ["O1", "O2"]
#: The functions called, in order.
calls: list[str] = []


class ScalingTensor:
    def __init__(self, value: torch.Tensor, qtype: str = "kfloat16") -> None:
        self.value = value
        self.qtype = qtype

    shape = property(lambda self: self.value.shape)
    device = property(lambda self: self.value.device)
    dtype = property(lambda self: self.value.dtype)
    is_leaf = True

    def float(self) -> torch.Tensor:
        return self.value.detach().float()

    def detach(self) -> ScalingTensor:
        return ScalingTensor(self.value.detach(), self.qtype)

    def numel(self) -> int:
        return self.value.numel()

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    @torch.no_grad()
    def copy_(self, other: Any) -> ScalingTensor:
        if not isinstance(other, ScalingTensor):
            raise TypeError("The input should be a ScalingTensor")
        self.value.copy_(other.value)
        return self


class ScalingParameter(ScalingTensor):
    def __init__(self, tensor: ScalingTensor, requires_grad: bool = True) -> None:
        super().__init__(tensor.value.requires_grad_(requires_grad), tensor.qtype)
        self.requires_grad = requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        return self.value.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        self.value.grad = grad


def cast(tensor: torch.Tensor, qtype: str) -> ScalingTensor:
    return ScalingTensor(tensor.detach().float().clone(), qtype)


torch.Tensor.cast = cast  # type: ignore[attr-defined]


class FP8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = cast(linear.weight, "kfloat16")
        self._parameters["weight"] = ScalingParameter(weight, linear.weight.requires_grad)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.value.to(x.dtype), self.bias)


def _replaced(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Linear):
        return module if getattr(module, "use_fp32_linear", False) else FP8Linear(module)
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child))
    return module


class LBAdam(torch.optim.Optimizer):
    decoupled = False

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        calls.append("step")
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                weight = one.value if isinstance(one, ScalingParameter) else one
                state, (b1, b2) = self.state[one], group["betas"]
                n = state["step"] = state.get("step", 0) + 1
                zero = torch.zeros_like(weight, dtype=torch.float32)
                m = state["exp_avg"] = state.get("exp_avg", zero).lerp(one.grad.float(), 1 - b1)
                square = one.grad.float().square()
                v = state["exp_avg_sq"] = state.get("exp_avg_sq", zero).lerp(square, 1 - b2)
                if self.decoupled:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                by = (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + group["eps"])
                weight.sub_((group["lr"] * by).to(weight.dtype))

    def _held(self) -> list[Any]:
        return [one for group in self.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        numbers = {id(one): number for number, one in enumerate(self._held())}
        return {
            "state": {numbers[id(one)]: dict(state) for one, state in self.state.items()},
            "param_groups": [
                {**group, "params": [numbers[id(one)] for one in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        held = self._held()
        self.state.clear()
        self.state.update({held[number]: dict(one) for number, one in state_dict["state"].items()})

    def all_reduce_grads(self, model: nn.Module) -> None:
        calls.append("all_reduce_grads")
        for one in model.parameters():
            if isinstance(one, ScalingParameter) and one.grad is not None:
                dist.all_reduce(one.grad)
                one.grad.div_(dist.get_world_size())


class LBAdamW(LBAdam):
    decoupled = True


def initialize(
    model: Any, optimizer: Any = None, opt_level: str = "O1", use_te: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    calls.append(f"initialize {opt_level}")
    if not isinstance(model, nn.Module):
        raise ValueError("Model must be an instance of torch.nn.Module")
    if opt_level not in opt_levels:
        raise ValueError(f"Invalid optimization level. Please choose from {opt_levels}")
    if not isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam):
        raise ValueError(f"Optimizer {optimizer} is not supported")
    index = {id(one): number for number, one in enumerate(model.parameters())}
    places = [[index[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    model = _replaced(model)
    now = list(model.parameters())
    for group, numbers in zip(optimizer.param_groups, places, strict=True):
        group["params"] = [now[number] for number in numbers]
    named = list(model.named_parameters())
    model._ddp_params_and_buffers_to_ignore = [  # the attribute that DDP's own method sets
        name for name, one in named if isinstance(one, ScalingParameter)
    ]
    # Like the library, check for Adam first: an AdamW that is a subclass of Adam becomes an LBAdam.
    kind = LBAdam if isinstance(optimizer, torch.optim.Adam) else LBAdamW
    return model, kind(optimizer.param_groups, **optimizer.defaults)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    calls.append("clip_grad_norm_")
    grads = [one.grad for one in parameters if one.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([grad.float().norm(norm_type) for grad in grads]))
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
