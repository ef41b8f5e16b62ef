"""Multi-token prediction: decoder layers carry the target's last state on, token by token.

DeepSeek-V3, arXiv 2412.19437: a head for each depth, which reads what the head before it made of
the same token, and one token more of the text. Each has norms of that state and of the token's
embedding, a projection of both, a decoder layer and a norm; the output rows are shared. The first
state is what the target's head reads. Behind the last head its own output takes the state's place
(FastMTP, arXiv 2509.18362), so one head drafts as far as several do.

Shape legend: B texts, L tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from foredraft.core.errors import unknown
from foredraft.drafters.common.anchored import AnchoredAttention
from foredraft.drafters.common.head import HeadSource, Prediction, TextBatch
from foredraft.drafters.common.llama_layer import LlamaLayer, RMSNorm
from foredraft.drafters.common.options import checked_count
from foredraft.drafters.common.rows import RowsHead, following, num_rows_of, rows_of
from foredraft.models.base import ModelShape

RETURNS = ("normed", "plain")


class MtpHead(nn.Module):
    """What one depth has for itself.

    Args:
        shape: of the target.
        returns: see `MtpModule`.
    """

    def __init__(self, shape: ModelShape, returns: str) -> None:
        super().__init__()
        self.returns = returns
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)

    @torch.no_grad()
    def start(self, source: HeadSource) -> None:
        """From the target's last layer and norm, the state handed on."""
        size = source.shape.hidden_size
        self.norm.weight.copy_(source.final_norm())
        self.layer.load_state_dict(dict(source.layer(-1)))
        self.join.weight.mul_(0.1)
        self.join.weight[:, size:] += torch.eye(size)

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """What the layer reads; [..., E].

        Args:
            embeddings: of the tokens behind those that the states know of.
            states: from `MtpModule.first_state`, of later heads from `next_state`.
        """
        normed = self.embedding_norm(embeddings.to(states.dtype)), self.hidden_norm(states)
        joined: Tensor = self.join(torch.cat(normed, -1))
        return joined

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """What the next head reads, of the layer's output and its norm."""
        return normed if self.returns == "normed" else x


class MtpModule(RowsHead):
    """See the module docstring.

    Args:
        returns: what stands for the target's state behind the anchor: the layer's output behind
            the last norm ("normed") or before it ("plain").
        heads: how many.
    """

    kind = "mtp"

    def __init__(
        self, shape: ModelShape, num_rows: int | None, returns: str = "normed", heads: int = 1
    ) -> None:
        super().__init__(shape, (shape.num_hidden_layers - 1,), num_rows)
        if returns not in RETURNS:
            raise unknown("value of returns", returns, RETURNS)
        self.returns = returns
        self.target_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.heads = nn.ModuleList(
            MtpHead(shape, returns) for _ in range(checked_count("heads", heads))
        )

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        module = cls(source.shape, num_rows_of(output_ids), **options)
        module.take_output(source, output_ids)
        with torch.no_grad():
            module.target_norm.weight.copy_(source.final_norm())
        for head in module.each_head():
            head.start(source)
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        return cls(shape, rows_of(config), str(config["returns"]), int(config["heads"]))

    @property
    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "returns": self.returns, "heads": len(self.heads)}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {
            "returns": "what stands for the target's state behind the anchor (normed)",
            "heads": "one for each depth, the last for all further ones too (1)",
        }

    def each_head(self) -> list[MtpHead]:
        """In the order of their depths."""
        return [cast(MtpHead, head) for head in self.heads]

    def first_state(self, hidden: Tensor) -> Tensor:
        """What the target's head reads, of its last layer's output; [..., E]."""
        normed: Tensor = self.target_norm(hidden.to(self.output.dtype))
        return normed

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        state_BLE, found = self.first_state(batch.taps[self.taps[0]]), list[Prediction]()
        heads = self.each_head()
        attentions = [AnchoredAttention(head.layer) for head in heads]
        for k in range(1, depth + 1):
            at = min(k, len(heads)) - 1
            x_BLE = heads[at].inputs(following(batch.embeddings_BLE, k), state_BLE)
            # A head's own entries are of the text, until it is used again.
            x_BLE = attentions[at].step(x_BLE, k - 1 - at)
            normed_BLE = heads[at].norm(x_BLE)
            state_BLE = heads[at].next_state(x_BLE, normed_BLE)
            found.append(Prediction(normed_BLE, self.output, shift=k + 1, depth=k))
        return found


MODULE = MtpModule
