"""Decoders of fixed shapes compute what the eager one does, and padding touches nothing.

Nothing is recorded on a CPU, but all else runs: grids, masks, scratch entries, buckets.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.random_model import random_weights
from foredraft.cache.kv import KVCache
from foredraft.core.errors import CapabilityError
from foredraft.core.params import SamplingParams
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.llm import LLM
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import DecoderConfig, read_config
from foredraft.models.native.cuda import (
    Bucket,
    GraphedDecoder,
    GridInputs,
    Recorder,
    attention_bias,
    choose_bucket,
    fits_grid,
    grid_inputs,
    paged_bucket,
)
from foredraft.models.native.model import FixedShapeDecoder, probe
from foredraft.models.native.plan import ForwardPlan, plan_forward
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import load_weights
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.models.checkpoints import made, text

TOLERANCE = 1e-4
TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


@pytest.fixture
def target(checkpoint: Path) -> NativeTarget:
    return NativeTarget.load(checkpoint, new_decoder=GraphedDecoder)


@pytest.fixture
def pair(checkpoint: Path, target: NativeTarget) -> Pair:
    return Pair(NativeTarget.load(checkpoint), target)


def decoder_of(target: NativeTarget) -> GraphedDecoder:
    assert isinstance(target.decoder, GraphedDecoder)
    return target.decoder


@dataclass
class Pair:
    """An eager and a graphed target that are fed the same; every step compares them."""

    eager: NativeTarget
    graphed: NativeTarget
    slots: list[int] = field(default_factory=list)

    def open(self, tokens: Sequence[int] = ()) -> int:
        """A slot of both that holds ``tokens``."""
        slot, other = self.eager.cache.allocate(), self.graphed.cache.allocate()
        assert slot == other
        if tokens:
            self.score([ScoreRow(slot, tokens)])
            self.keep(slot, len(tokens))
        return slot

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> None:
        pairs = zip(self.eager.score(rows, taps), self.graphed.score(rows, taps), strict=True)
        for expected, actual in pairs:
            assert actual.logits_NV.dtype == torch.float32
            assert_close(actual.logits_NV, expected.logits_NV)
            assert actual.taps.keys() == expected.taps.keys()
            for layer, tapped_TE in actual.taps.items():
                assert_close(tapped_TE, expected.taps[layer])

    def keep(self, slot: int, num_pending: int, path: Sequence[int] = ()) -> None:
        for target in (self.eager, self.graphed):
            target.cache.keep(slot, num_pending, path)
        counted = self.eager.cache.length(slot)
        for expected, actual in zip(
            *(entries(target, slot, counted) for target in (self.eager, self.graphed)), strict=True
        ):
            assert_close(actual, expected)

    def free(self, slot: int) -> None:
        self.eager.cache.free(slot)
        self.graphed.cache.free(slot)

    @property
    def num_replayed(self) -> int:
        return decoder_of(self.graphed).num_replayed


def entries(target: NativeTarget, slot: int, end: int) -> list[Tensor]:
    """Keys and values [H, end, D] of a slot, layer by layer."""
    store, table = target.cache.store, target.cache.table(slot)
    return [x for layer in range(store.shape.num_layers) for x in store.get(layer, table, end)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=0.0, atol=TOLERANCE)


# ------------------------------------------------------------------------------------ same values


def test_steps_of_one_row_equal_the_eager_decoder(pair: Pair) -> None:
    slot = pair.open(text(20))
    before = pair.num_replayed
    for tree in (EMPTY_TREE, TokenTree.chain((5, 6, 7)), TREE, TokenTree.chain(text(40))):
        pair.score([ScoreRow(slot, [11], tree)])
        pair.keep(slot, 1)
    assert pair.num_replayed == before + 4


def test_a_random_course_of_steps_equals_the_eager_decoder(pair: Pair) -> None:
    """Rows come, draft, keep, go back and leave; the cache grows on the way."""
    generator = random.Random(5)
    slots: list[int] = []
    for _ in range(60):
        if len(slots) < 4 and generator.random() < 0.3:
            slots.append(pair.open(text(generator.choice((0, 3, 40, 200)))))
        chosen = generator.sample(slots, generator.randint(min(1, len(slots)), len(slots)))
        if not chosen:
            continue
        trees = [random_tree(generator) for _ in chosen]
        rows = [ScoreRow(slot, [9], tree) for slot, tree in zip(chosen, trees, strict=True)]
        pair.score(rows, generator.choice(((), (2, 0))))
        for slot, tree in zip(chosen, trees, strict=True):
            pair.keep(slot, 1, generator.choice([(), *tree.paths]))
        if generator.random() < 0.1:
            slots.remove(chosen[0])
            pair.free(chosen[0])
    assert pair.num_replayed > 40


def random_tree(generator: random.Random) -> TokenTree:
    size = generator.choice((0, 0, 1, 3, 7, 12))
    parents = [generator.randrange(ROOT, node) for node in range(size)]
    return TokenTree(tuple(text(size)), tuple(parents))


def test_in_bfloat16_it_is_as_precise_as_the_eager_decoder(checkpoint: Path) -> None:
    precise = load_weights(checkpoint, read_config(checkpoint), torch.bfloat16)
    for tensor in precise.tensors().values():
        tensor.data = tensor.data.float()
    targets = (
        NativeTarget(read_config(checkpoint), precise),
        NativeTarget.load(checkpoint, torch.bfloat16),
        NativeTarget.load(checkpoint, torch.bfloat16, new_decoder=GraphedDecoder),
    )
    scored = []
    for target in targets:
        slot = target.cache.allocate()
        target.score([ScoreRow(slot, text(30))])
        target.cache.keep(slot, 30, ())
        scored.append(target.score([ScoreRow(slot, [4], TREE)])[0].logits_NV)
    expected, eager, graphed = scored
    assert (graphed - expected).abs().mean() < 1.3 * (eager - expected).abs().mean()


# -------------------------------------------------------------------------------- padding is alone


def test_only_the_plans_entries_are_written(target: NativeTarget) -> None:
    cache, slots = target.cache, [target.cache.allocate() for _ in range(4)]
    for slot in slots:
        target.score([ScoreRow(slot, text(30, seed=slot))])
        cache.keep(slot, 30, ())
    target.score([ScoreRow(slots[2], [5], TREE), ScoreRow(slots[0], [6])])
    before = [entries(target, slot, 64) for slot in slots]
    target.score([ScoreRow(slots[2], [8], TREE), ScoreRow(slots[0], [9])])
    expected = [{30}, set(), {*range(30, 38)}, set()]
    for slot, written in zip(slots, expected, strict=True):
        for old, new in zip(before[slot], entries(target, slot, 64), strict=True):
            assert set((old != new).any(-1).any(0).nonzero()[:, 0].tolist()) <= written


def test_what_does_not_count_has_no_influence(target: NativeTarget) -> None:
    """Entries of rejected nodes, of other rows and of padding hold anything; no bit changes.

    Not even NaN: attention gives what it may not see a weight of 0, and 0 times NaN is NaN.
    """
    cache, slots = target.cache, [target.cache.allocate() for _ in range(3)]
    for slot in slots:
        target.score([ScoreRow(slot, text(30, seed=slot))])
        cache.keep(slot, 30, ())
    rows = [ScoreRow(slots[1], [5], TREE), ScoreRow(slots[0], [6])]
    expected = target.score(rows)
    for slot in slots:
        cache.will_write(slot, 34)
    for store in (cache.store.keys, cache.store.values):
        for slot in slots:
            store[[*cache.table(slot)], :, :, 30:] = torch.nan
        store[[*cache.table(slots[2])]] = torch.nan
        store[-1] = torch.nan  # where padding writes
    for actual, wanted in zip(target.score(rows), expected, strict=True):
        assert torch.equal(actual.logits_NV, wanted.logits_NV)


def test_a_broken_row_does_not_harm_the_next_user_of_its_slot(
    checkpoint: Path, target: NativeTarget
) -> None:
    prompt, broken = text(20), text(60, seed=1)
    layer = target.weights.layers[0]
    slot = target.cache.allocate()
    kept = layer.attention_norm_E.clone()
    layer.attention_norm_E.fill_(torch.nan)
    target.score([ScoreRow(slot, broken)])
    target.cache.keep(slot, len(broken), ())
    [scores] = target.score([ScoreRow(slot, [3], TREE)])
    assert scores.logits_NV.isnan().all()
    layer.attention_norm_E.copy_(kept)
    target.cache.free(slot)
    pair = Pair(NativeTarget.load(checkpoint), target)
    assert pair.open(prompt) == slot
    before = pair.num_replayed
    pair.score([ScoreRow(slot, [3], TREE)])
    pair.keep(slot, 1, (1, 4))
    pair.score([ScoreRow(slot, [4])])
    assert pair.num_replayed == before + 2


def test_logits_and_taps_belong_to_the_caller(target: NativeTarget) -> None:
    slot = target.cache.allocate()
    [first] = target.score([ScoreRow(slot, [5], TREE)], taps=(0,))
    kept = first.logits_NV.clone(), first.taps[0].clone()
    target.score([ScoreRow(slot, [6], TREE)], taps=(0,))
    assert torch.equal(first.logits_NV, kept[0])
    assert torch.equal(first.taps[0], kept[1])


# ------------------------------------------------------------------------------ buckets, recordings


def plan_of(*rows: tuple[int, int, int], pending: int = 1):  # type: ignore[no-untyped-def]
    """A plan of (slot, tokens, start) rows."""
    score_rows = [
        ScoreRow(slot, text(pending), TokenTree.chain(text(tokens - pending)))
        for slot, tokens, _ in rows
    ]
    return plan_forward(score_rows, [start for *_, start in rows])


def test_steps_go_on_the_grid_and_all_else_does_not() -> None:
    assert fits_grid(plan_of((0, 1, 10)))
    assert fits_grid(plan_of((0, 64, 10)))
    assert fits_grid(plan_of(*((slot, 32, 10) for slot in range(8))))
    assert not fits_grid(plan_of((0, 65, 10)))
    assert not fits_grid(plan_of(*((slot, 33, 10) for slot in range(8))))
    assert not fits_grid(plan_of((0, 20, 0), pending=20))  # a prompt
    assert not fits_grid(replace(plan_of((0, 1, 10)), hidden_TE=torch.zeros(1, 64)))
    assert not fits_grid(plan_forward([ScoreRow(0, [1], wants_logits=False)], [0]))


def test_the_mask_is_the_plans(target: NativeTarget) -> None:
    rows = [ScoreRow(1, [4, 5], TREE), ScoreRow(0, [6], TokenTree.chain(text(63)))]
    plan = plan_forward(rows, [20, 3])
    for _ in range(2):
        target.cache.reserve(target.cache.allocate(), 100)
    bucket = choose_bucket(plan, target.cache.block_size)
    inputs = GridInputs.of(grid_inputs(plan, bucket, target.cache), bucket)
    bias = attention_bias(inputs, bucket, torch.float32)
    assert (bias == 0).any(-1).all(), "a token that sees nothing has no defined output"
    for place, row in enumerate(plan.rows):
        expected = torch.zeros(len(row), bucket.context, dtype=torch.bool)
        expected[:, : plan.end(row)] = plan.mask(row)
        assert torch.equal(bias[place, : len(row)] == 0, expected)


def test_equal_shapes_share_a_recording_and_the_least_recently_used_one_goes(
    checkpoint: Path,
) -> None:
    target = NativeTarget.load(
        checkpoint, new_decoder=lambda config, weights: GraphedDecoder(config, weights, 2)
    )
    decoder, slot = decoder_of(target), target.cache.allocate()

    def recorded(size: int) -> bool:
        before = decoder.num_recorded
        target.score([ScoreRow(slot, text(size)[:1], TokenTree.chain(text(size - 1)))])
        return decoder.num_recorded > before

    sizes = (1, 2, 1, 5, 6, 8, 1, 2)  # five to eight tokens have one shape
    is_new = [True, True, False, True, False, False, False, True]
    assert [recorded(size) for size in sizes] == is_new


def test_recordings_outlive_the_last_request_and_not_the_place_of_the_cache(pair: Pair) -> None:
    slot, decoder = pair.open(text(20)), decoder_of(pair.graphed)
    pair.score([ScoreRow(slot, [3])])
    pair.free(slot)
    assert pair.graphed.cache.num_bytes > 0
    before, slot = decoder.num_recorded, pair.open(text(30))
    pair.score([ScoreRow(slot, [3])])
    assert decoder.num_recorded == before
    pair.graphed.cache.store._resize(8)
    pair.score([ScoreRow(slot, [3])])
    assert decoder.num_recorded == before + 1


def test_a_recording_keeps_the_memory_that_it_works_on(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder of a GPU drops what it recorded; here one that does so, too."""
    alive: list[weakref.ref[object]] = []

    def record(self: Recorder, work: Callable[[], object]) -> Callable[[], object]:
        alive.append(weakref.ref(work))
        return dict

    monkeypatch.setattr(Recorder, "record", record)
    target.score([ScoreRow(target.cache.allocate(), [5])])
    gc.collect()
    assert alive[0]() is not None


