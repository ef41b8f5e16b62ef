"""The native decoders against transformers, and against themselves: every way of feeding the same
tokens must give the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.core.errors import ConfigError
from foredraft.core.tree import ROOT, TokenTree
from foredraft.models.base import ScoreRow
from foredraft.models.base import read as read_text
from foredraft.models.files.store import resolve_model
from foredraft.models.native.model import DecoderFactory, EagerDecoder
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import NATIVE_CONFIGS, VOCAB_SIZE, made, need_kernel, read, text

TOLERANCE = 1e-4
TREE = TokenTree((7, 8, 9, 8, 10, 11, 8), (ROOT, ROOT, 0, 0, 1, 2, 4))
"""Two first-level nodes, siblings below the first, paths of depth 1 to 3, a repeated token."""


def _fused() -> DecoderFactory:
    fused = pytest.importorskip("foredraft.models.native.cpu")
    need_kernel()
    factory: DecoderFactory = fused.FusedDecoder
    return factory


DECODERS: dict[str, Callable[[], DecoderFactory]] = {
    "eager": lambda: EagerDecoder,
    "fused": _fused,
}


PAIRS = [
    *((name, "eager") for name in NATIVE_CONFIGS),
    *((name, "fused") for name in ("llama", "qwen3.5-moe")),
]


@dataclass
class Pair:
    """The same checkpoint in transformers and in a native decoder."""

    reference: PreTrainedModel
    target: NativeTarget

    def reference_logits(self, tokens: list[int]) -> Tensor:
        """Logits [T, V] after each token, read in one go without a cache."""
        with torch.inference_mode():
            found: Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return found


@pytest.fixture(scope="module", params=PAIRS, ids=" ".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    name, decoder = request.param
    reference = AutoModelForCausalLM.from_pretrained(made(name), dtype=torch.float32)
    target = NativeTarget.load(made(name), torch.float32, new_decoder=DECODERS[decoder]())
    return Pair(reference, target)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max().item() < TOLERANCE


def test_step_by_step_equals_transformers(pair: Pair) -> None:
    tokens = text(24)
    expected = pair.reference_logits(tokens)
    slot = read(pair.target, tokens[:4])
    for position in range(4, len(tokens)):
        [scores] = pair.target.score([ScoreRow(slot, tokens[position : position + 1])])
        pair.target.cache.keep(slot, 1, ())
        assert_close(scores.logits_NV, expected[position : position + 1])
    pair.target.cache.free(slot)


def test_prefill_in_chunks_equals_transformers(pair: Pair) -> None:
    tokens, tapped = text(40), []
    slot = pair.target.cache.allocate()
    for start in range(0, 35, 7):
        chunk = ScoreRow(slot, tokens[start : start + 7], wants_logits=False)
        [scores] = pair.target.score([chunk], taps=(0, 1))
        assert scores.logits_NV.shape == (0, VOCAB_SIZE)
        tapped.append(scores.taps[1])
        pair.target.cache.keep(slot, 7, ())
    last = ScoreRow(slot, tokens[35:], TokenTree.chain((5, 6)))
    [scores] = pair.target.score([last], taps=(0, 1))
    assert_close(scores.logits_NV, pair.reference_logits([*tokens, 5, 6])[-3:])
    [whole] = pair.target.score(
        [ScoreRow(pair.target.cache.allocate(), tokens, TokenTree.chain((5, 6)))], taps=(1,)
    )
    assert_close(torch.cat([*tapped, scores.taps[1]]), whole.taps[1])


def test_a_chunk_without_logits_shares_a_forward(pair: Pair) -> None:
    """Rows of a batch that end, that go on, and that draft: each gets its own."""
    prompts = [text(30, seed=1), text(9, seed=2), text(5, seed=3)]
    slots = [pair.target.cache.allocate() for _ in prompts]
    rows = [
        ScoreRow(slots[0], prompts[0], wants_logits=False),
        ScoreRow(slots[1], prompts[1], TREE),
        ScoreRow(slots[2], prompts[2], wants_logits=False),
    ]
    scores = pair.target.score(rows, taps=(1,))
    assert [len(row.logits_NV) for row in scores] == [0, 1 + len(TREE), 0]
    assert [len(row.taps[1]) for row in scores] == [30, 9 + len(TREE), 5]
    for node, path in enumerate([(), *TREE.paths]):
        tokens = [*prompts[1], *(TREE.tokens[i] for i in path)]
        assert_close(scores[1].logits_NV[node], pair.reference_logits(tokens)[-1])
    pair.target.cache.keep(slots[2], 5, ())
    [later] = pair.target.score([ScoreRow(slots[2], [4])])
    assert_close(later.logits_NV, pair.reference_logits([*prompts[2], 4])[-1:])
    for slot in slots:
        pair.target.cache.free(slot)


def test_a_text_longer_than_a_piece_is_read_in_pieces(pair: Pair) -> None:
    tokens = text(600)
    slot = pair.target.cache.allocate()
    read_text(pair.target, slot, tokens[:-1])
    assert pair.target.cache.length(slot) == 599
    [scores] = pair.target.score([ScoreRow(slot, tokens[-1:])])
    assert_close(scores.logits_NV, pair.reference_logits(tokens)[-1:])
    pair.target.cache.free(slot)


def test_parts_are_those_of_transformers(pair: Pair) -> None:
    """The ends of the model, put together by hand, give its logits."""
    parts, reference = pair.target.parts, pair.reference
    ids_T = torch.tensor([3, 5, 8, 250])
    assert (parts.hidden_size, parts.dtype) == (64, torch.float32)
    assert_close(parts.embed(ids_T), reference.get_input_embeddings().weight[ids_T])
    config = pair.target.config
    rows_RE = reference.get_output_embeddings().weight[ids_T]
    assert_close(parts.head_rows(ids_T), rows_RE * config.logits_scale)
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, text(9), TREE)], taps=(2,))
    normed_TE = parts.norm(scores.taps[2][8:])
    assert_close(parts.logits(normed_TE), scores.logits_NV)
    products_TV = normed_TE @ parts.head_rows(torch.arange(VOCAB_SIZE)).T
    cap = config.logits_cap
    products_TV = products_TV if cap is None else cap * torch.tanh(products_TV / cap)
    assert_close(products_TV, scores.logits_NV)
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
    left = pair.target.cache.truncate(slot, 12)  # fewer where layers have states
    [scores] = pair.target.score([ScoreRow(slot, [*tokens[left:12], 42])])
    assert_close(scores.logits_NV, pair.reference_logits([*tokens[:12], 42])[-1:])
    pair.target.cache.free(slot)


def test_taps_are_the_outputs_of_the_layers(pair: Pair) -> None:
    tokens = text(16)
    with torch.inference_mode():
        states = pair.reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    slot = pair.target.cache.allocate()
    [scores] = pair.target.score([ScoreRow(slot, tokens)], taps=(0, 1))
    assert set(scores.taps) == {0, 1}
    if pair.target.config.model_type != "mamba2":  # which leaves the embeddings out
        states = states[1:]
    for layer, tapped in scores.taps.items():
        assert_close(tapped.float(), states[layer][0])
    assert pair.target.capabilities.taps == range(3)
    for layer in (3, -1):
        with pytest.raises(ConfigError, match=f"layer {layer} cannot be tapped.* layers 0 to 2"):
            pair.target.score([ScoreRow(slot, [1])], taps=(1, layer))
    pair.target.cache.free(slot)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.real_model
def test_smollm2_equals_transformers(decoder: str) -> None:
    directory, prompt = resolve_model("smollm2-135m-instruct"), text(40)
    pair = Pair(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        NativeTarget.load(directory, torch.float32, new_decoder=DECODERS[decoder]()),
    )
    [scores] = pair.target.score([ScoreRow(pair.target.cache.allocate(), prompt, TREE)])
    for node in (1, 4, 6):
        path = TREE.paths[node]
        expected = pair.reference_logits([*prompt, *(TREE.tokens[i] for i in path)])[-1]
        # Logits of this model reach 30, thirty layers deep: float32 leaves room for no less.
        assert (scores.logits_NV[node + 1] - expected).abs().max().item() < 5e-4


@pytest.mark.parametrize("decoder", ["eager", "fused"])
@pytest.mark.parametrize("name", NATIVE_CONFIGS)
def test_a_broken_node_breaks_neither_its_siblings_nor_what_is_before_it(
    name: str, decoder: str
) -> None:
    target = NativeTarget.load(made(name), torch.float32, new_decoder=DECODERS[decoder]())
    broken = TREE.tokens[2]
    slot = read(target, [token for token in text(12) if token != broken])
    row, intact = ScoreRow(slot, [5], TREE), torch.arange(VOCAB_SIZE) != broken
    expected = target.score([row]).logits_NV[:, intact].clone()
    target.weights.embedding_VE[broken] = torch.nan  # tied heads have it as well
    found = target.score([row]).logits_NV[:, intact]
    below = {2} | {node for node, path in enumerate(TREE.paths) if 2 in path}
    fine = [0, *(node + 1 for node in range(len(TREE)) if node not in below)]
    assert_close(found[fine], expected[fine])
    assert found[3].isnan().all()
