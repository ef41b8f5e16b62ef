"""Two-model speculation: a smaller model of the same vocabulary drafts a chain.

Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). With coupling "seeded" it
proposes its most likely tokens (chosen); with "drawn" it samples with the request's own
parameters and hands the distribution along.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.core.proposal import NO_PROPOSAL, DrawnProposalBuilder, Proposal
from foredraft.core.sampling import logits_to_probs
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DrafterContext, DrafterSpec, DraftRow, StatelessDrafter
from foredraft.models.base import ScoreRow, Target


@dataclass
class _Request:
    """The draft model's side of one request.

    Attributes:
        slot: in the draft model's cache.
        cached: the tokens whose entries the slot holds.
        num_confirmed: how many of them are known to be committed.
    """

    slot: int
    cached: list[int] = field(default_factory=list)
    num_confirmed: int = 0

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget cached tokens that were not committed; the last of ``tokens`` stays pending."""
        agreed, limit = self.num_confirmed, min(len(self.cached), len(tokens) - 1)
        while agreed < limit and self.cached[agreed] == tokens[agreed]:
            agreed += 1
        del self.cached[agreed:]
        self.num_confirmed = agreed


class _Chain:
    """One row's draft under construction."""

    def __init__(self, row: DraftRow) -> None:
        self._row = row
        self._builder = DrawnProposalBuilder(row.choices)
        self.tokens: list[int] = []

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self._row.budget

    def extend(self, logits_V: Tensor) -> None:
        """Add one token after the draft model scored the last one."""
        if self._row.params.coupling == "seeded":
            self.tokens.append(int(logits_V.argmax()))
            return
        probs_V = logits_to_probs(logits_V, self._row.params)
        node = self._builder.draw(len(self.tokens) - 1 if self.tokens else ROOT, probs_V)
        assert node is not None  # a chain has no siblings, so something is always left to draw
        self.tokens.append(self._builder.token(node))

    def build(self) -> Proposal:
        if self._row.params.coupling == "seeded":
            return Proposal.chosen(TokenTree.chain(self.tokens))
        return self._builder.build()


class DraftModelDrafter(StatelessDrafter):
    """See the module docstring. All rows that still draft share each forward of the draft model.

    Args:
        model: the draft model, with a cache of its own.
    """

    def __init__(self, model: Target) -> None:
        self._model = model
        self._requests: dict[int, _Request] = {}

    def begin(self, request_id: int, prompt: Sequence[int]) -> None:
        self._requests[request_id] = _Request(self._model.cache.allocate())

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        chains = {row.request_id: _Chain(row) for row in rows if self._has_room(row)}
        active = [row for row in rows if row.request_id in chains]
        pending = {row.request_id: self._catch_up(row) for row in active}
        while active:
            scores = self._model.score(
                [ScoreRow(self._slot(row), pending[row.request_id]) for row in active]
            )
            for row, score in zip(active, scores, strict=True):
                self._keep(row.request_id, pending[row.request_id])
                chains[row.request_id].extend(score.logits_NV[0])
                pending[row.request_id] = chains[row.request_id].tokens[-1:]
            active = [row for row in active if not chains[row.request_id].is_full]
        return [
            chains[row.request_id].build() if row.request_id in chains else NO_PROPOSAL
            for row in rows
        ]

    def end(self, request_id: int) -> None:
        self._model.cache.free(self._requests.pop(request_id).slot)

    def _has_room(self, row: DraftRow) -> bool:
        return row.budget > 0 and len(row.tokens) + row.budget <= self._model.max_context

    def _slot(self, row: DraftRow) -> int:
        return self._requests[row.request_id].slot

    def _catch_up(self, row: DraftRow) -> list[int]:
        """Drop what was rejected since the last draft; return what the draft model has not read."""
        request = self._requests[row.request_id]
        request.rewind(row.tokens)
        self._model.cache.truncate(request.slot, request.num_confirmed)
        return list(row.tokens[request.num_confirmed :])

    def _keep(self, request_id: int, tokens: Sequence[int]) -> None:
        request = self._requests[request_id]
        self._model.cache.keep(request.slot, len(tokens), ())
        request.cached.extend(tokens)


def _build(context: DrafterContext) -> DraftModelDrafter:
    model = context.draft_model
    assert model is not None  # the registry has checked needs_draft_model
    if model.vocab_size != context.target.vocab_size:
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens and the target "
            f"{context.target.vocab_size}: they must share one vocabulary; choose a draft model "
            "of the target's family"
        )
    if model is context.target:
        raise ConfigError("the draft model is the target itself: load it a second time")
    return DraftModelDrafter(model)


DRAFTER = DrafterSpec(
    build=_build,
    summary="a smaller model of the same vocabulary drafts a chain",
    num_draft_tokens=4,
    needs_draft_model=True,
)
