"""Medusa's heads: each guesses one later token from the last hidden state, and from nothing else.

T. Cai et al., arXiv 2401.10774 (heads alone: the target stays as it is). Head k is a residual block
or several, ``x + SiLU(W x)``, and a projection of its own; the last norm and the output rows are
shared, so that a head costs two small matrices instead of a vocabulary.

Shape legend: B texts, L tokens, E hidden size, H heads.
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
from foredraft.drafters.common.rows import RowsHead, num_rows_of, rows_of
from foredraft.models.base import ModelShape


class _Head(nn.Module):
    """Residual blocks and a projection [E, E] before the shared rows. It starts as the identity."""

    def __init__(self, hidden_size: int, num_blocks: int) -> None:
        super().__init__()
        blocks = [nn.Linear(hidden_size, hidden_size) for _ in range(num_blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=False)

    @torch.no_grad()
    def start(self) -> None:
        for parameter in self.blocks.parameters():
            parameter.zero_()
        nn.init.eye_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        projected: Tensor = self.projection(x)
        return projected


class MedusaModule(RowsHead):
    """See the module docstring.

    Args:
        num_heads: H, the most tokens it can draft.
        num_blocks: residual blocks of each head.
    """

    kind = "medusa"

    def __init__(
        self, shape: ModelShape, num_rows: int | None, num_heads: int = 4, num_blocks: int = 1
    ) -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows)
        self.num_heads, self.num_blocks = num_heads, num_blocks
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        heads = [_Head(shape.hidden_size, num_blocks) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads)
        self.output_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        counts = {name: checked_count(name, value) for name, value in options.items()}
        module = cls(source.shape, num_rows_of(output_ids), **counts)
        module.take_output(source, output_ids)
        with torch.no_grad():
            module.output_norm.weight.copy_(source.final_norm())
        for head in module.heads:
            cast(_Head, head).start()
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        return cls(shape, rows_of(config), int(config["num_heads"]), int(config["num_blocks"]))

    @property
    def config(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_heads": self.num_heads,
            "num_blocks": self.num_blocks,
        }

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {
            "num_heads": "heads, and so the most tokens on a path of a draft (4)",
            "num_blocks": "residual blocks of each head (1)",
        }

    def projected(self, hidden: Tensor, count: int) -> Tensor:
        """What the first heads make of the last layer's output [..., E], before the norm.

        Returns:
            [..., H, E] for ``count`` heads, or as many as there are.
        """
        normed = self.norm(hidden.to(self.output.dtype))
        return torch.stack([head(normed) for head in self.heads[:count]], -2)

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        states_BLHE = self.output_norm(self.projected(batch.taps[self.taps[0]], depth))
        return [
            Prediction(states_BLE, self.output, shift=k + 1, depth=k)
            for k, states_BLE in enumerate(states_BLHE.unbind(-2), 1)
        ]


MODULE = MedusaModule
