"""Base of how heads learn: where their weights start, and their predictions for whole texts.

A kind of head is a `HeadModule` (its parameters), a runner that drafts with them, and a
`HeadTraining`, which names the same computation for all places of a text at once. A module says in
``training_file`` which one has its own.

Positions are counted alike everywhere: the *anchor* ``i`` is the last token that the target has
read, so its hidden states are known, and so is token ``i + 1``, which the target drew from them.
Draft token ``k`` (from 1) is token ``i + 1 + k``.

Shape legend: B texts, L tokens of the longest, E hidden size, V vocabulary, R output rows,
K columns of the output product (E, or more), H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.layers import LlamaLayer
from foredraft.train.target import TrainingTarget


@dataclass(frozen=True)
class TextBatch:
    """Texts with the target's outputs for them.

    Attributes:
        tokens_BL: int64 token ids; padding after a text's end is any id.
        lengths_B: int64 tokens of each text.
        embeddings_BLE: the target's embeddings of the tokens.
        taps: for each layer that the head asks for its output [B, L, E].
    """

    tokens_BL: Tensor
    lengths_B: Tensor
    embeddings_BLE: Tensor
    taps: Mapping[int, Tensor]


@dataclass(frozen=True)
class Prediction:
    """A head's logits for one later token at every anchor, as two factors not yet multiplied.

    There are far more logits than states: losses compute them piece by piece, and only where they
    are needed. A bias by token (a Markov head's, say) is added as further columns of both factors.

    Attributes:
        states_BLK: factor of the output rows; entry ``i`` predicts token ``i + shift``, given all
            tokens before that one. Entries beyond a text's end have no meaning.
        depth: which draft token that is, from 1: acceptance is counted by it.
    """

    states_BLK: Tensor
    output_RK: Tensor
    depth: int

    @property
    def shift(self) -> int:
        """Tokens from an anchor to the one that is predicted: the target drew the first itself."""
        return self.depth + 1


M = TypeVar("M", bound=HeadModule)


class HeadTraining(ABC, Generic[M]):
    """How heads of one kind start and learn."""

    def __init__(self, module: M) -> None:
        self.module = module

    @abstractmethod
    def take_layers(self, source: TrainingTarget) -> None:
        """Start all but the output rows from the target's weights."""

    @abstractmethod
    def predictions(self, batch: TextBatch, depth: int) -> list[Prediction]:
        """The head's predictions for ``depth`` draft tokens behind every anchor.

        The tokens before the one that is predicted are those of the text. Hidden states behind an
        anchor are the head's own, as they will be when it drafts.
        """

    def extra_loss(self, batch: TextBatch, predictions: Sequence[Prediction]) -> Tensor | None:
        """A further term of the loss (a confidence head's, say); usually none."""
        return None

    def calibrate(self, batches: Iterable[TextBatch]) -> list[float]:
        """Set parameters that are not learnt, on held-out text; by default there are none.

        Returns:
            The settings, for display.
        """
        return []


def training_of(module: HeadModule) -> HeadTraining[Any]:
    """How a module learns: ``TRAINING`` of the file that it names."""
    training: type[HeadTraining[Any]] = importlib.import_module(module.training_file).TRAINING
    return training(module)


def start_head(
    kind: type[M],
    source: TrainingTarget,
    output_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> M:
    """A new head for a target, as close to useful as copying its weights makes it.

    Args:
        output_ids: the tokens it may name, ascending; None: all.
        options: some of `HeadModule.OPTIONS`; the others get their usual values.

    Raises:
        ConfigError: see `HeadModule.from_config`.
    """
    shape = source.shape
    usual = {name: option.usual_for(shape) for name, option in kind.OPTIONS.items()}
    num_rows = None if output_ids is None else len(output_ids)
    module = kind.from_config(shape, {"num_rows": num_rows, **usual, **options})
    with torch.no_grad():
        rows_VE = source.head()
        if output_ids is not None and module.output_ids_R is not None:
            ids_R = torch.as_tensor(output_ids, device=rows_VE.device)
            module.output_ids_R.copy_(ids_R)
            rows_VE = rows_VE[ids_R]
        module.rows.copy_(rows_VE)
        training_of(module).take_layers(source)
    return module


def following(x_BLE: Tensor, by: int) -> Tensor:
    """The entry ``by`` tokens later, for every token; beyond the end it has no meaning."""
    return x_BLE.roll(-by, 1) if by else x_BLE


def unrolled(
    batch: TextBatch,
    depth: int,
    output_RE: Tensor,
    state_BLE: Tensor,
    step: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[Prediction]:
    """Predictions of a head that drafts token by token from a state that it carries on.

    Args:
        step: from the number ``k`` of the draft token (from 1), the embeddings of the token before
            it and the state there: the input of the output rows, and the next state.
    """
    predictions = []
    for k in range(1, depth + 1):
        embeddings_BLE = following(batch.embeddings_BLE, k).to(state_BLE.dtype)
        read_BLE, state_BLE = step(k, embeddings_BLE, state_BLE)
        predictions.append(Prediction(read_BLE, output_RE, k))
    return predictions


class AnchoredAttention:
    """The state of one unrolled layer (training-time test, arXiv 2503.01840).

    In step s (from 0) the query of anchor i stands at position i + s. It sees the entries of the
    text up to i, which all anchors share, and those that its own earlier steps left.
    """

    def __init__(self, layer: LlamaLayer) -> None:
        self._layer = layer
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, x_BLE: Tensor, step: int) -> Tensor:
        positions_L = torch.arange(x_BLE.shape[1], device=x_BLE.device) + step
        queries, keys, values = self._layer.heads(x_BLE, positions_L)
        repeat = queries.shape[1] // keys.shape[1]
        self._keys.append(keys.repeat_interleave(repeat, 1))
        self._values.append(values.repeat_interleave(repeat, 1))
        if step:
            return self._layer.finish(x_BLE, self._attend(queries))
        attended = F.scaled_dot_product_attention(
            queries, self._keys[0], self._values[0], is_causal=True
        )
        return self._layer.finish(x_BLE, attended)

    def _attend(self, queries_BHLD: Tensor) -> Tensor:
        length, scale = queries_BHLD.shape[2], queries_BHLD.shape[3] ** -0.5
        queries_BHLD = queries_BHLD * scale
        scores = queries_BHLD @ self._keys[0].mT + behind_anchor(queries_BHLD, length)
        own = [(queries_BHLD * keys).sum(-1, keepdim=True) for keys in self._keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = weights[..., :length] @ self._values[0]
        for i, values in enumerate(self._values[1:]):
            attended = attended + weights[..., length + i, None] * values
        return attended


def behind_anchor(like: Tensor, length: int) -> Tensor:
    """Mask added to attention scores: -inf for entries behind each anchor; [L, L]."""
    return like.new_full((length, length), -torch.inf).triu(1)
