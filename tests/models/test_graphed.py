"""What GPUs record, and which forwards; decoders of fixed shapes compute what the eager one does.

Nothing is recorded on a CPU, and the kernels are `test_triton`'s: a forward here does nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.load import prove_bits
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import DecoderConfig
from foredraft.models.native.cuda import (
    TILE,
    Bucket,
    ExactDecoder,
    GridInputs,
    PagedDecoder,
    Recorder,
    enter_device,
    fits_grid,
    grid_inputs,
    paged_bucket,
    pieces,
)
from foredraft.models.native.model import EagerDecoder, FixedShapeDecoder, probe
from foredraft.models.native.plan import ForwardPlan, plan_forward
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights
from foredraft.models.table import TableModel
from tests.models.checkpoints import made, text


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


class Idle(PagedDecoder):
    """Records forwards that do nothing."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        EagerDecoder.__init__(self, config, weights)
        self._least = TILE
        self._begin()

    def _run(
        self, inputs: GridInputs, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> dict[int, Tensor]:
        return {i: torch.zeros(bucket.size, self._config.hidden_size) for i in bucket.taps}


@pytest.fixture
def target() -> NativeTarget:
    return NativeTarget.load(made("llama"), new_decoder=Idle)


def decoder_of(target: NativeTarget) -> PagedDecoder:
    assert isinstance(target.decoder, PagedDecoder)
    return target.decoder


def opened(target: NativeTarget, count: int = 20) -> int:
    """A slot that holds a text."""
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, text(count))])
    target.cache.keep(slot, count, ())
    return slot


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


def test_equal_shapes_share_a_recording(target: NativeTarget) -> None:
    slot, decoder = opened(target), decoder_of(target)
    for size in (0, 6, 7, 15):  # with the pending token, at most sixteen
        target.score([ScoreRow(slot, [3], TokenTree.chain(text(size)))])
    assert (decoder.num_recorded, decoder.num_replayed) == (1, 4)
    target.score([ScoreRow(slot, [3], SMALL_TREE)])
    scores = target.score([ScoreRow(slot, [3])], taps=(1,))
    assert decoder.num_recorded == 3
    assert scores[0].taps.keys() == {1}
    target.score([ScoreRow(slot, [3])])  # what was tapped once is there in all
    assert decoder.num_recorded == 3


def test_the_least_recently_used_recording_goes() -> None:
    target = NativeTarget.load(made("llama"), new_decoder=Idle)
    decoder, slot = decoder_of(target), target.cache.allocate()
    decoder.max_graphs = 2

    def recorded(size: int) -> bool:
        before = decoder.num_recorded
        target.score([ScoreRow(slot, text(size)[:1], TokenTree.chain(text(size - 1)))])
        return decoder.num_recorded > before

    sizes = (1, 17, 1, 33, 1, 17)
    assert [recorded(size) for size in sizes] == [True, True, False, True, False, True]


def test_a_cache_that_moved_is_recorded_anew(target: NativeTarget) -> None:
    slot, decoder = opened(target, 200), decoder_of(target)
    target.score([ScoreRow(slot, [3])])
    target.cache.store._resize(8)
    target.score([ScoreRow(slot, [3])])
    assert decoder.num_recorded == 2


def test_recordings_outlive_the_last_request(target: NativeTarget) -> None:
    slot, decoder = opened(target), decoder_of(target)
    target.score([ScoreRow(slot, [3])])
    target.cache.free(slot)
    assert target.cache.num_bytes > 0
    target.score([ScoreRow(opened(target, 30), [3])])
    assert decoder.num_recorded == 1


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


def test_kernels_are_launched_on_the_models_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    for name in ("cpu", "cuda", "cuda:1"):
        enter_device(torch.device(name))
    assert entered == [torch.device("cuda:1")]
    monkeypatch.setattr("foredraft.models.native.target.enter_device", entered.append)
    target = NativeTarget.load(made("llama"))
    target.score([ScoreRow(target.cache.allocate(), [5])])
    assert entered[1:] == 2 * [torch.device("cpu")]


@pytest.mark.parametrize("new_decoder", [Idle, EagerDecoder])
def test_a_cache_that_is_not_the_models_own_is_refused(new_decoder: type[EagerDecoder]) -> None:
    target = NativeTarget.load(made("llama"), new_decoder=new_decoder)
    cache = KVCache(target.config.kv_shape, torch.bfloat16, "cpu", 512)
    cache.reserve(cache.allocate(), 20)
    for length in (1, 20):
        plan = plan_forward([ScoreRow(0, text(length))], [0])
        with pytest.raises(ConfigError, match="make it of the model's own"):
            target.decoder.forward(plan, cache)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4", "gpt-oss", "deepseek-v2"])
