"""Models with recurrent layers through the engine: the texts of plain decoding, whatever happens.

Trees, cancelled requests, several replies to a prompt, texts that begin alike, and too little
memory for all of them at once, on the fused kernel.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import RowStep
from foredraft.core.traits import DrafterTraits
from foredraft.core.tree import TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.drafters.none import NoDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.request import Event
from foredraft.models.native.cpu import FusedDecoder
from foredraft.models.native.target import NativeTarget
from tests.engine.helpers import engine_of
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, need_kernel, save_checkpoint

MODELS = (
    *("lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next", "granite-hybrid"),
    *("falcon-h1", "nemotron-h", "nemotron-h-moe", "mamba2"),
)
_FEW_TOKENS = 450
"""That the small cache has room for: the longest text and one more."""


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_kernel()
    directory = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(directory, NATIVE_CONFIGS[request.param]())
    return directory


def new_target(path: Path, memory: int | None = None) -> NativeTarget:
    return NativeTarget.load(
        path, torch.float32, new_decoder=FusedDecoder, cache_memory=memory, max_context=512
    )


class RandomTrees:
    """Drafts trees of any shape, with some of the tokens that are to come."""

    taps: Sequence[int] = ()
    layers: Sequence[Any] = ()
    traits = DrafterTraits()

    def __init__(self, dice: random.Random, known: dict[int, list[int]]) -> None:
        self._dice, self._known = dice, known
        self.num_accepted = 0

    def begin(self, row: DraftRow) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def observe(self, observations: Sequence[RowStep]) -> None:
        self.num_accepted += sum(each.num_accepted for each in observations)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> Proposal:
        """Each right token among wrong siblings, in any order."""
        dice, text = self._dice, list(row.tokens)
        right = self._known.get(row.request_id, [])[len(text) :]
        tokens, parents, last = list[int](), list[int](), -1
        while len(tokens) < row.budget and dice.random() < 0.9:
            hit = right.pop(0) if right and dice.random() < 0.8 else None
            wanted = {
                hit if hit is not None else -1,
                *dice.sample(range(VOCAB_SIZE), dice.randint(0, 2)),
            }
            children = [token for token in wanted if token >= 0][: row.budget - len(tokens)]
            dice.shuffle(children)
            first = len(tokens)
            tokens += children
            parents += [last] * len(children)
            if hit is None or hit not in children:
                right = []
                last = dice.randrange(first - 1, len(tokens)) if tokens else -1
            else:
                last = first + children.index(hit)
            if last in parents:  # siblings must differ
                break
        return Proposal.chosen(TokenTree(tuple(tokens), tuple(parents)))


class Schedule:
    """Random requests, each with a text that is known beforehand; ``run`` compares."""

    def __init__(self, path: Path, seed: int) -> None:
        dice = self.dice = random.Random(f"hybrids {seed}")
        self.path = path
        plain_target = new_target(path)
        self._plain = engine_of(
            plain_target, NoDrafter(), FixedBudget(0), max_batch_size=1, prefix_caching=False
        )
        bytes_per_token = plain_target.cache.memory._token_bytes
        is_small = dice.random() < 0.7
        self.target = new_target(path, _FEW_TOKENS * bytes_per_token if is_small else None)
        self.expected: dict[int, list[int]] = {}
        self.drafter = RandomTrees(dice, self.expected)
        options = {
            "max_batch_size": dice.choice([1, 4, 8]),
            "max_step_tokens": dice.choice([8, 64, 512]),
            "prefix_caching": dice.random() < 0.8,
        }
        self.engine = engine_of(self.target, self.drafter, FixedBudget(12), **options)
        self.engine._headroom = 0  # small replies are to run out of memory, too
        self.texts: list[list[int]] = []
        self.replies: dict[int, list[int]] = {}
        self.num_steps = 0

    def run(self, num_steps: int) -> None:
        dice = self.dice
        while self.num_steps < num_steps or self.engine.has_work:
            num_live = len(self.engine._scheduler)
            if self.num_steps < num_steps and (
                (num_live < 20 and dice.random() < 0.2) or not num_live
            ):
                self._submit()
            if num_live and dice.random() < 0.01:
                live = [*self.engine._scheduler._by_id]
                self.engine.cancel(dice.choice(live))
            self.engine.step()
            self.num_steps += 1
            self.target.cache.check()
        assert not self.target.cache.slots

    def _submit(self) -> None:
        dice = self.dice
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([1, 3, 20, 70, 150]))]
        if self.texts and dice.random() < 0.6:
            text = dice.choice(self.texts)
            prompt = text[: dice.randint(1, len(text))][:260] + prompt[: dice.choice([0, 1, 9])]
        params = SamplingParams(
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.getrandbits(60),
            max_tokens=dice.choice([1, 8, 40, 90]),
            ignore_eos=True,
            n=dice.choice([1, 1, 1, 3]),
        )
        rows = self.engine.prepare(prompt, params)
        for row in rows:
            alone = SamplingParams(
                temperature=params.temperature,
                seed=row.seed,
                max_tokens=params.max_tokens,
                ignore_eos=True,
            )
            reply = plain_text(self._plain, prompt, alone)
            self.expected[row.request_id] = [*prompt, *reply]
            self.replies[row.request_id] = [*prompt]
        self.texts.append(self.expected[rows[0].request_id])
        self.engine.add(rows, self._take)

    def _take(self, event: Event) -> None:
        text = self.replies[event.request_id]
        text += event.token_ids
        expected = self.expected[event.request_id]
        assert text == expected[: len(text)], f"request {event.request_id} has another text"
        if event.result is not None and event.result.finish_reason != "cancelled":
            assert text == expected


def plain_text(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Alone, without drafts and without anything that an earlier text has left."""
    found = list[int]()
    engine.add(engine.prepare(prompt, params), lambda event: found.extend(event.token_ids))
    while engine.has_work:
        engine.step()
    return found


def test_texts_are_those_of_plain_decoding_whatever_happens(path: Path) -> None:
    schedule = Schedule(path, 0)
    schedule.run(300)
    assert schedule.drafter.num_accepted > 50


@pytest.mark.slow
def test_ten_thousand_steps(path: Path) -> None:
    num_steps, accepted, preempted, cached = 0, 0, 0, 0
    for seed in range(1, 21):
        schedule = Schedule(path, seed)
        schedule.run(500)
        num_steps += schedule.num_steps
        accepted += schedule.drafter.num_accepted
        preempted += schedule.engine.stats().preemptions
        cached += schedule.engine.stats().prefix_cached_tokens
    assert num_steps >= 10_000
    assert accepted > 1000
    assert preempted > 10
    assert cached > 1000