# ------------------------------------------------------------------------------------- on a device


def test_the_recorded_work_asks_the_device_for_no_value(checkpoint: Path) -> None:
    """Tensors on "meta" have no values and mix with no others: whatever would wait, raises."""
    config: DecoderConfig = replace(read_config(checkpoint), model_type="llama")
    decoder = GraphedDecoder(config, random_weights(config, torch.bfloat16, "meta"))
    cache = KVCache(config.kv_shape, torch.bfloat16, "meta", 512)
    cache.reserve(cache.allocate(), 300)
    bucket = Bucket(rows=2, tokens=8, context=256, taps=(1,))
    numbers = torch.zeros((8 + 8) * bucket.size + 2 * 4, dtype=torch.int64, device="meta")
    inputs = GridInputs.of(numbers, bucket)
    logits_NV = torch.empty(bucket.size, config.vocab_size, device="meta")
    tapped = decoder._run(inputs, bucket, cache, logits_NV)
    assert tapped[1].shape == (bucket.size, config.hidden_size)


def test_drafting_changes_no_text(checkpoint: Path, target: NativeTarget) -> None:
    params = SamplingParams(max_tokens=24, seed=3)
    prompts = [text(30) * 2, text(12, seed=1) * 3, text(5)]
    texts = []
    for options in (LoadOptions(drafter="none"), LoadOptions(drafter="ngram")):
        for model in (NativeTarget.load(checkpoint), target):
            results = LLM(model, None, options).generate(prompts, params)
            texts.append([result.token_ids for result in results])
    assert all(found == texts[0] for found in texts)
    assert decoder_of(target).num_replayed > 0


