"""One step's verdict becomes committed tokens; what stops cuts tokens, path and counts alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.core.errors import NonFiniteScoresError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import SpeculationStats
from foredraft.core.tree import TokenTree
from foredraft.core.verify import Verdict
from foredraft.engine.request import Request
from foredraft.engine.text import TextAssembler
from foredraft.engine.turn import Turn
from tests.engine.helpers import letters, new_request

PROMPT = [9, 9, 9]


def new_row(
    stop_ids: Sequence[int] = (), stop: Sequence[str] = (), max_tokens: int = 100
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop=stop, seed=0)
    text = TextAssembler(letters(), stop)
    return new_request(PROMPT, params, text=text, stop_ids=frozenset(stop_ids))


def commit(row: Request, proposal: Proposal, verdict: Verdict | None, num_read: int = 0) -> Turn:
    """Commit a step that read all that was pending, if nothing else is said."""
    turn = Turn(row, num_read or row.num_pending)
    turn.proposal, turn.verdict = proposal, verdict
    turn.commit()
    return turn


CHAIN = Proposal.chosen(TokenTree.chain([0, 1, 2, 3]))
ALL = Verdict((0, 1, 2, 3), 4, "bonus")


@pytest.mark.parametrize(
    ("row", "tokens", "reason", "num_accepted", "path", "discarded", "text"),
    [
        (new_row(), (0, 1, 2, 3, 4), None, 4, (0, 1, 2, 3), 0, "abcde"),
        (new_row(stop_ids=[0]), (0,), "stop", 1, (), 3, ""),
        (new_row(stop_ids=[2]), (0, 1, 2), "stop", 3, (0, 1), 1, "ab"),
        (new_row(stop_ids=[3]), (0, 1, 2, 3), "stop", 4, (0, 1, 2), 0, "abc"),
        (new_row(stop_ids=[4]), (0, 1, 2, 3, 4), "stop", 4, (0, 1, 2, 3), 0, "abcd"),
        (new_row(stop=["bc"]), (0, 1, 2), "stop", 3, (0, 1), 1, "a"),
        (new_row(stop=["e"]), (0, 1, 2, 3, 4), "stop", 4, (0, 1, 2, 3), 0, "abcd"),
        (new_row(max_tokens=2), (0, 1), "length", 2, (0,), 2, "ab"),
        (new_row(max_tokens=5), (0, 1, 2, 3, 4), "length", 4, (0, 1, 2, 3), 0, "abcde"),
        (new_row(stop_ids=[1], max_tokens=2), (0, 1), "stop", 2, (0,), 2, "a"),
    ],
)
def test_what_stops_cuts_everything_at_one_token(
    row: Request,
    tokens: tuple[int, ...],
    reason: str | None,
    num_accepted: int,
    path: tuple[int, ...],
    discarded: int,
    text: str,
) -> None:
    done = commit(row, CHAIN, ALL)
    assert (done.committed, done.finish_reason, done.num_accepted) == (tokens, reason, num_accepted)
    assert (done.path, done.num_read) == (path, len(PROMPT))
    assert row.generated == list(tokens)
    assert row.tokens[row.num_cached :] == [tokens[-1]]
    assert row.text.text == text
    stats = row.stats
    assert (stats.steps, stats.drafted, stats.committed) == (1, 4, len(tokens))
    assert (stats.accepted, stats.rejected, stats.discarded) == (num_accepted, 0, discarded)


def test_a_correction_commits_the_path_and_one_more() -> None:
    row = new_row()
    done = commit(row, CHAIN, Verdict((0, 1), 7, "correction"))
    assert (done.committed, done.path, done.num_accepted) == ((0, 1, 7), (0, 1), 2)
    assert (row.stats.accepted, row.stats.rejected) == (2, 2)


def test_a_path_through_a_tree() -> None:
    tree = TokenTree((0, 5, 1, 6), (-1, -1, 0, 1))
    row = new_row()
    done = commit(row, Proposal.chosen(tree), Verdict((1, 3), 7, "bonus"))
    assert (done.committed, done.path) == ((5, 6, 7), (1, 3))
    assert row.num_cached == len(PROMPT) + 2


def test_without_a_draft_it_is_plain_decoding() -> None:
    row = new_row()
    for token in (3, 4):
        done = commit(row, NO_PROPOSAL, Verdict((), token, "bonus"))
        assert (done.committed, done.path, done.num_accepted) == ((token,), (), 0)
    assert row.stats.steps == row.stats.committed == 2
    assert row.tokens[row.num_cached :] == [4]


def test_a_row_without_a_verdict_ends_in_an_error_and_keeps_what_it_had() -> None:
    row = new_row()
    commit(row, CHAIN, ALL)
    error = NonFiniteScoresError("the largest logit is nan")
    done = commit(row, CHAIN, Verdict.failed((0, 1), error))
    assert (done.committed, done.path, done.num_accepted) == ((0, 1), (0,), 2)
    assert done.finish_reason == row.finish_reason == "error"
    assert row.error == "NonFiniteScoresError: the largest logit is nan"
    assert row.generated == [0, 1, 2, 3, 4, 0, 1]


def test_a_chunk_of_a_prompt_commits_nothing() -> None:
    row = new_row()
    done = commit(row, NO_PROPOSAL, None, num_read=2)
    assert (done.committed, done.path, done.context, done.num_read) == ((), (), 0, 2)
    assert row.tokens[row.num_cached :] == [9]
    assert row.stats.steps == 0
    assert commit(row, NO_PROPOSAL, Verdict((), 3, "bonus")).context == 2


def test_a_text_that_cannot_be_decoded_ends_its_row_and_keeps_the_token() -> None:
    row = new_row()
    done = commit(row, CHAIN, Verdict((0, 1), 99, "correction"))  # no letter 99
    assert (done.committed, done.finish_reason) == ((0, 1, 99), "error")
    assert row.generated == [0, 1, 99]
    assert row.error is not None
    assert "IndexError" in row.error


# ---------------------------------------------------------------- one request's bookkeeping adds up


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
