"""One request's bookkeeping adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.params import SamplingParams
from foredraft.core.record import SpeculationStats
from foredraft.engine.request import Request
from tests.engine.helpers import new_request


def sequence(prompt: list[int], max_tokens: int = 8) -> Request:
    return new_request(prompt, SamplingParams(max_tokens=max_tokens))


def test_a_new_sequence_is_all_pending() -> None:
    new = sequence([5, 6, 7])
    assert new.tokens[new.num_cached :] == [5, 6, 7]
    assert new.generated == []
    assert new.num_remaining == 8
    new.check()


def test_pending_is_what_the_cache_lacks() -> None:
    one = sequence([5, 6, 7])
    one.num_cached = 3
    one.tokens += [8]
    one.stats.record((), "", verified=0, accepted=0, committed=1)
    assert one.tokens[one.num_cached :] == [8]
    assert one.generated == [8]
    assert one.num_remaining == 7
    one.check()


def test_nothing_pending_breaks_the_invariant() -> None:
    one = sequence([5, 6])
    one.num_cached = 2
    with pytest.raises(AssertionError):
        one.check()


def test_tokens_that_no_step_committed_break_the_invariant() -> None:
    one = sequence([5, 6])
    one.tokens.append(7)
    with pytest.raises(AssertionError):
        one.check()


def test_rates_of_nothing_are_zero() -> None:
    assert SpeculationStats().committed_per_step == 0.0
    assert SpeculationStats().acceptance_rate == 0.0


STEPS = st.lists(st.tuples(*[st.integers(0, 5)] * 3))


@given(STEPS)
def test_stats_add_up(steps: list[tuple[int, int, int]]) -> None:
    """Every draft token is accepted, rejected, or discarded behind a stop."""
    stats = SpeculationStats()
    for rejected, discarded, accepted in steps:
        verified = discarded + accepted
        stats.record((("a", rejected + verified),), "", verified, accepted, accepted + 1)
    assert stats.drafted == stats.accepted + stats.rejected + stats.discarded
    assert stats.rejected == sum(step[0] for step in steps)
    assert stats.discarded == sum(step[1] for step in steps)
    assert stats.accepted == sum(step[2] for step in steps)
    assert stats.committed == stats.accepted + stats.steps
    if stats.drafted:
        assert stats.acceptance_rate == stats.accepted / stats.drafted
        assert stats.committed_per_step == stats.committed / len(steps)
