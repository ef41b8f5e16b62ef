"""The fused decoder: the eager one's values, and the same bits however the tokens are fed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from foredraft.cache.kv import KVCache
from foredraft.core.errors import ConfigError
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.kernels.build import load_library
from foredraft.kernels.instructions import available
from foredraft.kernels.interface import FORM_PACKED, FORM_PLAIN
from foredraft.models.base import ScoreRow
from foredraft.models.native.config import read_config
from foredraft.models.native.cpu import (
    PHASES,
    FusedDecoder,
    _check_outcome,
    has_tiles,
    work_bytes,
)
from foredraft.models.native.model import DecoderFactory, EagerDecoder, finished_logits
from foredraft.models.native.plan import plan_forward
from foredraft.models.native.quant import Matrix, PackedMatrix, as_tensor, tensor_of
from foredraft.models.native.target import NativeTarget
from foredraft.models.native.weights import DecoderWeights, load_weights
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, made, need_kernel, save_checkpoint

BFLOAT16_TOLERANCE = 0.06
"""Of logits that reach about 5. Activations are float32, so all that is left of bfloat16 is that
keys and values are rounded to 8 bits as they enter the cache."""

MIXTURES = (
    *("mixtral", "qwen3-moe", "olmoe", "qwen3.5-moe"),
    *("qwen3-next", "gpt-oss", "granite-hybrid-moe", "gemma4-moe"),
    *("deepseek-v2", "deepseek-v3", "glm4-moe-lite"),
)
"""Where two experts are nearly as likely, rounding decides which of them a token chooses."""

TREE = TokenTree((7, 8, 9, 8, 10, 11, 8, 3), (ROOT, ROOT, 0, 0, 1, 2, 4, 4))
DTYPES = (torch.float32, torch.bfloat16)
TILES = 16
FORMATS = [*((dtype, bits) for dtype in DTYPES for bits in (None, 8, 4)), (torch.bfloat16, TILES)]
"""Dtype of cache and weights, and how many bits the matrices among these have instead."""
INT8_CACHES = [
    ("llama", torch.bfloat16, 8, torch.int8),
    ("awkward-sizes", torch.float32, None, torch.int8),
]
"""Of a model: the same, and the dtype of the cache."""


def _awkward_sizes() -> PretrainedConfig:
    """Nothing is a multiple of a vector, of a row block or of the number of threads."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE - 1,
        hidden_size=45,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


CONFIGS = {**NATIVE_CONFIGS, "awkward-sizes": _awkward_sizes}
FEW_CONFIGS = ("llama", "qwen3", "gemma2", "awkward-sizes", "youtu")


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    need_kernel()


