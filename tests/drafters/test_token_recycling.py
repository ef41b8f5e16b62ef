"""Token recycling: what the table learns, and which of it is drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.token_recycling import likeliest
from foredraft.models.table import TableModel
from tests.drafters.following import Followed, first_level

VOCAB = 20


def build(**options: Any) -> Drafter:
    target = TableModel.random(VOCAB, seed=0)
    return build_drafter("token_recycling", DrafterContext(target, options=options))


def logits(*likeliest: int) -> torch.Tensor:
    """Scores whose order starts with these tokens."""
    logits_V = torch.arange(VOCAB, 0, -1.0) - VOCAB
    for place, token in enumerate(likeliest):
        logits_V[token] = float(VOCAB - place)
    return logits_V


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1000, 5000])
def test_the_likeliest_tokens_are_found(size: int) -> None:
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(size))
    expected = logits_V.topk(min(8, size)).indices.tolist()
    assert likeliest(logits_V, 8) == expected
    logits_V[logits_V < logits_V.max()] = -torch.inf
    assert likeliest(logits_V, 8)[0] == expected[0]


def test_candidates_of_the_target_are_drafted_when_their_token_returns() -> None:
    request = Followed(build(), [5, 6], node_cost=0.02)
    request.commit(7, logits_V=logits(7, 8, 9))  # after 6
    request.commit(6, logits_V=logits(6))  # after 7
    tree = request.draft(8)
    assert first_level(tree)[:2] == [7, 8]
    assert tree.children[0], "the likeliest candidate is followed further"


def test_a_steady_row_is_trusted_more() -> None:
    request = Followed(build(), [1])
    before = 0
    for _ in range(6):
        request.commit(2, logits_V=logits(2))
        before = before or len(request.draft())
        request.commit(1, logits_V=logits(1))
    assert len(request.draft()) > before


def test_every_committed_position_of_a_step_teaches_and_no_rejected_one() -> None:
    drafter = build()
    drafter.begin(DraftRow.of(0, (1, 2)))
    # 3 was accepted, 4 (its sibling) and 5 (below 4) were rejected; the target added 6.
    tree = TokenTree((4, 3, 5), (-1, -1, 0))
    logits_NV = torch.stack([logits(3), logits(19), logits(6, 7), logits(18)])
    drafter.observe(
        [
            RowStep(
                *(0, 2, 1),
                proposal=Proposal.chosen(tree),
                committed=(3, 6),
                path=(1,),
                logits_NV=logits_NV,
            )
        ]
    )
    known = drafter._requests[0].successors  # type: ignore[attr-defined]
    assert known.get(2).candidates[0] == 3
    assert known.get(3).candidates[:2] == (6, 7)
    assert known.get(4) is None
    assert known.get(5) is None
