"""Stages that draft for a draft model, which keeps what it would have said itself.

Shape legend: N the root and the guessed nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from foredraft.core.proposal import Proposal
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.drafters.base import DraftRequest, DraftRow
from foredraft.drafters.cascade.stages import Cascade, Stage, StageCounts, seeded
from foredraft.drafters.common.chain import ChainDraft
from foredraft.drafters.common.draft_cache import DraftCache
from foredraft.models.base import ScoreRow, Target


class VerticalCascade(Cascade):
    """See `foredraft.drafters.cascade`. Rows that still draft share a forward of the draft model.

    Args:
        guessers: stages that draft for the draft model, the cheapest first.
        drafting: the draft model's stage; its drafter is not asked.
        model: the draft model.
    """

    def __init__(self, guessers: Sequence[Stage], drafting: Stage, model: Target) -> None:
        super().__init__(guessers)
        self._drafting, self._model, self._cache = drafting, model, DraftCache(model)

    @property
    def stage_counts(self) -> Mapping[str, StageCounts]:
        return {**super().stage_counts, self._drafting.name: self._drafting.counts}

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._cache.begin(request.request_id)

    def end(self, request_id: int) -> None:
        try:
            super().end(request_id)
        finally:
            self._cache.end(request_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        chains = [ChainDraft(row) for row in rows]
        active = [chain for chain in chains if chain.num_left and self._has_room(chain.row)]
        while active:
            self._forward(active, self._guess(active))
            active = [chain for chain in active if chain.num_left]
        for chain in chains:
            self._authors[chain.row.request_id] = [self._drafting] * len(chain.tokens)
        return [chain.build() for chain in chains]

    def _has_room(self, row: DraftRow) -> bool:
        return len(row.tokens) + row.budget <= self._model.max_context

    def _guess(self, chains: Sequence[ChainDraft]) -> dict[int, tuple[TokenTree, Stage]]:
        """What the draft model may say next, and who says so, by request.

        A forward always yields one token of the draft model's own, so one fewer is guessed.
        """
        found: dict[int, tuple[TokenTree, Stage]] = {}
        for stage in self._stages:
            asking = [c for c in chains if c.num_left > 1 and c.row.request_id not in found]
            for chain, offer in zip(asking, _offers(stage, asking), strict=True):
                if offer.tree.tokens:
                    found[chain.row.request_id] = (self._fitted(offer.tree), stage)
        return found

    def _fitted(self, tree: TokenTree) -> TokenTree:
        """The tree, or its first branch where the draft model has no tree attention."""
        if tree.is_chain or self._model.capabilities.tree_attention:
            return tree
        branch = max(tree.paths, key=len)
        return TokenTree.chain(tree.tokens[node] for node in branch)

    def _forward(
        self, chains: Sequence[ChainDraft], guesses: Mapping[int, tuple[TokenTree, Stage]]
    ) -> None:
        """One forward of the draft model: each chain grows by one token at least."""
        reads = [self._read(chain, guesses) for chain in chains]
        scores = self._model.score(reads)
        self._drafting.counts.asked += len(chains)
        for chain, read, score in zip(chains, reads, scores, strict=True):
            path = _follow(chain, read.tree, score.logits_NV)
            self._cache.keep(chain.row.request_id, read.pending, read.tree, path)
            if guess := guesses.get(chain.row.request_id):
                guess[1].counts.drafted += len(read.tree)
                guess[1].counts.accepted += len(path)

    def _read(self, chain: ChainDraft, guesses: Mapping[int, tuple[TokenTree, Stage]]) -> ScoreRow:
        request_id = chain.row.request_id
        pending = chain.tokens[-1:] or self._cache.catch_up(request_id, chain.row.tokens)
        tree, _ = guesses.get(request_id, (EMPTY_TREE, None))
        return ScoreRow(self._cache.slot(request_id), pending, tree)


def _offers(stage: Stage, chains: Sequence[ChainDraft]) -> list[Proposal]:
    """What a stage offers after each chain, or after the text where the chain is empty."""
    rows = [seeded(chain.row, chain.num_left - 1) for chain in chains]
    starting = [row for row, chain in zip(rows, chains, strict=True) if not chain.tokens]
    first = iter(stage.propose(starting) if starting else ())
    return [
        stage.propose_after(row, chain.tokens) if chain.tokens else next(first)
        for row, chain in zip(rows, chains, strict=True)
    ]


def _follow(chain: ChainDraft, tree: TokenTree, logits_NV: Tensor) -> list[int]:
    """Let the draft model speak for as long as the tree has foreseen it; the nodes on the way.

    The tokens, and with coupling "drawn" their distributions, are the draft model's own whatever
    the tree holds.
    """
    node, path = ROOT, list[int]()
    while chain.num_left:
        token = chain.extend(logits_NV[node + 1])
        child = None if token is None else tree.child_with_token(node, token)
        if child is None:
            break
        path.append(child)
        node = child
    return path
