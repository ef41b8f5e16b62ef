"""The drafter seam: everything that guesses ahead implements this and nothing more.

A drafter is one file, here or in the folder of its kind, with a class that implements `Drafter` and
is named by ``DRAFTER`` at the end of the file; the file's name is its registry key. One that needs
helpers of its own is a folder whose ``__init__`` names it. See docs/extend/add-a-drafter.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from foredraft.cache.layers import StoredLayers
from foredraft.core.choices import (
    Choice,
    DraftChoices,
    DrawnChoices,
    SharedChoices,
)
from foredraft.core.cost import USUAL_PRICES, Prices
from foredraft.core.errors import NoTokenError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Draft, Proposal
from foredraft.core.record import RowStep
from foredraft.core.rules import Rules
from foredraft.core.traits import DrafterTraits
from foredraft.models.base import Source


@dataclass(frozen=True)
class DraftRow:
    """A request as its drafter sees it, when it begins and whenever it drafts.

    Attributes:
        request_id: unchanged from `Drafter.begin` to `Drafter.end`.
        tokens: all committed tokens, prompt included. Do not change it.
        params: the distribution the user asked for, and the rest of the request but for its seed.
        budget: the most nodes to draft; 0 asks for an empty proposal.
        rules: rules of the request, applied to logits before a token is chosen or drawn.
        new_choices: makes `choices`.
        prices: prices of nodes in this step, for drafters that weigh them; see `Prices`.
        slot: the row's slot in the target's cache, for drafters that run the target's own layers.
        tenant: owner of the request: no text of one tenant may draft for another.
        num_cached: how many of the tokens the target's cache holds. The drafter does not
            observe the tokens that are cached when it begins.
        source: input of an encoder-decoder's encoder; None for other models.
        stop_ids: tokens that end the request: chosen tokens after one are useless.
        spare: nodes beyond the budget that a drafter may add: see `DrafterTraits.spare`.
        token_share: recent time of a token of its drafts, in plain steps; None: not known.
        shares: whether the drafter's state of this text may serve the tenant's other requests.
    """

    request_id: int
    tokens: Sequence[int]
    params: SamplingParams
    budget: int
    rules: Rules
    new_choices: Callable[[], DraftChoices]
    prices: Prices = USUAL_PRICES
    slot: int = -1
    tenant: str | None = None
    num_cached: int = 0
    source: Source | None = None
    stop_ids: frozenset[int] = frozenset()
    spare: int = 0
    shares: bool = True
    token_share: float | None = None

    @classmethod
    def of(
        cls,
        request_id: int,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        budget: int = 0,
        seed: int = 0,
        *,
        rules: Rules | None = None,
        **more: Any,
    ) -> DraftRow:
        """A row of a request with these tokens.

        Args:
            more: further attributes.
        """
        params = params or SamplingParams()
        rules = rules or params
        choices = partial(draft_choices, params, seed, len(tokens))
        return cls(request_id, tokens, params, budget, rules, choices, **more)

    @cached_property
    def choices(self) -> DraftChoices:
        """Random source of the row's tokens, chosen or drawn by the request's coupling.

        `draft` tells which it is.
        """
        return self.new_choices()

    @property
    def context(self) -> Sequence[int]:
        """All that is known of the text: its source, where it has one, and its tokens."""
        return self.tokens if self.source is None else (*self.source.token_ids, *self.tokens)

    def draft(self) -> Draft:
        """An empty draft that takes logits and chooses or draws, as the row's coupling asks."""
        return Draft(self.choices, self.rules, self.tokens)

    def choose(self, logits_V: Tensor, drafted: Sequence[int] = (), count: int = 1) -> list[Choice]:
        """The tokens that the target will likeliest draw after ``drafted``, likeliest first.

        Empty where the rules leave no token. For seeded requests; drawn ones have `draft`.

        Args:
            logits_V: the drafter's own of the position.
        """
        assert not isinstance(self.choices, DrawnChoices)
        try:
            law = self.rules.law(logits_V, self.tokens, drafted)
        except NoTokenError:  # such as after the end of a grammar
            return []
        return self.choices.best(law, len(drafted), count)

    def without_noise(self, budget: int) -> DraftRow:
        """The same row for a drafter whose tokens go on to another drafter, not to the target."""
        params = replace(self.params, coupling="seeded")
        silent = partial(SharedChoices, None, 0, 0.0)
        return replace(self, params=params, new_choices=silent, budget=budget)

    def chosen(self, budget: int) -> DraftRow:
        """The same row for a stage of a drafter, whose tokens are guesses and must be chosen."""
        if self.params.coupling == "seeded":
            return replace(self, budget=budget)
        return self.without_noise(budget)

    def weigh(self, candidates: Sequence[Choice], depth: int) -> list[Choice]:
        """Known candidates with their chances given the row's noise; see `SharedChoices`.

        For drafters that have counts and no logits. Where there is no shared noise (drawn
        requests, temperature 0) the candidates come back as they are.

        Args:
            depth: how many drafted tokens lie between the committed ones and the candidates.
        """
        if isinstance(self.choices, DrawnChoices):
            return list(candidates)
        return self.choices.weigh(candidates, depth)


