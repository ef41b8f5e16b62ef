"""A slow reading of the sampling docs in plain Python, for the fast code to agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from foredraft.core.params import SamplingParams
from foredraft.core.sampling import law_of
from foredraft.core.tree import TokenTree


def logits_to_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [V] of the law; one-hot at temperature 0."""
    return law_of(logits_V, params).probs_V


def is_path(tree: TokenTree, nodes: Sequence[int]) -> bool:
    """Whether ``nodes`` is a path from the root to a node (the empty path is one)."""
    return not nodes or (0 <= nodes[-1] < len(tree) and tuple(nodes) == tree.paths[nodes[-1]])


def reference_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """A reference of `logits_to_probs`: temperature, top-k, top-p, min-p, in that order."""
    if params.temperature == 0:
        return _one_hot(logits)
    best = max(logits)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    if params.top_k:
        weights = _keep(weights, at_least=_top_k_cutoff(weights, params.top_k))
    if params.top_p < 1:
        weights = _keep(weights, at_least=_top_p_cutoff(weights, params.top_p))
    if params.min_p:
        weights = _keep(weights, at_least=params.min_p * max(weights))
    return _normalise(weights)


def _one_hot(logits: list[float]) -> list[float]:
    best = logits.index(max(logits))
    return [float(token == best) for token in range(len(logits))]


def _top_k_cutoff(weights: list[float], top_k: int) -> float:
    return sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]


def _top_p_cutoff(weights: list[float], top_p: float) -> float:
    """The weight of the token with which the running mass reaches ``top_p``."""
    mass, total = 0.0, sum(weights)
    for weight in sorted(weights, reverse=True):
        mass += weight / total
        if mass >= top_p:
            return weight
    return min(weights)


def _keep(weights: list[float], at_least: float) -> list[float]:
    return _normalise([weight if weight >= at_least else 0.0 for weight in weights])


def _normalise(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def ruled_logits(
    logits: list[float],
    params: SamplingParams,
    prompt: Sequence[int],
    reply: Sequence[int],
    bad_sequences: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
) -> list[float]:
    """A reference of the rules' effect on logits, before temperature and filters."""
    changed = [logit + params.logit_bias.get(t, 0.0) for t, logit in enumerate(logits)]
    for token in {*prompt, *reply}:
        factor = params.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token in set(reply):
        changed[token] -= params.frequency_penalty * list(reply).count(token)
        changed[token] -= params.presence_penalty
    banned = {t for t in range(len(logits)) if t not in (params.allowed_token_ids or [t])}
    banned |= set(stop_ids) if len(reply) < params.min_tokens else set()
    for *beginning, last in bad_sequences:
        if list(reply[len(reply) - len(beginning) :]) == beginning and len(reply) >= len(beginning):
            banned.add(last)
    return [-math.inf if token in banned else logit for token, logit in enumerate(changed)]
