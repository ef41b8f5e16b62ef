"""EAGLE-3 as it is published: one layer that attends over a token and a fused state side by side.

Outputs of several of the target's layers, fused to one state, and the embedding of the token that
follows, each behind a norm, are what queries, keys and values are made of; the layer adds to the
state (arXiv 2503.01840). Behind the anchor the layer's own output takes the state's place. The
norms of EAGLE-3.1 are options here: one for each tapped layer, and whether the output goes on
behind the last norm.

`foredraft.drafters.eagle` is the same idea with a cheaper layer; heads of this shape are what other
engines load.

Shape legend: B texts, L tokens, E hidden size, P tapped layers, R output rows.
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

CHOICES: Mapping[str, tuple[str, ...]] = {
    "tap_norms": ("each", "all", "none"),
    "residual": ("plain", "normed"),
    "returns": ("normed", "plain"),
}
"""Values of the options, those of a new head first."""
_HELP = {
    "taps": "layers of the target to read, such as 1,14,26",
    "tap_norms": "norms of their outputs: of each, of all together, or none (each)",
    "residual": "what the layer adds to: the state as it is, or behind its norm (plain)",
    "returns": "which output goes on to the next token: behind the last norm, or plain (normed)",
}


class WideLayer(LlamaLayer):
    """A `LlamaLayer` on [..., 2E]: an embedding, and the state that the layer adds to.

    Args:
        is_normed: it adds to the state behind its norm.
    """

    def __init__(self, shape: ModelShape, is_normed: bool) -> None:
        super().__init__(shape)
        self._is_normed = is_normed
        self.token_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.qkv = nn.Linear(2 * shape.hidden_size, self.qkv.out_features, bias=False)

    def weights(self) -> dict[str, Tensor]:
        """Without what makes queries, keys and values: they are handed in."""
        before = ("attention_norm", "token_norm", "qkv")
        return {n: w for n, w in super().weights().items() if not n.startswith(before)}

    def attention_input(self, x_BLE: Tensor) -> Tensor:
        embeddings, states = x_BLE.chunk(2, -1)
        return torch.cat((self.token_norm(embeddings), self.attention_norm(states)), -1)

    def added_to(self, states: Tensor) -> Tensor:
        """What the layer adds to, for states [..., E]."""
        return self.attention_norm(states) if self._is_normed else states

    def finish(self, x_BLE: Tensor, attended_BHLD: Tensor) -> Tensor:
        return super().finish(self.added_to(x_BLE.chunk(2, -1)[1]), attended_BHLD)


class Eagle3Module(RowsHead):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        taps: the target's layers whose outputs it reads.
        num_rows: see `RowsHead`.
        tap_norms, residual, returns: see `CHOICES`.
    """

    kind = "eagle3"

    def __init__(
        self,
        shape: ModelShape,
        taps: Sequence[int],
        num_rows: int | None,
        tap_norms: str = "each",
        residual: str = "plain",
        returns: str = "normed",
    ) -> None:
        super().__init__(shape, taps, num_rows)
        self._chosen = {"tap_norms": tap_norms, "residual": residual, "returns": returns}
        for name, value in self._chosen.items():
            if value not in CHOICES[name]:
                raise unknown(f"value of {name}", value, CHOICES[name])
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        count = {"each": len(self.taps), "all": 1, "none": 0}[tap_norms]
        size = hidden if tap_norms == "each" else hidden * len(self.taps)
        self.tap_norms = nn.ModuleList(RMSNorm(size, eps) for _ in range(count))
        self.join_taps = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.layer = WideLayer(shape, residual == "normed")
        self.norm = RMSNorm(hidden, eps)

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        more = dict(options)
        taps = more.pop("taps", None) or published_taps(source.shape.num_hidden_layers)
        module = cls(source.shape, taps, num_rows_of(output_ids), **more)
        module.take_output(source, output_ids)
        last, size = dict(source.layer(-1)), source.shape.hidden_size
        with torch.no_grad():
            module.norm.weight.fill_(1.0 / float(module.output.norm(dim=1).mean()))
            module.join_taps.weight.mul_(0.1)
            module.join_taps.weight[:, -size:] += torch.eye(size)
            module.layer.qkv.weight.mul_(0.1)
            module.layer.qkv.weight[:, size:] = last.pop("qkv.weight")
            module.layer.load_state_dict(last, strict=False)
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        chosen = {name: str(config[name]) for name in CHOICES}
        return cls(shape, config["taps"], rows_of(config), **chosen)

    @property
    def config(self) -> dict[str, Any]:
        return {"taps": list(self.taps), "num_rows": self.num_rows, **self._chosen}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return _HELP

    def fused(self, taps: Sequence[Tensor]) -> Tensor:
        """One state [..., E] of the tapped layers' outputs."""
        states = [tap.to(self.output.dtype) for tap in taps]
        if self._chosen["tap_norms"] == "each":
            states = [norm(x) for norm, x in zip(self.tap_norms, states, strict=True)]
        joined = torch.cat(states, -1)
        if self._chosen["tap_norms"] == "all":
            joined = self.tap_norms[0](joined)
        fused: Tensor = self.join_taps(joined)
        return fused

    def next_state(self, x: Tensor, normed: Tensor) -> Tensor:
        """What goes on to the next token, of the layer's output and its norm."""
        return normed if self._chosen["returns"] == "normed" else x

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        state_BLE = self.fused([batch.taps[layer] for layer in self.taps])
        attention, found = AnchoredAttention(self.layer), list[Prediction]()
        for k in range(1, depth + 1):
            embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
            x_BLE = attention.step(torch.cat((embeddings_BLE, state_BLE), -1), k - 1)
            normed_BLE = self.norm(x_BLE)
            state_BLE = self.next_state(x_BLE, normed_BLE)
            found.append(Prediction(normed_BLE, self.output, shift=k + 1, depth=k))
        return found


def published_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's authors read: what goes into layers 2, L / 2 and L - 3."""
    return tuple(
        sorted({min(max(n - 1, 0), num_layers - 1) for n in (2, num_layers // 2, num_layers - 3)})
    )


MODULE = Eagle3Module
