"""The stages of a cascade, and what every cascade does with them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from foredraft.core.errors import ConfigError, unknown
from foredraft.core.proposal import NO_PROPOSAL, NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import (
    ContinuingDrafter,
    Drafter,
    DraftRow,
    Observation,
    ReadingDrafter,
)
from foredraft.drafters.model.chain import ChainDraft, DraftCache
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import ScoreRow, Target


@dataclass(frozen=True)
class Stage:
    """A drafter in a cascade.

    Attributes:
        limit: most tokens to draft before it hands over to the next stage; None: no limit.
    """

    name: str
    drafter: Drafter
    limit: int | None = None

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        return self.drafter.propose([self._limited(row) for row in rows])

    def propose_after(self, row: DraftRow, draft: Sequence[int]) -> Proposal:
        """Nothing, where the drafter cannot go on from a draft."""
        if not self.drafter.traits.continues:
            return NO_PROPOSAL
        drafter = cast(ContinuingDrafter, self.drafter)
        return drafter.propose_after(self._limited(row), draft)

    def hands_over(self, num_drafted: int) -> bool:
        return self.limit is not None and num_drafted >= self.limit

    def _limited(self, row: DraftRow) -> DraftRow:
        return row if self.limit is None else replace(row, budget=min(row.budget, self.limit))


class Cascade:
    """What both kinds share: every stage sees every request and every step.

    Args:
        stages: the cheapest first.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        drafters = [stage.drafter for stage in stages]
        self.taps: Sequence[int] = sorted({tap for drafter in drafters for tap in drafter.taps})
        self.layers = tuple(layers for drafter in drafters for layers in drafter.layers)
        skips_gaps = all(drafter.traits.skips_gaps for drafter in drafters if drafter.layers)
        self.traits = DrafterTraits(skips_gaps=skips_gaps)

    def begin(self, row: DraftRow) -> None:
        for stage in self._stages:
            stage.drafter.begin(row)

    def observe(self, observations: Sequence[Observation]) -> None:
        for stage in self._stages:
            stage.drafter.observe(observations)

    def end(self, request_id: int) -> None:
        with contextlib.ExitStack() as ends:  # all of them, whatever one of them raises
            for stage in self._stages:
                ends.callback(stage.drafter.end, request_id)


