"""A vertical cascade: cheap drafters draft for a draft model, which drafts for the target.

Spector and Re, arXiv 2308.04623; Chen et al., arXiv 2312.11462. The draft is the one that the draft
model would write alone, in fewer forwards of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from foredraft.core.errors import ConfigError
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import EMPTY_TREE, TokenTree
from foredraft.drafters import build_drafter, drafter_key, drafter_spec
from foredraft.drafters.base import (
    ContinuingDrafter,
    Drafter,
    DraftRow,
)
from foredraft.drafters.model.chain import ChainDraft
from foredraft.drafters.model.draft_model import DraftModelDrafter
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import Target


class VerticalCascade(DraftModelDrafter):
    """Cheap stages draft for a draft model. Rows that still draft share a forward of it.

    Every stage sees every request and every step.

    Args:
        guessers: drafters that draft for the draft model, the cheapest first.
        model: the draft model.
        vocab_size: of the target; None: the draft model's own.
    """

    def __init__(
        self, guessers: Sequence[Drafter], model: Target, vocab_size: int | None = None
    ) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._guessers = tuple(guessers)
        self.taps: Sequence[int] = sorted({tap for each in guessers for tap in each.taps})
        self.layers = tuple(layers for each in guessers for layers in each.layers)
        skips_gaps = all(each.traits.skips_gaps for each in guessers if each.layers)
        self.traits = DrafterTraits(skips_gaps=skips_gaps, reads=True)

    def begin(self, row: DraftRow) -> None:
        for guesser in self._guessers:
            guesser.begin(row)
        super().begin(row)

    def observe(self, observations: Sequence[RowStep]) -> None:
        for guesser in self._guessers:
            guesser.observe(observations)

    def end(self, request_id: int) -> None:
        with contextlib.ExitStack() as ends:  # all of them, whatever one of them raises
            ends.callback(super().end, request_id)
            for guesser in self._guessers:
                ends.callback(guesser.end, request_id)

    def _guesses(self, chains: Sequence[ChainDraft]) -> list[TokenTree]:
        found: dict[int, TokenTree] = {}
        for guesser in self._guessers:
            asking = [c for c in chains if c.num_left > 1 and c.row.request_id not in found]
            for chain, offer in zip(asking, _offers(guesser, asking), strict=True):
                if offer.tree.tokens:
                    found[chain.row.request_id] = self._fitted(offer.tree)
        return [found.get(chain.row.request_id, EMPTY_TREE) for chain in chains]

    def _fitted(self, tree: TokenTree) -> TokenTree:
        """The tree, or its first branch where the draft model has no tree attention."""
        if tree.is_chain or self._model.capabilities.tree_attention:
            return tree
        branch = max(tree.paths, key=len)
        return TokenTree.chain(tree.tokens[node] for node in branch)


def _offers(guesser: Drafter, chains: Sequence[ChainDraft]) -> list[Proposal]:
    """A guesser's proposals after each chain, or after the text where the chain is empty.

    Nothing after a chain, where the drafter cannot go on from a draft.
    """
    rows = [chain.row.chosen(chain.num_left - 1) for chain in chains]
    starting = [row for row, chain in zip(rows, chains, strict=True) if not chain.tokens]
    first = iter(guesser.propose(starting) if starting else ())
    following = cast(ContinuingDrafter, guesser) if guesser.traits.continues else None
    offers = list[Proposal]()
    for row, chain in zip(rows, chains, strict=True):
        if not chain.tokens:
            offers.append(next(first))
        else:
            offers.append(following.propose_after(row, chain.tokens) if following else NO_PROPOSAL)
    return offers


def _stage_names(options: Mapping[str, Any]) -> list[str]:
    """Names from text such as ``"ngram,draft_model"``.

    Raises:
        ConfigError: a name is unknown or there twice, or the draft model is not the last one.
    """
    text = str(options.get("stages", "ngram,draft_model"))
    names = [drafter_key(name) for name in text.replace(" ", "").split(",")]
    for number, name in enumerate(names):
        drafter_spec(name)  # says which name is nearest when it is unknown
        if name == "cascade" or name in names[:number]:
            raise ConfigError(f"stages is {text!r}; {name!r} cannot be a stage (again)")
    if len(names) < 2 or names[-1] != "draft_model":
        raise ConfigError(
            f"stages is {text!r}; a cascade has two or more, the last one 'draft_model', such as "
            "ngram,draft_model"
        )
    return names


def _uses_prediction(options: Mapping[str, Any]) -> bool:
    """Whether one of the stages does."""
    return any(drafter_spec(name).uses_prediction({}) for name in _stage_names(options))


def _build(context: DrafterContext) -> Drafter:
    nested = replace(context, options={})
    names = _stage_names(context.options)
    *guessers, _ = [build_drafter(name, nested) for name in names]  # it checks the draft model
    assert context.draft_model is not None
    return VerticalCascade(guessers, context.draft_model, context.target.vocab_size)


DRAFTER = DrafterSpec(
    build=_build,
    summary="cheap drafters draft for a draft model, which drafts for the target",
    options={"stages": "drafters, cheapest first, the last one draft_model (ngram,draft_model)"},
    num_draft_tokens=8,
    draft_model="required",
    reads_prediction=_uses_prediction,
)