def draft_choices(params: SamplingParams, seed: int, num_tokens: int) -> DraftChoices:
    """The random source of a drafter, by the request's coupling."""
    if params.coupling == "drawn":
        return DrawnChoices(seed, num_tokens)
    return SharedChoices(seed, num_tokens, params.temperature)


class Drafter(Protocol):
    """Guesses ahead for a batch of rows.

    A drafter can be wrong, slow or useless without changing a single token of the output: every
    step commits at least one token without it, and chosen tokens count only where the target draws
    the same. For drawn tokens (`coupling="drawn"`) this rests on one more thing: that they really
    are drawn from the probabilities beside them, with the numbers that ``row.choices`` hands out.
    `DraftRow.draft` sees to that; a drafter that goes round them can bias
    drawn texts, and no check of a single draft can tell (docs/understand/verify.md). After
    `observe`, or at the next `propose` at the latest, nothing of a rejected branch may be left in
    its state. A fault of its own costs it the request that it happened in: `end` follows, also
    after a `begin` that failed.

    Attributes:
        taps: hidden layers of the target whose outputs `observe` wants; usually none. They come
            with steps that may draft, so that plain steps pay nothing.
        layers: the cache layers in which it keeps something for each token of the text (see
            `Cache.add_layers`); usually none. With any, taps come with every step, chunks of
            prompts included, and `observe` writes the entries from ``context`` to ``end``, or keeps
            the inputs to write them until they are needed, or until `end`. A text whose entries
            have a gap cannot be followed further (but see `DrafterTraits.skips_gaps`).
        traits: further properties for the engine and controllers; usually the defaults.
    """

    @property
    def taps(self) -> Sequence[int]: ...

    @property
    def layers(self) -> Sequence[StoredLayers]: ...

    @property
    def traits(self) -> DrafterTraits: ...

    def begin(self, row: DraftRow) -> None:
        """A request starts; nothing is to be drafted yet."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        """One proposal a row, each of at most ``row.budget`` nodes.

        `NOT_READY` for a row that it cannot draft for yet: it does not count as a draft. After
        eight such answers in a row, the drafter is detached from that request.
        """

    def observe(self, observations: Sequence[RowStep]) -> None:
        """A step has been committed, or chunks of prompts have been read."""

    def end(self, request_id: int) -> None:
        """A request is over; forget it."""


class ContinuingDrafter(Drafter, Protocol):
    """A drafter whose traits say that it ``continues``: rules that force tokens, and other drafters
    (see `foredraft.drafters.model.staged`), build on it."""

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        """Draft what follows the row's tokens and ``draft``: chosen tokens, ``row.budget`` at most.

        ``draft`` is a guess that may be rejected: nothing of it may be left in the drafter's state.
        """


class Reading(NamedTuple):
    """Tokens of a text: read now, and still to be read before it can be drafted for."""

    num_read: int = 0
    num_left: int = 0


class ReadingDrafter(Drafter, Protocol):
    """A drafter whose traits say that it ``reads``: with a model of its own, it reads each text."""

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> Sequence[Reading]:
        """Read on in the texts of rows, before `propose` is asked for those that may draft.

        Args:
            rows: rows that it follows. The target need not have read their prompts.
            most_tokens: limit of the tokens read for all rows together.
        """


class BaseDrafter:
    """Do-nothing defaults for every part of `Drafter` but `propose`."""

    taps: Sequence[int] = ()
    layers: Sequence[StoredLayers] = ()
    traits = DrafterTraits()

    def begin(self, row: DraftRow) -> None:
        pass

    def observe(self, observations: Sequence[RowStep]) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass
