"""Two-model speculation: a smaller model of the same vocabulary drafts a chain or a tree.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). With coupling "seeded" it
proposes its most likely tokens (chosen); with "drawn" it samples with the request's own
parameters and hands the distribution along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from foredraft.core.errors import CapabilityError, ConfigError, VocabularyMismatchError, unknown
from foredraft.core.proposal import NOT_READY, Proposal
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import ROOT
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.chain import ChainDrafter, DraftCache, ModelPredictor, read_by
from foredraft.drafters.grow import BestFirstShape, DepthGrowth, FixedShape, TreeShape
from foredraft.drafters.heads.distilled import DraftModelModule
from foredraft.drafters.heads.steps import StepDrafter, growth_limits
from foredraft.drafters.heads.store import trained_head
from foredraft.drafters.spec import DrafterContext, DrafterSpec, checked_count, checked_ms
from foredraft.models.base import HeadTarget, ScoreRow, Target


class DraftModelDrafter(ChainDrafter):
    """Drafts chains. All rows that still draft share each forward of the draft model.

    Args:
        model: the draft model, with a cache of its own.
    """

    def __init__(self, model: Target) -> None:
        super().__init__(ModelPredictor(model))


class DraftTreeDrafter(BaseDrafter):
    """Drafts trees, one depth a forward; rows that still grow share each.

    A forward reads the row's last token and the tree so far. Its entries stay in the cache
    uncommitted; when the next draft begins, those on the accepted path are kept.

    Args:
        model: the draft model, with a cache of its own.
        shape: how the trees grow.
    """

    traits = DrafterTraits(learns=False)

    def __init__(self, model: Target, shape: TreeShape) -> None:
        self._model, self._shape = model, shape
        self._cache = DraftCache(model)
        self._last_reads: dict[int, ScoreRow] = {}

    def begin(self, row: DraftRow) -> None:
        self._cache.begin(row.request_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        growths = {row.request_id: self._shape.grow(row) for row in rows if self._has_room(row)}
        active = [row for row in rows if row.request_id in growths]
        for row in active:
            self._keep_accepted(row)
        while active:
            self._grow(active, [growths[row.request_id] for row in active])
            active = [row for row in active if growths[row.request_id].frontier]
        return [
            growths[row.request_id].build() if row.request_id in growths else NOT_READY
            for row in rows
        ]

    def end(self, request_id: int) -> None:
        self._cache.end(request_id)
        self._last_reads.pop(request_id, None)

    def _has_room(self, row: DraftRow) -> bool:
        num_scored = self._shape.max_scored(row.budget)
        return (
            row.budget > 0
            and len(read_by(self._model, row)) + num_scored <= self._model.max_context
        )

    def _grow(self, rows: Sequence[DraftRow], growths: Sequence[DepthGrowth]) -> None:
        """Add one depth to each tree."""
        reads = [
            ScoreRow(
                self._cache.slot(row.request_id),
                self._cache.catch_up(row),
                growth.tree,
                source=row.source,
            )
            for row, growth in zip(rows, growths, strict=True)
        ]
        scores = self._model.score(reads)
        for row, growth, read, score in zip(rows, growths, reads, scores, strict=True):
            if read.tree.tokens:
                self._last_reads[row.request_id] = read
            else:
                self._cache.keep(row.request_id, read.pending)
            growth.extend(score.logits_NV[[node + 1 for node in growth.frontier]])

    def _keep_accepted(self, row: DraftRow) -> None:
        """Keep the entries of the last forward that turned out to be text."""
        read = self._last_reads.pop(row.request_id, None)
        if read is None:
            return
        start = self._model.cache.length(read.slot)
        after = start + len(read.pending)
        tokens = read_by(self._model, row)
        if tuple(tokens[start:after]) != tuple(read.pending):
            return
        node, path = ROOT, list[int]()
        for token in tokens[after:]:
            child = read.tree.child_with_token(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        self._cache.keep(row.request_id, read.pending, read.tree, path)


def _build(context: DrafterContext) -> Drafter:
    if "head" in context.options:
        return _build_distilled(context)
    model = context.draft_model
    assert model is not None  # the registry has checked that there is one
    if model.vocab_size != context.target.vocab_size:
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens and the target "
            f"{context.target.vocab_size}: they must share one vocabulary; choose a draft model "
            "of the target's family, or the drafter 'cross-tokenizer'"
        )
    if model is context.target:
        raise ConfigError("the draft model is the target itself: load it a second time")
    shape = _shape(context.options, context.plain_ms)
    if shape is None:
        return DraftModelDrafter(model)
    for who, each in (("target", context.target), ("draft model", model)):
        if not each.capabilities.tree_attention:
            raise CapabilityError(
                f"shape {context.options['shape']!r} needs tree attention, which the {who} "
                f"({type(each).__name__}) does not offer; use shape 'chain'"
            )
    return DraftTreeDrafter(model, shape)


def _build_distilled(context: DrafterContext) -> Drafter:
    if context.draft_model is not None:
        raise ConfigError("head and a draft model are two ways to draft; give one of them")
    for name in ("parts", "cache_layers"):
        if not getattr(context.target.capabilities, name):
            raise CapabilityError(
                f"a distilled draft model needs a target with {name}, which "
                f"{type(context.target).__name__} does not offer"
            )
    if "shape" in context.options or "draft_ms" in context.options:
        raise ConfigError("shape and draft_ms are for draft models that are no head")
    limits, module = growth_limits(context), trained_head(context, DraftModelModule)
    return StepDrafter(module, cast(HeadTarget, context.target), limits)


def _shape(options: Mapping[str, Any], plain_ms: float | None) -> TreeShape | None:
    """The tree shape asked for; None for a chain.

    Args:
        plain_ms: milliseconds of a plain step; None: not measured, and forwards count as free.

    Raises:
        ConfigError: an option that does not fit.
    """
    name = str(options.get("shape", "chain")).replace("_", "-")
    if of_head := [option for option in ("branching", "round_cost") if option in options]:
        raise ConfigError(f"{of_head[0]} is of use with head alone")
    others = [option for option in options if option != "shape"]
    if name != "best-first" and others:
        raise ConfigError(f"{others[0]} is of use with shape 'best-first' alone")
    if name == "chain":
        return None
    if name == "best-first":
        draft_ms = checked_ms("draft_ms", options.get("draft_ms", 0.0))
        return BestFirstShape(
            width=checked_count("width", options.get("width", 4)),
            max_depth=checked_count("max_depth", options.get("max_depth", 6)),
            round_cost=draft_ms / (plain_ms or math.inf),
        )
    counts = name.split(",")
    if not all(count.strip().isdecimal() for count in counts):
        raise unknown("shape", name, ("chain", "best-first", "3,2,1"))
    return FixedShape(tuple(map(int, counts)))


DRAFTER = DrafterSpec(
    build=_build,
    summary="a smaller model of the same vocabulary drafts a chain or a tree",
    options={
        "shape": "chain, children at each depth such as 3,2,1, or best-first (chain)",
        "width": "best-first and head: nodes looked below at each depth (4)",
        "max_depth": "best-first and head: most tokens on a path (6)",
        "draft_ms": "best-first: time of one draft forward, in milliseconds (0)",
        "head": "directory of a distilled draft model, instead of a draft model",
        "branching": "head: tokens that hang below one node; 1 drafts chains (4)",
        "round_cost": "head: time of one of its forwards, in plain steps (0.1)",
    },
    num_draft_tokens=4,
    draft_model="required",
    instead_of_model="head",
    head=DraftModelModule,
)
