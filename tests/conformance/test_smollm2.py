"""Every drafter on the default model: the plain run's text, token for token.

The draft model is the target itself without a few of its layers: it shares the weights, costs no
memory, and is right often enough for both outcomes to occur.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from foredraft.core.params import SamplingParams
from foredraft.drafters import drafter_names, drafter_spec
from foredraft.drafters.trained import shipped_head
from foredraft.models.files.store import resolve_model
from foredraft.models.native.model import EagerDecoder
from foredraft.models.native.target import NativeTarget
from foredraft.models.text.tokenizer import Tokenizer
from tests.conformance.harness import Kind, fused_decoder, head_kind, plain, run, set_up
from tests.models.checkpoints import some_layers

pytestmark = pytest.mark.real_model

TEXTS = (
    "The list again: apples, pears, plums. The list again: apples,",
    "def area(width, height):\n    return",
    "Our ship left the harbour",
)
TEMPERATURES = (0.0, 0.7, 1.0)
SKIPPED_LAYERS = (13, 17, 21, 25)


@functools.cache
def directory() -> Path:
    return resolve_model("smollm2-135m-instruct")


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(directory())
    return [tokenizer.encode(text) for text in TEXTS]


@functools.cache
def kind(decoder: str) -> Kind:
    factory = EagerDecoder if decoder.startswith("eager") else fused_decoder()
    dtype = torch.bfloat16 if decoder.endswith("bf16") else torch.float32
    target = NativeTarget.load(directory(), dtype, new_decoder=factory)
    layers = [i for i in range(target.config.num_hidden_layers) if i not in SKIPPED_LAYERS]
    return Kind(
        decoder,
        new_target=lambda: target,
        new_draft_model=lambda: some_layers(target, layers),
        new_codec=lambda: Tokenizer(directory()),
    )


@functools.cache
def plain_text(decoder: str, params: SamplingParams) -> list[tuple[int, ...]]:
    return plain(kind(decoder).new_target(), prompts(), params)


@pytest.fixture(params=drafter_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(
    name: str, decoder: str, temperature: float, num_draft_tokens: int, max_tokens: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=max_tokens)
    target = kind(decoder).new_target()
    if drafter_spec(name).trained and not shipped_head(head_kind(name), target):
        pytest.skip(f"no head of {name} comes with the package")
    expected = plain_text(decoder, params)
    setup = set_up(name, kind(decoder))
    alone = run(setup.target, setup.drafter, prompts()[:1], params, num_draft_tokens)
    assert alone[0].token_ids == expected[0]
    together = run(setup.target, setup.drafter, prompts(), params, num_draft_tokens)
    assert [result.token_ids for result in together] == expected


def test_text_is_the_plain_runs(name: str) -> None:
    """Other temperatures and decoders are in the whole grid, and those of tiny models are run."""
    check(name, "fused-bf16", temperature=1.0, num_draft_tokens=5, max_tokens=10)


def test_text_is_the_plain_runs_without_the_kernel() -> None:
    check("hidden_head", "eager-fp32", temperature=0.7, num_draft_tokens=3, max_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("num_draft_tokens", range(9))
@pytest.mark.parametrize("decoder", ["eager-fp32", "fused-fp32", "fused-bf16"])
def test_text_is_the_plain_runs_over_the_whole_grid(
    name: str, decoder: str, num_draft_tokens: int, temperature: float
) -> None:
    check(name, decoder, temperature, num_draft_tokens, max_tokens=32)


@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_drafts_are_accepted_and_rejected(name: str) -> None:
    """Otherwise the texts above would agree for want of anything to verify."""
    setup = set_up(name, kind("fused-bf16"))
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12)
    results = run(setup.target, setup.drafter, prompts(), params, 4)
    assert sum(r.stats.accepted for r in results) > 0
    assert sum(r.stats.rejected for r in results) > 0