def test_heads_that_share_keys_attend_together_on_a_gpu(family: str) -> None:
    """As further tokens, for models that no kernel of ours knows too; here the same is done."""
    plain, grouped = (NativeTarget.load(made(family)) for _ in range(2))
    assert isinstance(grouped.decoder, EagerDecoder)
    grouped.decoder._groups_heads = True
    for target in (plain, grouped):
        opened(target, 40)
    for rows in ([ScoreRow(0, [5], SMALL_TREE)], [ScoreRow(0, [6])]):
        expected, actual = (target.score(rows)[0].logits_NV for target in (plain, grouped))
        assert torch.allclose(actual, expected, atol=1e-4)


# ------------------------------------------------------------- a step as the kernels of gpus get it


SMALL_TREE = TokenTree((7, 8, 9, 8), (ROOT, ROOT, 0, 2))


@pytest.mark.parametrize(
    ("sizes", "start", "bucket"),
    [
        ([1], 10, (1, 16, 256)),
        ([5], 10, (1, 16, 256)),
        ([1], 256, (1, 16, 1024)),
        ([8], 248, (1, 16, 1024)),
        ([17], 10, (1, 32, 256)),
        ([3, 1], 300, (4, 4, 1024)),
        ([1, 1, 1], 10, (16, 1, 256)),
        ([1] * 32, 1023, (32, 1, 1024)),
    ],
)
def test_a_step_has_sixteen_tokens_or_more(
    sizes: list[int], start: int, bucket: tuple[int, ...]
) -> None:
    plan = plan_of(*((slot, size, start) for slot, size in enumerate(sizes)))
    assert paged_bucket(plan, 64) == Bucket(*bucket, (), True)


def test_long_prompts_are_cut_into_few_sizes() -> None:
    def lengths(pending: int, tree: TokenTree = EMPTY_TREE, most: int = 256) -> list[int]:
        plan = plan_forward([ScoreRow(0, text(pending), tree)], [0])
        return [len(span) for spans in pieces(plan, most) for span in spans]

    assert lengths(90) == [64, 26]
    assert lengths(128) == [64, 64]
    assert lengths(129) == [129]
    assert lengths(330) == [256, 64, 10]
    assert lengths(330, most=64) == [64, 64, 64, 64, 64, 10]
    assert lengths(60, SMALL_TREE) == [64]
    assert lengths(62, SMALL_TREE) == [62, 4]
    assert lengths(254, SMALL_TREE) == [254, 4]
    assert lengths(66, SMALL_TREE) == [64, 6]
    assert lengths(1, TokenTree.chain(text(329))) == [256, 64, 10]


class Uneven(ExactDecoder):
    """Its logits are those of a token alone, but for what a grid of few tokens adds to them."""

    least, noise = TILE, 1.0

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        EagerDecoder.__init__(self, config, weights)
        self._least = self.least
        self._begin()

    def _run(
        self, inputs: GridInputs, bucket: Bucket, cache: KVCache, logits_NV: Tensor
    ) -> dict[int, Tensor]:
        tokens_N = inputs.token_ids[inputs.wanted[: len(logits_NV)]]
        logits_NV[:] = tokens_N[:, None] * torch.arange(logits_NV.shape[1])
        if bucket.size < 2 * TILE:
            logits_NV += self.noise
        return {}


class UnevenInLargeTiles(Uneven):
    least = 2 * TILE


@pytest.mark.parametrize(("noise", "decoder"), [(0.0, Uneven), (1.0, UnevenInLargeTiles)])
def test_a_card_whose_small_tiles_have_other_bits_takes_large_ones(
    noise: float, decoder: type[Uneven], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uneven, "noise", noise)
    monkeypatch.setattr("foredraft.load.LargeTileDecoder", UnevenInLargeTiles)
    target = NativeTarget.load(made("llama"), new_decoder=Uneven)
    prove_bits(target)
    assert type(target.decoder) is type(target.apart(64).decoder) is decoder


def test_a_chunk_of_a_long_prompt_wants_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uneven, "noise", 0.0)
    target = NativeTarget.load(made("llama"), new_decoder=Uneven)
    row = ScoreRow(target.cache.allocate(), text(90), wants_logits=False)
    assert len(target.score([row])[0].logits_NV) == 0


@pytest.mark.parametrize(("most", "size"), [(200, 256), (199, 64)])
def test_pieces_far_behind_are_small(most: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.models.native.cuda._LONG", most)
    target = NativeTarget.load(made("llama"), new_decoder=Uneven)
    target.score([ScoreRow(target.cache.allocate(), text(200))])
    assert isinstance(target.decoder, Uneven)
    assert {bucket.tokens for bucket in target.decoder._graphs} >= {size}
    assert all(bucket.tokens <= size for bucket in target.decoder._graphs)


def test_bits_that_differ_in_large_tiles_too_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.load.LargeTileDecoder", Uneven)
    monkeypatch.setattr(Uneven, "noise", 1.0)
    with pytest.raises(CapabilityError, match="exact=True"):
        prove_bits(NativeTarget.load(made("llama"), new_decoder=Uneven))


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
