"""Checks that every drafter must pass, and builders of drafters for them.

A drafter joins by existing: `drafter_names` finds it. It is built from its `DrafterSpec` alone: a
drafter that needs or takes a draft model gets a second model of the target's vocabulary, and
everyone a tokenizer; one that ``needs`` a capability is skipped on targets without it.

Each ``check_…`` function raises AssertionError when a drafter breaks the rule it is named after.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.cache.paged import Cache
from foredraft.control.base import Allowance, Row
from foredraft.control.fixed import FixedBudget
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import DrawnProposal, Proposal
from foredraft.core.record import RowStep
from foredraft.core.tree import EMPTY_TREE
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.spec import DrafterContext, DrafterSpec, TextCodec
from foredraft.drafters.trained import shipped_head
from foredraft.engine.request import GenerationResult
from foredraft.models.base import ScoreRow, Target
from foredraft.models.native.weights import DecoderWeights, load_weights
from foredraft.models.table import TableModel
from foredraft.train.heads.base import start_head
from tests.engine.helpers import drain, engine_of, finish
from tests.models.checkpoints import need_kernel

# ----------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Kind:
    """A kind of model: how to make a target, and a draft model that often agrees with it.

    Attributes:
        new_codec: text to ids and back, for both models.
    """

    name: str
    new_target: Callable[[], Target]
    new_draft_model: Callable[[], Target]
    new_codec: Callable[[], TextCodec]


class Letters:
    """A codec of one letter a token."""

    vocab_size = 6
    fingerprint = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [token for letter in text if 0 <= (token := ord(letter) - ord("a")) < 6]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def table_kind() -> Kind:
    """Explicit tables: exact, so any difference is a fault."""

    def draft(context: tuple[int, ...]) -> list[float]:
        right, other = TARGET_TABLE.probs(context), OTHER_TABLE.probs(context)
        return [0.7 * p + 0.3 * q for p, q in zip(right, other, strict=True)]

    return Kind(
        "table",
        lambda: TableModel(TARGET_TABLE.vocab_size, TARGET_TABLE.probs),
        lambda: TableModel(TARGET_TABLE.vocab_size, draft),
        Letters,
    )


TARGET_TABLE = TableModel.random(6, seed=1, sharpness=1.5)
OTHER_TABLE = TableModel.random(6, seed=2, sharpness=1.5)


def native_kind(
    decoder: str, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None
) -> Kind:
    """A tiny random llama; ``decoder`` is "eager" or "fused". Skips where it cannot run."""
    from foredraft.models.native.config import read_config
    from foredraft.models.native.model import EagerDecoder
    from foredraft.models.native.target import NativeTarget

    factory: Any = EagerDecoder
    if decoder == "fused":
        factory = fused_decoder()

    def new(noise: float) -> Target:
        parts = read_config(checkpoint(noise)), native_weights(noise, dtype), factory
        return NativeTarget(*parts, cache_dtype=cache_dtype)

    return Kind(f"{decoder}-{dtype}-{cache_dtype}", lambda: new(0.0), lambda: new(0.01), _tokenizer)


@functools.cache
def native_weights(noise: float, dtype: torch.dtype) -> DecoderWeights:
    """The weights of `checkpoint`. Targets share them: nothing may write to them."""
    from foredraft.models.native.config import read_config

    return load_weights(checkpoint(noise), read_config(checkpoint(noise)), dtype)


@functools.cache
def _tokenizer() -> TextCodec:
    from foredraft.models.text.tokenizer import Tokenizer

    return Tokenizer(checkpoint(0.0))


def fused_decoder() -> Any:
    need_kernel()
    from foredraft.models.native.cpu import FusedDecoder

    return FusedDecoder


def hf_kind() -> Kind:
    """The same tiny llama, run by transformers."""
    from foredraft.models.hf.target import HFTarget

    @functools.cache
    def model(noise: float) -> Any:
        return HFTarget.load(checkpoint(noise)).model

    return Kind("hf", lambda: HFTarget(model(0.0)), lambda: HFTarget(model(0.01)), _tokenizer)


@functools.cache
def checkpoint(noise: float) -> Path:
    """A saved tiny llama whose weights are off by ``noise``; 0.0 is the target."""
    from tests.models.checkpoints import NATIVE_CONFIGS, save_tokenizer, tiny_model

    model = tiny_model(NATIVE_CONFIGS["llama"]())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    directory = Path(_scratch().name) / f"llama-{noise}"
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="foredraft-conformance-")


KINDS: dict[str, Callable[[], Kind]] = {
    "table": table_kind,
    "native-eager": lambda: native_kind("eager"),
    "native-fused-bf16": lambda: native_kind("fused", torch.bfloat16),
    "hf": hf_kind,
    "native-fused-int8-cache": lambda: native_kind("fused", torch.bfloat16, torch.int8),
}


def is_empty(cache: Cache) -> bool:
    """Whether nothing but forgettable beginnings is held: new slots are then numbered from 0 on."""
    cache.forget()
    slots = [cache.allocate() for _ in range(16)]
    for slot in slots:
        cache.free(slot)
    return slots == list(range(16))


# ------------------------------------------------------------------------------ drafters and runs


@dataclass(frozen=True)
class Setup:
    """A drafter under test, on a target, with the draft model it was given, if any."""

    target: Target
    drafter: Drafter
    draft_model: Target | None


WITH_HEADS = {
    "blend+table": "table",
}
"""Drafters that a trained head turns into others: their names here, and the option that does it."""

VARIANTS: dict[str, dict[str, Any]] = {
    "draft_model+tree": {"shape": "best-first", "width": 3, "max_depth": 4, "round_cost": 0.0},
    "cascade+suffix": {"guesser": "suffix"},
    "early_exit+deep": {"exit_layer": 2},
}
"""Options that make another drafter of one, by the names that tests have for it."""


def spec_of(name: str) -> DrafterSpec:
    """The drafter's traits; see `WITH_HEADS` and `VARIANTS`."""
    return drafter_spec(name.partition("+")[0])


