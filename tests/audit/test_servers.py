"""The audit of servers: ours is found honest, and with each planted fault it is found to differ."""

from __future__ import annotations

import functools
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest

from foredraft.audit.faults import FAULTS, Fault, planted
from foredraft.audit.options import AuditOptions, ServerOptions
from foredraft.audit.report import (
    EXIT_DIFFERENT,
    EXIT_INCONCLUSIVE,
    EXIT_SAME,
    Finding,
    exit_code,
)
from foredraft.audit.servers import Endpoint, ServerAudit, connect
from foredraft.bench.prompts import load_prompts
from foredraft.core.errors import ForedraftError
from foredraft.core.params import SamplingParams
from foredraft.llm import LLM
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import LoadOptions
from tests.audit.marks import few_now
from tests.models.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.server.conftest import running

OPTIONS = AuditOptions(detect=0.1, alpha=1e-3, power=0.9)
SERVER = ServerOptions(endpoint="http://127.0.0.1", max_requests=4_000, reply_tokens=40)
SIGNS = "0123456789"
"""No two of these are one token."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("audit") / "tiny"
    save_tokenizer(directory)
    return Tokenizer(directory)


def new_llm(tokenizer: Tokenizer, **options: Any) -> LLM:
    """A model of signs, with a drafter that copies.

    The next token depends on the last sign, for some of them on the last two. So about half of the
    drawn drafts hold, and most of the greedy ones, and a wrong entry of the cache shows.
    """
    signs = [tokenizer.encode(sign, add_special_tokens=False)[0] for sign in SIGNS]

    @functools.cache
    def law(last: tuple[int, ...]) -> list[float]:
        drawn = random.Random(repr(last))
        weights = [0.0] * VOCAB_SIZE
        for sign in drawn.sample(signs, 6):
            weights[sign] = drawn.expovariate(1.0) ** 4 + 0.02
        weights[tokenizer.eos_token_ids[0]] = 0.01 * sum(weights)
        return [weight / sum(weights) for weight in weights]

    def next_law(context: tuple[int, ...]) -> list[float]:
        return law(context[-2:] if context[-1] in signs[:5] else context[-1:])

    target = TableModel(VOCAB_SIZE, next_law)
    asked = {"drafter": "suffix", "num_draft_tokens": 3, "prefix_caching": False} | options
    return LLM(target, tokenizer, LoadOptions(**asked))


@contextmanager
def served(tokenizer: Tokenizer, fault: Fault | None = None, **options: Any) -> Iterator[Endpoint]:
    """A server of this model, with a fault if one is named.

    How to plant a fault: write a function in the place of `foredraft.core.verify.verify`,
    ``rule(proposal, laws, choices) -> Verdict`` (see `foredraft.audit.faults` for eight of them and
    for what ``laws`` and ``choices`` offer), and name it in a ``Fault(name, said, rule=...)``. All
    requests of the server then commit what the rule says. Other faults can be made around this
    function, by changing ``llm`` before it is served.
    """
    with ExitStack() as stack:
        llm = new_llm(tokenizer, **options)
        if fault is not None:
            stack.enter_context(planted(fault, llm.policy, llm.target.cache))
        server = stack.enter_context(running(lambda trace: llm))
        yield Endpoint(stack.enter_context(connect(server.url, None)))


def audit(endpoint: Endpoint, plain: Endpoint | None = None, **server: Any) -> ServerAudit:
    return ServerAudit(endpoint, plain, OPTIONS, replace(SERVER, **server))


def test_an_honest_server_is_found_to_be_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    kept = tmp_path / "answers.jsonl"
    with served(tokenizer) as endpoint:
        report = audit(endpoint, keep=str(kept)).report()
    assert report.exit_code == EXIT_SAME, report.sentence
    assert [level.verdict for level in report.levels] == [Finding.SAME_BITS, Finding.SAME_LAW]
    assert all(level.figures["not_audited"] <= 5 for level in report.levels)
    answers = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(answers) == report.settings["requests"] <= SERVER.max_requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_of_these_tests_is_neither_useless_nor_perfect(
    tokenizer: Tokenizer, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=SERVER.reply_tokens, seed=1)
    prompts = [prompt.text for prompt in load_prompts(None)]
    stats = [result.stats for result in new_llm(tokenizer).generate(prompts, params)]
    assert 0.4 < sum(s.accepted for s in stats) / sum(s.drafted for s in stats) < 0.9


@pytest.mark.parametrize("fault", few_now(FAULTS, FAULTS[:1]))
def test_each_planted_fault_is_found(fault: Fault, tokenizer: Tokenizer) -> None:
    with served(tokenizer, fault) as endpoint:
        found = ServerAudit(endpoint, None, replace(OPTIONS, detect=0.05), SERVER)
        level = found.greedy()
        if level.verdict != Finding.DIFFERENT:
            level = found.law()
    assert level.verdict == Finding.DIFFERENT, level.said
    assert "tamper" not in level.said
    assert exit_code([level]) == EXIT_DIFFERENT


def test_a_plain_endpoint_may_tell_the_law(tokenizer: Tokenizer) -> None:
    few = {"max_requests": 700}
    with (
        served(tokenizer, FAULTS[0]) as endpoint,
        served(tokenizer, drafter="none", num_draft_tokens=None) as plain,
    ):
        assert audit(endpoint, plain, **few).greedy().verdict == Finding.DIFFERENT
        with served(tokenizer) as honest:
            assert audit(honest, plain, **few).greedy().verdict == Finding.SAME_BITS


def test_replies_are_in_flight_together_and_are_told_in_the_order_of_the_requests() -> None:
    met, is_later_done = Barrier(2, timeout=20), Event()

    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        if prompt != "alone":
            met.wait()
            is_later_done.set() if prompt == "second" else is_later_done.wait(20)
        return httpx.Response(200, json={"choices": [{"text": prompt}]})

    http = httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))
    endpoint, asked = Endpoint(http), ["alone", "first", "second"]
    told = endpoint.together([{"prompt": prompt} for prompt in asked])
    assert [choice["text"] for choice in told] == asked
    assert [each["request"]["prompt"] for each in endpoint.kept] == asked
    assert endpoint.requests == 3


def busy(times: int, says: dict[str, str]) -> Endpoint:
    """A server that turns each request away so many times."""
    came: Counter[bytes] = Counter()

    def answer(request: httpx.Request) -> httpx.Response:
        came[request.content] += 1
        if came[request.content] <= times:
            return httpx.Response(429, headers=says)
        return httpx.Response(200, json={"choices": [{"text": "a"}]})

    return Endpoint(httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)))


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("foredraft.audit.servers.time.sleep", slept.append)
    asked = [{"prompt": str(number)} for number in range(4)]
    endpoint = busy(2, {"Retry-After": "7"})
    assert len(endpoint.together(asked)) == len(endpoint.kept) == 4
    assert slept == [7.0] * 8
    with pytest.raises(ForedraftError, match="429"):
        busy(1000, {"Retry-After": "50"}).together(asked[:1])
    with pytest.raises(ForedraftError, match="429"):
        busy(1000, {}).together(asked[:1])
    assert sum(slept[8:]) == 100.0 + 120.0


def test_too_few_requests_are_inconclusive(tokenizer: Tokenizer) -> None:
    with served(tokenizer) as endpoint:
        report = audit(endpoint, max_requests=60).report()
        assert endpoint.requests <= 60
    assert report.exit_code == EXIT_INCONCLUSIVE
    assert "give it more --set max_requests" in report.sentence


def without_logprobs(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": "a", "logprobs": None}]})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda request: httpx.Response(500), "does not answer"),
        (lambda request: httpx.Response(200, text="no JSON"), "does not answer"),
        (lambda request: httpx.Response(200, json={"choices": []}), "does not answer"),
    ],
)
def test_a_server_that_is_none_is_said_to_be_none(answer: Any, says: str) -> None:
    http = httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))
    with pytest.raises(ForedraftError, match=says):
        audit(Endpoint(http)).report()


def test_a_server_without_log_probabilities_is_never_called_the_same() -> None:
    transport = httpx.MockTransport(without_logprobs)
    http = httpx.Client(base_url="http://test", transport=transport)
    report = audit(Endpoint(http), max_requests=20).report()
    assert report.exit_code == EXIT_INCONCLUSIVE
    assert "name a --plain-endpoint" in report.sentence


def cutting(all_of_them: int | None) -> Endpoint:
    """A server that draws from the two likeliest tokens unless its own ``top_k`` says otherwise.

    It refuses every other ``top_k``, or with None all of them, and says the whole law.
    """
    law = {"a": 0.5, "b": 0.3, "c": 0.2}

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if "top_k" in asked and asked["top_k"] != all_of_them:
            return httpx.Response(422, json={"error": "top_k"})
        drawn = random.Random(f"{asked['seed']} {asked['prompt']}")
        letters = [*law][: None if "top_k" in asked else 2]
        tokens = drawn.choices(letters, [law[letter] for letter in letters], k=asked["max_tokens"])
        likely = [{letter: math.log(p) for letter, p in law.items()}] * len(tokens)
        said = {"tokens": tokens, "top_logprobs": likely}
        return httpx.Response(200, json={"choices": [{"text": "".join(tokens), "logprobs": said}]})

    return Endpoint(httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)))


@pytest.mark.parametrize("all_of_them", [0, -1])
def test_servers_are_told_not_to_cut_the_law(all_of_them: int) -> None:
    assert audit(cutting(all_of_them), max_requests=2_000).law().verdict == Finding.SAME_LAW
    assert audit(cutting(None), max_requests=2_000).law().verdict == Finding.DIFFERENT


def greedy(asked: list[dict[str, Any]], wrong: int) -> Endpoint:
    """A server whose next letter depends on the last ten.

    In replies of several tokens one of ``wrong`` letters is another.
    """

    def letter(text: str, is_reply: bool) -> str:
        number = zlib.crc32(text[-10:].encode())
        return "abc"[(number + (is_reply and number // 3 % wrong == 0)) % 3]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        text, tokens = asked[-1]["prompt"], list[str]()
        for _ in range(number := asked[-1]["max_tokens"]):
            tokens.append(letter(text, number > 1))
            text += tokens[-1]
        likely = [
            {each: math.log(0.9 if each == token else 0.05) for each in "abc"} for token in tokens
        ]
        said = {"tokens": tokens, "top_logprobs": likely}
        return httpx.Response(200, json={"choices": [{"text": "".join(tokens), "logprobs": said}]})

    return Endpoint(httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)))


def test_a_place_of_greedy_replies_is_evidence_once() -> None:
    asked: list[dict[str, Any]] = []
    size = replace(SERVER, max_requests=2_000, reply_tokens=10)
    level = ServerAudit(greedy(asked, 10**9), None, replace(OPTIONS, detect=0.02), size).greedy()
    probed = [each["prompt"] for each in asked if each["max_tokens"] == 1]
    assert level.figures["tokens"] == len(probed) == len({*probed}) > 200


def test_what_differs_is_shown_with_its_own_text() -> None:
    level = audit(greedy([], 20), max_requests=2_000, reply_tokens=10).greedy()
    assert level.verdict == Finding.DIFFERENT
    assert len({(each["served"], each["before"]) for each in level.evidence}) > 1
    for each in level.evidence:
        number = zlib.crc32(each["before"][-10:].encode())
        assert (each["served"], each["alone"]) == ("abc"[(number + 1) % 3], "abc"[number % 3])
