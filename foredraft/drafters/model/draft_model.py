"""Two-model speculation: a smaller model of the same vocabulary drafts a chain or a tree.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). With coupling "seeded" it
proposes its most likely tokens (chosen); with "drawn" it samples with the request's own
parameters and hands the distribution along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.cache.base import NO_MEMORY
from foredraft.core.checks import checked_flag, checked_int
from foredraft.core.choices import LIKELIEST
from foredraft.core.errors import CapabilityError, ConfigError, VocabularyMismatchError, unknown
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, ContinuingDrafter, Drafter, DraftRow, Reading
from foredraft.drafters.growth import (
    GROWTH_OPTIONS,
    RANK_ACCEPTANCE,
    Growth,
    GrowthLimits,
    PlannedGrowth,
    growth_limits,
    planned_parents,
)
from foredraft.drafters.model.chain import ChainDraft, DraftCache, read_by
from foredraft.drafters.model.shortlist import FREQUENT, Shortlists
from foredraft.drafters.model.staged import MOST_GUESSES, Fit, StagedDrafter, fitted, text_guesser
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.drafters.text.table import found_table
from foredraft.kernels.build import describe_instructions
from foredraft.models.base import ScoreRow, Scores, Shortlist, Target, read
from foredraft.models.files.kept import recipe_of, this_week
from foredraft.system.machine import cpu_name

_log = logging.getLogger("foredraft")


_USUAL_FIT = Fit(0.75, 0.7, (0.25, 0.26, 0.28, 0.3))
"""Of a small model of the target's family: it is right less often in chats, and oftener in code."""
_NUM_TIMED, _CONTEXT, _MOST_READ = 7, 128, MOST_GUESSES + 1


class DraftModelDrafter(StagedDrafter):
    """Drafts chains.

    Args:
        model: the draft model, with a cache of its own.
        vocab_size: of the target; None: the draft model's own.
        num_frequent: see `Shortlists`.
    """

    def __init__(
        self,
        model: Target,
        fit: Fit = _USUAL_FIT,
        guesser: ContinuingDrafter | None = None,
        vocab_size: int | None = None,
        stops: bool = False,
        num_frequent: int = 0,
    ) -> None:
        vocab_size = vocab_size or model.vocab_size
        super().__init__(fit, guesser, vocab_size, stops)
        # How often it is right is not known yet: what is expected of a pair stands in for it.
        self.traits = replace(self.traits, reads=True, promise=None)
        self._model, self._cache = model, DraftCache(model)
        self._shortlists = Shortlists(num_frequent)

    def begin(self, row: DraftRow) -> None:
        self._cache.begin(row)
        super().begin(row)

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[Reading]:
        return self._cache.read(rows, most_tokens)

    def end(self, request_id: int) -> None:
        try:
            super().end(request_id)
        finally:
            self._shortlists.end(request_id)
            self._cache.end(request_id)

    def _has_room(self, row: DraftRow) -> bool:
        return self._cache.has_room(row, row.budget)

    def _next_read(self, chain: ChainDraft, guess: TokenTree) -> ScoreRow:
        row = chain.row
        pending = chain.tokens[-1:] or self._cache.catch_up(row)
        slot = self._cache.slot(row.request_id)
        # Beside a row that may name all tokens others may, too: nothing drawn depends on that.
        is_drawn = row.params.coupling == "drawn"
        shortlist = None if is_drawn else self._shortlists.of(row.request_id, row.tokens)
        return ScoreRow(
            slot, pending, guess, draw=chain.draw_key, source=row.source, shortlist=shortlist
        )

    def _score(self, chains: Sequence[ChainDraft], reads: Sequence[ScoreRow]) -> Scores:
        return self._model.score(reads)

    def _keep(self, chain: ChainDraft, read: ScoreRow, path: Sequence[int]) -> None:
        self._cache.keep(chain.row.request_id, read.pending, read.tree, path)