@pytest.fixture(scope="module", autouse=True)
def _many_threads() -> Iterator[None]:
    """Odd shares of the work are worth testing where there are only two cores, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.kernels.threads.available_cpus", lambda: 4)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    awkward = tmp_path_factory.mktemp("awkward")
    save_checkpoint(awkward, _awkward_sizes())
    return {**{name: made(name) for name in NATIVE_CONFIGS}, "awkward-sizes": awkward}


def fused(
    directory: Path,
    dtype: torch.dtype,
    num_threads: int = 1,
    bits: int | None = None,
    cache_dtype: torch.dtype | None = None,
    activation_bits: int = 16,
) -> NativeTarget:
    if bits == TILES and not has_tiles():
        pytest.skip("no tiles here")
    if bits == TILES and not read_config(directory).fits_tiles:
        pytest.skip("attention on tiles knows no windows and no caps")
    decoder = partial(FusedDecoder, num_threads=num_threads)
    return NativeTarget.load(
        *(directory, dtype),
        new_decoder=decoder,
        bits=bits,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
    )


class Alone:
    """The plainest way to score: one thread, one row, one token a forward."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        bits: int | None,
        cache_dtype: torch.dtype | None = None,
        activation_bits: int = 16,
    ) -> None:
        self.with_threads = partial(
            *(fused, directory, dtype),
            bits=bits,
            cache_dtype=cache_dtype,
            activation_bits=activation_bits,
        )
        """The same model, to be fed in some other way."""
        self._target = self.with_threads(1)
        self._slot = self._target.cache.allocate()
        self._tokens: list[int] = []
        self._logits: list[Tensor] = []

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, V] after each token. The common prefix with the last call is not read
        again."""
        shared = 0
        while (
            shared < min(len(tokens), len(self._tokens)) and tokens[shared] == self._tokens[shared]
        ):
            shared += 1
        self._target.cache.truncate(self._slot, shared)
        read = [step(self._target, self._slot, [token]) for token in tokens[shared:]]
        self._tokens, self._logits = list(tokens), [*self._logits[:shared], *read]
        return torch.cat(self._logits)


INT8_ACTIVATIONS = [(name, torch.bfloat16, 4, None, 8) for name in ("llama", "mixtral")]
IN_COMPANY = [
    *((name, *form) for name in FEW_CONFIGS for form in FORMATS),
    *INT8_CACHES,
    *INT8_ACTIVATIONS,
]


@pytest.fixture(scope="module", params=IN_COMPANY, ids=str)
def alone(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Alone:
    name, *form = request.param
    return Alone(checkpoints[name], *form)


def step(
    target: NativeTarget, slot: int, tokens: Sequence[int], tree: TokenTree = EMPTY_TREE
) -> Tensor:
    """Score and commit ``tokens``; logits after the last of them and after each node."""
    [scores] = target.score([ScoreRow(slot, tokens, tree)])
    target.cache.keep(slot, len(tokens), ())
    return scores.logits_NV


def text(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE - 1) for _ in range(length)]


# ------------------------------------------------------------------------------------ same values


def rounded_weights(directory: Path, dtype: torch.dtype, bits: int | None = None) -> DecoderWeights:
    """Weights that were rounded to ``dtype`` or int8, to be computed with in float32."""
    weights = load_weights(directory, read_config(directory), dtype, bits=bits)
    for tensor in weights.tensors().values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return weights


def largest_difference(one: NativeTarget, other: NativeTarget) -> float:
    """Of the logits of a text and a tree behind it."""
    tokens = text(40)
    found = [t.score([ScoreRow(t.cache.allocate(), tokens, TREE)])[0] for t in (one, other)]
    return (found[0].logits_NV - found[1].logits_NV).abs().max().item()


def difference(name: str, dtype: torch.dtype, one: NativeTarget, other: NativeTarget) -> float:
    """The largest; of mixtures in bfloat16 that of most tokens."""
    if name not in MIXTURES or dtype == torch.float32:
        return largest_difference(one, other)
    tokens, logits = text(40), []
    for target in (one, other):
        slot = target.cache.allocate()
        logits.append(torch.cat([step(target, slot, [token]) for token in tokens]))
    by_token = (logits[0] - logits[1]).abs().amax(1).sort().values
    return by_token[len(tokens) * 3 // 4].item()


@pytest.mark.parametrize("name", FEW_CONFIGS)
def test_an_int8_cache_holds_the_same_entries_rounded(
    name: str, checkpoints: dict[str, Path]
) -> None:
    exact = fused(checkpoints[name], torch.float32)
    rounded = fused(checkpoints[name], torch.float32, 2, cache_dtype=torch.int8)
    assert rounded.cache.store.block_bytes < 0.6 * exact.cache.store.block_bytes
    # Steps of 1/127 of the largest number, where bfloat16 has steps of 1/256 of each. A latent is
    # key and value of all heads.
    most = BFLOAT16_TOLERANCE * (4 if exact.config.latent else 2)
    assert 0 < largest_difference(exact, rounded) < most
    layer, num_entries = 0, 40  # the first layer's depend on no other entries
    for numbers, entries in (
        (exact.cache.store.keys, rounded.cache.store.keys),
        (exact.cache.store.values, rounded.cache.store.values),
    ):
        numbers_HTD, entries_HTN = (x[0, layer, :, :num_entries] for x in (numbers, entries))
        scales_HT1 = entries_HTN[..., :4].clone().view(torch.float32)
        off = (entries_HTN[..., 4:] * scales_HT1 - numbers_HTD).abs()
        assert (off <= scales_HT1 * (0.5 + 1e-5)).all()
        assert torch.allclose(numbers_HTD.abs().amax(-1, keepdim=True) / 127, scales_HT1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "deepseek-v3"])
def test_work_memory_is_what_a_plan_says(name: str, checkpoints: dict[str, Path]) -> None:
    for form, bits in ((FORM_PLAIN, None), (FORM_PACKED, 8)):
        target = NativeTarget.load(checkpoints[name], new_decoder=FusedDecoder, bits=bits)
        assert isinstance(target.decoder, FusedDecoder)
        for length in (40, 1, 8):  # what is there is used again
            target.score([ScoreRow(target.cache.allocate(), text(length))])
            taken = target.decoder._workspace.nbytes
            assert taken == work_bytes(target.config, False, form, 40)


def test_weights_laid_out_for_tiles_are_refused_where_there_are_none(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "foredraft.models.native.cpu.load_library", partial(load_library, instructions="portable")
    )
    with pytest.raises(ConfigError, match="laid out for tiles"):
        NativeTarget.load(
            checkpoints["llama"], torch.bfloat16, new_decoder=FusedDecoder, bits=TILES
        )


class Int8Reference(EagerDecoder):
    """Float32 all through, but for weights of int8 and activations of int16."""

    def _linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 32639
        return super()._linear((x / step).round() * step, weight, bias)


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        pytest.param(name, dtype, bits, marks=() if is_quick else pytest.mark.slow)
        for name in CONFIGS
        for dtype, bits in FORMATS
        if bits != 4
        for is_quick in [bits != 8 or dtype == torch.bfloat16 or name in FEW_CONFIGS]
    ],
    ids=str,
)
def test_logits_equal_the_eager_decoder_on_the_same_numbers(
    name: str, dtype: torch.dtype, bits: int | None, checkpoints: dict[str, Path]
) -> None:
    target = fused(checkpoints[name], dtype, 2, bits)
    weights = rounded_weights(checkpoints[name], dtype, 8 if bits == 8 else None)
    decoder = Int8Reference if bits == 8 else EagerDecoder
    eager = NativeTarget(read_config(checkpoints[name]), weights, decoder)
    exact = 1e-3 if bits == 8 else 1e-4
    tolerance = exact if dtype == torch.float32 else BFLOAT16_TOLERANCE
    assert difference(name, dtype, target, eager) < tolerance


class Int8ActivationsReference(Int8Reference):
    """Weights of 4 bits are multiplied with activations of int8, each 32 with a scale."""

    def _linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, PackedMatrix):  # small ones of recurrent layers
            return EagerDecoder._linear(self, x, weight, bias)
        if weight.bits > 4:
            return super()._linear(x, weight, bias)
        blocks = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
        step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        rounded = ((blocks / step).round() * step).flatten(-2)[..., : x.shape[-1]]
        return EagerDecoder._linear(self, rounded, weight, bias)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXTURES])
def test_activations_of_8_bits_equal_the_eager_decoder_on_the_same_integers(
    name: str, checkpoints: dict[str, Path]
) -> None:
    config, directory = read_config(checkpoints[name]), checkpoints[name]
    target = fused(directory, torch.float32, num_threads=2, bits=4, activation_bits=8)
    weights = rounded_weights(directory, torch.float32, bits=4)
    eager = NativeTarget(config, weights, Int8ActivationsReference)
    in_sixteen = NativeTarget(config, weights, Int8Reference)
    off = largest_difference(target, eager)
    assert off < BFLOAT16_TOLERANCE  # where a number lies between two integers
    assert off < 0.75 * largest_difference(target, in_sixteen)


# ---------------------------------------------------------------------------------------- same bits


AT_ENDS_OF_CHUNKS = [(2, 249), (1, 255), (3, 256), (2, 510), (3, 510)]
"""Threads and lengths of texts of which each differs in the chunks that a thread gets."""


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_chain_has_the_bits_of_one_token_at_a_time(alone: Alone, num_threads: int) -> None:
    target, prompt, longest = alone.with_threads(num_threads), text(21), 17
    expected = alone.logits([*prompt, *text(longest, seed=1)])
    for length in range(1, longest + 1, 1 if num_threads == 1 else 4):
        slot = target.cache.allocate()
        step(target, slot, prompt)
        first, *rest = text(longest, seed=1)[:length]
        found = step(target, slot, [first], TokenTree.chain(rest))
        assert torch.equal(found, expected[len(prompt) : len(prompt) + length])
        target.cache.free(slot)


@pytest.mark.parametrize(
    ("num_threads", "length"),
    [
        *((1, 19), (2, 19)),
        *(
            pytest.param(*case, marks=() if case in AT_ENDS_OF_CHUNKS else pytest.mark.slow)
            for case in itertools.product((1, 2, 3), (249, 255, 256, 510))
        ),
    ],
)
def test_a_tree_node_has_the_bits_of_its_path_alone(
    alone: Alone, num_threads: int, length: int
) -> None:
    """Attention runs in chunks of 256 entries, which are distributed over threads."""
    target, prompt = alone.with_threads(num_threads), text(length)
    slot = target.cache.allocate()
    step(target, slot, prompt[:-1])
    found = step(target, slot, prompt[-1:], TREE)
    for node, path in enumerate([(), *TREE.paths]):
        tokens = [*prompt, *(TREE.tokens[i] for i in path)]
        assert torch.equal(found[node], alone.logits(tokens)[-1])


@pytest.mark.parametrize("chunk", [2, 5, 16, 33, 64, 130])
def test_prefill_in_chunks_has_the_bits_of_one_token_at_a_time(alone: Alone, chunk: int) -> None:
    target, prompt = alone.with_threads(2), text(130)
    slot = target.cache.allocate()
    for start in range(0, len(prompt), chunk):
        found = step(target, slot, prompt[start : start + chunk])
    assert torch.equal(found, alone.logits(prompt)[-1:])


def test_rows_of_a_batch_have_the_bits_of_each_alone(alone: Alone) -> None:
    target = alone.with_threads(2)
    prompts = [text(length, seed=length) for length in (1, 7, 30, 66)]
    trees = [TokenTree(), TokenTree.chain((3, 4, 5)), TREE, TokenTree.chain((9,))]
    slots = [target.cache.allocate() for _ in prompts]
    step(target, slots[2], prompts[2][:20])  # this row is ahead of the others
    pendings = [prompts[0], prompts[1], prompts[2][20:], prompts[3]]
    rows = [ScoreRow(*parts) for parts in zip(slots, pendings, trees, strict=True)]
    for prompt, tree, scores in zip(prompts, trees, target.score(rows), strict=True):
        for node, path in enumerate([(), *tree.paths]):
            tokens = [*prompt, *(tree.tokens[i] for i in path)]
            assert torch.equal(scores.logits_NV[node], alone.logits(tokens)[-1])


def test_a_kept_path_leaves_the_bits_of_a_plain_history(alone: Alone) -> None:
    target, prompt, path = alone.with_threads(2), text(18), (1, 4, 6)
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, prompt, TREE)])
    target.cache.keep(slot, len(prompt), path)
    found = step(target, slot, [42], TREE)
    history = [*prompt, *(TREE.tokens[i] for i in path), 42]
    for node, branch in enumerate([(), *TREE.paths]):
        tokens = [*history, *(TREE.tokens[i] for i in branch)]
        assert torch.equal(found[node], alone.logits(tokens)[-1])


def test_where_blocks_lie_changes_no_bit(alone: Alone) -> None:
    tokens, target = text(400), alone.with_threads(2)
    slot, *others = (target.cache.allocate() for _ in range(3))
    for start in range(0, 320, 40):
        step(target, slot, tokens[start : start + 40])
        step(target, others[start // 40 % 2], tokens[:60])
    target.cache.free(others[0])
    found = step(target, slot, tokens[320:])
    table = [*target.cache.table(slot)]
    assert table != sorted(table)
    assert torch.equal(found, alone.logits(tokens)[-1:])


def test_a_shared_block_is_copied_before_it_is_written(alone: Alone) -> None:
    tokens, target = text(150), alone.with_threads(2)
    slot = target.cache.allocate()
    step(target, slot, tokens[:140])
    copy = target.cache.fork(slot)
    step(target, copy, text(10, seed=1))
    assert [*target.cache.table(slot)][:2] == [*target.cache.table(copy)][:2]
    assert torch.equal(step(target, slot, tokens[140:]), alone.logits(tokens)[-1:])


def test_taps_have_the_same_bits_in_every_forward(alone: Alone) -> None:
    target, tokens = alone.with_threads(2), text(20)
    slot = target.cache.allocate()
    [together] = target.score([ScoreRow(slot, tokens)], taps=(0, 1))
    slot = target.cache.allocate()
    for position, token in enumerate(tokens):
        [single] = target.score([ScoreRow(slot, [token])], taps=(1,))
        target.cache.keep(slot, 1, ())
        assert set(single.taps) == {1}
        assert torch.equal(single.taps[1][0], together.taps[1][position])
    assert together.taps[0].dtype == target.weights.dtype


def test_parts_are_the_decoder_s_own(alone: Alone) -> None:
    """Of quantised heads too; alone and together, with the same bits."""
    parts, weights = alone.with_threads(2).parts, alone.with_threads(1).weights
    head_VE = as_tensor(weights.head_VE, torch.float32).float()
    normed_TE = parts.norm(torch.randn(20, parts.hidden_size, dtype=parts.dtype) * 3)
    logits_TV = parts.logits(normed_TE)
    assert logits_TV.dtype == torch.float32
    expected_TV = finished_logits(normed_TE.float() @ head_VE.T, alone.with_threads(1).config)
    torch.testing.assert_close(logits_TV, expected_TV, atol=2e-3, rtol=1e-3)
    assert torch.equal(parts.logits(normed_TE[7:8]), logits_TV[7:8])
    ids_R = torch.tensor([5, 0, 17, 200, 5])
    assert torch.equal(parts.head_rows(ids_R), head_VE[ids_R].to(parts.dtype))
    assert torch.equal(parts.embed(ids_R), weights.embedding_VE[ids_R])


MIXED = [
    *(("qwen3-moe", torch.bfloat16, bits, None, 16) for bits in (None, 4, TILES)),
    ("glm4-moe", torch.float32, 8, None, 16),
    *(("gemma4-moe", torch.bfloat16, bits, None, 8) for bits in (None, 4)),
]
"""Three or four experts a token: their pairs are few up to ten or eight tokens."""


@pytest.mark.parametrize(
    "instructions", [None, *(pytest.param(one.name, marks=pytest.mark.slow) for one in available())]
)
@pytest.mark.parametrize("form", MIXED, ids=str)
def test_experts_give_the_same_bits_in_any_company(
    form: tuple[Any, ...],
    instructions: str | None,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs are made once, and gathered for experts that not all tokens chose."""
    library = partial(load_library, instructions=instructions)
    monkeypatch.setattr("foredraft.models.native.cpu.load_library", library)
    name, *others = form
    alone, tokens = Alone(checkpoints[name], *others), text(40)
    expected = alone.logits(tokens)
    for num_threads in (1, 2, 4):
        target = alone.with_threads(num_threads)
        for count in (*range(1, 17), 33, 40) if num_threads == 1 else (1, 4, 8, 11, 16, 33):
            slot = target.cache.allocate()
            found = step(target, slot, tokens[:1], TokenTree.chain(tokens[1:count]))
            assert torch.equal(found, expected[:count]), (num_threads, count)
            target.cache.free(slot)


