"""Token recycling: the target's likeliest successors at the last occurrence of each token.

Every scored position yields the target's few most likely next tokens, of which one is used. Keep
the others: a table from each token to its last candidates, walked from the end of the text, gives
a tree of drafts. (X. Luo et al., "Turning Trash into Treasure", arXiv 2408.08696.)

Shape legend: V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from foredraft.core.record import RowStep
from foredraft.core.sampling import largest
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import best_first
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.confidence import priors
from foredraft.drafters.text.per_request import PerRequestDrafter

NUM_CANDIDATES = 8
"""K; as many have priors, and more are never drafted."""
_STEADIEST = 3
_PRIOR_WEIGHT = 20.0


class _Row(NamedTuple):
    """The candidates after one token, likeliest first.

    Attributes:
        steadiness: how many updates in a row had the same first one, up to `_STEADIEST`.
    """

    candidates: tuple[int, ...]
    steadiness: int


class Successors:
    """The table from each token to its last candidates, K at most."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def get(self, token: int) -> _Row | None:
        return self._rows.get(token)

    def update(self, token: int, candidates: Sequence[int]) -> None:
        old, steadiness = self._rows.get(token), 0
        if old is not None and old.candidates[0] == candidates[0]:
            steadiness = min(old.steadiness + 1, _STEADIEST)
        self._rows[token] = _Row(tuple(candidates), steadiness)

    def read(self, text: Sequence[int]) -> None:
        """Learn from a text without scores: a token's successor becomes its first candidate."""
        for token, follower in pairwise(text):
            old = self._rows.get(token)
            others = [c for c in old.candidates if c != follower] if old else []
            self.update(token, (follower, *others[: NUM_CANDIDATES - 1]))


class RankConfidence:
    """Probability that the next token is the candidate of a rank, measured on committed text."""

    def __init__(self) -> None:
        self._hits = [[prob * _PRIOR_WEIGHT for prob in row] for row in priors().ranks]
        self._trials = [_PRIOR_WEIGHT] * len(self._hits)

    def __getitem__(self, steadiness: int) -> list[float]:
        """By rank; ranks beyond the list are not worth drafting."""
        return [hits / self._trials[steadiness] for hits in self._hits[steadiness]]

    def record(self, row: _Row, token: int) -> None:
        """``token`` came where ``row`` held the candidates."""
        hits = self._hits[row.steadiness]
        self._trials[row.steadiness] += 1.0
        for rank, candidate in enumerate(row.candidates[: len(hits)]):
            if candidate == token:
                hits[rank] += 1.0
                return


class _Request:
    """One request: its last token, its table, and how its ranks have done."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.successors, self._confidence = Successors(), RankConfidence()
        self.last = prompt[-1]
        self.successors.read(prompt)

    def commit(self, token: int, candidates: Sequence[int]) -> None:
        """A committed token, and the target's likeliest tokens at its position."""
        if (row := self.successors.get(self.last)) is not None:
            self._confidence.record(row, token)
        self.successors.update(self.last, candidates)
        self.last = token

    def following(self, token: int) -> Iterator[tuple[int, float, int]]:
        """Candidates after ``token``, for `best_first`."""
        if (row := self.successors.get(token)) is not None:
            probs = self._confidence[row.steadiness]
            for candidate, prob in zip(row.candidates, probs, strict=False):
                yield candidate, prob, candidate


def likeliest(logits_V: Tensor, count: int) -> list[int]:
    """The ``count`` tokens of the highest logits, highest first, of equal ones the first."""
    count = min(count, logits_V.numel())
    if logits_V.device.type != "cpu":
        top: list[int] = logits_V.topk(count).indices.tolist()
        return top
    return largest(logits_V.detach().numpy(), count)


class TokenRecyclingDrafter(PerRequestDrafter[_Request]):
    """See the module docstring.

    Only committed positions teach the table. Positions of rejected nodes have candidates, too, but
    a draft must not depend on tokens that were rejected before it.
    """

    def __init__(self, tree: bool = True) -> None:
        super().__init__()
        self._tree = tree

    def begin_request(self, row: DraftRow) -> _Request:
        return _Request(row.tokens)

    def draft_tree(self, request: _Request, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        last = draft[-1] if draft else request.last
        return best_first(last, request.following, row, self._tree, len(draft))

    def observe_request(self, request: _Request, seen: RowStep) -> None:
        nodes = [0, *(node + 1 for node in seen.path)]
        for token, node in zip(seen.committed, nodes, strict=False):
            request.commit(token, likeliest(seen.logits_NV[node], NUM_CANDIDATES))


def _build(context: DrafterContext) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(context.target.capabilities.tree_attention)


DRAFTER = DrafterSpec(
    build=_build,
    summary="drafts the target's likeliest successors at each token's last occurrence",
    num_draft_tokens=12,
)
