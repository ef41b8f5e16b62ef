"""Several drafters, one of which follows each request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import BaseDrafter, DraftRequest, DraftRow, Observation, Switching
from foredraft.drafters.common.switch import Loaded, SwitchDrafter
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions


class Noted(BaseDrafter):
    """Drafts its own number and notes what it is told."""

    def __init__(self, token: int, taps: Sequence[int] = ()) -> None:
        self.token, self.taps = token, taps
        self.begun: dict[int, tuple[int, ...]] = {}
        self.seen: list[int] = []

    def begin(self, request: DraftRequest) -> None:
        self.begun[request.request_id] = tuple(request.tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal.chosen(TokenTree.chain([self.token] * row.budget)) for row in rows]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += [seen.request_id for seen in observations]

    def end(self, request_id: int) -> None:
        del self.begun[request_id]


def row(request_id: int, drafter: str | None, budget: int = 2) -> DraftRow:
    return DraftRow.of(request_id, (5, 6, 7), SamplingParams(), budget, drafter=drafter)


@pytest.fixture
def parts() -> tuple[SwitchDrafter, Noted, Noted]:
    head, copy = Noted(1, taps=(3,)), Noted(2)
    loaded = {"head": Loaded(head, joins_late=False), "copy": Loaded(copy, joins_late=True)}
    return (
        SwitchDrafter(loaded, lambda request_id, params: "head" if request_id else None),
        head,
        copy,
    )


def test_each_row_is_drafted_for_by_its_own(parts: tuple[SwitchDrafter, Noted, Noted]) -> None:
    switch, head, copy = parts
    for request_id in range(3):
        switch.begin(DraftRequest(request_id, (5,)))
    assert [switch.follower(i) for i in range(3)] == [None, "head", "head"]
    rows = [row(0, "copy"), row(1, ""), row(2, "copy", 1)]
    assert [proposal.tree.tokens for proposal in switch.propose(rows)] == [(2, 2), (1, 1), (2,)]
    assert copy.begun == {0: (5, 6, 7), 2: (5, 6, 7)}
    assert head.begun == {1: (5,)}
    assert switch.taps == [3]
    switch.propose([row(1, None)])
    assert (head.begun, switch.taps, switch.follower(1)) == ({}, [], None)
    for request_id in range(3):
        switch.end(request_id)
    assert not copy.begun


def test_one_that_cannot_join_late_does_not(parts: tuple[SwitchDrafter, Noted, Noted]) -> None:
    switch, head, _ = parts
    switch.begin(DraftRequest(0, (5,)))
    assert [len(proposal.tree) for proposal in switch.propose([row(0, "head")])] == [0]
    assert not head.begun
    assert isinstance(switch, Switching)


def test_texts_do_not_depend_on_who_drafts() -> None:
    """Through the default controller, which changes its mind as it goes."""
    target = TableModel.random(8, seed=3, order=2)
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=150)
    prompts = [[1, 2], [3], [4, 5, 6]]

    def texts(options: LoadOptions) -> list[tuple[int, ...]]:
        return [result.token_ids for result in LLM(target, None, options).generate(prompts, params)]

    plain = texts(LoadOptions(drafter="none"))
    assert texts(LoadOptions()) == plain
    assert texts(LoadOptions(drafter="token_recycling")) == plain
    assert texts(LoadOptions(drafter="lookahead", max_batch_size=2)) == plain