# ---------------------------------------------------------------------------------------- manners


def test_a_token_outside_the_vocabulary_is_an_error(checkpoints: dict[str, Path]) -> None:
    target = fused(checkpoints["llama"], torch.float32)
    with pytest.raises(IndexError, match=f"do not fit a vocabulary of {VOCAB_SIZE}"):
        target.score([ScoreRow(target.cache.allocate(), [VOCAB_SIZE])])


def test_weights_of_other_dtypes_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        fused(checkpoints["llama"], torch.float64)
    config = read_config(checkpoints["llama"])
    weights = load_weights(checkpoints["llama"], config, torch.float32)
    half = replace(weights.layers[1], down_weight=tensor_of(weights.layers[1].down_weight).half())
    mixed = replace(weights, layers=(weights.layers[0], half, *weights.layers[2:]))
    with pytest.raises(
        ConfigError, match=r"of one dtype, not torch\.float16 beside torch\.float32"
    ):
        FusedDecoder(config, mixed)


@pytest.mark.parametrize("new_decoder", [FusedDecoder, EagerDecoder])
def test_a_cache_that_is_not_the_model_s_own_is_refused(
    checkpoints: dict[str, Path], new_decoder: DecoderFactory
) -> None:
    """The kernel would write float32 where there is room for bfloat16."""
    target = NativeTarget.load(checkpoints["llama"], new_decoder=new_decoder)
    shape = target.config.kv_shape
    for dtype, other in ((torch.bfloat16, shape), (torch.float32, replace(shape, num_layers=2))):
        cache = KVCache(other, dtype, "cpu", 512)
        slot = cache.allocate()
        cache.reserve(slot, 20)
        for length in (1, 20):
            plan = plan_forward([ScoreRow(slot, text(length))], [0])
            with pytest.raises(ConfigError, match="make it of the model's own"):
                target.decoder.forward(plan, cache)


