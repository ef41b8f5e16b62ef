"""The target seam: whatever can score pending tokens and a tree in one forward.

Shape legend: N tree nodes, V vocabulary, T tokens of one row in one forward, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from foredraft.cache.base import Cache
from foredraft.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True)
class Capabilities:
    """What a target offers beyond scoring chains.

    Attributes:
        tree_attention: drafts may branch.
        taps: hidden states of inner layers can be handed out.
        layer_views: a model of some of its layers can be made from it, sharing the weights.
        encoder: it has an encoder whose output the decoder attends to.
    """

    tree_attention: bool = False
    taps: bool = False
    layer_views: bool = False
    encoder: bool = False


@dataclass(frozen=True)
class ScoreRow:
    """One row's part of a forward: the pending tokens, then the tree that hangs off the last."""

    slot: int
    pending: Sequence[int]
    tree: TokenTree = EMPTY_TREE


@dataclass(frozen=True)
class RowScores:
    """What a forward says about one row.

    Attributes:
        logits_NV: float32 (or float64) logits after the last pending token (row 0) and after each
            tree node (row i + 1).
        taps: for each tapped layer its output [T, E] over pending tokens and nodes.
    """

    logits_NV: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)


class Target(Protocol):
    """A causal language model with a cache.

    Attributes:
        vocab_size: logits per position.
        max_context: most tokens a row may hold, pending and drafted ones included.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def cache(self) -> Cache: ...

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> list[RowScores]:
        """One forward over all rows.

        Writes cache entries for all tokens but commits none: `Cache.keep` does. A failed call
        leaves every slot's length as it was.
        """
        ...
