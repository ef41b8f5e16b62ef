"""The target seam: whatever can score pending tokens and a tree in one forward.

Shape legend: N tree nodes, V vocabulary, T tokens of one row in one forward, E hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        layer_views: a model of some of its layers can be made from it, sharing the weights (see
            `LayeredTarget`).
        shallow: its first layers can draft on its own cache, and `score` goes on from them.
        encoder: it has an encoder whose output the decoder attends to.
    """

    tree_attention: bool = False
    taps: bool = False
    layer_views: bool = False
    shallow: bool = False
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


class ShallowTarget(Protocol):
    """The first layers of a target, its final norm and its head, on the target's own cache."""

    def score_last(self, rows: Sequence[ScoreRow]) -> list[Tensor]:
        """Float32 logits [V] of these layers after the last token of each row.

        A row repeats its pending tokens and the tree so far; what an earlier call made of the same
        tokens is not computed again, neither here nor in the target's next `Target.score` of them.
        Commits nothing.
        """
        ...


class LayeredTarget(Target, Protocol):
    """A target with the capability ``layer_views``."""

    @property
    def num_layers(self) -> int: ...

    def layer_view(self, layers: Sequence[int]) -> Target:
        """A target of some of the layers, with a cache of its own."""
        ...

    def sublayer_view(self, no_attention: Collection[int], no_mlp: Collection[int]) -> Target:
        """A target that leaves out the attention or the MLP of some layers, likewise."""
        ...

    def shallow(self, exit_layer: int) -> ShallowTarget:
        """The first ``exit_layer`` layers; needs the capability ``shallow``."""
        ...