def test_a_broken_value_reaches_the_logits(checkpoints: dict[str, Path]) -> None:
    """NaN must not be swallowed by a maximum or a clamp on the way."""
    target = fused(checkpoints["llama"], torch.float32)
    tensor_of(target.weights.layers[0].qkv_weight)[0] = float("nan")
    slot = target.cache.allocate()
    assert step(target, slot, text(9)).isnan().any()


def test_all_threads_compute_with_the_caller_s_arithmetic(checkpoints: dict[str, Path]) -> None:
    """Also where it was changed after they had started."""
    found = []
    for num_threads in (2, 1):
        target = fused(checkpoints["llama"], torch.float32, num_threads)
        target.weights.embedding_VE[:] = 1e-40
        step(target, target.cache.allocate(), text(3))
        torch.set_flush_denormal(True)
        try:
            found.append(step(target, target.cache.allocate(), text(3)))
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(*found)
    assert not found[0].any()


def test_a_broken_activation_reaches_the_logits_of_int8_weights(
    checkpoints: dict[str, Path],
) -> None:
    target = fused(checkpoints["llama"], torch.bfloat16, bits=8)
    target.weights.embedding_VE[text(9)[4], 3] = float("inf")
    slot = target.cache.allocate()
    assert step(target, slot, text(9)).isnan().any()


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_phases_are_parts_of_the_time_of_a_forward(
    num_tokens: int, checkpoints: dict[str, Path]
) -> None:
    target = fused(checkpoints["llama"], torch.float32, num_threads=2)
    decoder = target.decoder
    assert isinstance(decoder, FusedDecoder)
    assert decoder.phase_seconds() == dict.fromkeys(PHASES, 0.0)
    slot = target.cache.allocate()
    started = time.perf_counter()
    step(target, slot, text(num_tokens))
    passed = time.perf_counter() - started
    phases = decoder.phase_seconds()
    assert list(phases) == ["linear", "attention", "head", "other"]
    assert min(phases.values()) > 0
    assert sum(phases.values()) < passed


