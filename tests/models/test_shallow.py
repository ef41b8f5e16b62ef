"""Early exit inside the target: the same numbers, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.cache.kv import KVCache
from foredraft.core.errors import ConfigError
from foredraft.core.tree import EMPTY_TREE, ROOT, TokenTree
from foredraft.models.base import Computed, ScoreRow
from foredraft.models.native.plan import ForwardPlan, plan_forward
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made, read, some_layers, text
from tests.models.test_parity import DECODERS

TREE = TokenTree((7, 8, 9, 8, 10), (ROOT, ROOT, 0, 0, 1))
EXIT = 2


@dataclass
class Forward:
    """One call of the decoder: which layers, for how many tokens."""

    layers: range | None
    num_tokens: int


class Spy:
    """A decoder that notes its calls, and can be told to fail."""

    def __init__(self, decoder: object) -> None:
        self.inner, self.calls, self.fails = decoder, list[Forward](), False

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def forward(
        self, plan: ForwardPlan, cache: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        self.calls.append(Forward(plan.layers, len(plan)))
        done = self.inner.forward(plan, cache, taps)  # type: ignore[attr-defined]
        if self.fails:
            raise RuntimeError("out of memory")
        return done


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made("llama")


@pytest.fixture(params=["eager", "fused", "fused-bf16"])
def target(request: pytest.FixtureRequest, checkpoint: Path) -> NativeTarget:
    name, _, dtype = request.param.partition("-")
    factory = DECODERS[name]()
    return NativeTarget.load(
        checkpoint,
        torch.bfloat16 if dtype else torch.float32,
        new_decoder=lambda config, weights: Spy(factory(config, weights)),
    )


def calls(target: NativeTarget) -> list[tuple[range | None, int]]:
    """Forwards of the decoder since the last call."""
    spy = target.decoder
    assert isinstance(spy, Spy)
    seen = [(call.layers, call.num_tokens) for call in spy.calls]
    spy.calls.clear()
    return seen


def assert_same(target: NativeTarget, actual: Tensor, expected: Tensor) -> None:
    """Bit for bit where the decoder promises it, else within float32's noise."""
    if target.decoder.name == "fused":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def shallow_row(target: NativeTarget, exit_layer: int, row: ScoreRow) -> tuple[Tensor, Computed]:
    """Logits of the row's last token, and what is known of the row."""
    (logits_V,), (computed,) = target.shallow(exit_layer).score_last([row])
    return logits_V, computed


def drafted(
    target: NativeTarget, slot: int, pending: list[int], draft: Sequence[int]
) -> Computed | None:
    """Run the first layers over pending and draft tokens, one draft token at a time."""
    computed = None
    for end in range(len(draft) + 1):
        row = ScoreRow(slot, pending, TokenTree.chain(draft[:end]), computed=computed)
        _, computed = shallow_row(target, EXIT, row)
    return computed


def test_shallow_logits_are_those_of_a_view_of_the_first_layers(target: NativeTarget) -> None:
    prompt, view = text(9), some_layers(target, range(EXIT))
    slot, other = read(target, prompt), read(view, prompt)
    for tree in (EMPTY_TREE, TokenTree.chain([5]), TokenTree.chain([5, 6])):
        actual, _ = shallow_row(target, EXIT, ScoreRow(slot, [4], tree))
        (expected,) = view.score([ScoreRow(other, [4], tree)])
        assert_same(target, actual, expected.logits_NV[-1])


def test_each_shallow_call_computes_one_more_token(target: NativeTarget) -> None:
    slot = read(target, text(9))
    calls(target)
    drafted(target, slot, [4, 3], [5, 6])
    assert calls(target) == [(range(EXIT), 2), (range(EXIT), 1), (range(EXIT), 1)]


def test_the_full_forward_goes_on_and_gives_the_same(target: NativeTarget) -> None:
    prompt, draft = text(9), [5, 6, 7]
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, [4], TokenTree.chain(draft))])
    computed = drafted(target, slot, [4], draft[:2])
    calls(target)
    (actual,) = target.score([ScoreRow(slot, [4], TokenTree.chain(draft), computed=computed)])
    assert calls(target) == [(range(EXIT), 1), (range(EXIT, 3), 4)]
    assert_same(target, actual.logits_NV, expected.logits_NV)
    target.cache.keep(slot, 1, (0, 1))
    target.cache.keep(untouched, 1, (0, 1))
    (later,) = target.score([ScoreRow(slot, [9])])
    (expected_later,) = target.score([ScoreRow(untouched, [9])])
    assert_same(target, later.logits_NV, expected_later.logits_NV)


