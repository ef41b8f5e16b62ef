"""Hydra's heads: like Medusa's, but each also knows the tokens drafted before its own.

Z. Ankner et al., arXiv 2402.05109. What a head knows of them is in a state that goes from one to
the next, as in the speculators of D. Wertheimer et al., arXiv 2404.19124: the state and the
embedding of the newest token make the next state, by a linear path and one hidden layer beside it.
The first state is the target's last hidden state. There is no attention, and nothing is kept of the
text.

Shape legend: B texts, L tokens, T states, E hidden size, W width of the hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.common.head import HeadSource, Prediction, TextBatch
from foredraft.drafters.common.llama_layer import RMSNorm
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.rows import RowsHead, following, num_rows_of, rows_of
from foredraft.models.base import ModelShape


class HydraStep(nn.Module):
    """From a state and the token after it to the next state."""

    def __init__(self, hidden_size: int, width: int, eps: float) -> None:
        super().__init__()
        self.state_norm = RMSNorm(hidden_size, eps)
        self.token_norm = RMSNorm(hidden_size, eps)
        self.linear = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(2 * hidden_size, width)
        self.down = nn.Linear(width, hidden_size, bias=False)

    @torch.no_grad()
    def start(self, norm_E: Tensor) -> None:
        """The linear path hands the state on as the target's head would read it."""
        size = len(norm_E)
        self.state_norm.weight.copy_(norm_E)
        nn.init.zeros_(self.linear.weight)
        nn.init.eye_(self.linear.weight[:, :size])

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        x = torch.cat((self.state_norm(state), self.token_norm(embedded)), -1)
        new: Tensor = self.linear(x) + self.down(F.silu(self.up(x)))
        return new


class HydraModule(RowsHead):
    """See the module docstring.

    Args:
        num_steps: steps with weights of their own; tokens behind those of the last use its weights.
        width: W.
    """

    kind = "hydra"

    def __init__(
        self, shape: ModelShape, num_rows: int | None, num_steps: int = 2, width: int = 0
    ) -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows)
        self.num_steps, self.width = num_steps, width or shape.intermediate_size
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.steps = nn.ModuleList(HydraStep(hidden, self.width, eps) for _ in range(num_steps))

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        counts = {name: checked_count(name, value) for name, value in options.items()}
        module = cls(source.shape, num_rows_of(output_ids), **counts)
        module.take_output(source, output_ids)
        for step in module.steps:
            cast(HydraStep, step).start(source.final_norm())
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        return cls(shape, rows_of(config), int(config["num_steps"]), int(config["width"]))

    @property
    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "num_steps": self.num_steps, "width": self.width}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {
            "num_steps": "draft tokens with weights of their own; later ones share the last's (2)",
            "width": "of the hidden layer (the target's intermediate size)",
        }

    def step(self, depth: int, state: Tensor, embedded: Tensor) -> Tensor:
        """The state that names draft token ``depth``, from 1.

        Args:
            state: the one before it; for the first the last layer's output; [..., E].
            embedded: of the token before it; [..., E].
        """
        dtype = self.output.dtype
        step = self.steps[min(depth, self.num_steps) - 1]
        new: Tensor = step(state.to(dtype), embedded.to(dtype))
        return new

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        state_BLE, found = batch.taps[self.taps[0]], list[Prediction]()
        for k in range(1, depth + 1):
            state_BLE = self.step(k, state_BLE, following(batch.embeddings_BLE, k))
            found.append(Prediction(state_BLE, self.output, shift=k + 1, depth=k))
        return found


MODULE = HydraModule