@pytest.mark.parametrize("num_threads", [0, -1, 5, 100_000])
def test_threads_that_the_machine_has_not_are_refused(
    num_threads: int, checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=f"threads is {num_threads}; this machine runs 1 to 4"):
        fused(checkpoints["llama"], torch.float32, num_threads)


def test_torch_threads_beyond_the_cores_are_not_used(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100_000)
    target = NativeTarget.load(checkpoints["llama"], torch.float32, new_decoder=FusedDecoder)
    assert step(target, target.cache.allocate(), text(3)).isfinite().all()


def test_a_forward_within_a_forward_of_the_same_memory_is_refused(
    checkpoints: dict[str, Path],
) -> None:
    """The lock keeps Python out; without it the kernel itself says no, and computes nothing."""
    target = fused(checkpoints["llama"], torch.float32)
    decoder = target.decoder
    assert isinstance(decoder, FusedDecoder)
    scores = target.score([ScoreRow(target.cache.allocate(), text(300))])
    expected, described = scores.logits_NV.clone(), decoder._described.forward

    def again() -> list[int]:
        return [decoder._forward(decoder._model, described) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(again) for _ in range(2)]
        outcomes = [outcome for job in jobs for outcome in job.result()]
    assert {*outcomes} == {0, 1}
    assert torch.equal(scores.logits_NV, expected)
    with pytest.raises(RuntimeError, match="two forwards of one decoder at the same time"):
        _check_outcome(1, 2)


