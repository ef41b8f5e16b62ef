"""The tokens that two vocabularies have in common, and a draft model that says nothing else.

Shape legend: N nodes, V draft vocabulary, S shared tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.core.errors import VocabularyMismatchError
from foredraft.core.proposal import Renaming
from foredraft.drafters.model.cross_tokenizer.transcript import CodecPair, Specials
from foredraft.drafters.spec import TextCodec
from foredraft.models.base import ScoreRow, Scores, Target

_UNFINISHED = "\ufffd"


class SharedVocabulary:
    """Pairs of a target and a draft token that stand for the same text.

    Tokens that are no whole characters (bytes of one, say) are left out. Special tokens are shared
    where both sides have one of the same name.

    Raises:
        VocabularyMismatchError: nothing is shared.
    """

    def __init__(self, codecs: CodecPair, target_size: int, draft_size: int) -> None:
        target_ids = token_texts(codecs.target, codecs.target_specials, target_size)
        draft_ids = token_texts(codecs.draft, codecs.draft_specials, draft_size)
        common = draft_ids.keys() & target_ids.keys()
        pairs = sorted((draft_ids[text], target_ids[text]) for text in common)
        if not pairs:
            raise VocabularyMismatchError(
                "the vocabularies of target and draft model have no token in common: use mode "
                "'slem', which goes through text"
            )
        self.renaming = Renaming(dict(pairs), target_size)


def token_texts(codec: TextCodec, specials: Specials, size: int) -> dict[tuple[str, bool], int]:
    """Tokens by their text and whether they are special; those of broken characters left out."""
    # Behind another token, since decoders treat the first token of a text differently.
    anchor = codec.encode("a", add_special_tokens=False)
    before = codec.decode(anchor, skip_special_tokens=False)
    found: dict[tuple[str, bool], int] = {}
    for token in range(min(size, codec.vocab_size)):
        special = specials.text(token)
        joined = codec.decode([*anchor, token], skip_special_tokens=False)
        text = special or joined[len(before) :]
        if not text or _UNFINISHED in text or not (special or joined.startswith(before)):
            continue
        key = text, bool(special)
        # Two tokens of one text, such as a letter and its byte: the one that encoding uses.
        if key not in found or codec.encode(text, add_special_tokens=False)[-1:] == [token]:
            found[key] = token
    return found


class RestrictedModel:
    """A draft model whose every distribution is restricted to some tokens.

    See `foredraft.models.base.Target`.

    Args:
        allowed_S: the tokens that keep their logits; all others get minus infinity.
    """

    def __init__(self, model: Target, allowed_S: Tensor) -> None:
        self._model, self._allowed_S = model, allowed_S
        self.vocab_size, self.max_context = model.vocab_size, model.max_context
        self.capabilities, self.cache = model.capabilities, model.cache

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        scores = self._model.score(rows, taps)
        allowed_S = self._allowed_S = self._allowed_S.to(scores.logits_NV.device)
        logits_NV = torch.full_like(scores.logits_NV, -math.inf)
        logits_NV[:, allowed_S] = scores.logits_NV[:, allowed_S]
        return replace(scores, logits_NV=logits_NV, drawn=None)  # of all tokens they were
