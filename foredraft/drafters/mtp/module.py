"""Multi-token prediction: one decoder layer carries the target's last state on, token by token.

DeepSeek-V3, arXiv 2412.19437; one head used again for each further token as in FastMTP, arXiv
2509.18362. Norms of the state and of the embedding of the token after it, a projection of both, a
decoder layer, a norm, output rows. The first state is what the target's head reads; behind the
anchor the head's own output takes its place.

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from foredraft.core.errors import unknown
from foredraft.drafters.common.anchored import AnchoredAttention
from foredraft.drafters.common.head import HeadSource, Prediction, TextBatch
from foredraft.drafters.common.llama_layer import LlamaLayer, RMSNorm
from foredraft.drafters.common.rows import RowsHead, following, num_rows_of, rows_of
from foredraft.models.base import ModelShape

RETURNS = ("normed", "plain")


class MtpModule(RowsHead):
    """See the module docstring.

    Args:
        returns: what stands for the target's state behind the anchor: the layer's output behind
            the last norm ("normed") or before it ("plain").
    """

    kind = "mtp"

    def __init__(self, shape: ModelShape, num_rows: int | None, returns: str = "normed") -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows)
        if returns not in RETURNS:
            raise unknown("value of returns", returns, RETURNS)
        self.returns = returns
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.target_norm = RMSNorm(hidden, eps)
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        module = cls(source.shape, num_rows_of(output_ids), **options)
        module.take_output(source, output_ids)
        size = source.shape.hidden_size
        with torch.no_grad():
            module.target_norm.weight.copy_(source.final_norm())
            module.norm.weight.copy_(source.final_norm())
            module.layer.load_state_dict(dict(source.layer(-1)))
            module.join.weight.mul_(0.1)
            module.join.weight[:, size:] += torch.eye(size)
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        return cls(shape, rows_of(config), str(config["returns"]))

    @property
    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "returns": self.returns}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {"returns": "what stands for the target's state behind the anchor (normed)"}

    def first_state(self, hidden: Tensor) -> Tensor:
        """What the target's head reads, of its last layer's output; [..., E]."""
        normed: Tensor = self.target_norm(hidden.to(self.output.dtype))
        return normed

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """What the layer reads; [..., E].

        Args:
            embeddings: of the tokens behind those that the states are of.
            states: from `first_state`, behind the anchor from `next_state`.
        """
        normed = self.embedding_norm(embeddings.to(states.dtype)), self.hidden_norm(states)
        joined: Tensor = self.join(torch.cat(normed, -1))
        return joined

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """What goes on to the next token, of the layer's output and its norm."""
        return normed if self.returns == "normed" else x

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        state_BLE = self.first_state(batch.taps[self.taps[0]])
        attention, found = AnchoredAttention(self.layer), list[Prediction]()
        for k in range(1, depth + 1):
            x_BLE = self.inputs(following(batch.embeddings_BLE, k), state_BLE)
            x_BLE = attention.step(x_BLE, k - 1)
            normed_BLE = self.norm(x_BLE)
            state_BLE = self.next_state(x_BLE, normed_BLE)
            found.append(Prediction(normed_BLE, self.output, shift=k + 1, depth=k))
        return found


MODULE = MtpModule