def test_a_tree_goes_on_from_a_part_of_it(target: NativeTarget) -> None:
    prompt = text(9)
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, [4], TREE)])
    computed = None
    for size in (0, 2, 4):
        part = TokenTree(TREE.tokens[:size], TREE.parents[:size])
        _, computed = shallow_row(target, EXIT, ScoreRow(slot, [4], part, computed=computed))
    calls(target)
    (actual,) = target.score([ScoreRow(slot, [4], TREE, computed=computed)])
    assert calls(target)[0] == (range(EXIT), 1)
    assert_same(target, actual.logits_NV, expected.logits_NV)


def test_nothing_is_left_of_the_first_layers_when_all_tokens_are_known(
    target: NativeTarget,
) -> None:
    slot = read(target, text(9))
    computed = drafted(target, slot, [4], [5, 6])
    calls(target)
    target.score([ScoreRow(slot, [4], TokenTree.chain([5, 6]), computed=computed)])
    assert calls(target) == [(range(EXIT, 3), 3)]


@pytest.mark.parametrize(
    ("pending", "tree", "num_new"),
    [
        ([4], TokenTree.chain([5, 9]), 1),  # the draft went another way
        ([3], TokenTree.chain([5, 6]), None),  # and so did the text
        ([4], TokenTree((5, 6), (ROOT, ROOT)), 1),  # the same tokens, another shape
        ([4, 5], TokenTree.chain([6]), 2),  # a draft token became text: it sees the same
        ([4], EMPTY_TREE, 0),  # nothing was drafted after all
    ],
)
def test_other_tokens_are_computed_anew(
    target: NativeTarget, pending: list[int], tree: TokenTree, num_new: int | None
) -> None:
    prompt = text(9)
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, pending, tree)])
    computed = drafted(target, slot, [4], [5, 6])
    calls(target)
    (actual,) = target.score([ScoreRow(slot, pending, tree, computed=computed)])
    first = calls(target)[0]
    num_tokens = len(pending) + len(tree)
    if num_new is None:
        assert first == (None, num_tokens)
    elif num_new == 0:
        assert first == (range(EXIT, 3), num_tokens)
    else:
        assert first == (range(EXIT), num_new)
    assert_same(target, actual.logits_NV, expected.logits_NV)


def test_rows_with_and_without_states_share_a_forward(target: NativeTarget) -> None:
    prompts = [text(9, seed=1), text(4, seed=2), text(6, seed=3)]
    slots = [read(target, prompt) for prompt in prompts]
    untouched = [read(target, prompt) for prompt in prompts]
    trees = [TokenTree.chain([5, 6]), TREE, TokenTree.chain([7])]
    expected = target.score(
        [ScoreRow(slot, [4], tree) for slot, tree in zip(untouched, trees, strict=True)]
    )
    known = [drafted(target, slots[0], [4], [5]), None, drafted(target, slots[2], [4], [7])]
    calls(target)
    actual = target.score(
        [
            ScoreRow(slot, [4], tree, computed=computed)
            for slot, tree, computed in zip(slots, trees, known, strict=True)
        ]
    )
    assert calls(target) == [(range(EXIT), 1 + 6), (range(EXIT, 3), 3 + 6 + 2)]
    for mine, right in zip(actual, expected, strict=True):
        assert_same(target, mine.logits_NV, right.logits_NV)


def test_rows_with_other_exit_layers_share_a_forward(target: NativeTarget) -> None:
    prompt, tree = text(9), TokenTree.chain([5, 6])
    slots = [read(target, prompt) for _ in range(3)]
    (expected,) = target.score([ScoreRow(slots[0], [4], tree)])
    rows = []
    for slot, exit_layer in zip(slots[1:], (1, 2), strict=True):
        row = ScoreRow(slot, [4], TokenTree.chain([5]))
        _, computed = shallow_row(target, exit_layer, row)
        rows.append(ScoreRow(slot, [4], tree, computed=computed))
    for mine in target.score(rows):
        assert_same(target, mine.logits_NV, expected.logits_NV)


def test_another_exit_layer_takes_over_the_slot(target: NativeTarget) -> None:
    prompt, tree = text(9), TokenTree.chain([5, 6])
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, [4], tree)])
    _, computed = shallow_row(target, 2, ScoreRow(slot, [4], TokenTree.chain([5, 6])))
    shallow_row(target, 1, ScoreRow(slot, [9]))  # overwrites an entry of the other
    (actual,) = target.score([ScoreRow(slot, [4], tree, computed=computed)])
    assert_same(target, actual.logits_NV, expected.logits_NV)


