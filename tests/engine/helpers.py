"""Helpers of the engine's tests: targets that misbehave on purpose, and scripted drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foredraft.control.base import Controller
from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.policy import Policy
from foredraft.engine.request import Event, GenerationResult, Request
from foredraft.models.base import ScoreRow, Scores, Target
from foredraft.models.table import TableModel, TokenCache

LETTERS = "abcdefghij"
"""One letter a token: what `letters` decodes to."""


def letters(prompt: Sequence[int] = ()) -> Callable[[int], str | None]:
    """A new decoder over `LETTERS`."""
    return LETTERS.__getitem__


def counting_model(vocab_size: int = len(LETTERS)) -> TableModel:
    """Counts upwards and around at temperature 0; any token may come at temperature 1."""

    def conditional(context: tuple[int, ...]) -> list[float]:
        following = (context[-1] + 1) % vocab_size
        return [0.55 if i == following else 0.45 / (vocab_size - 1) for i in range(vocab_size)]

    return TableModel(vocab_size, conditional)


def noting_model(read: list[int]) -> TableModel:
    """A random model that notes in ``read`` how many tokens of each row its forwards read."""

    class Noting(TableModel):
        def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
            read.extend(len(row.pending) for row in rows)
            return super().score(rows, taps)

    return Noting.random(10, seed=3)


class FaultyTarget(TableModel):
    """A `TableModel` that can be told to fail."""

    raise_at: int | None = None
    """The number of the forward that raises, counted from 1."""
    nan_after: tuple[int, ...] | None = None
    """Logits after a text that ends with these tokens are NaN."""
    num_forwards = 0

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.num_forwards += 1
        if self.num_forwards == self.raise_at:
            raise RuntimeError("device lost")
        scores = super().score(rows, taps)
        if self.nan_after is not None:
            for row, wanted in zip(rows, scores.row_wanted, strict=True):
                text = (*self.cache.context(row.slot), *row.pending)
                for node, logits_row in zip((ROOT, *range(len(row.tree))), wanted, strict=False):
                    path = () if node == ROOT else row.tree.paths[node]
                    here = (*text, *(row.tree.tokens[i] for i in path))
                    if here[-len(self.nan_after) :] == self.nan_after:
                        scores.logits_NV[logits_row] = torch.nan
        return scores


def limited(target: TableModel, num_tokens: int) -> TableModel:
    """The same target with memory for so many tokens."""
    target.cache = TokenCache(max_tokens=num_tokens, block_size=1)
    return target


class ScriptedDrafter(BaseDrafter):
    """Proposes what a function says."""

    def __init__(self, script: Callable[[DraftRow], Proposal]) -> None:
        self._script = script

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._script(row) for row in rows]


def counting_drafter(wrong_every: int = 0) -> ScriptedDrafter:
    """Drafts what `counting_model` says at temperature 0, with every n-th token wrong."""

    def script(row: DraftRow) -> Proposal:
        tokens: list[int] = []
        for position in range(len(row.tokens), len(row.tokens) + row.budget):
            wrong = wrong_every and position % wrong_every == 0
            tokens.append(((tokens or row.tokens)[-1] + (2 if wrong else 1)) % len(LETTERS))
        return Proposal.chosen(TokenTree.chain(tokens))

    return ScriptedDrafter(script)


def new_engine(
    target: TableModel, drafter: Drafter | None = None, num_draft_tokens: int = 4, **options: Any
) -> Engine:
    """An engine over letters, if nothing else is asked for."""
    options.setdefault("new_decoder", letters)
    return engine_of(target, drafter or NoDrafter(), FixedBudget(num_draft_tokens), **options)


def engine_of(target: Target, drafter: Drafter, controller: Controller, **options: Any) -> Engine:
    """An engine with one drafter."""
    policy = Policy.of(target, drafter, controller)
    return Engine(target, policy, EngineOptions(**options))


NOBODY_DRAFTS = Policy(FixedBudget(0, drafter=None))


def new_request(
    tokens: Sequence[int], params: SamplingParams | None = None, number: int = 0, **more: Any
) -> Request:
    """A request that no engine knows of; the tokens are its prompt if nothing else is said."""
    num_prompt = more.pop("num_prompt", len(tokens))
    params = params or SamplingParams()
    more.setdefault("rules", params)
    return Request(number, list(tokens), num_prompt, params, 0, NOBODY_DRAFTS, **more)


def drain(engine: Engine) -> dict[int, GenerationResult]:
    """Results of every request that ends from here on."""
    results = [event.result for event in engine.run() if event.result is not None]
    return {result.request_id: result for result in results}


def finish(engine: Engine) -> dict[int, GenerationResult]:
    """Like `drain`, for requests that have not begun: their events must add up to their result."""
    events: dict[int, list[Event]] = {}
    for event in engine.run():
        events.setdefault(event.request_id, []).append(event)
    results = {}
    for request_id, mine in events.items():
        result = mine[-1].result
        assert result is not None
        assert all(event.result is None for event in mine[:-1])
        assert tuple(token for event in mine for token in event.token_ids) == result.token_ids
        assert "".join(p.text for event in mine for p in event.pieces) == result.text
        check_sums(result, sum(event.num_accepted for event in mine))
        results[request_id] = result
    return results


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[GenerationResult]:
    """Run a batch; results in the order of the prompts."""
    request_ids = [engine.submit(prompt, params) for prompt in prompts]
    results = finish(engine)
    return [results[request_id] for request_id in request_ids]


def check_sums(result: GenerationResult, num_accepted: int | None = None) -> None:
    """The accounting that holds for every result."""
    stats = result.stats
    assert stats.drafted == stats.accepted + stats.rejected + stats.discarded
    assert stats.committed == len(result.token_ids)
    assert stats.accepted <= stats.committed <= stats.accepted + stats.steps
    if num_accepted is not None:
        assert stats.accepted == num_accepted
