"""The target's own layers in few bits draft on its own cache, and leave nothing in it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.cache.blocks import BLOCK
from foredraft.control.fixed import FixedBudget
from foredraft.core.choices import DrawKey
from foredraft.core.errors import CapabilityError, ConfigError, ModelLoadError
from foredraft.core.params import SamplingParams
from foredraft.core.rules import Rules
from foredraft.core.tree import TokenTree
from foredraft.drafters import build_drafter
from foredraft.drafters.base import DraftRow
from foredraft.drafters.guide import Guide
from foredraft.drafters.model import self_draft as self_draft_file
from foredraft.drafters.model.self_draft import Fit, SelfDrafter, measured_fit
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.per_request import GuidedDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Policy
from foredraft.models.base import LowBitCopy, ScoreRow, read
from foredraft.models.files.kept import KeptFiles
from foredraft.models.native import copy as copy_module
from foredraft.models.native.copy import NativeLowBitCopy
from foredraft.models.native.plan import announce, plan_forward
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import rounded
from foredraft.models.table import TableModel
from tests.conformance.harness import fused_decoder, plain
from tests.drafters.heads import random_text, tiny_target
from tests.drafters.prices import FREE_NODES
from tests.engine.helpers import drain, engine_of

PROMPTS = ([3, 1, 4, 1, 5], [2], [7, 8, 9, 7, 8, 9, 7])
FOLLOWED = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.8, logit_bias={3: 2.0}),
    SamplingParams(temperature=0.9, coupling="drawn"),
)


@pytest.fixture
def target() -> NativeTarget:
    return tiny_target(fused_decoder())


def self_draft(target: Any, **options: Any) -> SelfDrafter:
    drafter = build_drafter("self_draft", DrafterContext(target, options=options))
    assert isinstance(drafter, SelfDrafter)
    return drafter


def without_screen(target: NativeTarget, copy: NativeLowBitCopy) -> NativeLowBitCopy:
    """All logits are those of the head."""
    weights = replace(copy.weights, screen_VE=None)
    return NativeLowBitCopy(target.config, weights, fused_decoder(), target.cache)


def entries(target: NativeTarget, slot: int, count: int) -> Tensor:
    """The bytes of a slot's first entries, all layers."""
    store, size = target.cache.store, target.cache.block_size
    table = target.cache.table(slot)
    places = [(table[entry // size], entry % size) for entry in range(count)]
    both = [kept[block, :, :, at] for block, at in places for kept in (store.keys, store.values)]
    return torch.stack(both).clone()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_committed_entries_are_those_of_the_target_alone(
    target: NativeTarget, bits: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=5)
    engine = engine_of(target, self_draft(target, bits=bits), FixedBudget(5))
    prompt = random_text(20)
    engine.submit(prompt, params)
    alone = tiny_target(fused_decoder())
    (written,) = plain(alone, [prompt], params)
    text = [*prompt, *written]
    own = alone.cache.allocate()
    alone.score([ScoreRow(own, text)])
    alone.cache.keep(own, len(text), ())
    results = []
    while engine.has_work:
        results += [event.result for event in engine.step() if event.result is not None]
        for slot in target.cache.slots:
            count = target.cache.length(slot)
            assert torch.equal(entries(target, slot, count), entries(alone, own, count))
    (result,) = results
    assert result.token_ids == written
    assert result.stats.drafted > 20


def test_what_it_drafts_is_what_the_copy_alone_would_say(target: NativeTarget) -> None:
    """Once the text is the copy's own: then all entries that it reads are."""
    copy = NativeTarget(target.config, rounded(target.weights, 8), fused_decoder())
    prompt = random_text(12)
    (expected,) = plain(copy, [prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    slot = target.cache.allocate()
    low = target.low_bit_copy(8)
    low.score([ScoreRow(slot, prompt[:-1])], [0])
    drafted, last, start = list[int](), prompt[-1], len(prompt) - 1
    for place in range(start, start + 6):
        scores = low.score([ScoreRow(slot, (last,))], [place])
        last = int(scores.logits_NV[0].argmax())
        drafted.append(last)
    assert drafted == list(expected)


class FreeGuesser(GuidedDrafter):
    """Guesses as if nodes cost nothing."""

    def draft_tree(self, request: Guide, row: DraftRow, draft: Sequence[int]) -> TokenTree:
        return super().draft_tree(request, replace(row, prices=FREE_NODES), draft)


class Oracle(Guide):
    """Knows what will be written, but for every so many tokens; counts nothing."""

    def __init__(self, text: list[int], start: int, wrong_every: int) -> None:
        self._text, self.place, self._wrong_every = text, start, wrong_every

    def successors(self, place: int) -> list[tuple[int, float, int]]:
        if place >= len(self._text):
            return []
        wrong = place % self._wrong_every == 0
        return [(self._text[place] ^ wrong, 0.9, place + 1)]

    def advance(self, place: int, token: int) -> int:
        return place + 1

    def commit(self, token: int) -> None:
        self.place += 1


@pytest.mark.parametrize("params", FOLLOWED)
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 1000])
def test_guesses_change_no_draft_and_save_forwards(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, wrong_every: int
) -> None:
    """Guesses never change the copy's draft; right ones save forwards."""
    params = replace(params, max_tokens=30, ignore_eos=True, seed=3)
    prompt = PROMPTS[0]
    (written,) = plain(target, [prompt], params)
    text = [*prompt, *written]
    drafts: list[list[tuple[int, ...]]] = []
    forwards: list[int] = []
    for has_guesses in (False, True):
        drafter = self_draft(target, bits=8)
        forwards.append(0)
        drafts.append([])

        def count(each: SelfDrafter, *args: Any, usual: Any = SelfDrafter._extended) -> Any:
            forwards[-1] += 1
            return usual(each, *args)

        known = text if has_guesses else []
        drafter._guesser = FreeGuesser(
            lambda row, known=known: Oracle(known, len(row.tokens), wrong_every),  # type: ignore[misc]
            tree=False,
        )
        with monkeypatch.context() as patched:
            patched.setattr(SelfDrafter, "_extended", count)
            policy = Policy.of(target, drafter, FixedBudget(6))
            policy.trace = lambda record: drafts[-1].append(record.rows[0].proposal.tree.tokens)
            engine = Engine(target, policy)
            engine.submit(prompt, params)
            drain(engine)
    assert drafts[0] == drafts[1]
    assert forwards[1] <= forwards[0]
    if wrong_every == 1000 and params.coupling == "seeded":
        assert forwards[1] < 0.9 * forwards[0]


def test_of_a_long_text_the_copy_reads_the_first_block_and_the_end(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the entries in between were not there; tokens keep their positions."""
    text, cache = random_text(5 * BLOCK + 20), target.cache
    copy, slot = without_screen(target, target.low_bit_copy(8)), cache.allocate()
    read(target, slot, text[:-1])
    num = len(text) - 1
    row = ScoreRow(slot, (text[-1],), TokenTree.chain([3, 5]))
    all_of_it = copy.score([row], [num]).logits_NV
    monkeypatch.setattr(copy_module, "_LONG", 4 * BLOCK)
    monkeypatch.setattr(copy_module, "_NEAR", 2 * BLOCK)
    found = copy.score([row], [num]).logits_NV

    kept = [*range(BLOCK), *range((num - 2 * BLOCK) // BLOCK * BLOCK, num)]
    other = target.apart(num)
    there = other.cache.allocate()
    read(other, there, text[: len(kept)])  # for the room
    for layer in range(cache.shape.num_layers):
        keys, values = cache.store.get(layer, cache.table(slot), num)
        other.cache.store.put(layer, other.cache.table(there), 0, keys[:, kept], values[:, kept])
    plan = plan_forward([replace(row, slot=there)], [len(kept)])
    announce(plan, other.cache)
    plan = replace(plan, positions=[num, num + 1, num + 2])
    expected, _ = copy.on(other)._decoder.forward(plan, other.cache)
    assert torch.equal(found, expected)
    assert not torch.equal(found, all_of_it)


def test_it_drafts_nothing_in_the_first_step(target: NativeTarget) -> None:
    """So a drawn text does not depend on what the cache holds of its prompt."""
    sizes: list[list[int]] = []
    policy = Policy.of(target, self_draft(target), FixedBudget(4))
    policy.trace = lambda record: sizes[-1].append(len(record.rows[0].proposal.tree))
    engine = Engine(target, policy)
    for _ in range(2):  # the second finds its prompt in the cache
        sizes.append([])
        engine.submit(random_text(40), SamplingParams(max_tokens=12, ignore_eos=True))
        drain(engine)
    assert sizes[0][0] == sizes[1][0] == 0
    assert sizes[0][1] == sizes[1][1] == 4


def test_drawn_tokens_are_those_of_the_rules(target: NativeTarget) -> None:
    """Where the forward draws, it is what the rules make of the logits."""
    drafter, params = self_draft(target), SamplingParams(temperature=0.8)
    tokens = random_text(16)
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, tokens[:-1])])
    target.cache.keep(slot, len(tokens) - 1, ())
    drafter.begin(DraftRow.of(0, tokens[:4]))
    row = DraftRow.of(0, tuple(tokens), params, 6, seed=4, slot=slot)
    (drawn,) = drafter.propose([row])
    ruled = replace(row, rules=NoScale(row.rules))
    (chosen,) = drafter.propose([ruled])
    assert len(drawn.tree) == 6
    assert drawn.tree == chosen.tree


class NoScale:
    """Rules that do not say that their law is nothing but scaled logits."""

    scale = None

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rules, name)


def test_its_fit_is_measured(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = map(float, itertools.count())
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))  # each forward takes a second
    fit = measured_fit(target, target.low_bit_copy(8), [[1]])
    assert fit.greedy > 0.7
    assert fit.shares == (1.0,) * 4
    assert 0.0 < fit.token_share(0.9) < fit.token_share(0.1)
    drafter = self_draft(target, bits=8)
    assert drafter.traits.promise is not None
    assert drafter.traits.round_share is not None
    assert not target.cache.slots


def test_a_copy_that_errs_is_measured_longer(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few tokens its chance is known too badly to choose between copies."""
    agreement, prompts = self_draft_file._agreement, [[1], [2, 3], [4], [5]]
    monkeypatch.setattr(self_draft_file, "_MOST_SECONDS", math.inf)
    assert agreement(target, target.low_bit_copy(4), prompts, 0.0)[0] < 129 / 130
    monkeypatch.setattr(self_draft_file, "_drawn", lambda _: 3)
    chance, times = agreement(target, target.low_bit_copy(4), prompts, 0.0)
    assert chance == 33 / 34
    assert len(times) == 16
    told = itertools.cycle(range(50))
    monkeypatch.setattr(self_draft_file, "_drawn", lambda _: next(told))
    assert agreement(target, target.low_bit_copy(4), prompts, 0.0)[0] == 1 / 130


def test_a_copy_is_chosen_by_the_price_of_nodes() -> None:
    """Where nodes are cheap, chains are long, and errors cost more than time."""
    shares = (0.2, 0.25, 0.3, 0.35)
    quick, right = Fit(0.85, 0.85, shares), Fit(0.97, 0.97, tuple(1.4 * x for x in shares))
    assert right.speedup > quick.speedup * 1.05
    dear = [replace(fit, node_share=0.8).speedup for fit in (quick, right)]
    assert dear[0] == pytest.approx(dear[1], rel=0.05)


def test_it_is_measured_with_unlike_tokens(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like ones touch few experts of a mixture: guesses would look cheaper than they are."""
    read: list[Sequence[int]] = []
    score = type(target.low_bit_copy(8)).score

    def recorded(self: LowBitCopy, rows: Sequence[ScoreRow], *rest: Any) -> Any:
        read.append((*rows[0].pending, *rows[0].tree.tokens))
        return score(self, rows, *rest)

    monkeypatch.setattr(type(target.low_bit_copy(8)), "score", recorded)
    measured_fit(target, target.low_bit_copy(8), [[1]])
    assert max(map(len, read)) == 4
    assert all(len(set(tokens)) == len(tokens) for tokens in read)


def test_measuring_does_not_touch_the_cache_of_a_running_engine(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine may be running on this cache")

    for name in ("allocate", "reserve", "keep"):
        monkeypatch.setattr(target.cache, name, refuse)
    assert measured_fit(target, target.low_bit_copy(8), [[1]]).greedy > 0.7


def test_a_copy_that_was_measured_beside_a_busy_neighbour_is_measured_again(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By later processes, three in all; one that pays is not."""
    kept, copy_seconds = dict[str, Any](), [9.0, 8.0, 0.3, 0.2]

    def agreement(*_: object) -> tuple[float, list[tuple[float, ...]]]:
        return 0.9, [(1.0, 1.1, *[copy_seconds[0]] * 4)]

    def keep(name: str, recipe: str, make: Callable[[], Any]) -> Any:
        if name not in kept:
            kept[name] = make()
            copy_seconds.pop(0)
        return kept[name]

    monkeypatch.setattr("foredraft.drafters.model.self_draft._agreement", agreement)
    monkeypatch.setattr(type(target.parts), "kept", lambda parts, *args: keep(*args))
    copy = target.low_bit_copy(8)
    shares = [measured_fit(target, copy, [[1]]).shares[0] for _ in range(5)]
    assert shares == pytest.approx([9.0, 9.0, 0.3, 0.3, 0.3])


def test_what_cannot_be_is_said(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="bits is 5; this target has weights of 32 bits"):
        self_draft(target, bits=5)
    small = NativeTarget(target.config, rounded(target.weights, 4), fused_decoder())
    with pytest.raises(CapabilityError, match="with weights of more than 4 bits"):
        self_draft(small)
    middle = NativeTarget(target.config, rounded(target.weights, 8), fused_decoder())
    assert middle.low_bits == (4,)
    with pytest.raises(CapabilityError, match="our own kernels"):
        self_draft(TableModel.random(4, 0))
    monkeypatch.setattr(copy_module, "available_memory", lambda: 1000)
    with pytest.raises(ModelLoadError, match="a copy of the target in 4 bits takes"):
        target.low_bit_copy(4)


def divergence(target: NativeTarget, copy: LowBitCopy, text: list[int]) -> float:
    """Of the copy's laws from the target's, per token."""
    slot = target.cache.allocate()
    target.cache.reserve(slot, len(text))
    row = ScoreRow(slot, text[:1], TokenTree.chain(text[1:]))
    right, other = (
        scores.logits_NV.log_softmax(-1) for scores in (target.score([row]), copy.score([row], [0]))
    )
    target.cache.free(slot)
    return float((right.exp() * (right - other)).sum(-1).mean())


def test_rounding_for_the_text_brings_the_copy_closer(target: NativeTarget) -> None:
    rng = random.Random(7)
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=1)
    prompts = [[rng.randrange(target.vocab_size)] for _ in range(30)]
    texts = [
        [*prompt, *reply]
        for prompt, reply in zip(prompts, plain(target, prompts, params), strict=True)
    ]
    before = target.low_bit_copy(4)
    lost = [divergence(target, before, text) for text in texts[24:]]
    steps: list[str] = []
    after = target.tune_copy(texts[:24], steps.append)
    assert target.low_bit_copy(4) is after
    assert after.identity != before.identity
    assert len(steps) == target.num_layers
    assert sum(divergence(target, after, text) for text in texts[24:]) < 0.8 * sum(lost)


def test_a_tuned_copy_is_kept(tmp_path: Path) -> None:
    """And found again by another process: its matrices are the same, all else is the target's."""
    kept = KeptFiles(tmp_path)
    made = tiny_target(fused_decoder())

    def loaded() -> NativeTarget:
        return NativeTarget(made.config, made.weights, fused_decoder(), kept=kept)

    first = loaded().tune_copy([random_text(60, seed) for seed in range(4)], lambda done: None)
    assert loaded().low_bit_copy(4).identity == first.identity
    rounded_again = NativeTarget(made.config, made.weights, fused_decoder()).low_bit_copy(4)
    assert rounded_again.identity != first.identity


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_screen_finds_what_the_head_draws(target: NativeTarget, temperature: float) -> None:
    """Nearly always the token that all logits of 8 bits give, and with its very logit."""
    copy = target.low_bit_copy(8)
    whole = without_screen(target, copy)
    assert copy.weights.screen_VE is not None
    assert whole.identity != copy.identity
    slot, text = target.cache.allocate(), random_text(12)
    scale = 1.0 / temperature if temperature else 0.0
    num_same = num_draws = 0
    for seed in range(30):
        copy.score([ScoreRow(slot, text[:-1])], [0])
        tree = TokenTree.chain(random_text(2, seed))
        row = ScoreRow(slot, text[-1:], tree, draw=DrawKey(seed, 40, scale))
        screened, scores = copy.score([row], [11]), whole.score([row], [11])
        assert screened.drawn is not None
        assert scores.drawn is not None
        for ahead, (draw, wanted) in enumerate(zip(screened.drawn, scores.drawn, strict=True)):
            assert draw is not None
            assert wanted is not None
            assert screened.logits_NV[ahead, draw.drawn] == scores.logits_NV[ahead, draw.drawn]
            num_same += draw.drawn == wanted.drawn
            num_draws += 1
    assert num_same > 0.95 * num_draws


def test_guesses_behind_a_chain_are_worth_their_nodes(target: NativeTarget) -> None:
    """They come where they are sure and nodes cost little, and texts stay the same."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    (written,) = plain(target, PROMPTS[:1], params)
    text = [*PROMPTS[0], *written]
    drafter = self_draft(target, bits=8)
    drafter._guesser = GuidedDrafter(lambda row: Oracle(text, len(row.tokens), 1000), tree=False)
    row = DraftRow.of(0, PROMPTS[0], params, 3, 3, slot=target.cache.allocate())
    read(target, row.slot, PROMPTS[0])
    drafter.begin(row)
    row = replace(row, tokens=text[: len(PROMPTS[0]) + 1])
    for price, num_guesses in (((1.0, 1.01), 3), ((1.0, 10), 0)):
        (proposal,) = drafter.propose([replace(row, spare=3, prices=price)])
        assert len(proposal.tree) == 3 + num_guesses
        assert len(drafter.propose([replace(row, prices=price)])[0].tree) == 3
