"""Thoughts of a reply: told apart from what it says, counted, switched and limited."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
from tests.server.conftest import TOOL_TEMPLATE, Running, running, wait_until
from tests.server.events import data_of
from tests.server.scripted import one_of, replying

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS, SAID = "The river is wide.", "Take the ferry."
REPLY = f"<think>\n{THOUGHTS}</think>\n\n{SAID}"
USER = [{"role": "user", "content": "How?"}]
BODY: dict[str, Any] = {"messages": USER, "temperature": 0}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("thoughts")
    save_tokenizer(directory, TEMPLATE)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def client(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with running(replying(tokenizer, REPLY)) as server, server.client() as client:
        yield client


def size(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_chat_tells_thoughts_apart(client: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = client.post(CHAT, json=BODY).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHTS, SAID)
    assert message["reasoning_content"] == THOUGHTS
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < answer["usage"]["completion_tokens"]
    assert abs(counted - size(tokenizer, REPLY[: -len(SAID)])) <= 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = data_of(client.post(CHAT, json=BODY | options))
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name, text in (("reasoning", THOUGHTS), ("content", SAID)):
        assert "".join(delta.get(name, "") for delta in deltas) == text


def test_a_reply_that_was_cut_is_all_thoughts(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=BODY | {"max_tokens": 9}).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9


def test_messages_and_responses_tell_them_apart(client: httpx.Client) -> None:
    message = client.post(MESSAGES, json=BODY | {"max_tokens": 400}).json()
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHTS)
    assert (text["type"], text["text"]) == ("text", SAID)
    response = client.post(RESPONSES, json={"input": "How?", "temperature": 0}).json()
    reasoning, said = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHTS}]
    assert said["content"][0]["text"] == SAID
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < 400


def test_one_name_alone(tokenizer: Tokenizer) -> None:
    load = replying(tokenizer, REPLY)
    with running(load, reasoning_content=False) as server, server.client() as client:
        message = client.post(CHAT, json=BODY).json()["choices"][0]["message"]
    assert message["reasoning"] == THOUGHTS
    assert "reasoning_content" not in message


def test_thoughts_that_the_prompt_has_opened(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>{% endif"))
    load = replying(Tokenizer(tmp_path), REPLY.removeprefix("<think>\n"))
    with running(load) as server, server.client() as client:
        answer = client.post(CHAT, json=BODY).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == SAID
    assert message["reasoning"].endswith(THOUGHTS[-8:])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_both_names_are_read(client: httpx.Client) -> None:
    def count(post: Callable[..., httpx.Response], **more: str) -> int:
        turn = {"role": "assistant", "content": SAID, **more}
        return int(post("/tokenize", json={"messages": [*USER, turn]}).json()["count"])

    plain = count(client.post)
    new, old = (count(client.post, **{n: THOUGHTS}) for n in ("reasoning", "reasoning_content"))
    assert plain < new == old


def test_thoughts_are_counted_while_a_server_drains(tokenizer: Tokenizer) -> None:
    """Then it has no tokenizer for new requests."""

    def load(trace: Any) -> Any:
        llm = replying(tokenizer, REPLY)(trace)
        score = llm.target.score

        def slowly(*given: Any, **options: Any) -> Any:
            time.sleep(0.02)
            return score(*given, **options)

        llm.target.score = slowly  # type: ignore[method-assign]
        return llm

    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    with (
        running(load, drain_timeout=20.0) as server,
        server.client() as client,
        client.stream("POST", CHAT, json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        server.loop.call_soon_threadsafe(server.server.end)
        wait_until(lambda: not server.context.is_ready)
        *_, last, done = [line for line in lines if line.startswith("data: ")]
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_none_are_counted_where_there_can_be_none(shared: Any) -> None:
    with shared.client() as client:
        usage = client.post(CHAT, json=BODY | {"max_tokens": 4}).json()["usage"]
    assert "completion_tokens_details" not in usage


# ------------------------------------------------------------------- prompts that open the thoughts

LOOK = {"name": "look", "parameters": one_of("at", "here", "there")}
TOOL = {"type": "function", "function": LOOK}
SCHEMA = one_of("n", 1, 2, 3)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model that thinks, and then says something else than what is asked for."""
    directory = tmp_path_factory.mktemp("thinker")
    template = TOOL_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    save_tokenizer(directory, template)
    load = replying(Tokenizer(directory), f"{THOUGHTS}</think>\n\n{SAID}", begin="<think>\n")
    with running(load) as server, server.client() as client:
        yield client


