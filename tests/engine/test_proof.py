"""Live proof: what steps with drafts committed is written again without them, to be the same."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foredraft import LLM, AsyncLLM, SamplingParams
from foredraft.audit.faults import FAULTS, Fault, planted
from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError
from foredraft.core.record import StepRecord
from foredraft.engine.policy import Policy
from foredraft.engine.proof import LiveProof
from foredraft.load import LoadedModel, ModelPlan
from foredraft.models.table import TableModel
from foredraft.options import LoadOptions
from tests.models.encoder_decoders import SourceTable

VOCAB = 12
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
ACCEPT_ALL = next(fault for fault in FAULTS if fault.name == "accept all")
SPOILED = next(fault for fault in FAULTS if fault.spoils_cache)


def new_llm(drafter: str = "ngram", sharpness: float = 6.0, **more: Any) -> LLM:
    target = TableModel.random(VOCAB, seed=5, order=2, sharpness=sharpness)
    return LLM(target, None, LoadOptions(drafter=drafter, prefix_caching=False), **more)


def new_proof(llm: LLM, every: int) -> LiveProof:
    plain = Policy(FixedBudget(0, drafter=None), is_apart=True)
    return LiveProof(llm.engine, plain, every)


def proven(llm: LLM, params: SamplingParams, every: int = 1) -> LiveProof:
    """The proof of one request's steps, when it has come to its end."""
    proof = llm.engine.proof = new_proof(llm, every)
    llm.generate([PROMPT], params)
    while proof.advance() is not None:
        pass
    return proof


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "more",
    [{}, {"repetition_penalty": 1.3}, {"min_tokens": 20, "top_p": 0.9}, {"logprobs": 2}],
    ids=["plain", "penalty", "min_tokens", "logprobs"],
)
def test_steps_of_an_exact_engine_come_out_the_same(
    temperature: float, more: dict[str, Any]
) -> None:
    params = SamplingParams.of(temperature=temperature, seed=3, max_tokens=80, **more)
    proof = proven(new_llm(), params)
    assert proof.num_steps >= 5
    assert proof.num_differences == 0


@pytest.mark.parametrize("fault", [ACCEPT_ALL, SPOILED], ids=["rule", "cache"])
def test_a_planted_fault_is_counted_and_said(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    llm = new_llm("token_recycling", sharpness=3.0)
    with planted(fault, llm.policy, llm.target.cache):
        proof = llm.engine.proof = new_proof(llm, 1)
        llm.generate([PROMPT], SamplingParams(temperature=1.0, seed=2, max_tokens=80))
    while proof.advance() is not None:
        pass
    assert proof.num_differences > 0
    assert "plain decoding writes" in caplog.text


def test_one_in_so_many_is_proven_and_no_more_than_there_is_room_for() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=300, ignore_eos=True)
    everything = proven(new_llm(), params)
    assert everything.num_steps == 16, "older ones made way"
    few = proven(new_llm(), params, every=10)
    assert 0 < few.num_steps < 16


@pytest.mark.parametrize(("coupling", "is_proven"), [("drawn", False), ("seeded", True)])
def test_drawn_drafts_are_left_out(coupling: str, is_proven: bool) -> None:
    target, draft = (TableModel.random(VOCAB, seed=5, order=2, sharpness=3.0) for _ in range(2))
    options = LoadOptions(drafter="draft_model", num_draft_tokens=3)
    llm = LLM(target, None, options, draft=LoadedModel(draft))
    params = SamplingParams.of(temperature=1.0, seed=3, max_tokens=30, coupling=coupling)
    proof = proven(llm, params)
    assert bool(proof.num_steps) is is_proven
    assert proof.num_differences == 0


def test_a_proof_gives_way_and_changes_nothing_for_others() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
    alone = new_llm().generate([PROMPT], params)[0]
    records: list[StepRecord] = []
    llm = new_llm(trace=records.append)
    proof = llm.engine.proof = new_proof(llm, 1)
    assert llm.generate([PROMPT], params)[0].token_ids == alone.token_ids
    steps, counted = len(records), llm.engine.stats().steps
    assert proof.advance() == 0.0, "one has begun"
    assert proof.num_steps == 0 or llm.engine.num_live == 0
    stream = llm.stream(PROMPT, params)
    tokens = next(stream).token_ids
    assert proof.advance() is not None, "it waits"
    tokens += tuple(token for event in stream for token in event.token_ids)
    assert tokens == alone.token_ids
    while proof.advance() is not None:
        pass
    assert proof.num_differences == 0
    assert llm.engine.num_live == 0
    assert len(records) == 2 * steps, "no trace and no figure has a proof's own steps"
    assert llm.engine.stats().steps == 2 * counted
    assert llm.engine.stats().finished == {"length": 2}


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_so_many_is_a_whole_number(every: object) -> None:
    with pytest.raises(ConfigError, match="every "):
        new_proof(new_llm(), every)  # type: ignore[arg-type]


def test_a_near_tie_is_no_fault() -> None:
    llm = new_llm()
    llm.plan = cast(ModelPlan, SimpleNamespace(is_exact=False))
    with pytest.raises(ConfigError, match="would count near-ties as faults"):
        AsyncLLM(llm, prove_every=2)


async def test_an_idle_engine_proves_by_itself() -> None:
    told: list[bool] = []
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
    async with AsyncLLM(new_llm(), prove_every=2, on_proof=told.append) as engine:
        await asyncio.gather(*(engine.generate(PROMPT[cut:], params) for cut in (0, 2, 1)))
        end = time.monotonic() + 60
        while not told and time.monotonic() < end:
            await asyncio.sleep(0.01)
    assert told
    assert all(told)
    assert engine.proof is not None
    assert engine.proof.num_steps >= len(told) > 0


def test_an_encoder_decoder_is_proven_with_its_source() -> None:
    def conditional(source: tuple[int, ...], text: tuple[int, ...]) -> list[float]:
        wanted = (sum(source) + len(text)) % 3 + 2
        return [0.9 if token == wanted else 0.1 / (VOCAB - 1) for token in range(VOCAB)]

    options = LoadOptions(drafter="ngram", prefix_caching=False)
    llm = LLM(SourceTable(VOCAB, conditional), None, options)
    proof = proven(llm, SamplingParams(temperature=0.0, max_tokens=60))
    assert proof.num_steps >= 5
    assert proof.num_differences == 0


async def test_a_closed_engine_proves_nothing_and_another_may_begin() -> None:
    llm = new_llm()
    async with AsyncLLM(llm, prove_every=1) as first:
        assert llm.engine.proof is first.proof
        with pytest.raises(ConfigError, match="close it first"):
            AsyncLLM(llm, prove_every=1)
    assert llm.engine.proof is None
    async with AsyncLLM(llm, prove_every=1) as second:
        assert llm.engine.proof is second.proof
