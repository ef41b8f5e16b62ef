"""Lookahead decoding (Fu et al., arXiv 2402.02057): Jacobi iteration beside the step itself.

The forward that verifies also refines a window of guesses for the positions ahead. Row by row the
window holds what the target said, one step ago, two steps ago and so on, would stand there; a
column read downwards is an n-gram that the target produced by itself. Those go into a pool, and
the ones that begin with the last token are verified.

As a token tree the window is a comb: its first row is a chain from the root, and below each of
its tokens hang the later rows of that column.

    root ── a₀ ── a₁ ── a₂          row 0: guesses for the next three positions
            │     │     │
            b₀    b₁    b₂          row 1: what followed them one step ago

Shape legend: N tree nodes, V vocabulary, C window columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.core.checks import checked_int
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRow
from foredraft.drafters.spec import DrafterContext, DrafterSpec

_STRIDE = 7919
"""Steps through the prompt for the first guesses: any tokens do, and these are no random ones."""


@dataclass(frozen=True)
class LookaheadSizes:
    """How large the window and the pool are.

    Attributes:
        window: columns, the positions guessed ahead.
        ngram_size: length of the n-grams, the first token included; one more than the rows.
        guesses: n-grams verified a step, and kept for each first token.
    """

    window: int = 4
    ngram_size: int = 3
    guesses: int = 3

    @property
    def num_rows(self) -> int:
        return self.ngram_size - 1

    @property
    def num_nodes(self) -> int:
        """Nodes of a full step: the window and the guesses."""
        return (self.window + self.guesses) * self.num_rows


class NgramPool:
    """For each token the n-grams that began with it, the latest last.

    Args:
        capacity: n-grams a first token.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._grams: dict[int, list[tuple[int, ...]]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        grams = self._grams.setdefault(first, [])
        if rest in grams:
            grams.remove(rest)
        grams.append(rest)
        del grams[: -self._capacity]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of ``token``, the latest first."""
        return self._grams.get(token, [])[::-1]


class JacobiWindow:
    """Guesses for the positions ahead, one row a step back.

    The token of row r and column c is a guess for the position r + c + 1 after the last committed
    token.

    Args:
        filler: tokens to begin with.
    """

    def __init__(self, sizes: LookaheadSizes, filler: Sequence[int]) -> None:
        self._sizes, self._filler = sizes, filler
        self._num_filled = 0
        self.rows = [self._padded([])]

    def advance(self, num_committed: int, outputs: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by the committed tokens, and take in what the target said after the last row.

        Args:
            outputs: its most likely tokens, column by column; none if the window was not scored.

        Returns:
            The n-grams that are complete now.
        """
        ngrams: list[tuple[int, ...]] = []
        num_gone = num_committed
        if outputs:
            if len(self.rows) == self._sizes.num_rows:
                columns = zip(*self.rows, strict=True)
                ngrams = [(*c, token) for c, token in zip(columns, outputs, strict=False)]
                # Without its first row all that is left stands for one position more.
                self.rows, num_gone = self.rows[1:], num_committed - 1
            self.rows = [*self.rows, self._padded(list(outputs))]
        self.rows = [self._padded(row[num_gone:]) for row in self.rows]
        return ngrams

    def _padded(self, row: list[int]) -> list[int]:
        while len(row) < self._sizes.window:
            row.append(self._filler[self._num_filled * _STRIDE % len(self._filler)])
            self._num_filled += 1
        return row


class _Request:
    """One request's window, pool and last proposal."""

    def __init__(self, sizes: LookaheadSizes, prompt: Sequence[int]) -> None:
        self._sizes = sizes
        self.window, self.pool = JacobiWindow(sizes, prompt), NgramPool(sizes.guesses)
        self._num_read = self._num_tokens = 0
        self._asked: list[int] = []  # nodes of the window's last row in the last proposal
        self._num_proposed = 0
        self._outputs: list[int] = []
        self._read(prompt)
        self._num_tokens = len(prompt)

    def propose(self, row: DraftRow) -> Proposal:
        self._read(row.tokens)
        for ngram in self.window.advance(len(row.tokens) - self._num_tokens, self._outputs):
            self.pool.add(ngram)
        self._num_tokens, self._outputs = len(row.tokens), []
        return Proposal.chosen(self._tree(row.tokens[-1], row.budget))

    def observe(self, seen: RowStep) -> None:
        if self._asked and len(seen.proposal.tree) == self._num_proposed:
            logits_CV = seen.logits_NV[[node + 1 for node in self._asked]]
            # For a few rows numpy is an order of magnitude quicker than torch's threads.
            self._outputs = logits_CV.numpy(force=True).argmax(1).tolist()

    def _read(self, tokens: Sequence[int]) -> None:
        """Take the text's own n-grams into the pool."""
        size = self._sizes.ngram_size
        for end in range(max(self._num_read + 1, size), len(tokens) + 1):
            self.pool.add(tokens[end - size : end])
        self._num_read = len(tokens)

    def _tree(self, last_token: int, budget: int) -> TokenTree:
        """Guesses first, so that one is followed where a guess and the window agree."""
        rows, sizes = self.window.rows, self._sizes
        room = max(sizes.num_rows, budget - sizes.window * len(rows))
        guesses = TokenTree.of_paths(self.pool.after(last_token), min(budget, room))
        tokens, parents = [*guesses.tokens], [*guesses.parents]
        num_columns = min(sizes.window, (budget - len(tokens)) // len(rows))
        above: list[int] = []
        for r, row in enumerate(rows):
            level: list[int] = []
            for c, token in enumerate(row[:num_columns]):
                in_chain = level[-1] if level else ROOT
                level.append(len(tokens))
                tokens.append(token)
                parents.append(above[c] if r else in_chain)
            above = level
        self._asked, self._num_proposed = above, len(tokens)
        return TokenTree(tuple(tokens), tuple(parents))


class LookaheadDrafter(BaseDrafter):
    """See the module docstring."""

    def __init__(self, sizes: LookaheadSizes) -> None:
        self._sizes = sizes
        self._requests: dict[int, _Request] = {}

    def begin(self, row: DraftRow) -> None:
        self._requests[row.request_id] = _Request(self._sizes, row.tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [
            self._requests[row.request_id].propose(row) if row.budget else NO_PROPOSAL
            for row in rows
        ]

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            self._requests[seen.request_id].observe(seen)

    def end(self, request_id: int) -> None:
        del self._requests[request_id]


def _build(context: DrafterContext) -> LookaheadDrafter:
    least = {"ngram_size": 2}  # an n-gram has a first token and at least one more
    sizes = {
        name: checked_int(name, value, least.get(name, 1))
        for name, value in context.options.items()
    }
    return LookaheadDrafter(LookaheadSizes(**sizes))


DRAFTER = DrafterSpec(
    build=_build,
    summary="guesses several positions ahead in the same forward (Jacobi window, n-gram pool)",
    options={
        "window": "positions guessed ahead (4)",
        "ngram_size": "length of the n-grams, one more than the window's rows (3)",
        "guesses": "n-grams verified a step (3)",
    },
    num_draft_tokens=LookaheadSizes().num_nodes,
    needs=("tree_attention",),
)
