"""Drafts in stages: what is known of a text guesses for a model, and the model drafts.

A forward of the model that drafts yields its own next token, and those behind the guesses that it
takes itself. One of two or three tokens takes it hardly longer than one of one, so guesses that are
right now and then make drafting faster. The drafted tokens, and with coupling "drawn" their
distributions, are the model's in any case (cascades: Z. Chen et al., arXiv 2312.11462; staged:
B. Spector and C. Re, arXiv 2308.04623).

A model may end a chain where it doubts it: where the chance of the chain, by the distances of the
draws from the next best tokens, is not worth another forward (the fallback policy of Kim et al.,
arXiv 2302.07863). The tokens so far stay in the draft, so nothing is biased.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import mean

from torch import Tensor

from foredraft.core.choices import Choice, DrawKey, DrawnChoices, SharedChoices, chance_alike
from foredraft.core.cost import (
    USUAL_PRICES,
    Prices,
    chain_speedup,
    interpolated,
    price_of,
    relative,
)
from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.noise import gumbel_argmax
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.drafters.base import BaseDrafter, ContinuingDrafter, DraftRow
from foredraft.drafters.model.chain import ChainDraft
from foredraft.drafters.text.per_request import GuidedDrafter
from foredraft.drafters.text.table import NgramTable, new_text
from foredraft.models.base import ScoreRow, Scores, Shortlist

MOST_GUESSES = 3
"""In a forward of the model."""
GUESSED = 0.5
"""How often a guess is right, roughly."""
_WORTH = 0.6
"""Plain steps that a chain's next token is worth where all before it are accepted: its own chance,
over the tokens that a plain step's time commits with drafts. Fitted to replayed replies, on which
0.5 to 0.7 differ by 1 %."""
_LEAST_CHANCE = 0.01


@dataclass(frozen=True)
class Fit:
    """How well a model drafts for its target on this machine.

    Attributes:
        greedy: the chance that the target takes its token at temperature 0.
        sampled: the same chance at temperature 1, with the same noise.
        shares: time of a forward of the model with one token, two and so on, in forwards of the
            target with one.
        node_share: the time that a node adds to a forward of the target, in the same unit.
    """

    greedy: float
    sampled: float
    shares: tuple[float, ...]
    node_share: float = USUAL_PRICES[1] - USUAL_PRICES[0]

    def token_share(self, guessed: float) -> float:
        """Time of a drafted token, in plain steps, with guesses right by this chance."""
        tokens = accumulate(guessed**depth for depth in range(len(self.shares)))
        return min(share / count for share, count in zip(self.shares, tokens, strict=True))

    def guess_prices(self, num_rows: int) -> Prices:
        """Of a row's guesses in a forward of the model for so many rows that guess as much."""
        times, most = tuple(enumerate(self.shares, start=1)), num_rows * (MOST_GUESSES + 1)
        return relative([interpolated(times, n) for n in range(num_rows, most + 1, num_rows)])

    @property
    def speedup(self) -> float:
        """Roughly, over plain decoding: the mean of both temperatures."""
        share, prices = self.token_share(GUESSED), (1.0, 1.0 + self.node_share)
        chances = (self.greedy, self.sampled)
        return mean(chain_speedup(chance, share, prices) for chance in chances)


