"""Faults that other servers had, tried on this one; docs/operate/security.md lists them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from foredraft.llm import LLM
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel
from tests.models.checkpoints import VOCAB_SIZE
from tests.server.conftest import loading, running
from tests.server.test_bad_input import CHAT, USER, refused

REPO = Path(__file__).parents[2]
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *(({"logit_bias": {str(i): 1}}, "logit_bias") for i in (-1, VOCAB_SIZE, 2**40)),
        *(({"stop_token_ids": [i]}, "stop_token_ids") for i in (-1, VOCAB_SIZE, True, 1.5)),
        *(({"allowed_token_ids": [i]}, "allowed_token_ids") for i in (-1, VOCAB_SIZE, "x")),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias")
            for key in ("000000000000000000005", "05", "+5", " 5", "5.0", "٥", "")
        ),
        *(
            ({name: True}, name)
            for name in ("max_tokens", "seed", "top_k", "min_tokens", "priority", "temperature")
        ),
        *(({name: -(2**63)}, name) for name in ("max_tokens", "top_k", "min_tokens")),
    ],
    ids=str,
)
def test_numbers_are_checked_before_anything_is_indexed(
    client: httpx.Client, more: dict[str, Any], param: str
) -> None:
    body = {"messages": USER, "max_tokens": 2} | more
    assert param in refused(client.post(CHAT, json=body))["message"]


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"null"}' + "}}" * depth


GRAMMARS: dict[str, dict[str, Any]] = {
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "no end": {"regex": "(" * 2000 + "a" + ")" * 2000},
    "stars of stars": {"regex": "(((a*)*)*)*b"},
    "unclosed": {"regex": "(a"},
    "look-ahead": {"regex": "(?=a)b"},
    "of itself": {"grammar": "start: start"},
    "unknown name": {"grammar": "start: nothing_of_that_name"},
    "no text": {"choice": [""]},
    "many": {"choice": [str(i) for i in range(5000)]},
    "far away": {"json": {"$ref": "http://example.org/schema"}},
    "of no type": {"json": {"type": "objekt"}},
    "400 deep": {"json": nested(400)},
    "20000 deep": {"json": nested(20_000)},
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_is_compiled_in_time_or_refused(
    client: httpx.Client, grammar: dict[str, Any]
) -> None:
    began = time.process_time()  # busy neighbours do not count
    body = {"messages": USER, "max_tokens": 4, "structured_outputs": grammar}
    response = client.post(CHAT, json=body)
    assert response.status_code in (200, 400), response.text
    assert time.process_time() - began < 10
    if response.status_code == 400:
        assert len(response.content) < 4000
    assert client.post(CHAT, json={"messages": USER, "max_tokens": 1}).status_code == 200


def part(kind: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, **more}]}]


URL = "http://127.0.0.1:1/x"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"messages": part("image_url", image_url={"url": URL})}),
        (CHAT, {"messages": part("input_audio", input_audio={"data": "AA==", "format": "wav"})}),
        (CHAT, {"messages": part("video_url", video_url={"url": URL})}),
        (CHAT, {"messages": part("file", file={"file_id": "x"})}),
        (RESPONSES, {"input": part("input_image", image_url=URL)}),
        (RESPONSES, {"input": part("input_file", file_url=URL)}),
        (MESSAGES, {"messages": part("image", source={"type": "url", "url": URL})}),
        (MESSAGES, {"messages": part("document", source={"type": "url", "url": URL})}),
        (MESSAGES, {"messages": USER, "mcp_servers": [{"type": "url", "url": URL, "name": "x"}]}),
    ],
    ids=str,
)
def test_nothing_makes_the_server_ask_somebody_else(
    client: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    refused(client.post(route, json=body | {"max_tokens": 2} if route != RESPONSES else body))


PARAMETERS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.5, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {"7": 5}},
    {"min_tokens": 4, "stop_token_ids": [9]},
    {"ignore_eos": True, "stop": ["zz"]},
    {"bad_words": ["a"]},
    {"allowed_token_ids": [7, 8, 9, 10]},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 3},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["left", "right"]}},
    {"prediction": {"type": "content", "content": "the ferry"}},
]
DRAFTERS = ["none", "ngram", "suffix", "token_recycling", "lookahead", "prediction"]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_parameter_ends_the_engine_whatever_drafts(
    load: Callable[..., LLM], drafter: str
) -> None:
    """With a grammar or a penalty one server's engine died of its drafter."""
    asked = {"messages": USER, "max_tokens": 8}
    with running(partial(load, drafter=drafter)) as server, server.client() as client:
        for temperature in (0, 1):
            for coupling in ("seeded", "drawn"):
                for more in PARAMETERS:
                    body = asked | {"temperature": temperature, "coupling": coupling} | more
                    response = client.post(CHAT, json=body)
                    assert response.status_code in (200, 400), (more, response.text)
        assert server.context.is_live
        stats = server.context.engine.stats()
        assert not stats.finished.get("error")
        assert client.post(CHAT, json=asked).status_code == 200


class NaNTarget(TableModel):
    """Knows nothing of what follows `UNSPEAKABLE`."""

    UNSPEAKABLE = 11

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        scores = super().score(rows, taps)
        for row, wanted in zip(rows, scores.row_wanted, strict=True):
            if self.UNSPEAKABLE in (*self.cache.context(row.slot), *row.pending):
                scores.logits_NV[list(wanted)] = torch.nan
        return scores


def test_a_reply_without_numbers_fails_alone(tokenizer_directory: Path) -> None:
    load = loading(NaNTarget.random(VOCAB_SIZE, seed=5), tokenizer_directory)
    with running(load) as server, server.client() as client:
        for prompt, status in (([5, 6], 200), ([5, NaNTarget.UNSPEAKABLE], 500), ([5, 6], 200)):
            allowed = [i for i in range(60) if i != NaNTarget.UNSPEAKABLE]
            body = {"prompt": prompt, "max_tokens": 4, "allowed_token_ids": allowed}
            assert client.post(COMPLETIONS, json=body).status_code == status


def test_one_key_cannot_see_by_the_clock_or_the_drafts_what_another_has_sent(
    load: Callable[..., LLM],
) -> None:
    keys = ["first-secret", "second-secret"]
    text = "a letter that nobody else has written, and a number: 4711 " * 4
    body = {"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    # A fixed budget: how much drafts pay is learnt from all.
    fixed = partial(load, num_draft_tokens=6)
    with running(fixed, api_key=",".join(keys)) as server:

        def ask(key: str, **more: Any) -> tuple[int, Any]:
            with server.client(headers={"authorization": f"Bearer {key}"}) as client:
                answer = client.post(COMPLETIONS, json=body | more).json()
            told = answer["metrics"]["speculative_decoding"]
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], told

        first = ask(keys[0])
        assert ask(keys[1]) == first == (0, first[1]), "as if nobody had been there"
        assert ask(keys[0], cache_salt="x") == first
        assert ask(keys[0])[0] > 0


def test_the_list_names_tests_that_are_there() -> None:
    page = (REPO / "docs" / "operate" / "security.md").read_text()
    listed = page[page.index("<!-- faults -->") : page.index("<!-- /faults -->")]
    found = re.findall(r"\[`(test_\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)", listed)
    assert len(found) > 30
    for name, path in found:
        assert f"def {name}(" in (REPO / path).read_text(), (name, path)