def set_up(name: str, kind: Kind, target: Target | None = None) -> Setup:
    """Build drafter ``name``, on a new target if none is given.

    Heads are as training would begin with them. Skips when the target lacks what the drafter needs.
    """
    spec, target = spec_of(name), target or kind.new_target()
    wants: set[str] = {*spec.needs}
    option = WITH_HEADS.get(name, "head" if spec.trained else None)
    wants |= {"parts", "cache_layers"} if option else set()
    missing = [need for need in sorted(wants) if not getattr(target.capabilities, need)]
    if missing:
        pytest.skip(f"{name} needs a target with {' and '.join(missing)}")
    takes_model = spec.draft_model != "none" and option is None
    draft_model = kind.new_draft_model() if takes_model else None
    codec = kind.new_codec()
    built = name.partition("+")[0]
    comes_along = option == "head" and shipped_head(head_kind(built), target) is not None
    options = VARIANTS.get(name, {})
    if option and not comes_along:
        options = {option: saved_head(built)}
    if option == "table":
        options = {"head": saved_head(built), "table": saved_table()}
    if built == "self_draft":  # by itself it takes what is faster, which varies on a tiny model
        options = {"bits": 4}
    # Where a chain stops depends on how long forwards take.
    context = DrafterContext(
        target, draft_model, options, tokenizer=codec, draft_tokenizer=codec, is_fixed=True
    )
    return Setup(target, build_drafter(built, context), draft_model)


@functools.cache
def head_kind(name: str) -> str:
    """The kind of head that a drafter loads."""
    return spec_of(name).trained or name


@functools.cache
def saved_head(kind: str) -> Path:
    """A saved head of the tiny llama that can name every other token."""
    if kind == "table":
        return saved_table()
    from foredraft.drafters.registry import head_class
    from foredraft.train.heads.base import TextBatch
    from foredraft.train.heads.saving import save_head
    from foredraft.train.target import TrainingTarget

    target = native_kind("eager").new_target()
    source = TrainingTarget(target, "tiny llama", "its weights")
    torch.manual_seed(9)
    module = start_head(head_class(head_kind(kind)), source, range(0, target.vocab_size, 2), {})
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name in ("output", "output.weight"):
                weight *= 4.0  # sure of what it says, so that it drafts
    tokens = torch.arange(6)
    (states,) = source.read([tokens.numpy()], module.taps)
    taps = {layer: states.layers[layer][None] for layer in module.taps}
    text = TextBatch(tokens[None], torch.tensor([6]), source.parts.embed(tokens)[None], taps)
    directory = Path(_scratch().name) / f"head-{kind}"
    info = {"target": source.identity, "provenance": {}, "measured": {}}
    save_head(directory, module, info, text, 2, "A head that nobody trained.")
    return directory


