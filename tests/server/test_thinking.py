"""Switches of thoughts, in the words of every API, and the most tokens of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.core.errors import ConfigError
from foredraft.core.params import ThinkingLimit
from foredraft.core.rules.bans import thinking_ends
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.thinking import Thinking
from tests.models.checkpoints import save_tokenizer
from tests.server.conftest import Running, running
from tests.server.scripted import replying

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
USER = [{"role": "user", "content": "How?"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
THOUGHTS = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("thinking")
    save_tokenizer(directory, TEMPLATE)
    load = replying(Tokenizer(directory), f"{THOUGHTS}</think>\n\nSo.", begin="<think>\n")
    with running(load) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def size(client: httpx.Client, path: str, **more: Any) -> int:
    """Tokens of the prompt: fewer where the thoughts are not opened and closed."""
    body = {"input": "How?"} if path == RESPONSES else {"messages": USER}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = client.post(path, json=body | {limit: 2} | more)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return int(usage.get("prompt_tokens", usage.get("input_tokens", 0))) + cached


def test_thoughts_are_switched_off_in_the_words_of_every_api(client: httpx.Client) -> None:
    thinking = size(client, CHAT)
    off = size(client, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert off > thinking
    assert size(client, CHAT, enable_thinking=False) == off
    assert size(client, CHAT, reasoning_effort="none") == off
    assert size(client, RESPONSES, reasoning={"effort": "none"}) == off
    assert size(client, MESSAGES, thinking={"type": "disabled"}) == off
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert size(client, MESSAGES, thinking=enabled) == thinking
    assert size(client, CHAT, reasoning_effort="high") > thinking


def test_switches_that_cannot_be_used(client: httpx.Client, shared: Running) -> None:
    for more, param in (
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "<|im_end|>"}}, "chat_template_kwargs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ):
        answer = client.post(CHAT, json={"messages": USER} | more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with shared.client() as other:  # its template has no switch
        body = {"messages": USER, "max_tokens": 2, "reasoning_effort": "low"}
        assert other.post(CHAT, json=body).headers["x-foredraft-ignored"] == "reasoning_effort"


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_limit_ends_thoughts(tmp_path: Path, drafter: str) -> None:
    save_tokenizer(tmp_path, TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    load = replying(tokenizer, f"{THOUGHTS}</think>\n\nSo.", begin="<think>\n", drafter=drafter)
    with running(load) as server, server.client() as client:
        body = {"messages": USER, "temperature": 0, "max_tokens": 60, "thinking_token_budget": 6}
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
        enough = client.post(CHAT, json=body | {"thinking_token_budget": 50}).json()
    first = tokenizer.encode(THOUGHTS, False)[:6]
    assert message["reasoning"] == tokenizer.decode(first)
    assert message["content"]
    assert enough["choices"][0]["message"]["reasoning"] == THOUGHTS
    assert json.dumps(enough)


def test_the_limit_by_itself() -> None:
    ends = thinking_ends(ThinkingLimit(3, (7,), (8, 9)))
    assert ends.permits(5, 2, (7, 1))
    assert not ends.permits(5, 3, (7, 1, 2))
    assert ends.permits(8, 3, (7, 1, 2))
    assert ends.permits(9, 4, (7, 1, 2, 8))
    assert ends.permits(5, 5, (7, 1, 2, 8, 9))
    assert ends.permits(5, 3, (7, 8, 2)), "they were over"
    assert ends.permits(5, 3, (1, 1, 2)), "there are none"


def test_words_of_templates() -> None:
    known = {"thinking", "reasoning_effort"}
    assert Thinking(False).of_template(known) == {"thinking": False}
    assert Thinking(effort="xhigh").of_template(known) == {
        "thinking": True,
        "reasoning_effort": "high",
    }
    assert Thinking(effort="none").of_template({"enable_thinking"}) == {"enable_thinking": False}
    with pytest.raises(ConfigError, match="thinking"):
        Thinking(variables={"thinkin": True}).of_template(known)
