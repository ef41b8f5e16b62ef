"""A draft model of another vocabulary (Timor et al., arXiv 2502.05202).

Wraps a drafter that works in the draft model's own tokens. Two ways to get its draft into the
target's:

- ``slem``, string-level exact match: the draft goes through text. Any pair of tokenizers will do;
  the tokens are chosen.
- ``tli``, token-level intersection: the draft model is restricted to the tokens that both
  vocabularies have, and those are renamed. Chosen or drawn, as the coupling asks.

For an encoder-decoder's reply the draft model reads the source first, then what is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from foredraft.cache.paged import Cache
from foredraft.core.errors import ConfigError, unknown
from foredraft.core.proposal import NO_PROPOSAL, NOT_READY, Proposal, Renaming
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow, Reading, ReadingDrafter
from foredraft.drafters.model.cross_tokenizer.shared_vocabulary import (
    RestrictedModel,
    SharedVocabulary,
)
from foredraft.drafters.model.cross_tokenizer.transcript import CodecPair, Transcript
from foredraft.drafters.spec import DrafterContext, DrafterSpec
from foredraft.models.base import Capabilities, ScoreRow, Scores, Target

_MAX_RATIO = 8
"""Most draft tokens to ask for where one target token is wanted."""
_MODES = ("slem", "tli")


class CrossTokenizerDrafter(BaseDrafter):
    """See the module docstring. The wrapped drafter sees draft tokens only, and no observations.

    Args:
        inner: drafts in the draft model's tokens.
        codecs: the tokenizers of target and draft model.
        renaming: the target's ids of the tokens that both have, in mode ``tli``; None: drafts go
            through text.
    """

    def __init__(self, inner: Drafter, codecs: CodecPair, renaming: Renaming | None) -> None:
        reads, share = inner.traits.reads, inner.traits.round_share
        self.traits = DrafterTraits(learns=False, reads=reads, round_share=share)
        self._inner, self._codecs, self._renaming = inner, codecs, renaming
        self._transcripts: dict[int, Transcript] = {}

    def begin(self, row: DraftRow) -> None:
        transcript = Transcript(self._codecs)
        transcript.begin(row.context)
        self._transcripts[row.request_id] = transcript
        tokens = tuple(transcript.draft_tokens)
        begun = replace(row.without_noise(0), tokens=tokens, num_cached=0, slot=-1, source=None)
        self._inner.begin(begun)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        asked = [(row, asks) for row in rows if (asks := self._ask(row)) is not None]
        drafts = self._inner.propose([asks for _, asks in asked])
        answers = {
            row.request_id: draft if draft is NOT_READY else self._answer(row, draft)
            for (row, _), draft in zip(asked, drafts, strict=True)
        }
        return [answers.get(row.request_id, NO_PROPOSAL) for row in rows]

    def read(self, rows: Sequence[DraftRow], most_tokens: int) -> list[Reading]:
        """As the wrapped drafter, in its own tokens; nothing where there are none to ask for."""
        asked = {row.request_id: self._read_row(row) for row in rows}
        reading = [row for row in asked.values() if row is not None]
        found = iter(cast(ReadingDrafter, self._inner).read(reading, most_tokens))
        return [Reading() if asked[row.request_id] is None else next(found) for row in rows]

    def end(self, request_id: int) -> None:
        del self._transcripts[request_id]
        self._inner.end(request_id)

    def _read_row(self, row: DraftRow) -> DraftRow | None:
        transcript = self._transcripts[row.request_id]
        transcript.catch_up(row.context)
        if not transcript.draft_tokens:
            return None
        return replace(row, tokens=tuple(transcript.draft_tokens), slot=-1, source=None)

    def _ask(self, row: DraftRow) -> DraftRow | None:
        """The row, in draft tokens, that the wrapped drafter drafts for; None: no draft."""
        transcript = self._transcripts[row.request_id]
        transcript.catch_up(row.context)
        if not row.budget or not transcript.draft_tokens:
            return None
        if self._renaming is None:
            ratio = len(transcript.draft_tokens) / len(row.context)
            asked = row.without_noise(math.ceil(row.budget * min(max(ratio, 1.0), _MAX_RATIO)))
        elif transcript.held:  # inside a character the draft model's text ends earlier
            return None
        else:  # the noise of chosen tokens is that of other ids
            asked = row if row.params.coupling == "drawn" else row.without_noise(row.budget)
        tokens = tuple(transcript.draft_tokens)
        return replace(asked, tokens=tokens, rules=asked.params, slot=-1, source=None)

    def _answer(self, row: DraftRow, draft: Proposal) -> Proposal:
        """Its draft in the target's tokens."""
        if self._renaming is not None:
            return draft.renamed(self._renaming)
        tree = draft.tree
        leaves = [node for node in range(len(tree)) if node not in tree.children]
        paths = [[tree.tokens[node] for node in tree.paths[leaf]] for leaf in leaves]
        continuations = map(self._transcripts[row.request_id].continuation, paths)
        return Proposal.chosen(TokenTree.of_paths(continuations, row.budget))


@dataclass(frozen=True)
class _DraftSide:
    """The wrapped drafter's target: sizes in the draft model's vocabulary, no cache, no scores."""

    vocab_size: int
    max_context: int
    capabilities: Capabilities

    @property
    def cache(self) -> Cache:
        raise ConfigError("a drafter inside 'cross-tokenizer' cannot use the target's cache")

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        raise ConfigError("a drafter inside 'cross-tokenizer' cannot run the target")


def _build(context: DrafterContext) -> CrossTokenizerDrafter:
    model, options = context.draft_model, dict(context.options)
    assert model is not None  # the registry has checked needs_draft_model
    if context.tokenizer is None or context.draft_tokenizer is None:
        raise ConfigError(
            "drafter 'cross-tokenizer' works on text and needs the tokenizers of both models; "
            "load them with LLM.load"
        )
    name, mode = options.pop("drafter", "draft_model"), str(options.pop("mode", "slem"))
    if mode not in _MODES:
        raise unknown("mode", mode, _MODES)
    codecs = CodecPair.of(context.tokenizer, context.draft_tokenizer)
    if mode == "slem":
        return CrossTokenizerDrafter(_inner(name, model, context, options), codecs, None)
    shared = SharedVocabulary(codecs, context.target.vocab_size, model.vocab_size)
    restricted = RestrictedModel(model, shared.renaming.ids_S[0])
    inner = _inner(name, restricted, context, options)
    return CrossTokenizerDrafter(inner, codecs, shared.renaming)


def _inner(
    name: str, model: Target, context: DrafterContext, options: Mapping[str, Any]
) -> Drafter:
    spec = drafter_spec(name)
    if spec.draft_model != "required":
        raise ConfigError(
            f"drafter {name!r} has no model of another vocabulary to wrap; use 'draft_model'"
        )
    can = Capabilities(tree_attention=context.target.capabilities.tree_attention)
    outside = _DraftSide(model.vocab_size, model.max_context, can)
    codec = context.draft_tokenizer
    inner = build_drafter(name, DrafterContext(outside, model, options, codec, codec))
    if inner.taps:
        raise ConfigError(f"drafter {name!r} reads the target's layers and cannot be wrapped")
    return inner


DRAFTER = DrafterSpec(
    build=_build,
    summary="a draft model of another vocabulary, by way of text or of shared tokens",
    options={
        "mode": "slem goes through text, tli uses the shared tokens (slem)",
        "drafter": "what drafts in the draft model's tokens (draft_model)",
        "shape": "of that drafter: chain or best-first (chain)",
    },
    num_draft_tokens=4,
    draft_model="any vocabulary",
)
