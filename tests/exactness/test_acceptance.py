"""Exact expected acceptance of the rules: better rules must really be better."""

from __future__ import annotations

import pytest

from foredraft.core.verify import verify_block, verify_target_only, verify_traversal
from tests.exactness.drafting import SHAPES, Drawn
from tests.exactness.laws import Rule, Steps
from tests.exactness.reference_rules import verify_recursive, verify_token_rule
from tests.exactness.worlds import KINDS, World, world

ROUNDING = 1e-12
SEEDS = range(6)
DRAWN_RULES = (verify_token_rule, verify_block, verify_recursive, verify_traversal)
TREES = ["star of 2", "fork below a chain", "unbalanced", "unbalanced, late", "siblings far apart"]


def accepted(w: World, shape: str, rule: Rule, replacement: bool = True) -> float:
    return Steps(w, Drawn(SHAPES[shape], replacement), rule).expected_accepted()


@pytest.mark.parametrize("shape", ["chain of 1", "chain of 2", "chain of 3"])
@pytest.mark.parametrize("kind", KINDS)
def test_block_never_accepts_less_than_the_token_rule(kind: str, shape: str) -> None:
    for seed in SEEDS:
        w = world(kind, 3, seed)
        assert accepted(w, shape, verify_block) >= accepted(w, shape, verify_token_rule) - ROUNDING


def test_block_accepts_more_on_some_chains() -> None:
    gains = [
        accepted(w, "chain of 3", verify_block) - accepted(w, "chain of 3", verify_token_rule)
        for w in (world("random", 3, seed) for seed in SEEDS)
    ]
    assert max(gains) > 0.01, gains


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_traversal_never_accepts_less_than_recursive_rejection(
    kind: str, shape: str, replacement: bool
) -> None:
    for seed in SEEDS[:2]:
        w = world(kind, 3, seed)
        best = accepted(w, shape, verify_traversal, replacement)
        assert best >= accepted(w, shape, verify_recursive, replacement) - ROUNDING


def test_traversal_accepts_more_on_trees_of_depth() -> None:
    gains = [
        accepted(w, "unbalanced", verify_traversal) - accepted(w, "unbalanced", verify_recursive)
        for w in (world("random", 3, seed) for seed in SEEDS[:3])
    ]
    assert min(gains) > 0.01, gains


def test_traversal_and_recursive_rejection_are_equal_where_nothing_is_below() -> None:
    for seed in SEEDS:
        w = world("random", 3, seed)
        assert accepted(w, "star of 3", verify_traversal) == pytest.approx(
            accepted(w, "star of 3", verify_recursive), abs=ROUNDING
        )


def test_one_token_is_accepted_with_the_overlap() -> None:
    w = world("random", 4)
    overlap = sum(map(min, w.target_table(()), w.draft_table(())))
    for rule in DRAWN_RULES:
        assert accepted(w, "chain of 1", rule) == pytest.approx(overlap, abs=ROUNDING)


def test_a_draft_from_the_target_itself_is_accepted_whole() -> None:
    for rule in DRAWN_RULES:
        assert accepted(world("q is p", 3), "chain of 3", rule) == pytest.approx(3.0, abs=ROUNDING)


def test_a_draft_of_impossible_tokens_is_rejected_whole() -> None:
    for rule in (*DRAWN_RULES, verify_target_only):
        assert accepted(world("disjoint", 3), "chain of 3", rule) == 0.0


def test_siblings_without_replacement_are_accepted_more_often() -> None:
    for seed in SEEDS:
        w = world("random", 3, seed)
        for rule in (verify_recursive, verify_traversal):
            apart = accepted(w, "star of 2", rule, replacement=False)
            assert apart > accepted(w, "star of 2", rule)