def test_a_grammar_binds_behind_the_thoughts(thinker: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = thinker.post(CHAT, json=BODY | {"response_format": form}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] == THOUGHTS
    assert json.loads(choice["message"]["content"])["n"] in (1, 2, 3)
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    output = thinker.post(RESPONSES, json={"input": "How?", "temperature": 0, "text": text}).json()
    reasoning, said = output["output"]
    assert reasoning["content"][0]["text"] == THOUGHTS
    assert json.loads(said["content"][0]["text"])["n"] in (1, 2, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_asked_for_is_made_behind_the_thoughts(
    thinker: httpx.Client, stream: bool
) -> None:
    body = BODY | {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    response = thinker.post(CHAT, json=body)
    if stream:
        choices = [choice for chunk in data_of(response)[:-1] for choice in chunk["choices"]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
        function = {
            "name": calls[0]["function"]["name"],
            "arguments": "".join(call["function"]["arguments"] for call in calls),
        }
        choice = choices[-1]
    else:
        choice = response.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        function = call["function"]
        assert choice["message"]["reasoning"] == THOUGHTS
    assert choice["finish_reason"] == "tool_calls"
    assert function["name"] == "look"
    assert json.loads(function["arguments"])["at"] in ("here", "there")


@pytest.mark.parametrize("drafter", ["none", "suffix", "ngram"])
def test_log_probabilities_of_a_text_are_of_its_own_tokens(
    tokenizer: Tokenizer, drafter: str
) -> None:
    """However many tokens a step brings, and where thoughts and text meet within one."""
    load = replying(tokenizer, REPLY, drafter=drafter)
    asked = {"input": f"{REPLY} {REPLY}", "include": ["message.output_text.logprobs"]}
    with running(load) as server, server.client() as client:
        answer = client.post(RESPONSES, json=asked | {"temperature": 0}).json()
        events = data_of(client.post(RESPONSES, json=asked | {"temperature": 0, "stream": True}))
    entries = answer["output"][1]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == SAID
    assert entries[-1]["token"] == "<|im_end|>"
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries


# --------------------------------------------------------------------------------------- switches

SWITCHES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
TEN = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("thinking")
    save_tokenizer(directory, SWITCHES)
    load = replying(Tokenizer(directory), f"{TEN}</think>\n\nSo.", begin="<think>\n")
    with running(load) as server, server.client() as client:
        yield client


def asked(client: httpx.Client, path: str, **more: Any) -> int:
    """Tokens of the prompt: fewer where the thoughts are not opened and closed."""
    body = {"input": "How?"} if path == RESPONSES else {"messages": USER}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = client.post(path, json=body | {limit: 2} | more)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return int(usage.get("prompt_tokens", usage.get("input_tokens", 0))) + cached


def test_thoughts_are_switched_off_in_the_words_of_every_api(switch: httpx.Client) -> None:
    thinking = asked(switch, CHAT)
    off = asked(switch, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert off > thinking
    assert asked(switch, CHAT, enable_thinking=False) == off
    assert asked(switch, CHAT, reasoning_effort="none") == off
    assert asked(switch, RESPONSES, reasoning={"effort": "none"}) == off
    assert asked(switch, MESSAGES, thinking={"type": "disabled"}) == off
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert asked(switch, MESSAGES, thinking=enabled) == thinking
    assert asked(switch, CHAT, reasoning_effort="high") > thinking


def test_switches_that_cannot_be_used(switch: httpx.Client, shared: Running) -> None:
    for more, param in (
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "<|im_end|>"}}, "chat_template_kwargs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ):
        answer = switch.post(CHAT, json={"messages": USER} | more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with shared.client() as other:  # its template has no switch
        body = {"messages": USER, "max_tokens": 2, "reasoning_effort": "low"}
        assert other.post(CHAT, json=body).headers["x-foredraft-ignored"] == "reasoning_effort"


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_limit_ends_thoughts(tmp_path: Path, drafter: str) -> None:
    save_tokenizer(tmp_path, SWITCHES)
    tokenizer = Tokenizer(tmp_path)
    load = replying(tokenizer, f"{TEN}</think>\n\nSo.", begin="<think>\n", drafter=drafter)
    with running(load) as server, server.client() as client:
        body = {"messages": USER, "temperature": 0, "max_tokens": 60, "thinking_token_budget": 6}
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
        enough = client.post(CHAT, json=body | {"thinking_token_budget": 50}).json()
    first = tokenizer.encode(TEN, False)[:6]
    assert message["reasoning"] == tokenizer.decode(first)
    assert message["content"]
    assert enough["choices"][0]["message"]["reasoning"] == TEN
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
