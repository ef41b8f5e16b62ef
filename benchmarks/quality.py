"""How far a model in few bits is from the same model in float32.

Speed is compared at equal text; a coarser weight format changes the text, so its figure of speed
needs one of quality beside it.

Shape legend: N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.course import loading
from benchmarks.texts import read_text
from foredraft.bench.report import Report, check_outputs
from foredraft.cli import options as o
from foredraft.cli.display import progress_bar
from foredraft.core.errors import ConfigError
from foredraft.core.tree import TokenTree
from foredraft.load import load_target, plan_models
from foredraft.models.base import ScoreRow, Target
from foredraft.options import LoadOptions

WINDOW = 512
"""Tokens of a text that are scored together: each one sees those before it in its window."""

_CHUNK = 64


@dataclass(frozen=True)
class Quality:
    """Change of the next-token distributions from reference to candidate.

    Attributes:
        num_tokens: distributions compared.
        mean_kl: mean of KL(reference || candidate), in nats.
        p99_kl: its 99th percentile over the tokens.
        top1_agreement: share of tokens where both have the same most likely token.
        perplexity: of the text under the candidate.
        reference_perplexity: of the text under the reference.
    """

    num_tokens: int
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def windows(tokens: Sequence[int], limit: int | None = None) -> list[Sequence[int]]:
    """A text cut into windows; the last is left out if it has a single token, which predicts none.

    Args:
        tokens: of the text.
        limit: use at most this many.
    """
    used = tokens[:limit]
    cut = [used[start : start + WINDOW] for start in range(0, len(used), WINDOW)]
    return [window for window in cut if len(window) > 1]


def measure_quality(
    reference: Target,
    candidate: Target,
    texts: Sequence[Sequence[int]],
    advance: Callable[[], None] = lambda: None,
) -> Quality:
    """Score the same texts with both and compare each token's distribution.

    Args:
        reference: the model in float32.
        candidate: the model as it is to be used.
        texts: token ids, at least two each; see `windows`.
        advance: called after each text.
    """
    parts: list[list[Tensor]] = []
    for tokens in texts:
        scored = zip(log_probs(reference, tokens), log_probs(candidate, tokens), strict=True)
        start = 1
        for reference_NV, candidate_NV in scored:
            next_N = torch.tensor(tokens[start : start + _CHUNK])
            parts.append(_compare(reference_NV[: len(next_N)], candidate_NV[: len(next_N)], next_N))
            start += _CHUNK
        advance()
    kl_N, agrees_N, reference_N, candidate_N = map(torch.cat, zip(*parts, strict=True))
    return Quality(
        num_tokens=len(kl_N),
        mean_kl=kl_N.mean().item(),
        p99_kl=kl_N.quantile(0.99).item(),
        top1_agreement=agrees_N.double().mean().item(),
        perplexity=math.exp(-candidate_N.mean().item()),
        reference_perplexity=math.exp(-reference_N.mean().item()),
    )


def divergence(reference_NV: Tensor, candidate_NV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || candidate) in nats [N], and whether their most likely tokens agree [N]."""
    kl_N = (reference_NV.exp() * (reference_NV - candidate_NV)).sum(-1)
    return kl_N, reference_NV.argmax(-1) == candidate_NV.argmax(-1)


def _compare(reference_NV: Tensor, candidate_NV: Tensor, next_N: Tensor) -> list[Tensor]:
    """KL, agreement of the top token, and the log probabilities of the next one: each [N]."""
    kl_N, agrees_N = divergence(reference_NV, candidate_NV)
    chosen = [x.gather(1, next_N[:, None])[:, 0] for x in (reference_NV, candidate_NV)]
    return [kl_N, agrees_N, *chosen]


def log_probs(target: Target, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Log probabilities [N, V] after each token in float64, a chunk at a time."""
    slot = target.cache.allocate()
    try:
        for start in range(0, len(tokens), _CHUNK):
            first, *rest = tokens[start : start + _CHUNK]
            [scores] = target.score([ScoreRow(slot, [first], TokenTree.chain(rest))])
            target.cache.keep(slot, 1, range(len(rest)))
            yield scores.logits_NV.to("cpu", torch.float64).log_softmax(-1)
    finally:
        target.cache.free(slot)


@o.with_options
def quality(
    load: Annotated[LoadOptions, loading(drafter="none", draft_model=None, calibrate=False)],
    text: Annotated[
        str | None, typer.Option(help="A text file; a built-in text when not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most so many tokens.")] = None,
    output: o.Output = None,
) -> None:
    """Compare the model as it would run with itself in float32, token by token.

    The divergence says how far the next-token distributions are apart; the perplexity, how well
    each predicts the text.
    """
    check_outputs(output)
    if limit is not None and limit < 2:
        raise ConfigError(f"--limit is {limit}; the second token is the first to be predicted")
    content = read_text(text)
    llm = o.load_llm(load)
    assert llm.plan is not None
    assert llm.tokenizer is not None
    texts = windows(llm.tokenizer.encode(content), limit)
    if not texts:
        raise ConfigError(f"{text} is a single token; none follows it that could be predicted")
    in_full = replace(load, dtype="float32", weights="auto", cache_dtype="auto", activations="auto")
    reference = load_target(plan_models(in_full)[0])
    with progress_bar(len(texts)) as advance:
        figure = measure_quality(reference, llm.target, texts, lambda: advance("scoring"))
    plan = llm.plan
    facts = {"model": plan.name, "dtype": plan.dtype, "weights": plan.weights, "text": text}
    lines = [
        f"{plan.name}, {plan.number_format}, {plan.decoder} kernels, against float32; "
        f"{figure.num_tokens} tokens of {text or 'the built-in text'}",
        f"KL divergence: mean {figure.mean_kl:.5f} nats, 99th percentile {figure.p99_kl:.5f}",
        f"same most likely token: {100 * figure.top1_agreement:.2f} %",
        f"perplexity: {figure.perplexity:.4f}, in float32 {figure.reference_perplexity:.4f}",
    ]
    Report(facts=facts | {"quality": figure.as_dict()}, lines=lines).give(output)