@functools.cache
def saved_table() -> Path:
    """A saved table of the tiny llama, of texts that repeat what the prompts here say."""
    from foredraft.models.files.progress import SilentProgress
    from foredraft.train.options import TableOptions
    from foredraft.train.table import train_table
    from foredraft.train.target import TrainingTarget
    from foredraft.train.texts import Text

    target = TrainingTarget(native_kind("eager").new_target(), "tiny llama", "its weights")
    texts = [Text(torch.arange(i, i + 24).remainder(6).numpy(), 4, i % 2) for i in range(12)]
    directory = Path(_scratch().name) / "table"
    train_table(target, texts, directory, TableOptions(), {}, SilentProgress())
    return directory


def simplest_kind(name: str) -> str:
    """The first kind of model that drafter ``name`` can work with."""
    needs: list[str] = [*spec_of(name).needs]
    needs += ["parts", "cache_layers"] if name in WITH_HEADS else []
    for kind in KINDS:
        capabilities = KINDS[kind]().new_target().capabilities
        if all(getattr(capabilities, need) for need in needs):
            return kind
    return pytest.skip(f"no kind of model offers {' and '.join(needs)}")


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_draft_tokens: int,
    max_batch_size: int = 8,
) -> list[GenerationResult]:
    """Generate a batch; results in the order of the prompts. The sums are checked on the way."""
    budget = FixedBudget(num_draft_tokens)
    engine = engine_of(target, drafter, budget, max_batch_size=max_batch_size)
    request_ids = [engine.submit(prompt, params) for prompt in prompts]
    results = finish(engine)
    return [results[request_id] for request_id in request_ids]


