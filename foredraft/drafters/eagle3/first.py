"""EAGLE-1 and EAGLE-2 heads: one layer on the target's last state, and the target's own head.

The state that the target's head reads and the embedding of the token after it go through one
matrix; then comes a decoder layer without a norm before its attention, and its output, which has no
norm either, is what the target's head reads next (arXiv 2401.15077; EAGLE-2, arXiv 2406.16858,
drafts with the same weights). They are read from their checkpoints; nothing here trains them.

Shape legend: B texts, L tokens, T tokens of a run, E hidden size, V vocabulary, Q columns of
queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.drafters.common.anchored import AnchoredAttention
from foredraft.drafters.common.head import Prediction, TextBatch
from foredraft.drafters.common.llama_layer import LlamaLayer, RMSNorm
from foredraft.drafters.common.rows import following
from foredraft.drafters.common.steps import ModuleDrafter
from foredraft.models.base import HeadRow, HeadTarget, HeadWeights, ModelShape


class FirstLayer(LlamaLayer):
    """A `LlamaLayer` without a norm before its attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.attention_norm = nn.Identity()

    def weights(self) -> dict[str, Tensor]:
        """Without what makes queries, keys and values: they are handed in."""
        return {name: w for name, w in super().weights().items() if name != "qkv.weight"}


class FirstEagleModule(nn.Module):
    """See the module docstring.

    Args:
        shape: of the target; feed-forward size, heads and rotary base are the layer's own.
        has_bias: whether there is one in the matrix that joins state and embedding.

    Attributes:
        output: the target's head [V, E].
    """

    output_ids_R: Tensor | None = None
    promise: tuple[float, float] | None = None

    def __init__(self, shape: ModelShape, has_bias: bool) -> None:
        super().__init__()
        self.shape, self.taps = shape, (shape.num_hidden_layers - 1,)
        hidden = shape.hidden_size
        self.target_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.join = nn.Linear(2 * hidden, hidden, bias=has_bias)
        self.layer = FirstLayer(shape)
        self.output = nn.Parameter(torch.zeros(shape.vocab_size, hidden))

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """See `HeadModule.predictions`."""
        state_BLE = self.target_norm(batch.taps[self.taps[0]].to(self.output.dtype))
        attention, found = AnchoredAttention(self.layer), list[Prediction]()
        for k in range(1, depth + 1):
            embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
            x_BLE = self.join(torch.cat((embeddings_BLE, state_BLE), -1))
            state_BLE = attention.step(x_BLE, k - 1)
            found.append(Prediction(state_BLE, self.output, shift=k + 1, depth=k))
        return found


class FirstEagleRunner:
    """See `foredraft.drafters.common.steps.StepRunner`.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: FirstEagleModule, target: HeadTarget) -> None:
        parts = target.parts
        self._parts, self._norm = parts, module.target_norm.to(parts.device).eval()
        bias: Tensor | None = module.join.bias
        self._join = _weight(module.join.weight, target)
        self._bias = None if bias is None else _weight(bias, target)
        self._qkv = _weight(module.layer.qkv.weight, target)
        weights = {n: _weight(w, target) for n, w in module.layer.weights().items()}
        self._runner = target.head_runner(
            HeadWeights([weights], None, _weight(module.output, target), module.shape)
        )
        self.layers = self._runner.layers

    @torch.no_grad()
    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        return self.own_inputs(following, self._norm(taps[0].to(self._join.device)))

    @torch.no_grad()
    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        embeddings_NE = self._parts.embed(torch.tensor(tokens))
        joined = torch.cat((embeddings_NE, states_NE.to(embeddings_NE)), 1)
        x_NE = F.linear(joined, self._join, self._bias)
        return torch.cat((x_NE, F.linear(x_NE, self._qkv)), 1)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


def _weight(weight: Tensor, target: HeadTarget) -> Tensor:
    return weight.detach().to(target.parts.device, target.parts.dtype)


class FirstEagleDrafter(ModuleDrafter):
    """A `FirstEagleModule` drafts trees."""

    runner = FirstEagleRunner
