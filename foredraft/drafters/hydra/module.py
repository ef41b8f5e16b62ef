"""Hydra's heads: like Medusa's, but each also knows the tokens drafted before its own.

Z. Ankner et al., arXiv 2402.05109. What is known of them is in a state that goes from one token to
the next, as in the speculators of D. Wertheimer et al., arXiv 2404.19124. State and embedding of
the token after it are joined by a linear path; a gated feed-forward layer stands beside that. The
first state is the target's last hidden state. There is no attention, and nothing is kept of the
text: of an EAGLE layer it is what lies beside the attention.

Shape legend: E hidden size, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.common.head import HeadSource, Prediction, TextBatch
from foredraft.drafters.common.llama_layer import RMSNorm
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.rows import RowsHead, following, num_rows_of, rows_of
from foredraft.models.base import ModelShape


class FeedForward(nn.Module):
    """The half of a `LlamaLayer` that does not attend."""

    def __init__(self, hidden_size: int, width: int, eps: float) -> None:
        super().__init__()
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.gate_up = nn.Linear(hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Its tensors by name, as `foredraft.models.base.HeadWeights` wants them."""
        return {name: tensor.detach() for name, tensor in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        product: Tensor = self.down(F.silu(gate) * up)
        return x + product


class HydraModule(RowsHead):
    """See the module docstring.

    Args:
        width: F; the target's own when 0.
    """

    kind = "hydra"

    def __init__(self, shape: ModelShape, num_rows: int | None, width: int = 0) -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows)
        self.width = width or shape.intermediate_size
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm, self.own_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.token_norm = RMSNorm(hidden, eps)
        self.join_hidden = nn.Linear(2 * hidden, hidden, bias=False)
        self.join_own = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = FeedForward(hidden, self.width, eps)
        self.norm = RMSNorm(hidden, eps)

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        counts = {name: checked_count(name, value) for name, value in options.items()}
        module = cls(source.shape, num_rows_of(output_ids), **counts)
        module.take_output(source, output_ids)
        size = source.shape.hidden_size
        with torch.no_grad():
            module.norm.weight.copy_(source.final_norm())
            for join in (module.join_hidden, module.join_own):
                join.weight.mul_(0.1)
                join.weight[:, :size] += torch.eye(size)
            if module.width == source.shape.intermediate_size:
                last = source.layer(-1)
                module.layer.load_state_dict({name: last[name] for name in module.layer.weights()})
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        return cls(shape, rows_of(config), int(config["width"]))

    @property
    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "width": self.width}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {"width": "of the feed-forward layer (the target's own)"}

    def inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What goes into the layer for a token that the target has read; [..., E].

        Args:
            embeddings: of the token after it.
            hidden: the target's last layer's output.
        """
        normed = self.hidden_norm(hidden.to(self.output.dtype))
        joined: Tensor = self.join_hidden(torch.cat((normed, self._token(embeddings)), -1))
        return joined

    def own_inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Behind the anchor: ``states`` are the layer's own output one token earlier."""
        normed = self.own_norm(states.to(self.output.dtype))
        joined: Tensor = self.join_own(torch.cat((normed, self._token(embeddings)), -1))
        return joined

    def _token(self, embeddings: Tensor) -> Tensor:
        normed: Tensor = self.token_norm(embeddings.to(self.output.dtype))
        return normed

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        x_BLE = self.inputs(following(batch.embeddings_BLE, 1), batch.taps[self.taps[0]])
        found = list[Prediction]()
        for k in range(1, depth + 1):
            if k > 1:
                x_BLE = self.own_inputs(following(batch.embeddings_BLE, k), x_BLE)
            x_BLE = self.layer(x_BLE)
            found.append(Prediction(self.norm(x_BLE), self.output, shift=k + 1, depth=k))
        return found


MODULE = HydraModule