def test_two_decoders_may_run_at_the_same_time(checkpoints: dict[str, Path]) -> None:
    targets = [fused(checkpoints["llama"], torch.float32, num_threads=2) for _ in range(2)]

    def read(target: NativeTarget) -> Tensor:
        return torch.cat([step(target, target.cache.allocate(), text(50)) for _ in range(10)])

    expected = read(targets[0])
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(read, targets):
            assert torch.equal(found, expected)


def test_a_forked_child_has_threads_of_its_own(checkpoints: dict[str, Path]) -> None:
    """Also where a thread that it does not have was in the middle of a forward."""
    target = fused(checkpoints["llama"], torch.float32, num_threads=2)
    decoder, states_TE = target.decoder, torch.randn(200, target.config.hidden_size)
    assert isinstance(decoder, FusedDecoder)

    def found() -> list[Tensor]:
        return [decoder.logits(states_TE), step(target, target.cache.allocate(), text(40))]

    expected = found()
    with decoder._lock_here():
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):  # nothing of pytest may run twice
            is_same = all(map(torch.equal, found(), expected))
            status = 0 if is_same and torch.get_num_threads() == 1 else 2
        os._exit(status)
    assert _exit_status(child) == 0


def _exit_status(child: int, seconds: float = 60.0) -> int | None:
    """Of a child process; None if it hangs."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
