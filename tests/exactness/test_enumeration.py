"""The proof by enumeration: every random outcome of the shipped code, summed with its probability.

The joint law of the first tokens must be the target's, to rounding. A new verification rule or
tree shape joins with one line in `RULES` or in `drafting.SHAPES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.params import SamplingParams
from foredraft.core.tree import ROOT
from foredraft.core.verify import verify, verify_block, verify_target_only, verify_traversal
from tests.exactness.drafting import (
    SHAPES,
    Chosen,
    Draft,
    Drawn,
    Stopping,
)
from tests.exactness.laws import Rule, Steps
from tests.exactness.ledger import total_variation
from tests.exactness.reference_rules import verify_recursive, verify_token_rule
from tests.exactness.worlds import KINDS, PLAIN, Tokens, World, target_law, world

ROUNDING = 1e-12
BINARY = SHAPES["binary of depth 2"]


@dataclass(frozen=True)
class Taken:
    """A rule and the proposals it takes.

    Attributes:
        ours: it ships; others are what ours are compared with.
    """

    rule: Rule
    chosen: bool = False
    drawn: bool = True
    trees: bool = True
    ours: bool = True


RULES = {
    "target-only": Taken(verify_target_only, chosen=True, drawn=False),
    "token rule": Taken(verify_token_rule, trees=False, ours=False),
    "block": Taken(verify_block, trees=False),
    "recursive": Taken(verify_recursive, ours=False),
    "traversal": Taken(verify_traversal),
}

FILTERS = {
    "greedy": SamplingParams(temperature=0.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=2.5),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.35),
    "all at once": SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1),
}

STOPPING: dict[str, Draft] = {
    "stop after an unlikely token": Stopping(3, unlikely=0.4),
    "stop before a flat distribution": Stopping(3, flat=0.55),
}


def _is_tree(parents: tuple[int, ...]) -> bool:
    return parents != tuple(range(ROOT, len(parents) - 1))


def is_small(draft: object) -> bool:
    return isinstance(draft, Chosen | Drawn) and len(draft.parents) == 2


def drafts_for(taken: Taken) -> dict[str, Draft]:
    """Every way to draft that a rule takes, by name."""
    drafts: dict[str, Draft] = {}
    for name, parents in SHAPES.items():
        if _is_tree(parents) and not taken.trees:
            continue
        if taken.chosen:
            drafts[f"chosen {name}"] = Chosen(parents)
        if taken.drawn and parents:
            drafts[f"drawn {name}"] = Drawn(parents)
        if taken.drawn and _is_tree(parents):
            drafts[f"drawn {name} without replacement"] = Drawn(parents, replacement=False)
    return drafts


CASES = [
    pytest.param(taken.rule, draft, id=f"{rule}, {name}")
    for rule, taken in RULES.items()
    for name, draft in drafts_for(taken).items()
]


OURS = [taken.rule for taken in RULES.values() if taken.ours]


def cases_in_every_kind() -> Iterator[ParameterSet]:
    """The rules that ours are compared with, and do not ship, are slow in most kinds."""
    for kind, case in itertools.product(KINDS, CASES):
        is_slow = case.values[0] not in OURS and kind not in ("random", "zeros in both")
        marks = pytest.mark.slow if is_slow else ()
        yield pytest.param(kind, *case.values, id=f"{case.id}-{kind}", marks=marks)


def small_cases() -> Iterator[ParameterSet]:
    """Of two nodes; slow where the rule does not ship."""
    for case in CASES:
        if is_small(case.values[1]):
            marks = () if case.values[0] in OURS else pytest.mark.slow
            yield pytest.param(*case.values, id=case.id, marks=marks)


def assert_exact(
    w: World,
    draft: Draft,
    rule: Rule,
    num_tokens: int,
    params: SamplingParams = PLAIN,
    draft_params: SamplingParams = PLAIN,
) -> None:
    text_law = Steps(w, draft, rule, params, draft_params).text_law(num_tokens)
    distance = total_variation(text_law, target_law(w, params, num_tokens))
    assert distance < ROUNDING, f"total variation {distance:.3g} over {num_tokens} tokens"


@pytest.mark.parametrize(("kind", "rule", "draft"), [*cases_in_every_kind()])
def test_every_rule_and_shape_in_every_kind_of_world(rule: Rule, draft: Draft, kind: str) -> None:
    assert_exact(world(kind, 2 if draft == Drawn(BINARY) else 3), draft, rule, num_tokens=3)


@pytest.mark.parametrize("kind", ["random", "zeros in both"])
@pytest.mark.parametrize(("rule", "draft"), [*small_cases()])
def test_four_tokens_of_four_or_five(rule: Rule, draft: Draft, kind: str) -> None:
    assert_exact(world(kind, 5 if kind == "zeros in both" else 4), draft, rule, num_tokens=4)


@pytest.mark.parametrize("drafted_from", ["the same", "everything"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("rule", "draft"), [*small_cases()])
def test_every_filter(rule: Rule, draft: Draft, name: str, drafted_from: str) -> None:
    params = FILTERS[name]
    draft_params = params if drafted_from == "the same" else PLAIN
    assert_exact(world("random", 4), draft, rule, 3, params, draft_params)


@pytest.mark.parametrize("drafted_from", FILTERS)
def test_a_filter_on_the_draft_alone(drafted_from: str) -> None:
    for draft in (Drawn(SHAPES["chain of 2"]), Drawn(SHAPES["star of 3"], replacement=False)):
        assert_exact(world("random", 4), draft, verify, 3, PLAIN, FILTERS[drafted_from])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STOPPING)
def test_stopping_early_by_what_was_known_before_the_draw(name: str, kind: str) -> None:
    assert_exact(world(kind, 3), STOPPING[name], verify, num_tokens=3)


@pytest.mark.parametrize("replacement", [True, False])
def test_target_only_on_drawn_trees_is_wasteful_but_exact(replacement: bool) -> None:
    draft = Drawn(SHAPES["fork below a chain"], replacement)
    assert_exact(world("random", 3), draft, verify_target_only, num_tokens=3)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Small integer weights, zeros and ties included, by the last token."""
    vocab_size = draw(st.integers(2, 3))
    row = st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size).filter(any)
    rows = st.lists(row, min_size=vocab_size + 1, max_size=vocab_size + 1)
    target, draft = draw(rows), draw(rows)

    def look_up(table: list[list[int]], context: Tokens) -> list[float]:
        weights = table[context[-1] if context else vocab_size]
        return [weight / sum(weights) for weight in weights]

    return World(
        vocab_size,
        lambda context: look_up(target, context),
        lambda context: look_up(draft, context),
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(1, 4))
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))


@settings(max_examples=60)
@given(worlds(), shapes(), st.booleans(), st.sampled_from(sorted(RULES)))
def test_any_small_world_and_shape(
    w: World, parents: tuple[int, ...], replacement: bool, name: str
) -> None:
    taken = RULES[name]
    if _is_tree(parents) and not taken.trees:
        parents = tuple(range(ROOT, len(parents) - 1))
    assert_exact(w, Drawn(parents, replacement), taken.rule, num_tokens=2)
    if taken.chosen:
        assert_exact(w, Chosen(parents), taken.rule, num_tokens=2)