@pytest.mark.parametrize(
    "event", ["keep", "truncate", "reuse", "fork", "failure", "score", "shallow", "other cache"]
)
def test_states_do_not_outlive_their_entries(target: NativeTarget, event: str) -> None:
    """After any change of the slot the next forward computes all of its tokens."""
    prompt, tree = text(9), TokenTree.chain([5, 6])
    slot, keeps_the_cache = read(target, prompt), read(target, prompt)
    computed = drafted(target, slot, [4], [5, 6])
    cache = target.cache
    if event == "keep":  # a step of which nothing but the pending token counts, then back
        cache.keep(slot, 1, ())
        cache.truncate(slot, len(prompt))
        cache.store.keys[[*cache.table(slot)], :, :, len(prompt) :] = 0.5
    elif event == "truncate":
        cache.truncate(slot, 4)
        target.score([ScoreRow(slot, prompt[4:])])
        cache.keep(slot, len(prompt) - 4, ())
    elif event == "reuse":
        cache.free(slot)
        assert cache.allocate() == slot
        target.score([ScoreRow(slot, prompt)])
        cache.keep(slot, len(prompt), ())
    elif event == "fork":
        cache.free(slot)
        slot = cache.fork(keeps_the_cache)
    elif event == "failure":
        target.decoder.fails = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            target.shallow(EXIT).score_last([ScoreRow(slot, [8], TREE)])
        target.decoder.fails = False  # type: ignore[attr-defined]
    elif event == "score":
        target.score([ScoreRow(slot, [8], TREE)])  # and not kept
    elif event == "shallow":
        shallow_row(target, EXIT, ScoreRow(slot, [8], TREE))
    else:
        other = some_layers(target, range(3))
        computed = drafted(other, read(other, prompt), [4], [5, 6])
    calls(target)
    (actual,) = target.score([ScoreRow(slot, [4], tree, computed=computed)])
    assert calls(target) == [(None, 3)]
    (expected,) = target.score([ScoreRow(keeps_the_cache, [4], tree)])
    assert_same(target, actual.logits_NV, expected.logits_NV)


def test_taps_of_the_first_layers_are_complete(target: NativeTarget) -> None:
    prompt, tree = text(9), TokenTree.chain([5, 6])
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, [4], tree)], taps=(0, 2))
    computed = drafted(target, slot, [4], [5])
    (actual,) = target.score([ScoreRow(slot, [4], tree, computed=computed)], taps=(0, 2))
    for layer in (0, 2):
        assert actual.taps[layer].dtype == expected.taps[layer].dtype
        assert_same(target, actual.taps[layer], expected.taps[layer])


@pytest.mark.parametrize("taps", [(2,), (EXIT - 1,), (EXIT - 1, 2)])
def test_taps_from_the_exit_on_do_not_cost_the_states(
    target: NativeTarget, taps: tuple[int, ...]
) -> None:
    prompt, tree = text(9), TokenTree.chain([5, 6])
    slot, untouched = read(target, prompt), read(target, prompt)
    (expected,) = target.score([ScoreRow(untouched, [4], tree)], taps=taps)
    computed = drafted(target, slot, [4], [5])
    calls(target)
    (actual,) = target.score([ScoreRow(slot, [4], tree, computed=computed)], taps=taps)
    assert calls(target)[1][0] == range(EXIT, 3)
    for tap in taps:
        assert_same(target, actual.taps[tap], expected.taps[tap])
        assert actual.taps[tap].dtype == expected.taps[tap].dtype


def test_a_part_of_a_plan_sees_what_the_plan_sees() -> None:
    rows = [ScoreRow(0, [1, 2], TREE), ScoreRow(1, [3])]
    whole = plan_forward(rows, [4, 9])
    rest = whole.part([whole.rows[0][6:], whole.rows[1][1:]])
    assert (rest.rows, rest.slots, rest.entries) == ([range(1)], [0], [10])
    assert rest.end(rest.rows[0]) == whole.end(whole.rows[0]) == 11
    mask, full = rest.mask(rest.rows[0]), whole.mask(whole.rows[0])
    assert mask is not None  # the last node has siblings that it does not see
    assert full is not None
    assert torch.equal(mask[0], full[-1])


@pytest.mark.parametrize("exit_layer", [0, -1, 4])
def test_layers_that_do_not_exist_are_refused(target: NativeTarget, exit_layer: int) -> None:
    with pytest.raises(ConfigError, match="the model has 3"):
        target.shallow(exit_layer)