def measured_fit(target: Target, model: Target, shortlist: Shortlist | None = None) -> Fit:
    """Forward times of a draft model over the target's, measured and cached for a week.

    Its acceptance rate is that of a usual pair until requests show their own: to measure it would
    delay the start.

    Args:
        shortlist: the tokens that it may draft; None: all.
    """
    own, others = target.capabilities.apart, model.capabilities.apart
    longest = _CONTEXT + _MOST_READ
    if own is None or others is None or min(own.max_context, others.max_context) < longest:
        return _USUAL_FIT

    def measure() -> Tensor:
        both = own.apart(longest), others.apart(longest)
        slots = [each.cache.allocate() for each in both]
        for each, slot in zip(both, slots, strict=True):
            read(each, slot, [i % each.vocab_size for i in range(_CONTEXT)])
        # The first round finds cold weights; one that a neighbour disturbed is not in the median.
        rounds = [_times(both, slots, shortlist) for _ in range(1 + _NUM_TIMED)][1:]
        shares = [[lap / target_s for lap in laps] for target_s, *laps in rounds]
        return torch.tensor([median(each) for each in zip(*shares, strict=True)])

    here = (cpu_name(), torch.get_num_threads(), describe_instructions(), this_week())
    recipe = recipe_of(own.identity, others.identity, shortlist, *here)
    try:
        shares = own.parts.kept("draft-model-shares", recipe, measure).tolist()
    except NO_MEMORY as error:
        _log.info("what a draft model takes is not measured: %s", error)
        return _USUAL_FIT
    return replace(_USUAL_FIT, shares=tuple(shares))


def _times(
    both: Sequence[Target], slots: Sequence[int], shortlist: Shortlist | None
) -> list[float]:
    """Seconds of a forward of the target with one token, and of the model's with one and more."""
    sizes = [(0, 1), *((1, 1 + more) for more in range(_MOST_READ))]
    laps = [time.perf_counter()]
    for which, size in sizes:
        vocab_size = both[which].vocab_size
        tree = TokenTree.chain([i % vocab_size for i in range(1, size)])
        row = ScoreRow(slots[which], [0], tree, draw=LIKELIEST, shortlist=shortlist)
        both[which].score([row])
        laps.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(laps)]


