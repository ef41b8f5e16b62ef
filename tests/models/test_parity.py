"""The native decoders against transformers, and against themselves: every way of feeding the same
tokens must give the same logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft.models.native.target as native_target
from foredraft.core.errors import ConfigError
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.native.eager import EagerDecoder
from foredraft.models.native.graphed import GraphedDecoder
from foredraft.models.native.target import DecoderFactory, NativeTarget
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, save_checkpoint

TOLERANCE = 1e-4
TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))
"""Two first-level nodes, siblings below the first, paths of depth 1 to 3, a repeated token."""


def _fused() -> DecoderFactory:
    fused = pytest.importorskip("foredraft.models.native.fused")
    build = pytest.importorskip("foredraft.kernels.build")
    try:
        build.load_library()
    except build.KernelUnavailable as reason:
        pytest.skip(f"no fused kernel: {reason}")
    factory: DecoderFactory = fused.FusedDecoder
    return factory


DECODERS: dict[str, Callable[[], DecoderFactory]] = {
    "eager": lambda: EagerDecoder,
    "graphed": lambda: GraphedDecoder,
    "fused": _fused,
}


@dataclass
class Pair:
    """The same checkpoint in transformers and in a native decoder."""

    reference: PreTrainedModel
    target: NativeTarget

    def reference_logits(self, tokens: list[int]) -> Tensor:
        """Logits [T, V] after each token, read in one go without a cache."""
        with torch.inference_mode():
            logits: Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits
        return logits[0]


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> DecoderFactory:
    return DECODERS[request.param]()


@pytest.fixture(scope="module", params=NATIVE_CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(directory, NATIVE_CONFIGS[request.param]())
    return directory


@pytest.fixture(scope="module")
def pair(checkpoint: Path, decoder: DecoderFactory) -> Pair:
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return Pair(reference, NativeTarget.load(checkpoint, torch.float32, new_decoder=decoder))


def text(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max().item() < TOLERANCE


def read(target: NativeTarget, tokens: list[int]) -> int:
    """A slot that holds ``tokens``."""
    slot = target.cache.allocate()
    target.score([ScoreRow(slot, tokens)])
    target.cache.keep(slot, len(tokens), ())
    return slot


def test_prefill_equals_transformers(pair: Pair) -> None:
    tokens = text(40)
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens)])
    assert_close(scores.logits_NV, pair.reference_logits(tokens)[-1:])
    pair.target.cache.free(slot)


def test_step_by_step_equals_transformers(pair: Pair) -> None:
    tokens = text(24)
    expected = pair.reference_logits(tokens)
    slot = read(pair.target, tokens[:4])
    for position in range(4, len(tokens)):
        [scores] = pair.target.score([ScoreRow(slot, tokens[position : position + 1])])
        pair.target.cache.keep(slot, 1, ())
        assert_close(scores.logits_NV, expected[position : position + 1])
    pair.target.cache.free(slot)


def test_prefill_in_chunks_equals_transformers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_target, "_PREFILL_CHUNK", 7)
    tokens = text(40)
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens, TokenTree.chain((5, 6)))], taps=(0, 1))
    assert_close(scores.logits_NV, pair.reference_logits([*tokens, 5, 6])[-3:])
    assert scores.taps[1].shape == (42, 64)
    pair.target.cache.free(slot)


def test_a_prompt_longer_than_one_chunk_equals_transformers(pair: Pair) -> None:
    tokens = text(native_target._PREFILL_CHUNK + 77)
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens)])
    assert_close(scores.logits_NV, pair.reference_logits(tokens)[-1:])
    pair.target.cache.free(slot)


def test_rows_of_different_lengths_equal_transformers(pair: Pair) -> None:
    texts = [text(length, seed=length) for length in (1, 9, 30)]
    drafts = [TokenTree(), TokenTree.chain((3, 4, 5)), TREE]
    slots = [pair.target.cache.allocate() for _ in texts]
    rows = [ScoreRow(*parts) for parts in zip(slots, texts, drafts, strict=True)]
    for row, scores in zip(rows, pair.target.score(rows), strict=True):
        for node, path in enumerate([(), *row.tree.paths]):
            tokens = [*row.pending, *(row.tree.tokens[i] for i in path)]
            assert_close(scores.logits_NV[node], pair.reference_logits(tokens)[-1])
    for slot in slots:
        pair.target.cache.free(slot)


def test_a_tree_equals_each_of_its_paths_alone(pair: Pair) -> None:
    prompt, pending = text(20), [11, 12]
    slot = read(pair.target, prompt)
    [scores] = pair.target.score([ScoreRow(slot, pending, TREE)])
    for node, path in enumerate([(), *TREE.paths]):
        alone = pair.target.cache.fork(slot)
        chain = TokenTree.chain(TREE.tokens[i] for i in path)
        [expected] = pair.target.score([ScoreRow(alone, pending, chain)])
        assert_close(scores.logits_NV[node], expected.logits_NV[-1])
        pair.target.cache.free(alone)
    pair.target.cache.free(slot)


def test_after_keep_only_the_accepted_path_remains(pair: Pair) -> None:
    prompt, pending, path = text(20), [11, 12], (1, 4, 6)
    slot = read(pair.target, prompt)
    pair.target.score([ScoreRow(slot, pending, TREE)])
    pair.target.cache.keep(slot, len(pending), path)
    [scores] = pair.target.score([ScoreRow(slot, [42])])
    tokens = [*prompt, *pending, *(TREE.tokens[i] for i in path), 42]
    assert_close(scores.logits_NV, pair.reference_logits(tokens)[-1:])
    pair.target.cache.free(slot)


def test_a_truncated_slot_goes_on_as_if_nothing_had_followed(pair: Pair) -> None:
    tokens = text(20)
    slot = read(pair.target, tokens)
    pair.target.cache.truncate(slot, 12)
    [scores] = pair.target.score([ScoreRow(slot, [42])])
    assert_close(scores.logits_NV, pair.reference_logits([*tokens[:12], 42])[-1:])
    pair.target.cache.free(slot)


def test_taps_are_the_outputs_of_the_layers(pair: Pair) -> None:
    tokens = text(16)
    with torch.inference_mode():
        states = pair.reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens)], taps=(0, 1))
    assert set(scores.taps) == {0, 1}
    for layer, tapped in scores.taps.items():
        assert_close(tapped.float(), states[layer + 1][0])
    pair.target.cache.free(slot)


def test_a_layer_view_equals_a_model_of_those_layers(pair: Pair, checkpoint: Path) -> None:
    kept = (0, 2)
    short = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    short.model.layers = torch.nn.ModuleList(short.model.layers[i] for i in kept)
    for index, layer in enumerate(short.model.layers):
        layer.self_attn.layer_idx = index
    short.config.num_hidden_layers = len(kept)
    view = pair.target.layer_view(kept)
    tokens = text(16)
    slot = view.cache.allocate()
    [scores] = view.score([ScoreRow(slot, tokens)])
    assert_close(scores.logits_NV, Pair(short, view).reference_logits(tokens)[-1:])
    assert view.cache is not pair.target.cache
    assert view.weights.embedding_VE is pair.target.weights.embedding_VE


def test_a_layer_view_of_a_missing_layer_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="layer 3 does not exist; the model has 3"):
        pair.target.layer_view((0, 3))


@pytest.mark.real_model
def test_smollm2_equals_transformers(decoder: DecoderFactory) -> None:
    from foredraft.models.store import resolve_model

    directory = resolve_model("smollm2-135m-instruct")
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    pair = Pair(reference, NativeTarget.load(directory, torch.float32, new_decoder=decoder))
    tokens = text(200)
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens, TREE)])
    for node, path in enumerate([(), *TREE.paths]):
        expected = pair.reference_logits([*tokens, *(TREE.tokens[i] for i in path)])[-1]
        # Logits of this model reach 30, thirty layers deep: float32 leaves room for no less.
        assert (scores.logits_NV[node] - expected).abs().max().item() < 5e-4
