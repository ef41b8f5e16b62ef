"""EAGLE: one decoder layer that reads what the target made of the text, and drafts step by step.

An entry of the layer stands for a token whose hidden states are known together with the token
that follows it. Its input joins both: normed outputs of several of the target's layers (low,
middle and high, as in EAGLE-3, arXiv 2503.01840) and the embedding of the following token. Behind
the anchor the target's states are not known; the layer's own output takes their place, and
training does just that (training-time test).

Shape legend: B texts, L tokens, E hidden size, R output rows, H query heads, G key-value heads,
D head size, S draft steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from foredraft.drafters.heads.base import (
    HeadSource,
    NamingHead,
    Prediction,
    TextBatch,
    following,
    num_rows_of,
)
from foredraft.drafters.heads.layers import (
    AnchoredAttention,
    Joined,
    JoinedTokens,
    LlamaLayer,
    RMSNorm,
)
from foredraft.drafters.heads.steps import GROWTH_OPTIONS, ModuleDrafter, built_with
from foredraft.drafters.heads.store import HEAD_OPTION
from foredraft.drafters.spec import DrafterSpec
from foredraft.models.base import Capabilities, HeadRow, HeadTarget, HeadWeights, ModelShape


class HiddenHeadModule(NamingHead):
    """See the module docstring.

    Args:
        shape: of the target.
        taps: the target's layers whose outputs it reads.
        num_rows: see `NamingHead`.
    """

    kind = "hidden_head"

    def __init__(self, shape: ModelShape, taps: Sequence[int], num_rows: int | None) -> None:
        super().__init__(shape, taps, num_rows)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.tap_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in taps)
        self.own_norm, self.embedding_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.join_taps = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.join_own = nn.Linear(hidden, hidden, bias=False)
        self.join_embedding = nn.Linear(hidden, hidden, bias=False)
        self.layer = LlamaLayer(shape)
        self.norm = RMSNorm(hidden, eps)
        self.output = nn.Linear(hidden, num_rows or shape.vocab_size, bias=False)

    @property
    def rows(self) -> Tensor:
        return self.output.weight

    @classmethod
    def start(
        cls, source: HeadSource, output_ids: Sequence[int] | None, options: Mapping[str, Any]
    ) -> Self:
        taps = options.get("taps") or usual_taps(source.shape.num_hidden_layers)
        module = cls(source.shape, taps, num_rows_of(output_ids))
        module.take_output(source, output_ids)
        with torch.no_grad():
            # Logits of about 1: a layer that knows nothing yet must not be sure of anything.
            module.norm.weight.fill_(1.0 / float(module.rows.norm(dim=1).mean()))
            module.layer.load_state_dict(dict(source.layer(-1)))
        return module

    @classmethod
    def from_config(cls, shape: ModelShape, config: Mapping[str, Any]) -> Self:
        num_rows = config["num_rows"]
        return cls(shape, config["taps"], None if num_rows is None else int(num_rows))

    @property
    def config(self) -> dict[str, Any]:
        return {"taps": list(self.taps), "num_rows": self.num_rows}

    @classmethod
    def option_help(cls) -> Mapping[str, str]:
        return {"taps": "layers of the target to read, such as 9,19,29 (low, middle, last)"}

    def inputs(self, embeddings: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Entries whose token the target has read; [..., E].

        Args:
            embeddings: of the tokens that follow.
            taps: the target's states of the tokens themselves, one for each tapped layer.
        """
        normed = [norm(x) for norm, x in zip(self.tap_norms, taps, strict=True)]
        joined: Tensor = self.join_taps(torch.cat(normed, -1)) + self._join_token(embeddings)
        return joined

    def own_inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Entries behind the anchor: ``states`` are the layer's own output one token earlier."""
        joined: Tensor = self.join_own(self.own_norm(states)) + self._join_token(embeddings)
        return joined

    def _join_token(self, embeddings: Tensor) -> Tensor:
        joined: Tensor = self.join_embedding(self.embedding_norm(embeddings))
        return joined

    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        embeddings_BLE = following(batch.embeddings_BLE, 1)
        x_BLE = self.inputs(embeddings_BLE, [batch.taps[layer] for layer in self.taps])
        attention = AnchoredAttention(self.layer)
        found = []
        for step in range(depth):
            if step:
                embeddings_BLE = following(batch.embeddings_BLE, step + 1)
                x_BLE = self.own_inputs(embeddings_BLE, x_BLE)
            x_BLE = attention.step(x_BLE, step)
            states = self.norm(x_BLE)
            found.append(Prediction(states, self.output.weight, step + 2, step + 1))
        return found


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1}))


class HiddenHeadRunner:
    """The module's weights where the target runs them.

    Args:
        module: a trained head.
        target: its target.
    """

    def __init__(self, module: HiddenHeadModule, target: HeadTarget) -> None:
        eps = module.shape.rms_norm_eps
        self._runner = target.head_runner(
            HeadWeights(
                [module.layer.weights()],
                module.norm.weight.detach(),
                module.output.weight.detach(),
                module.shape,
            )
        )
        self.layers = self._runner.layers

        tokens = JoinedTokens(
            target.parts,
            module.join_embedding.weight * module.embedding_norm.weight,
            eps,
            target.vocab_size,
        )
        norms = [module.get_parameter(f"tap_norms.{i}.weight") for i in range(len(module.taps))]
        self._join_taps = Joined(target, norms, module.join_taps.weight, eps, tokens)
        own_norms = [module.own_norm.weight]
        self._join_own = Joined(target, own_norms, module.join_own.weight, eps, tokens)

    def text_inputs(self, following: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Layer inputs [T, E] for tokens that the target has read, and those that follow them."""
        return self._join_taps(taps, following)

    def own_inputs(self, tokens: Sequence[int], states_NE: Tensor) -> Tensor:
        """Layer inputs [N, E] for drafted tokens, ``states_NE`` of what each was drafted from."""
        return self._join_own([states_NE], tokens)

    def run(self, rows: Sequence[HeadRow], inputs_TE: Tensor) -> tuple[Tensor, Tensor]:
        return self._runner.run(rows, inputs_TE)


class HiddenHeadDrafter(ModuleDrafter):
    """An `HiddenHeadModule` drafts trees."""

    runner = HiddenHeadRunner


DRAFTER = DrafterSpec(
    build=built_with(HiddenHeadModule, HiddenHeadDrafter),
    summary="a trained layer on the target's hidden states drafts a tree, token by token",
    options={**HEAD_OPTION, **GROWTH_OPTIONS},
    num_draft_tokens=16,
    needs=Capabilities(parts=True, cache_layers=True),
    trained=HiddenHeadModule.kind,
    head=HiddenHeadModule,
)
