"""Tiny targets for heads, and what a drafter's own forward says where the text is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.random_model import random_config, random_weights
from foredraft.core.choices import Choice
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.sampling import Law, law_of
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.heads.base import HeadModule
from foredraft.load import native_decoder
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import RotaryEmbedding
from foredraft.models.native.model import DecoderFactory, EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.train.heads.base import Prediction, TextBatch
from foredraft.train.target import TrainingTarget
from tests.drafters.prices import FREE_NODES
from tests.models.checkpoints import need_kernel

VOCAB = 96
OUTPUT_IDS = [*range(0, VOCAB, 3)]


def logits_of(prediction: Prediction) -> Tensor:
    """All logits [B, L, R] of a prediction."""
    return prediction.states_BLK @ prediction.output_RK.T


def tiny_target(
    new_decoder: DecoderFactory = EagerDecoder,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> NativeTarget:
    """Three layers with random weights, wide enough for texts with some shape."""
    config = replace(
        random_config("smollm2-135m"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        ropes=(RotaryEmbedding(10000.0, 16),),
        vocab_size=VOCAB,
    )
    torch.manual_seed(3)
    weights = random_weights(config, dtype, device)
    for matrix in weights.tensors().values():
        if matrix.ndim == 2:
            matrix *= 8.0
    return NativeTarget(config, weights, new_decoder)


def decoded_by(decoder: str) -> NativeTarget:
    """The tiny target on a decoder of that name."""
    if decoder == "fused":
        need_kernel()
    return tiny_target(native_decoder(decoder))


def tiny_source(target: NativeTarget) -> TrainingTarget:
    """The source of a head for the tiny target."""
    return TrainingTarget(target, "tiny", "")


def shaken(module: HeadModule, noise: float = 0.2) -> HeadModule:
    """The module with weights that are no longer zeros and identities."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return module


def random_text(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def text_batch(
    target: NativeTarget, texts: Sequence[Sequence[int]], taps: Sequence[int]
) -> TextBatch:
    """A training batch; shorter texts are padded with zeros."""
    longest = max(map(len, texts))
    tokens_BL = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    tapped: dict[int, list[Tensor]] = {tap: [] for tap in taps}
    for tokens_L in tokens_BL.tolist():
        slot = target.cache.allocate()
        (scores,) = target.score([ScoreRow(slot, tokens_L)], taps)
        target.cache.free(slot)
        for tap in taps:
            tapped[tap].append(scores.taps[tap])
    return TextBatch(
        tokens_BL,
        torch.tensor([*map(len, texts)]),
        target.parts.embed(tokens_BL.flatten()).unflatten(0, tokens_BL.shape),
        {tap: torch.stack(found) for tap, found in tapped.items()},
    )


class AnyRules:
    """Rules of which nothing is known, so that every choice is asked for."""

    filters_only = False

    def law(self, logits_V: Tensor, text: Sequence[int], drafted: Sequence[int] = ()) -> Law:
        return law_of(logits_V, SamplingParams())


@dataclass
class Forced:
    """Chooses the text's own tokens, and remembers the logits it was shown.

    Attributes:
        text: what is drafted, and what stands before it.
        num_tokens: how much of it is committed.
    """

    text: Sequence[int]
    num_tokens: int
    seen: dict[int, Tensor] = field(default_factory=dict)

    def best(self, law: Law, depth: int, count: int = 1, trust: float = 1.0) -> list[Choice]:
        self.seen[depth + 1] = law.logits_V.clone()
        return [Choice(self.text[self.num_tokens + depth], 0.99)]

    def among(
        self, candidates: Sequence[Choice], depth: int, count: int = 1, trust: float = 1.0
    ) -> list[Choice]:
        raise AssertionError("rules of a text are asked for whole laws")

    def weigh(self, candidates: Sequence[Choice], depth: int) -> list[Choice]:
        return list(candidates)


def drafted_logits(
    drafter: Drafter, target: NativeTarget, text: Sequence[int], anchor: int, depth: int
) -> list[Tensor]:
    """The drafter's logits [V] at each depth, when it drafts the text's own tokens.

    Args:
        anchor: the last token that the target has read; the one behind it is committed too.
    """
    tokens = tuple(text[: anchor + 2])
    slot = target.cache.allocate()
    drafter.begin(DraftRow.of(1, tokens[:-1], slot=slot))
    (scores,) = target.score([ScoreRow(slot, tokens[:-1])], drafter.taps)
    target.cache.keep(slot, len(tokens) - 1, ())
    drafter.observe(
        [
            RowStep(
                *(1, 0, len(tokens) - 1),
                committed=tokens[-1:],
                tokens=tokens,
                logits_NV=scores.logits_NV,
                taps=scores.taps,
            )
        ]
    )
    choices = Forced(text, len(tokens))
    row = DraftRow(
        *(1, tokens, SamplingParams(), depth, AnyRules(), lambda: choices),
        prices=FREE_NODES,
        slot=slot,
    )
    (proposal,) = drafter.propose([row])
    assert proposal == Proposal.chosen(proposal.tree)
    drafter.end(1)
    target.cache.free(slot)
    return [choices.seen[k] for k in range(1, depth + 1)]