# ------------------------------------------------------------- a step as the kernels of gpus get it


SMALL_TREE = TokenTree((7, 8, 9, 8), (ROOT, ROOT, 0, 2))


@pytest.mark.parametrize(
    ("sizes", "start", "bucket", "paged"),
    [
        ([1], 10, (1, 1, 256), (1, 16, 256)),
        ([5], 10, (1, 8, 256), (1, 16, 256)),
        ([1], 256, (1, 1, 512), (1, 16, 1024)),
        ([8], 248, (1, 8, 256), (1, 16, 1024)),
        ([17], 10, (1, 32, 256), (1, 32, 256)),
        ([3, 1], 300, (2, 4, 512), (4, 4, 1024)),
        ([1, 1, 1], 10, (4, 1, 256), (16, 1, 256)),
        ([1] * 32, 1023, (32, 1, 1024), (32, 1, 1024)),
    ],
)
def test_the_smallest_bucket_is_chosen_and_a_step_of_kernels_has_sixteen_tokens(
    sizes: list[int], start: int, bucket: tuple[int, ...], paged: tuple[int, ...]
) -> None:
    plan = plan_of(*((slot, size, start) for slot, size in enumerate(sizes)))
    assert choose_bucket(plan, block_size=64) == Bucket(*bucket, ())
    assert paged_bucket(plan, 64) == Bucket(*paged, (), True)


