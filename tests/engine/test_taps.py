"""Hidden states and state: who gets them when, and whose cache layers count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from foredraft.cache.base import KVShape, common_prefix
from foredraft.control.base import Allowance, Row
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import NO_PROPOSAL, Proposal
from foredraft.core.record import RowStep
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine
from foredraft.engine.slots import open_slot
from foredraft.models.base import ScoreRow, Scores, Target
from foredraft.models.table import TableModel
from tests.conformance.harness import KINDS
from tests.engine.helpers import counting_model, drain, engine_of, new_engine

PROMPT = [1, 2, 3, 4, 3, 4, 5]


class Tapping(BaseDrafter):
    """Taps a layer, drafts nothing, and remembers what it saw."""

    def __init__(self, *taps: int) -> None:
        self.taps = taps
        self.seen: list[RowStep] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [NO_PROPOSAL for _ in rows]

    def observe(self, observations: Sequence[RowStep]) -> None:
        self.seen += observations


class Keeping(Tapping):
    """Keeps an entry for each token."""

    def __init__(self, target: Target, *taps: int) -> None:
        super().__init__(*taps)
        self.layers = (target.cache.add_layers(KVShape(1, 1, 1), torch.float32),)
        self.slots: dict[int, int] = {}

    def begin(self, request: object) -> None:
        self.slots[request.request_id] = request.slot  # type: ignore[attr-defined]

    def observe(self, observations: Sequence[RowStep]) -> None:
        super().observe(observations)
        for seen in observations:
            entries = torch.tensor(seen.tokens[seen.context : seen.end]).float()[None, :, None]
            self.layers[0].write(0, self.slots[seen.request_id], seen.context, entries, entries)


class Joining(Keeping):
    """An entry joins a token with the one that follows it."""

    def observe(self, observations: Sequence[RowStep]) -> None:
        for seen in observations:
            joined = joined_pairs(seen.tokens)[seen.context : seen.end]
            entries = torch.tensor(joined).float()[None, :, None]
            self.layers[0].write(0, self.slots[seen.request_id], seen.context, entries, entries)


def joined_pairs(tokens: Sequence[int]) -> list[int]:
    return [100 * token + following for token, following in pairwise(tokens)]


class Asked(TableModel):
    """Remembers which taps each forward was asked for."""

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.asked = [*getattr(self, "asked", []), tuple(taps)]
        return super().score(rows, taps)


class EverySecond(FixedBudget):
    """Drafts in every second step."""

    num_steps = 0

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        self.num_steps += 1
        budget = 2 * (self.num_steps % 2)
        return [Allowance(row.drafter, budget) for row in rows]


def run(target: Target, drafter: Drafter, num_tokens: int, chunk: int = 512) -> None:
    engine = engine_of(target, drafter, EverySecond(2), max_step_tokens=chunk)
    engine.submit(PROMPT, SamplingParams(max_tokens=num_tokens))
    drain(engine)


def test_taps_come_with_steps_that_may_draft() -> None:
    target, drafter = Asked(10, counting_model().probs), Tapping(1)
    run(target, drafter, 4, chunk=3)
    # Two chunks of the prompt, then its end and three more steps.
    assert target.asked == [(), (), (1,), (), (1,), ()]
    assert [bool(seen.taps) for seen in drafter.seen] == [bool(taps) for taps in target.asked]


def test_who_keeps_a_state_gets_them_with_every_step() -> None:
    target = Asked(10, counting_model().probs)
    drafter = Keeping(target, 1)
    run(target, drafter, 4, chunk=3)
    assert target.asked == [(1,)] * 6
    spans = [(seen.context, seen.end, len(seen.hidden(1))) for seen in drafter.seen]
    assert spans == [(0, 3, 3), (3, 6, 3), (6, 7, 1), (7, 8, 1), (8, 9, 1), (9, 10, 1)]
    assert drafter.seen[-1].tokens == (*PROMPT, 6, 7, 8, 9)


@pytest.mark.parametrize("kind", ["table", "native-eager", "native-fused-bf16", "hf"])
def test_the_last_layer_can_be_tapped_and_the_next_one_is_refused(kind: str) -> None:
    target = KINDS[kind]().new_target()
    last = target.capabilities.taps.stop - 1
    drafter = Tapping(last)
    run(target, drafter, 3)
    assert [len(seen.committed) for seen in drafter.seen] == [1, 1, 1]
    assert len(drafter.seen[0].taps[last]) == len(PROMPT)
    with pytest.raises(ConfigError, match=f"layer {last + 1} cannot be tapped.* 0 to {last}"):
        run(target, Tapping(last + 1), 3)


def test_a_drafter_of_this_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoDrafter, "taps", (7,))
    from foredraft.drafters import build_drafter

    with pytest.raises(CapabilityError, match=r"'none' does not fit.* layer 7 .*layers 0 to 1"):
        build_drafter("none", DrafterContext(TableModel.random(4, 0)))


def two_turns(engine: Engine) -> int:
    """Number of tokens that the second turn found in the cache."""
    params = SamplingParams(max_tokens=3)
    engine.submit(PROMPT, params)
    ((_, first),) = drain(engine).items()
    engine.submit([*PROMPT, *first.token_ids, 1], params)
    ((_, second),) = drain(engine).items()
    return second.num_cached_tokens


def test_drafters_that_share_a_target_do_not_spoil_each_other_s_conversations() -> None:
    target = counting_model()
    plain, keeping = new_engine(target), new_engine(target, Keeping(target))
    assert two_turns(plain) == len(PROMPT) + 2
    assert two_turns(keeping) == len(PROMPT) + 3  # it finds what the other one read


@pytest.mark.parametrize("second", [[1, 2, 3, 4, 9], [1, 2, 3, 4, 3, 4], [7, 8], PROMPT])
def test_entries_that_looked_ahead_follow_a_conversation_that_turns_elsewhere(
    second: list[int],
) -> None:
    target = counting_model()
    drafter, params = Joining(target), SamplingParams(max_tokens=4)
    engine = new_engine(target, drafter)
    for prompt in (PROMPT, second):
        engine.submit(prompt, params)
        ((_, result),) = drain(engine).items()
    text = [*second, *result.token_ids]
    num_common = common_prefix(PROMPT, second)
    slot, num_cached = open_slot(engine.target.cache, text)
    assert num_cached == len(text) - 1
    kept, _ = drafter.layers[0].read(0, slot, num_cached)
    pairs = zip(kept.flatten().tolist(), joined_pairs(text)[:num_cached], strict=True)
    # The one at which the two texts part was made with the first one's next token.
    assert [i for i, (is_, right) in enumerate(pairs) if is_ != right] in ([], [num_common - 1])
