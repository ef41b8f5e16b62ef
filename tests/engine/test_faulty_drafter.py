"""With any faulty drafter the text is the plain run's, and only that request loses speed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foredraft.core.errors import CacheFullError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Draft, Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.engine.request import GenerationResult
from foredraft.models.base import Capabilities
from foredraft.models.table import TableModel
from tests.engine.helpers import LETTERS, ScriptedDrafter, counting_drafter, generate, new_engine

V = len(LETTERS)
PROMPTS = [[1], [5, 6], [2]]
TARGET = TableModel.random(V, seed=8)


class Faulty(ScriptedDrafter):
    """Drafts well but fails in one of its methods, from the second call of it on."""

    def __init__(self, method: str, error: Exception | None = None) -> None:
        good = counting_drafter()
        super().__init__(lambda row: good.propose([row])[0])
        self._method, self._error = method, error or ValueError("out of ideas")
        self.calls: dict[str, int] = {}
        self.live: set[int] = set()

    def _count(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if method == self._method and self.calls[method] > 1:
            raise self._error

    def begin(self, row: DraftRow) -> None:
        self.live.add(row.request_id)
        self._count("begin")

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        assert all(row.request_id in self.live for row in rows)
        self._count("propose")
        return super().propose(rows)

    def observe(self, observations: Sequence[RowStep]) -> None:
        assert all(seen.request_id in self.live for seen in observations)
        self._count("observe")

    def end(self, request_id: int) -> None:
        self.live.remove(request_id)
        self._count("end")


def plain(params: SamplingParams) -> list[GenerationResult]:
    return generate(new_engine(TARGET), PROMPTS, params)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "end"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_raises_costs_speed_only(
    method: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=15)
    drafter = Faulty(method)
    engine = new_engine(TARGET, drafter, max_batch_size=2)
    for _ in range(4):
        results = generate(engine, PROMPTS, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain(params)]
        assert {r.finish_reason for r in results} == {"length"}
    said = [text for text in warnings(caplog) if not text.startswith("drafter switched off")]
    assert said
    assert all(f"drafter failed in {method} (ValueError: out of ideas)" in text for text in said)
    assert drafter.live == set()


@pytest.mark.parametrize("later", [(99,), None, "x"])
def test_taps_that_change_or_break_after_loading_change_nothing(later: Any) -> None:
    """They are read once: a forward for all rows must not fail by one drafter."""
    drafter, params = counting_drafter(), SamplingParams(max_tokens=15)
    engine = new_engine(TARGET, drafter)
    drafter.taps = later
    results = generate(engine, PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain(params)]


def test_a_drafter_is_switched_off_for_a_while_after_three_faults(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = Faulty("propose")
    engine = new_engine(TARGET, drafter)
    params = SamplingParams(max_tokens=15)
    for _ in range(6):
        generate(engine, PROMPTS[:1], params)
    assert drafter.calls["propose"] == 1 + 3  # the first call is a good one
    assert drafter.calls["begin"] == 3
    assert warnings(caplog)[-1].startswith("drafter switched off for the next 64 requests")
    assert caplog.text.count("Traceback") == 3
    drafter._method = "nothing"
    for _ in range(64 - 3):
        assert not generate(engine, PROMPTS[:1], SamplingParams(max_tokens=1))[0].stats.drafted
    assert generate(engine, PROMPTS[:1], params)[0].stats.drafted > 0


def test_a_lack_of_memory_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """However often it comes: the next request may find some."""
    drafter = Faulty("propose", CacheFullError("no room"))
    engine = new_engine(TARGET, drafter)
    for _ in range(5):
        (result,) = generate(engine, PROMPTS[:1], SamplingParams(max_tokens=15))
        assert result.finish_reason == "length"
    assert drafter.calls["begin"] == 5
    assert set(warnings(caplog)) == {
        f"request {number} goes on with plain decoding: no room" for number in range(5)
    }
    assert drafter.live == set()


def test_a_fault_costs_the_request_that_it_happened_in() -> None:
    good = counting_drafter()

    def propose(row: DraftRow) -> Proposal:
        if row.tokens[0] == 5:
            raise ValueError("fives are beyond me")
        return good.propose([row])[0]

    params = SamplingParams(max_tokens=12)
    engine = new_engine(TARGET, ScriptedDrafter(propose))
    for _ in range(4):
        drafted = [r.stats.drafted > 0 for r in generate(engine, PROMPTS, params)]
        assert drafted == [True, False, True]


def chain(*tokens: int) -> Proposal:
    return Proposal.chosen(TokenTree.chain(tokens))


def unchecked_tree(tokens: Any, parents: Any) -> Proposal:
    """A tree that `TokenTree` itself would have refused."""
    tree = TokenTree()
    object.__setattr__(tree, "tokens", tokens)
    object.__setattr__(tree, "parents", parents)
    return Proposal.chosen(tree)


def drawn(row: DraftRow, **changes: Any) -> Proposal:
    builder = Draft(row.choices, replacement=True)
    builder.draw(ROOT, torch.full((V,), 1 / V))
    return dataclasses.replace(builder.build(), **changes)


def zero_where_drawn(row: DraftRow) -> Proposal:
    proposal = drawn(row)
    probs_NV = torch.full((1, V), 1 / V)
    probs_NV[0, proposal.tree.tokens[0]] = 0.0
    return dataclasses.replace(proposal, draft_probs_NV=probs_NV)


def siblings(row: DraftRow, probs_NV: torch.Tensor, tokens: tuple[int, int] = (1, 2)) -> Proposal:
    """Two children of the root, said to be drawn from these rows without replacement."""
    tree = TokenTree(tokens, (ROOT, ROOT))
    return dataclasses.replace(drawn(row), tree=tree, draft_probs_NV=probs_NV, replacement=False)


MALFORMED: dict[str, Callable[[DraftRow], Any]] = {
    "too many nodes": lambda row: chain(*range(row.budget + 1)),
    "a token outside the vocabulary": lambda row: chain(V),
    "a parent after its child": lambda row: TokenTree((1, 2), (1, -1)),
    "a parent that is no node": lambda row: TokenTree((1,), (5,)),
    "fewer parents than tokens": lambda row: TokenTree((1, 2), (-1,)),
    "a negative token": lambda row: chain(-1),
    "a float token": lambda row: TokenTree.chain([1.0]),  # type: ignore[list-item]
    "a tensor token": lambda row: TokenTree.chain(torch.tensor([1])),
    "no proposal": lambda row: None,
    "a tree instead of a proposal": lambda row: TokenTree.chain([1]),
    "a list instead of a tree": lambda row: Proposal.chosen([1, 2]),  # type: ignore[arg-type]
    "a tree that is none": lambda row: unchecked_tree(None, None),
}

MALFORMED_DRAWS: dict[str, Callable[[DraftRow], Any]] = {
    "no row of probabilities": lambda row: drawn(row, draft_probs_NV=torch.ones(0, V)),
    "one row too many": lambda row: drawn(row, draft_probs_NV=torch.ones(2, V) / V),
    "another vocabulary": lambda row: drawn(row, draft_probs_NV=torch.ones(1, V + 1)),
    "no rows at all": lambda row: drawn(row, draft_probs_NV=torch.ones(V)),
    "whole numbers": lambda row: drawn(row, draft_probs_NV=torch.ones(1, V, dtype=torch.int64)),
    "NaN": lambda row: drawn(row, draft_probs_NV=torch.full((1, V), torch.nan)),
    "infinite": lambda row: drawn(row, draft_probs_NV=torch.full((1, V), torch.inf)),
    "negative": lambda row: drawn(row, draft_probs_NV=torch.arange(V)[None] - 1.0),
    "a list": lambda row: drawn(row, draft_probs_NV=[[1 / V] * V]),
    "zero for the token drawn": zero_where_drawn,
    "siblings of two distributions": lambda row: siblings(
        row, torch.stack((torch.full((V,), 1 / V), torch.arange(V) + 1.0))
    ),
    "one token twice without replacement": lambda row: siblings(
        row, torch.full((2, V), 1 / V), (1, 1)
    ),
}


def run_malformed(
    propose: Callable[[DraftRow], Any], params: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine(TARGET, ScriptedDrafter(propose))
    for _ in range(4):
        results = generate(engine, PROMPTS, params)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain(params)]
        assert sum(r.stats.drafted for r in results) == 0
    said = [text for text in warnings(caplog) if not text.startswith("drafter switched off")]
    assert len(said) == 3  # then it is switched off
    assert all("drafter failed in propose" in text for text in said)


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_proposal_is_an_empty_one(what: str, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    run_malformed(MALFORMED[what], params, caplog)


@pytest.mark.parametrize("what", MALFORMED_DRAWS)
def test_draft_probs_that_cannot_be_verified_are_an_empty_proposal(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, coupling="drawn")
    run_malformed(MALFORMED_DRAWS[what], params, caplog)


def test_drawn_tokens_are_refused_where_the_text_must_not_depend_on_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, coupling="seeded")
    run_malformed(drawn, params, caplog)


@pytest.mark.parametrize("returned", [[], [NO_PROPOSAL] * 5, None, 7, iter([NO_PROPOSAL])])
def test_the_wrong_number_of_proposals(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    class WrongCount(ScriptedDrafter):
        def propose(self, rows: Sequence[DraftRow]) -> Any:
            return returned

    params = SamplingParams(max_tokens=12)
    results = generate(new_engine(TARGET, WrongCount(drawn)), PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain(params)]
    assert len(warnings(caplog)) == len(PROMPTS) + 1


def test_a_branching_draft_needs_a_target_with_tree_attention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = TableModel.random(V, seed=8)
    target.capabilities = Capabilities(tree_attention=False)
    params = SamplingParams(max_tokens=12)
    branching = ScriptedDrafter(lambda row: Proposal.chosen(TokenTree((1, 2), (ROOT, ROOT))))
    (result,) = generate(new_engine(target, branching), [[1]], params)
    assert (result.token_ids, result.stats.drafted) == (plain(params)[0].token_ids, 0)
    assert "without tree attention" in warnings(caplog)[0]


def test_draft_probs_need_not_be_normalised() -> None:
    """Both the draw and its verification divide by the sum."""

    def draws(scale: float, dtype: torch.dtype) -> list[tuple[int, ...]]:
        def script(row: DraftRow) -> Proposal:
            builder = Draft(row.choices, replacement=True)
            weights_V = (torch.arange(V, dtype=dtype) % 4 + 1) * scale
            builder.draw(ROOT, weights_V)
            return builder.build()

        params = SamplingParams(temperature=1.0, seed=6, max_tokens=40, coupling="drawn")
        results = generate(new_engine(TARGET, ScriptedDrafter(script)), PROMPTS, params)
        assert sum(r.stats.accepted for r in results) > 0
        return [r.token_ids for r in results]

    assert draws(1 / 32, torch.float32) == draws(8.0, torch.float32) == draws(1.0, torch.bfloat16)