def test_paths_lead_through_the_tree() -> None:
    target = NativeTarget.load(made("llama"))
    cache, slot = target.cache, target.cache.allocate()
    target.score([ScoreRow(slot, [3] * 70)])
    cache.keep(slot, 70, ())
    cache.reserve(slot, 5)
    plan = plan_forward([ScoreRow(slot, [5], SMALL_TREE)], [70])
    bucket = paged_bucket(plan, cache.store.block_size)
    assert not bucket.is_chain
    inputs = GridInputs.of(grid_inputs(plan, bucket, cache), bucket)
    assert inputs.token_ids[:6].tolist() == [5, 7, 8, 9, 8, 0]
    assert inputs.lengths.tolist() == [71, 72, 72, 73, 74, *[0] * 11]
    assert [inputs.paths[i, :4].tolist() for i in range(5)] == [
        *([0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 3, 0], [0, 1, 3, 4])
    ]
    assert inputs.starts[0] == 70
    assert inputs.blocks[5:].unique().tolist() == [cache.store.num_blocks]


@pytest.mark.parametrize("window", [1, 3, 12, 40])
def test_a_prompts_window_hides_what_lies_behind_it(window: int) -> None:
    rows = [ScoreRow(0, [1] * 9, SMALL_TREE)]
    plan: ForwardPlan = plan_forward(rows, [20])
    mask = plan.mask(plan.rows[0], window)
    assert mask is not None
    for i, token in enumerate(plan.rows[0]):
        seen = [*range(plan.prefixes[token]), *plan.extras[token]][-window:]
        assert mask[i].nonzero()[:, 0].tolist() == seen
    assert mask.dtype == torch.bool