class StagedDrafter(BaseDrafter, ABC):
    """See the module docstring. All rows that still draft share each forward of the model.

    Args:
        fit: how well the model drafts.
        guesser: guesses for it; None: no token is guessed.
        vocab_size: of the target: other tokens are not drafted.
        stops: whether it ends chains that it doubts.
    """

    def __init__(
        self,
        fit: Fit,
        guesser: ContinuingDrafter | None,
        vocab_size: int,
        stops: bool = False,
    ) -> None:
        chances = (fit.greedy, fit.sampled)
        share = fit.token_share(GUESSED) if guesser else fit.shares[0]
        self.traits = DrafterTraits(
            promise=chances,
            round_share=share,
            spare=MOST_GUESSES if guesser else 0,
            stops=stops,
        )
        self._fit, self._token_share, self._guesser = fit, share, guesser
        self._vocab_size = vocab_size

    @abstractmethod
    def _has_room(self, row: DraftRow) -> bool:
        """Whether the model can draft for a row now."""

    @abstractmethod
    def _next_read(self, chain: ChainDraft, guess: TokenTree) -> ScoreRow:
        """The model's row: unread tokens of the text and the chain, then a tree of guesses."""

    @abstractmethod
    def _score(self, chains: Sequence[ChainDraft], reads: Sequence[ScoreRow]) -> Scores:
        """A forward of the model."""

    def _keep(self, chain: ChainDraft, read: ScoreRow, path: Sequence[int]) -> None:
        """The chain has taken the guesses of this path; does nothing if not overridden."""

    def begin(self, row: DraftRow) -> None:
        if self._guesser:
            self._guesser.begin(row)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        able = [row for row in rows if row.budget and self._has_room(row)]
        chains = {row.request_id: ChainDraft(row) for row in able}
        alike = list(chains.values())
        while alike:
            prices = self._fit.guess_prices(len(alike))
            guesses = [(chain, self._guess(chain, prices)) for chain in alike]
            alike = self._extended([each for each in guesses if self._is_worth_more(*each)])
        drafts = {request_id: self._built(chain) for request_id, chain in chains.items()}
        return [drafts.get(row.request_id, NOT_READY) for row in rows]

    def observe(self, observations: Sequence[RowStep]) -> None:
        if self._guesser:
            self._guesser.observe(observations)

    def end(self, request_id: int) -> None:
        if self._guesser:
            self._guesser.end(request_id)

    def _guess(self, chain: ChainDraft, prices: Prices) -> TokenTree:
        """A chain of guesses: a forward yields one token in any case, and these behind it."""
        most = min(chain.num_left - 1, MOST_GUESSES)
        if self._guesser is None or not most:
            return EMPTY_TREE
        row = replace(chain.row.chosen(most), prices=prices)
        tree = self._guesser.propose_after(row, chain.tokens).tree
        if not tree.is_chain:
            tree = TokenTree.chain(tree.tokens[node] for node in max(tree.paths, key=len))
        return tree

    def _is_worth_more(self, chain: ChainDraft, guess: TokenTree) -> bool:
        """Whether another forward of the model pays, and the nodes that come of it."""
        prices, before = chain.row.prices, len(chain.tokens)
        if not before or not self.traits.stops:
            return True
        if chain.row.params.coupling == "drawn":  # drawn texts repeat, whatever the machine's times
            return True
        tokens = sum(GUESSED**depth for depth in range(1 + len(guess)))
        rise = price_of(prices, before + tokens) - price_of(prices, before)
        # The fit was measured beside whatever ran then: it counts until steps show a recent time.
        taken = chain.row.token_share
        share = self._fit.shares[len(guess)] if taken is None else tokens * taken
        return _WORTH * chain.chance * tokens >= share + rise

    def _built(self, chain: ChainDraft) -> Proposal:
        """The chain, and guesses behind it where they are worth what their nodes cost."""
        row, proposal = chain.row, chain.build()
        may_grow = row.spare and row.params.coupling != "drawn"
        if self._guesser is None or not may_grow or not chain.goes_on or chain.num_left:
            return proposal
        share = self._token_share if row.token_share is None else row.token_share
        prices = _spare_prices(row.prices, len(chain.tokens), share, chain.chance)
        row = replace(row, budget=row.spare, prices=prices)
        guess = self._guesser.propose_after(row, chain.tokens).tree
        if not guess.tokens:
            return proposal
        return Proposal.chosen(proposal.tree.hang(guess, len(chain.tokens) - 1))

    def _extended(self, guesses: Sequence[tuple[ChainDraft, TokenTree]]) -> list[ChainDraft]:
        """A forward of the model: each chain grows by a token, and by as many as were guessed.

        Returns:
            Chains that may grow further.
        """
        if not guesses:
            return []
        chains = [chain for chain, _ in guesses]
        reads = [self._next_read(*each) for each in guesses]
        scores = self._score(chains, reads)
        for chain, read, span in zip(chains, reads, scores.row_wanted, strict=True):
            known = scores if read.draw is not None else replace(scores, drawn=None)
            shortlist = read.shortlist if scores.is_short else None
            path = chain.follow(read.tree, partial(self._take, chain, known, span, shortlist))
            self._keep(chain, read, path)
        return [chain for chain in chains if chain.num_left]

    def _take(
        self,
        chain: ChainDraft,
        scores: Scores,
        span: range,
        shortlist: Shortlist | None,
        ahead: int,
    ) -> int | None:
        """Add the token after the first of the chain's own that was read, or after one behind it.

        A law of scaled logits alone was drawn from already.
        """
        row, key, logits_V = chain.row, chain.draw_key, scores.logits_NV[span[ahead]]
        chance = None
        if scores.drawn is not None and key is not None:
            law = scores.drawn[span[ahead]]
            drawn, chance = (None, None) if law is None else (law.drawn, law.chance)
            token = drawn if drawn is not None and drawn < self._vocab_size else None
        elif row.rules.filters_only and not isinstance(row.choices, DrawnChoices):
            logits_V = fitted(logits_V, self._vocab_size, shortlist)
            token, key = _filtered_draw(row, row.choices, logits_V, chain.tokens)
        else:
            return chain.extend(fitted(logits_V, self._vocab_size, shortlist))
        matters = self.traits.stops and chain.num_left > 1 and logits_V.is_cpu
        if token is None or key is None or not matters:
            return chain.take(token)
        return chain.take(Choice(token, chance or chance_alike(logits_V, key)))


