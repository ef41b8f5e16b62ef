"""The head works from outside the package: exact, and its state follows the text everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from foredraft_toy_head import ToyHeadDrafter
from torch import Tensor

from benchmarks.random_model import random_config, random_weights
from foredraft import SamplingParams
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import CapabilityError
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters import build_drafter, drafter_names
from foredraft.drafters.base import BaseDrafter, Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.policy import Policy
from foredraft.engine.slots import open_slot, release
from foredraft.kernels.build import KernelUnavailable, load_library
from foredraft.load import native_decoder
from foredraft.models.native.config import RotaryEmbedding
from foredraft.models.native.target import NativeTarget
from foredraft.models.table import TableModel

PROMPT = [token * 7 % 90 for token in range(50)]
SECOND = [5, 4, 3, 2, 1] * 5
CHUNK = 16


def new_target(decoder: str) -> NativeTarget:
    """A tiny model with random weights, wide enough for texts with some shape."""
    if decoder == "fused":
        try:
            load_library()
        except KernelUnavailable as reason:
            pytest.skip(f"no fused kernel here: {reason}")
    config = replace(
        random_config("smollm2-135m"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        ropes=(RotaryEmbedding(10000.0, 16),),
        vocab_size=96,
    )
    torch.manual_seed(3)
    weights = random_weights(config, torch.float32, "cpu")
    for matrix in weights.tensors().values():
        if matrix.ndim == 2:
            matrix *= 8.0
    return NativeTarget(config, weights, native_decoder(decoder))


@pytest.fixture(params=["eager", "fused"])
def target(request: pytest.FixtureRequest) -> NativeTarget:
    return new_target(request.param)


def sampling(temperature: float, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=max_tokens)


@dataclass
class Conversation:
    """Two turns of one conversation; of each, the text."""

    engine: Engine
    turns: list[list[int]]


def converse(
    target: NativeTarget,
    drafter: Drafter,
    params: SamplingParams,
    max_step_tokens: int = CHUNK,
    num_draft_tokens: int = 4,
) -> Conversation:
    policy = Policy.of(target, drafter, FixedBudget(num_draft_tokens))
    engine = Engine(target, policy, EngineOptions(max_step_tokens=max_step_tokens))
    engine.forget_prefixes()  # nothing of an earlier conversation of the test
    done = Conversation(engine, [])
    text = PROMPT
    for more in ([], SECOND):
        engine.submit([*text, *more], params)
        result = next(event.result for event in engine.run() if event.result is not None)
        assert result.finish_reason == "length"
        assert bool(more) == bool(result.num_cached_tokens)  # the second turn is a continued one
        text = [*text, *more, *result.token_ids]
        done.turns.append(text)
    return done


def entries(drafter: ToyHeadDrafter, engine: Engine, text: Sequence[int]) -> Tensor:
    """Its keys and values of what is kept of a text, in one piece."""
    slot, length = open_slot(engine.target.cache, text)
    at_least = len(text) - 1 - drafter.look_ahead
    assert length >= at_least
    found = torch.cat(drafter.layers[0].read(0, slot, at_least))
    release(engine.target.cache, slot, text)
    return found


class Helped(BaseDrafter):
    """The head's guesses replaced by some right and some wrong ones, so that both happen."""

    def __init__(self, head: ToyHeadDrafter, turns: Sequence[Sequence[int]]) -> None:
        self.head, self._turns = head, turns
        self.taps, self.layers, self.look_ahead = head.taps, head.layers, head.look_ahead

    def begin(self, row: DraftRow) -> None:
        self.head.begin(row)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        guesses = self.head.propose(rows)  # these leave entries behind the text
        return [self._mixed(row, guess) for row, guess in zip(rows, guesses, strict=True)]

    def observe(self, observations: Sequence[RowStep]) -> None:
        self.head.observe(observations)

    def end(self, request_id: int) -> None:
        self.head.end(request_id)

    def _mixed(self, row: DraftRow, guess: Proposal) -> Proposal:
        """A wrong token, and beside it up to two right ones with a wrong one behind them."""
        at = len(row.tokens)
        text = next(turn for turn in self._turns if len(turn) > at)
        right = [*text[at : at + 1 + at % 2]]
        if row.budget < 4:
            return guess
        wrong = [(token + 1) % 96 for token in (text[at], text[min(at + 2, len(text) - 1)])]
        tokens = [wrong[0], *right, wrong[1]]
        return Proposal.chosen(TokenTree(tuple(tokens), (ROOT, ROOT, *range(1, len(right) + 1))))


def test_is_registered_by_its_entry_point() -> None:
    assert "toy_head" in drafter_names()
    target = new_target("eager")
    drafter = build_drafter("toy-head", DrafterContext(target, options={"tap": 1}))
    assert isinstance(drafter, ToyHeadDrafter)
    assert drafter.taps == (1,)


def test_a_layer_that_is_not_there_is_refused_before_anything_runs() -> None:
    context = DrafterContext(new_target("eager"), options={"tap": 3})
    with pytest.raises(CapabilityError, match=r"toy_head.*layer 3 .*layers 0 to 2"):
        build_drafter("toy_head", context)


def test_a_target_without_parts_is_refused() -> None:
    with pytest.raises(CapabilityError, match="parts"):
        build_drafter("toy_head", DrafterContext(TableModel.random(5, seed=0)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_turns_are_those_of_plain_decoding(target: NativeTarget, temperature: float) -> None:
    params = sampling(temperature)
    plain = converse(target, build_drafter("none", DrafterContext(target)), params)
    assert converse(target, ToyHeadDrafter(target), params).turns == plain.turns
    helped = Helped(ToyHeadDrafter(target), plain.turns)
    assert converse(target, helped, params).turns == plain.turns


def test_its_guesses_are_right_now_and_then() -> None:
    """By chance: the noise that it shares with the target is large against two flat laws."""
    target = new_target("eager")
    engine = Engine(target, Policy.of(target, ToyHeadDrafter(target), FixedBudget(4)))
    params = SamplingParams(temperature=8.0, seed=1, max_tokens=60)
    engine.submit(PROMPT, params)
    result = next(event.result for event in engine.run() if event.result is not None)
    assert result.stats.accepted > result.stats.drafted / 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_state_is_that_of_reading_all_at_once(target: NativeTarget, temperature: float) -> None:
    """After chunks, accepted and rejected drafts, and a second turn."""
    params = sampling(temperature)
    plain = converse(target, build_drafter("none", DrafterContext(target)), params)
    head = ToyHeadDrafter(target)
    done = converse(target, Helped(head, plain.turns), params)
    text = done.turns[-1]
    found = entries(head, done.engine, text)
    once = ToyHeadDrafter(target)
    engine = Engine(target, Policy.of(target, once, FixedBudget(0)))
    engine.forget_prefixes()
    engine.submit(text, sampling(0.0, max_tokens=1))
    list(engine.run())
    torch.testing.assert_close(found, entries(once, engine, text))


def test_plain_steps_keep_the_state_too() -> None:
    """The controller may draft nothing for a while; entries must not be missing afterwards."""
    target = new_target("eager")
    drafter = ToyHeadDrafter(target)
    done = converse(target, drafter, sampling(1.0), num_draft_tokens=0)
    assert entries(drafter, done.engine, done.turns[-1]).isfinite().all()


def test_drawn_drafts_are_repeated_with_the_seed() -> None:
    target = new_target("eager")
    params = replace(sampling(1.0), coupling="drawn")
    first, second = (converse(target, ToyHeadDrafter(target), params) for _ in range(2))
    assert first.turns == second.turns