# ----------------------------------------- the fixed-shape decoder computes what the eager one does


TEXT = [(i * 7) % 250 + 3 for i in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_accepts_this_machine(checkpoint: Path, dtype: torch.dtype) -> None:
    probe(NativeTarget.load(checkpoint, dtype, new_decoder=FixedShapeDecoder))


def test_equals_the_eager_decoder(checkpoint: Path) -> None:
    eager = NativeTarget.load(checkpoint)
    fixed = NativeTarget.load(checkpoint, new_decoder=FixedShapeDecoder)
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 1))
    scored = []
    for target in (eager, fixed):
        slot = target.cache.allocate()
        scored.append(target.score([ScoreRow(slot, TEXT, tree)])[0].logits_NV)
    assert torch.allclose(*scored, atol=1e-4)


def test_a_tree_node_has_the_bits_of_its_path_alone(checkpoint: Path) -> None:
    target = NativeTarget.load(checkpoint, torch.bfloat16, new_decoder=FixedShapeDecoder)
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 1))
    slots = [target.cache.allocate() for _ in range(3)]
    other = ScoreRow(slots[1], TEXT[:9])
    in_company = target.score([other, ScoreRow(slots[0], TEXT, tree)])[1].logits_NV
    for node, path in enumerate(tree.paths):
        chain = TokenTree.chain(tree.tokens[i] for i in path)
        alone = target.score([ScoreRow(slots[2], TEXT, chain)])[0].logits_NV
        assert torch.equal(in_company[node + 1], alone[-1])


def test_probe_refuses_a_target_whose_bits_depend_on_the_shape() -> None:
    class Noisy(TableModel):
        def score(self, rows, taps=()):  # type: ignore[no-untyped-def]
            scores = super().score(rows, taps)
            for score in scores:
                score.logits_NV.mul_(1 + 1e-12 * len(score.logits_NV))
            return scores

    model = Noisy.random(30, seed=1)
    noisy = Noisy(30, model.probs)
    with pytest.raises(CapabilityError, match="exact=True"):
        probe(noisy)