def fitted(logits_V: Tensor, vocab_size: int, shortlist: Shortlist | None = None) -> Tensor:
    """Logits of as many tokens: those that the model lacks cannot occur.

    Models of one tokenizer have rows for ids that it never gives, more or fewer of them.

    Args:
        shortlist: the logits are those of its tokens; None: of the first ones.
    """
    missing = vocab_size - len(logits_V)
    if not missing:
        return logits_V
    if missing < 0:
        return logits_V[:vocab_size]
    num_first, others = shortlist or Shortlist(len(logits_V))
    fitted_V = logits_V.new_full((vocab_size,), -math.inf)
    fitted_V[:num_first] = logits_V[:num_first]
    fitted_V[[*others]] = logits_V[num_first : num_first + len(others)]
    return fitted_V


def _filtered_draw(
    row: DraftRow, choices: SharedChoices, logits_V: Tensor, drafted: Sequence[int]
) -> tuple[int | None, DrawKey | None]:
    """The token that the target would draw from these logits, and the key that draws it."""
    try:
        law = row.rules.law(logits_V, row.tokens, drafted)
    except NonFiniteScoresError:
        return None, None
    key = choices.draw_key(len(drafted), law.scale or 0.0)
    if law.scale is None or key is None:
        return law.token, key
    return gumbel_argmax(law.given_V, key.seed, key.position, law.scale, law.cut), key


def _spare_prices(prices: Prices, num_drafted: int, token_share: float, chance: float) -> Prices:
    """Of further nodes, for what a step with so many drafted tokens takes and commits.

    Args:
        chance: that all of these are accepted.
    """
    before = price_of(prices, num_drafted)
    each = (before + num_drafted * token_share) / (1 + num_drafted)
    rises = (price_of(prices, num_drafted + n) - before for n in range(MOST_GUESSES + 1))
    return relative([each + rise / max(chance, _LEAST_CHANCE) for rise in rises])


def text_guesser(table: NgramTable | None) -> GuidedDrafter:
    """Guesses what a request's text, and a table of the target's if there is one, say."""
    return GuidedDrafter(partial(new_text, table=table), tree=False)
