"""Muon for hidden matrices, AdamW for the rest, and the schedule of their rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.drafters.heads.base import HeadModule
from foredraft.train.options import Rates

_WARM_UP = 0.02
"""Share of a training over which rates rise."""
_LAST_RATE = 0.02
"""Share of the rate that is left at the end."""


def product_dtype(device: torch.device, float32: bool = False) -> torch.dtype:
    """The type of all products of training: bfloat16 where it is fast, else float32.

    CPUs without bfloat16 instructions emulate its products: the optimiser's alone took 17 s a step
    in bfloat16 and take half a second in float32 (AVX2, two cores, eagle for a model of 135M
    parameters).

    Args:
        float32: take that in any case.
    """
    if float32:
        return torch.float32
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


_A, _B, _C = 3.4445, -4.7750, 2.0315
_MOMENTUM, _NUM_ITERATIONS = 0.95, 5


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) scaled as in arXiv 2502.16982, with products of a chosen type.

    `torch.optim.Muon` computes the same and multiplies in bfloat16 on every machine.

    Args:
        rate: the learning rate; a step is as large as one of AdamW.
        weight_decay: share of a weight that goes with each step at a rate of 1.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rate: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(matrices, {"lr": rate, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - _MOMENTUM)
                update = orthogonalised(weight.grad.lerp(momentum, _MOMENTUM), self._dtype)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix with singular values near 1: five Newton-Schulz iterations in that dtype."""
    is_tall = len(matrix) > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


class Optimiser:
    """Both optimisers as one.

    Args:
        module: the trained head. A matrix has rows of tokens if it has as many rows as output rows,
            or as tokens.
    """

    def __init__(
        self, module: HeadModule, rates: Rates, dtype: torch.dtype = torch.float32
    ) -> None:
        groups = parameter_groups(module)
        self._parts: list[torch.optim.Optimizer] = []
        if groups["matrices"]:
            self._parts.append(Muon(groups["matrices"], rates.matrices, rates.weight_decay, dtype))
        others = [
            {"params": groups[name], "lr": getattr(rates, name)}
            for name in ("tables", "vectors")
            if groups[name]
        ]
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0))
        self._highest = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def step(self, share: float) -> None:
        """A step at this share of the highest rates."""
        for part, rates in zip(self._parts, self._highest, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * share
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on, by name."""
        return {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self._parts)
            for index, entries in part.state_dict()["state"].items()
            for name, value in entries.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a `state`."""
        for number, part in enumerate(self._parts):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                own, index, entry = name.split(".", 2)
                if int(own) == number:
                    state.setdefault(int(index), {})[entry] = tensor
            part.load_state_dict(
                {"state": state, "param_groups": part.state_dict()["param_groups"]}
            )


def parameter_groups(module: HeadModule) -> dict[str, list[nn.Parameter]]:
    """Parameters by how they are trained: ``matrices``, ``tables`` and ``vectors``."""
    vocab = module.shape.vocab_size
    tables = {vocab} if module.output_ids_R is None else {vocab, len(module.output_ids_R)}
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "tables": [], "vectors": []}
    for parameter in (each for each in module.parameters() if each.requires_grad):
        if parameter.ndim == 2 and not tables & set(parameter.shape):
            groups["matrices"].append(parameter)
        else:
            groups["tables" if parameter.ndim == 2 else "vectors"].append(parameter)
    return groups


def rate_share(done: float) -> float:
    """Share of the highest rate at a share of the training: a short rise, then half a cosine."""
    done = min(max(done, 0.0), 1.0)
    if done < _WARM_UP:
        return (done + 1e-3) / (_WARM_UP + 1e-3)
    fallen = (done - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * fallen)) / 2
