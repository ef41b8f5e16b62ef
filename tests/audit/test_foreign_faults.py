"""Faults written without knowledge of the audit's tests.

Each is the kind that ships: the text reads well, and greedy tests of one request pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from foredraft.audit.report import EXIT_DIFFERENT, exit_code
from foredraft.audit.servers import Endpoint, ServerAudit, connect
from foredraft.bench.prompts import load_prompts
from foredraft.core.choices import DrawKey
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.sampling import Law, NodeLaws
from foredraft.core.verify import Verdict, verify
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.text.tokenizer import Tokenizer
from tests.audit.test_servers import OPTIONS, SERVER, new_llm, tokenizer
from tests.server.conftest import running

__all__ = ["tokenizer"]

Plant = Callable[[LLM], None]
"""Makes an honest LLM a faulty one, before it is served."""


def nothing(llm: LLM) -> None:
    """The honest server of the same set-up."""


def bonus_by_the_sampler_of_the_draft(llm: LLM) -> None:
    """The token after a draft that holds in whole is drawn at 0.7 of the temperature asked for.

    Such a bonus token is drawn apart from verification. Here that is done by the sampler that the
    draft was made with, which has a temperature of its own.
    """

    def rule(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        verdict = verify(proposal, laws, choices)
        if verdict.kind != "bonus" or not verdict.path:
            return verdict
        law = laws(verdict.path[-1])
        colder = Law(law.logits_V, law.scale and law.scale / 0.7, law.token)
        return replace(verdict, next_token=choices.draw_target(colder, len(verdict.path)))

    llm.policy.rule = rule


def corrections_not_counted(llm: LLM) -> None:
    """The counter of the random numbers misses the tokens that replace a rejected one.

    It is moved on by what was accepted, and by the bonus token. So the token after a correction
    is drawn with the very numbers of the correction. Each draw alone follows the right law.
    """
    uncounted: dict[tuple[int, int], int] = {}  # by seed and length: corrections in a text

    def rule(proposal: Proposal, laws: NodeLaws, choices: DrawKey) -> Verdict:
        seed, num_tokens = choices.seed, choices.position
        lag = uncounted.pop((seed, num_tokens), 0)
        lagging = DrawKey(seed, num_tokens - lag)  # without the draws made ahead
        verdict = verify(proposal, lambda node: replace(laws(node), drawn=None), lagging)
        if verdict.next_token is not None:
            after = seed, num_tokens + len(verdict.path) + 1
            uncounted[after] = lag + (verdict.kind == "correction")
        return verdict

    llm.policy.rule = rule


def rows_rolled_back_as_one(llm: LLM) -> None:
    """After a step every row of the batch keeps as many drafted entries as the luckiest one.

    The others go on behind entries of tokens that were rejected. A row that is alone, or as lucky
    as the best, is served right.
    """
    target, cache = llm.target, llm.target.cache
    context, score = cache.context, target.score
    scored: dict[int, tuple[int, Sequence[int]]] = {}  # by slot: entries before the draft, and it
    stale: dict[int, Sequence[int]] = {}

    def score_with_stale_entries(rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        slots = {row.slot for row in rows}
        accepted = {
            slot: cache.length(slot) - before
            for slot, (before, draft) in scored.items()
            if slot in slots and 0 <= cache.length(slot) - before <= len(draft)
        }
        most = max(accepted.values(), default=0)
        stale.clear()
        stale.update({slot: scored[slot][1][num:most] for slot, num in accepted.items()})
        scored.clear()
        for row in rows:
            scored[row.slot] = cache.length(row.slot) + len(row.pending), row.tree.tokens
        return score(rows, taps)

    target.score = score_with_stale_entries
    cache.context = lambda slot: (*context(slot), *stale.get(slot, ()))


@contextmanager
def served(tokenizer: Tokenizer, plant: Plant) -> Iterator[Endpoint]:
    llm = new_llm(tokenizer)
    plant(llm)
    with running(lambda trace: llm) as server, connect(server.url, None) as http:
        yield Endpoint(http)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plant", "detect"),
    [
        (nothing, 0.05),
        (bonus_by_the_sampler_of_the_draft, 0.02),
        (corrections_not_counted, 0.02),
        (rows_rolled_back_as_one, 0.05),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_fault_that_nobody_told_the_audit_of_is_found(
    tokenizer: Tokenizer, plant: Plant, detect: float
) -> None:
    many = replace(SERVER, max_requests=10_000)
    with served(tokenizer, plant) as endpoint:
        audit = ServerAudit(endpoint, None, replace(OPTIONS, detect=detect), many)
        levels = [audit.greedy(), audit.law()]
    is_different = exit_code(levels) == EXIT_DIFFERENT
    assert is_different == (plant is not nothing), [level.said for level in levels]


def test_rows_rolled_back_as_one_are_a_fault_of_batches(tokenizer: Tokenizer) -> None:
    """Else the audit could not be blamed for missing it."""
    llm, honest = new_llm(tokenizer), new_llm(tokenizer)
    rows_rolled_back_as_one(llm)
    prompts = [prompt.text for prompt in load_prompts(None)][:8]
    params = SamplingParams(temperature=1.0, max_tokens=SERVER.reply_tokens, seed=0)

    def texts(llm: LLM, prompts: list[str]) -> list[str]:
        return [result.text for result in llm.generate(prompts, params)]

    assert texts(llm, prompts[:1]) == texts(honest, prompts[:1])
    assert texts(llm, prompts) != texts(honest, prompts)