class DraftTreeDrafter(BaseDrafter):
    """Drafts trees, one depth a forward; rows that still grow share each.

    A forward reads the row's last token and the tree so far. Its entries stay in the cache
    uncommitted; when the next draft begins, those on the accepted path are kept.

    Args:
        model: the draft model, with a cache of its own.
        vocab_size: of the target; None: the draft model's own.
    """

    traits = DrafterTraits(learns=False, reads=True)

    def __init__(self, model: Target, limits: GrowthLimits, vocab_size: int | None = None) -> None:
        self._model, self._limits = model, limits
        self._vocab_size = vocab_size or model.vocab_size
        self._cache = DraftCache(model)
        self._last_reads: dict[int, ScoreRow] = {}

    def begin(self, row: DraftRow) -> None:
        self._cache.begin(row)

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[Reading]:
        for row in rows:
            self._keep_accepted(row)
        return self._cache.read(rows, most_tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        growths = {row.request_id: self._growth(row) for row in rows if self._has_room(row)}
        active = [row for row in rows if row.request_id in growths]
        for row in active:
            self._keep_accepted(row)
        while active:
            self._grow(active, [growths[row.request_id] for row in active])
            active = [row for row in active if growths[row.request_id].frontier]
        drafts = {request_id: growth.build() for request_id, growth in growths.items()}
        return [drafts.get(row.request_id, NOT_READY) for row in rows]

    def end(self, request_id: int) -> None:
        self._cache.end(request_id)
        self._last_reads.pop(request_id, None)

    def _has_room(self, row: DraftRow) -> bool:
        return row.budget > 0 and self._cache.has_room(row, self._most_scored(row))

    def _most_scored(self, row: DraftRow) -> int:
        return max(row.budget, self._limits.width * (self._limits.max_depth - 1))

    def _growth(self, row: DraftRow) -> Growth | PlannedGrowth:
        limits = self._limits
        if row.params.coupling == "drawn":
            ranks = RANK_ACCEPTANCE[: limits.branching]
            return PlannedGrowth(row, planned_parents(ranks, row.budget, limits.max_depth))
        return Growth(row, limits, room=self._most_scored(row), num_rounds=1)

    def _grow(self, rows: Sequence[DraftRow], growths: Sequence[Growth | PlannedGrowth]) -> None:
        reads = [
            ScoreRow(
                self._cache.slot(row.request_id),
                self._cache.catch_up(row),
                growth.scored,
                source=row.source,
            )
            for row, growth in zip(rows, growths, strict=True)
        ]
        scores = self._model.score(reads)
        for row, growth, done, score in zip(rows, growths, reads, scores, strict=True):
            if done.tree.tokens:
                self._last_reads[row.request_id] = done
            else:
                self._cache.keep(row.request_id, done.pending)
            asked_FV = score.logits_NV[[node + 1 for node in growth.frontier]]
            growth.extend([fitted(logits_V, self._vocab_size) for logits_V in asked_FV])

    def _keep_accepted(self, row: DraftRow) -> None:
        """Keep the entries of the last forward that turned out to be text."""
        last = self._last_reads.pop(row.request_id, None)
        if last is None:
            return
        start = self._model.cache.length(last.slot)
        after = start + len(last.pending)
        tokens = read_by(self._model, row)
        if tuple(tokens[start:after]) != tuple(last.pending):
            return
        node, path = ROOT, list[int]()
        for token in tokens[after:]:
            child = last.tree.child_with_token(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        self._cache.keep(row.request_id, last.pending, last.tree, path)


def _build(context: DrafterContext) -> Drafter:
    model = draft_model_of(context)
    shape = str(context.options.get("shape", "chain")).replace("_", "-")
    if shape not in _OPTIONS:
        raise unknown("shape", shape, _OPTIONS)
    others = sorted({*context.options} - {"shape", *_OPTIONS[shape]})
    if others:
        raise ConfigError(f"{others[0]} is of no use with shape {shape!r}")
    return (chain_drafter if shape == "chain" else _tree_drafter)(context, model)


def draft_model_of(context: DrafterContext) -> Target:
    """The draft model that was named.

    Raises:
        ConfigError: it is the target itself, or of another vocabulary.
    """
    model = context.draft_model
    assert model is not None  # the registry has checked that there is one
    _check_vocabularies(context, model)
    if model is context.target:
        raise ConfigError("the draft model is the target itself: load it a second time")
    return model


def _tree_drafter(context: DrafterContext, model: Target) -> Drafter:
    for role, each in (("target", context.target), ("draft model", model)):
        if not each.capabilities.tree_attention:
            raise CapabilityError(
                f"shape 'best-first' needs tree attention, which the {role} "
                f"({type(each).__name__}) does not offer; use shape 'chain'"
            )
    cost = measured_fit(context.target, model).shares[0]
    limits = growth_limits(context, GrowthLimits(round_cost=cost))
    return DraftTreeDrafter(model, limits, context.target.vocab_size)


def chain_drafter(
    context: DrafterContext, model: Target, guesser: ContinuingDrafter | None = None
) -> Drafter:
    """A drafter of chains by any model with the target's vocabulary.

    Args:
        context: its options, and the target.
        guesser: drafts for the model itself; None: copies of earlier text do, if options allow it.
    """
    # A target without parts passes no observations on, or runs where guesses save no time.
    guesses = checked_flag("guesses", context.options.get("guesses", True))
    if guesser is None and guesses and context.target.capabilities.parts is not None:
        guesser = text_guesser(found_table(context, "table"))
    num_frequent = _num_frequent(context.options, model)
    shortlist = Shortlist(num_frequent) if num_frequent else None
    fit = measured_fit(context.target, model, shortlist)
    vocab_size, stops = context.target.vocab_size, not context.is_fixed
    return DraftModelDrafter(model, fit, guesser, vocab_size, stops, num_frequent)


def _num_frequent(options: Mapping[str, Any], model: Target) -> int:
    """The size of the shortlist, without the text's own tokens; 0: every token may be drafted."""
    wanted = checked_int("draft_vocab_size", options.get("draft_vocab_size", FREQUENT), 0)
    return wanted if wanted < model.vocab_size else 0


def _check_vocabularies(context: DrafterContext, model: Target) -> None:
    """One tokenizer, or as many tokens where none is known: models have rows for no token, too."""
    if model.vocab_size == context.target.vocab_size:
        return
    ours, others = context.fingerprint, context.draft_tokenizer
    if ours is None or (others is not None and others.fingerprint != ours):
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens and the target "
            f"{context.target.vocab_size}: they must share one vocabulary; choose a draft model "
            "of the target's family, or the drafter 'cross-tokenizer'"
        )


_OPTIONS = {
    "chain": {
        "guesses": "chain: copies of earlier text guess for the draft model (true)",
        "table": "chain: directory of a table that guesses too (the one that comes with the model)",
        "draft_vocab_size": "chain: first ids to draft beside those of the text; 0: all (65536)",
    },
    "best-first": {name: f"best-first: {text}" for name, text in GROWTH_OPTIONS.items()},
}

DRAFTER = DrafterSpec(
    build=_build,
    summary="a smaller model of the same vocabulary drafts a chain or a tree",
    options={
        "shape": "chain, or best-first: a tree of the likeliest nodes (chain)",
        **_OPTIONS["chain"],
        **_OPTIONS["best-first"],
    },
    num_draft_tokens=8,
    draft_model="required",
)
