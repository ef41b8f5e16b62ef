"""Tools in the form of each family, through the SDKs of OpenAI and Anthropic: free and forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.formats import FORMATS
from tests.models.checkpoints import save_tokenizer
from tests.server.conftest import Running, running
from tests.server.scripted import replying
from tests.server.test_formats import FORMS, TEMPLATES, TWICE, add_special

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Köln", "Bonn"]}, "days": {"const": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMES = ("look", "stop", "leap")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES
]
USER = {"role": "user", "content": "Weather?"}
MODEL = "tiny"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module", params=[form.name for form in FORMATS])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that writes two calls in its form, whatever it is asked; its marks are tokens."""
    directory: Path = tmp_path_factory.mktemp("family")
    marks = json.dumps(TEMPLATES[family]).replace("{{ tools }}", "")
    template = (
        "{% if tools or messages[0]['tools'] %}<|im_start|>system\n{{ tools }}<|im_end|>{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}{{ call.id }}{{ call.function | tojson }}"
        "{% endfor %}{{ message.tool_call_id or '' }}<|im_end|>\n{% endfor %}"
        f"{{% if false %}}{{{{ {marks} }}}}{{% endif %}}{{{{ '<|im_start|>assistant\\n' }}}}"
    )
    save_tokenizer(directory, template)
    add_special(directory / "tokenizer.json", family)
    load = replying(Tokenizer(directory), TWICE[family])
    with running(load, served_model_names=[MODEL], tool_format=family) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def other(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_two_turns_and_a_stream(client: Any, family: str) -> None:
    asked = {"model": MODEL, "tools": TOOLS, "temperature": 0}
    choice = client.chat.completions.create(messages=[USER], **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    look, stop = choice.message.tool_calls
    assert (look.function.name, stop.function.name) == ("look", "stop")
    assert json.loads(look.function.arguments)["days"] == 3
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in (look, stop)
    ]
    turns = [USER, choice.message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(messages=turns, **asked).choices[0]
    assert len(again.message.tool_calls) == 2
    arguments = ["", ""]
    for chunk in client.chat.completions.create(messages=[USER], stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments[call.index] += call.function.arguments or ""
    assert arguments == [look.function.arguments, stop.function.arguments]


@pytest.mark.parametrize("choice", ["required", "leap"])
def test_a_forced_call(client: Any, family: str, choice: str) -> None:
    named: Any = {"type": "function", "function": {"name": choice}}
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[USER],
        tools=TOOLS,
        tool_choice="required" if choice == "required" else named,
        seed=3,
        temperature=1.0,
    ).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call.function.name in (NAMES if choice == "required" else (choice,))
    found = json.loads(call.function.arguments)
    assert found["city"] in ("Köln", "Bonn")
    assert found["days"] == 3


def test_messages_of_anthropic(other: Any, family: str) -> None:
    tools: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    asked = {"model": MODEL, "max_tokens": 400, "tools": tools, "messages": [USER]}
    free = other.messages.create(extra_body=GREEDY, **asked)
    assert free.stop_reason == "tool_use"
    assert [block.name for block in free.content if block.type == "tool_use"] == ["look", "stop"]
    with other.messages.stream(extra_body=GREEDY, **asked) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [block.input for block in free.content]
    forced = other.messages.create(tool_choice={"type": "tool", "name": "leap"}, **asked)
    (block,) = forced.content
    assert (block.type, block.name, block.input["days"]) == ("tool_use", "leap", 3)


def test_an_answer_by_a_schema_beside_tools(client: Any, family: str) -> None:
    """A model that wants to call may; the grammar binds what it says otherwise."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model=MODEL, messages=[USER], tools=TOOLS, response_format=form, temperature=0
    ).choices[0]
    assert reply.finish_reason in ("tool_calls", "stop"), "it calls as often as it may, and ends"
    if reply.message.tool_calls:
        assert json.loads(reply.message.tool_calls[0].function.arguments)["days"] == 3
    else:
        assert json.loads(reply.message.content)["days"] == 3
    assert bool(reply.message.tool_calls) == (not FORMS[family].beside_answer)