def plain(
    target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[tuple[int, ...]]:
    """The reply of plain decoding to each prompt alone."""
    drafter = build_drafter("none", DrafterContext(target))
    return [run(target, drafter, [prompt], params, 0)[0].token_ids for prompt in prompts]


class Wrapped:
    """A drafter around another one."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.traits = replace(inner.traits, continues=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Recorded(Wrapped):
    """Remembers what was asked for and what was proposed."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.drafts: list[tuple[DraftRow, Proposal]] = []

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        proposals = self.inner.propose(rows)
        self.drafts.extend(zip(rows, proposals, strict=True))
        return proposals


class NeverRight(Wrapped):
    """Replaces each first-level token by one that the target will not choose."""

    def __init__(self, inner: Drafter, text: Sequence[int], vocab_size: int) -> None:
        super().__init__(inner)
        self._text, self._vocab_size = text, vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        return [
            self._spoil(row, proposal)
            for row, proposal in zip(rows, self.inner.propose(rows), strict=True)
        ]

    def _spoil(self, row: DraftRow, proposal: Proposal) -> Proposal:
        tree, right = proposal.tree, self._text[len(row.tokens)]
        wrong = (right + 1) % self._vocab_size
        tokens = tuple(
            wrong if depth == 1 and token == right else token
            for token, depth in zip(tree.tokens, tree.depths, strict=True)
        )
        return Proposal.chosen(replace(tree, tokens=tokens))


# ----------------------------------------------------------------------------------------- checks


_RARE = 7_000_000_001
"""Numbers of requests from here on occur nowhere else, so that a forgotten one can be found."""


class UnevenBudget(FixedBudget):
    """Another budget for each row and step, zero included."""

    def allow(self, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Allowance]:
        most = super().allow(rows, others)
        uneven = [(len(row.tokens) * 7 + row.request_id) % 9 for row in rows]
        return [
            replace(allowance, budget=min(allowance.budget, other))
            for allowance, other in zip(most, uneven, strict=True)
        ]


def check_budget(
    drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """No proposal is larger than asked for, and asking for nothing gives nothing."""
    recorded = Recorded(drafter)
    engine = engine_of(target, recorded, UnevenBudget(8))
    for prompt in prompts:
        engine.submit(prompt, params)
    finish(engine)
    assert all(len(proposal.tree) <= row.budget for row, proposal in recorded.drafts)
    drafter.begin(DraftRow.of(0, prompts[0]))
    row = DraftRow.of(0, tuple(prompts[0]), params, 0)
    (nothing,) = drafter.propose([row])
    drafter.end(0)
    assert nothing.tree == EMPTY_TREE


def check_forgets(
    setup: Setup, prompts: Sequence[Sequence[int]], params: SamplingParams, num_draft_tokens: int
) -> None:
    """After `end` nothing of a request is left: finished, cancelled or out of context."""
    target = setup.target
    engine = engine_of(target, setup.drafter, FixedBudget(num_draft_tokens))
    engine._ids = itertools.count(_RARE)
    request_ids = [engine.submit(prompt, params) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.cancel(request_ids[0])
    drain(engine)
    for request_id in request_ids:
        assert not mentions(setup.drafter, request_id), "a request is left over"
    assert is_empty(target.cache), "a slot of the target is left over"
    if setup.draft_model is not None:
        assert is_empty(setup.draft_model.cache), "a slot of the draft model is left over"


def mentions(root: object, number: int) -> bool:
    """Whether ``number`` occurs in an object's state. Models are not looked into."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, torch.Tensor | str | bytes | type):
            continue
        seen.add(id(item))
        if isinstance(item, int) and item == number:
            return True
        if isinstance(item, dict):
            todo.extend((*item.keys(), *item.values()))
        elif isinstance(item, Iterable) and hasattr(item, "__len__"):
            todo.extend(item)
        elif not hasattr(item, "score"):
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
    return False


def check_rejections_leave_nothing(
    new_drafter: Callable[[], Drafter],
    target: Target,
    prompt: Sequence[int],
    params: SamplingParams,
    num_draft_tokens: int,
) -> GenerationResult:
    """Every draft equals that of a fresh drafter which saw the committed text and no rejection.

    Drafters of the target's own layers must be built on ``target``: they find its text in a slot.

    Returns:
        The run whose drafts were compared.
    """
    lived = Recorded(new_drafter())
    (result,) = run(target, lived, [prompt], params, num_draft_tokens)
    history = _plain_history(target, [*prompt, *result.token_ids], len(prompt), lived.taps)
    for row, proposal in lived.drafts:
        slot, sheltered = _slot_that_holds(target, row.tokens[:-1]), new_drafter()
        sheltered.begin(DraftRow.of(row.request_id, prompt, slot=slot))
        for observation in history[: len(row.tokens) - len(prompt)]:
            sheltered.observe([observation._replace(request_id=row.request_id)])
        (expected,) = sheltered.propose([replace(row, slot=slot)])
        target.cache.free(slot)
        sheltered.end(row.request_id)
        assert proposal.tree == expected.tree, f"another draft after {len(row.tokens)} tokens"
        assert proposal.is_drawn == expected.is_drawn
        if isinstance(proposal, DrawnProposal) and isinstance(expected, DrawnProposal):
            probs, others = proposal.draft_probs_NV, expected.draft_probs_NV
            torch.testing.assert_close(probs, others, rtol=1e-3, atol=1e-4)
    return result


def _slot_that_holds(target: Target, tokens: Sequence[int]) -> int:
    slot = target.cache.allocate()
    if tokens:
        target.score([ScoreRow(slot, tokens)])
        target.cache.keep(slot, len(tokens), ())
    return slot


def _plain_history(
    target: Target, text: Sequence[int], num_prompt: int, taps: Sequence[int]
) -> list[RowStep]:
    """Observations of a drafter when this text is decoded plainly."""
    observations, slot = [], target.cache.allocate()
    for end in range(num_prompt, len(text)):
        start = target.cache.length(slot)
        pending = text[start:end]
        (scores,) = target.score([ScoreRow(slot, pending)], taps)
        target.cache.keep(slot, len(pending), ())
        observations.append(
            RowStep(
                *(0, start, len(pending)),
                committed=(text[end],),
                tokens=text[: end + 1],
                logits_NV=scores.logits_NV,
                taps=scores.taps,
            )
        )
    target.cache.free(slot)
    return observations
