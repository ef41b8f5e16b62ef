"""Muon for hidden matrices, AdamW for the rest, and the schedule of their rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from foredraft.drafters.heads.base import HeadModule
from foredraft.train.options import Rates

_WARM_UP = 0.02
"""Share of a training over which rates rise."""
_LAST_RATE = 0.02
"""Share of the rate that is left at the end."""


class Optimiser:
    """Both optimisers as one.

    Args:
        module: what is trained. Rows of a matrix that belong to tokens are recognised by their
            number: as many as output rows, or as tokens.
    """

    def __init__(self, module: HeadModule, rates: Rates) -> None:
        groups = parameter_groups(module)
        self._parts: list[torch.optim.Optimizer] = []
        if groups["matrices"]:
            self._parts.append(
                torch.optim.Muon(
                    groups["matrices"],
                    lr=rates.matrices,
                    weight_decay=rates.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
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
    for parameter in _trained(module):
        if parameter.ndim == 2 and not tables & set(parameter.shape):
            groups["matrices"].append(parameter)
        else:
            groups["tables" if parameter.ndim == 2 else "vectors"].append(parameter)
    return groups


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def rate_share(done: float) -> float:
    """Share of the highest rate at a share of the training: a short rise, then half a cosine."""
    done = min(max(done, 0.0), 1.0)
    if done < _WARM_UP:
        return (done + 1e-3) / (_WARM_UP + 1e-3)
    fallen = (done - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * fallen)) / 2