class VerticalCascade(Cascade):
    """Cheap stages draft for a draft model. Rows that still draft share a forward of it.

    Args:
        guessers: stages that draft for the draft model, the cheapest first.
        model: the draft model.
    """

    def __init__(self, guessers: Sequence[Stage], model: Target) -> None:
        super().__init__(guessers)
        self.traits = replace(self.traits, reads=True)
        self._model, self._cache = model, DraftCache(model)

    def begin(self, row: DraftRow) -> None:
        super().begin(row)
        self._cache.begin(row)

    def end(self, request_id: int) -> None:
        try:
            super().end(request_id)
        finally:
            self._cache.end(request_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        chains = [ChainDraft(row) for row in rows]
        active = able = [chain for chain in chains if chain.num_left and self._has_room(chain.row)]
        while active:
            self._forward(active, self._guess(active))
            active = [chain for chain in active if chain.num_left]
        return [chain.build() if chain in able else NOT_READY for chain in chains]

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[int]:
        return self._cache.read(rows, most_tokens)

    def _has_room(self, row: DraftRow) -> bool:
        return self._cache.has_room(row, row.budget)

    def _guess(self, chains: Sequence[ChainDraft]) -> dict[int, TokenTree]:
        """What the draft model may say next, by request.

        A forward always yields one token of the draft model's own, so one fewer is guessed.
        """
        found: dict[int, TokenTree] = {}
        for stage in self._stages:
            asking = [c for c in chains if c.num_left > 1 and c.row.request_id not in found]
            for chain, offer in zip(asking, _offers(stage, asking), strict=True):
                if offer.tree.tokens:
                    found[chain.row.request_id] = self._fitted(offer.tree)
        return found

    def _fitted(self, tree: TokenTree) -> TokenTree:
        """The tree, or its first branch where the draft model has no tree attention."""
        if tree.is_chain or self._model.capabilities.tree_attention:
            return tree
        branch = max(tree.paths, key=len)
        return TokenTree.chain(tree.tokens[node] for node in branch)

    def _forward(self, chains: Sequence[ChainDraft], guesses: Mapping[int, TokenTree]) -> None:
        """One forward of the draft model: each chain grows by one token at least."""
        reads = [self._read(chain, guesses) for chain in chains]
        scores = self._model.score(reads)
        for chain, read, score in zip(chains, reads, scores, strict=True):
            # Tokens, and with coupling "drawn" their laws, are the draft model's in any case.
            path = chain.follow(read.tree, partial(_extend, chain, score.logits_NV))
            self._cache.keep(chain.row.request_id, read.pending, read.tree, path)

    def _read(self, chain: ChainDraft, guesses: Mapping[int, TokenTree]) -> ScoreRow:
        row, request_id = chain.row, chain.row.request_id
        pending = chain.tokens[-1:] or self._cache.catch_up(row)
        tree = guesses.get(request_id, EMPTY_TREE)
        return ScoreRow(self._cache.slot(request_id), pending, tree, source=row.source)


def _offers(stage: Stage, chains: Sequence[ChainDraft]) -> list[Proposal]:
    """What a stage offers after each chain, or after the text where the chain is empty."""
    rows = [chain.row.chosen(chain.num_left - 1) for chain in chains]
    starting = [row for row, chain in zip(rows, chains, strict=True) if not chain.tokens]
    first = iter(stage.propose(starting) if starting else ())
    return [
        stage.propose_after(row, chain.tokens) if chain.tokens else next(first)
        for row, chain in zip(rows, chains, strict=True)
    ]


def _extend(chain: ChainDraft, logits_NV: Tensor, place: int) -> int | None:
    return chain.extend(logits_NV[place])


@dataclass
class _Relay:
    """One row's draft, handed from stage to stage.

    Attributes:
        waits: whether a stage cannot draft for the row yet.
    """

    row: DraftRow
    proposal: Proposal = NO_PROPOSAL
    authors: list[Stage] = field(default_factory=list)
    waits: bool = False

    @property
    def is_handed_over(self) -> bool:
        """Whether the last stage reached its limit, and another can go on."""
        if not self.authors or self.proposal.is_drawn or not self.proposal.tree.is_chain:
            return False
        last = self.authors[-1]
        return last.hands_over(self.authors.count(last)) and len(self.authors) < self.row.budget

    def take(self, offer: Proposal, stage: Stage) -> None:
        """Add what ``stage`` offers, behind what is there."""
        self.waits = self.waits or offer is NOT_READY
        if offer.tree.tokens:
            joined = Proposal.chosen(
                self.proposal.tree.hang(offer.tree, len(self.proposal.tree) - 1)
            )
            self.proposal = joined if self.authors else offer
            self.authors += [stage] * len(offer.tree)

    def build(self) -> Proposal:
        """What the stages drafted, with their names."""
        return replace(self.proposal, authors=tuple(stage.name for stage in self.authors))


_MOST_WAITS = 4
"""Of a request: a stage that is late oftener, such as a model without room, never comes."""


class HorizontalCascade(Cascade):
    """See `foredraft.drafters.model.cascade`.

    Where nothing was drafted and a stage waits, which might have drafted, the cascade waits, too.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        readers = [stage.drafter for stage in stages if stage.drafter.traits.reads]
        self._readers = [cast(ReadingDrafter, drafter) for drafter in readers]
        self.traits = replace(self.traits, reads=bool(readers))
        self._num_waits: Counter[int] = Counter()

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[int]:
        """All of them read; a row waits until each of them can draft."""
        share = most_tokens // len(self._readers)
        unread = [reader.read(rows, share) for reader in self._readers]
        return [max(each) for each in zip(*unread, strict=True)]

    def end(self, request_id: int) -> None:
        self._num_waits.pop(request_id, None)
        super().end(request_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        relays = [_Relay(row) for row in rows]
        for stage in self._stages:
            handed_over = [relay for relay in relays if relay.is_handed_over]
            empty = [relay for relay in relays if relay.row.budget and not relay.authors]
            if empty:
                offers = stage.propose([relay.row for relay in empty])
                for relay, offer in zip(empty, offers, strict=True):
                    relay.take(offer, stage)
            for relay in handed_over:
                tokens = relay.proposal.tree.tokens
                rest = relay.row.chosen(relay.row.budget - len(tokens))
                relay.take(stage.propose_after(rest, tokens), stage)
        return [NOT_READY if self._waits(relay) else relay.build() for relay in relays]

    def _waits(self, relay: _Relay) -> bool:
        request_id = relay.row.request_id
        self._num_waits[request_id] += relay.waits
        return relay.waits and not relay.authors and self._num_waits[request_id] <= _MOST_WAITS


_MODES = ("vertical", "horizontal")


def _parse_stages(text: Any) -> list[tuple[str, int | None]]:
    """Names and limits from text such as ``"draft_model:2,ngram"``."""
    found: list[tuple[str, int | None]] = []
    for part in str(text).replace(" ", "").split(","):
        name, colon, limit = part.partition(":")
        name = name.replace("-", "_")
        drafter_spec(name)  # says which name is nearest when it is unknown
        if name == "cascade" or name in (known for known, _ in found):
            raise ConfigError(f"stages is {text!r}; {name!r} cannot be a stage (again)")
        if colon and (not limit.isdecimal() or int(limit) < 1):
            raise ConfigError(f"stages is {text!r}; the limit in {part!r} must be 1 or more")
        found.append((name, int(limit) if colon else None))
    if len(found) < 2:
        raise ConfigError(f"stages is {text!r}; a cascade has two or more, such as ngram,suffix")
    return found


_WITHOUT_MODEL = "suffix,token_recycling"
_WITH_MODEL = "ngram,draft_model"


def _uses_prediction(options: Mapping[str, Any]) -> bool:
    """Whether one of the stages does."""
    stages = _parse_stages(options.get("stages", _WITHOUT_MODEL))
    return any(drafter_spec(name).uses_prediction({}) for name, _ in stages)


def _build(context: DrafterContext) -> Drafter:
    has_model = context.draft_model is not None
    default = _WITH_MODEL if has_model else _WITHOUT_MODEL
    parts = _parse_stages(context.options.get("stages", default))
    last_is_model = parts[-1][0] == "draft_model"
    mode = str(context.options.get("mode", _MODES[not last_is_model]))
    if mode not in _MODES:
        raise unknown("mode of a cascade", mode, _MODES)
    nested = replace(context, options={})
    stages = [Stage(name, build_drafter(name, nested), limit) for name, limit in parts]
    if has_model and "draft_model" not in (name for name, _ in parts):
        raise ConfigError("a draft model was given, and 'draft_model' is not among the stages")
    if mode == "horizontal":
        return HorizontalCascade(stages)
    if not last_is_model or parts[-1][1] is not None:
        raise ConfigError(
            "the last stage of a vertical cascade is 'draft_model' without a limit (the number of "
            f"draft tokens is its limit), not {parts[-1][0]!r}; or use mode 'horizontal'"
        )
    assert context.draft_model is not None  # the stage was built with it
    return VerticalCascade(stages[:-1], context.draft_model)


DRAFTER = DrafterSpec(
    build=_build,
    summary="cheap drafters for a draft model, or drafters that take turns",
    options={
        "stages": "drafters, cheapest first; NAME:N hands over after N tokens",
        "mode": "vertical: they draft for the last one; horizontal: the first that has something",
    },
    num_draft_tokens=8,
    draft_model="optional",
    reads_prediction=_uses_prediction,
)
