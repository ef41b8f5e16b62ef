"""The SDKs that people use, unchanged, against a server in this process (`make test-clients`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running

KEY = "unused-key"
USER: Any = [{"role": "user", "content": "Where is the ferry?"}]


class TestOpenAI:
    """openai."""

    @pytest.fixture
    def client(self, server: Running) -> Any:
        openai = pytest.importorskip("openai")
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)

    def test_chat(self, client: Any) -> None:
        reply = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8, seed=1)
        assert reply.usage.completion_tokens <= 8
        assert reply.choices[0].message.content is not None

    def test_chat_streamed(self, client: Any) -> None:
        asked: Any = {"model": "tiny", "messages": USER, "max_tokens": 8, "seed": 1}
        options = {"include_usage": True}
        chunks = [*client.chat.completions.create(**asked, stream=True, stream_options=options)]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == client.chat.completions.create(**asked).choices[0].message.content
        assert chunks[-1].usage.completion_tokens <= 8

    def test_the_stream_helper(self, client: Any) -> None:
        ends = {"stop_token_ids": list(range(0, 300, 2))}  # the helper refuses replies that are cut
        asked: Any = {"model": "tiny", "messages": USER, "seed": 1, "extra_body": ends}
        with client.chat.completions.stream(**asked) as stream:
            assert [event.type for event in stream]
        assert stream.get_final_completion().choices[0].finish_reason == "stop"

    def test_a_prediction(self, client: Any) -> None:
        expected = {"type": "content", "content": "The ferry crosses the river."}
        reply = client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=8, prediction=expected
        )
        assert reply.usage.completion_tokens_details.accepted_prediction_tokens is not None

    def test_completions(self, client: Any) -> None:
        reply = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, echo=True)
        assert [choice.text[0] for choice in reply.choices] == ["a", "b"]

    def test_responses(self, client: Any) -> None:
        reply = client.responses.create(model="tiny", input="Where?", max_output_tokens=8)
        assert isinstance(reply.output_text, str)
        with client.responses.stream(model="tiny", input="Where?", max_output_tokens=8) as stream:
            kinds = [event.type for event in stream]
        assert kinds[-1] in ("response.completed", "response.incomplete")

    def test_models_and_errors(self, client: Any) -> None:
        import openai

        assert "tiny" in [model.id for model in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="tiny", messages=USER, temperature=-1)


class TestAnthropic:
    """anthropic."""

    @pytest.fixture
    def client(self, server: Running) -> Any:
        anthropic = pytest.importorskip("anthropic")
        return anthropic.Anthropic(base_url=server.url, api_key=KEY)

    def test_messages(self, client: Any) -> None:
        reply = client.messages.create(model="tiny", messages=USER, max_tokens=8)
        assert reply.stop_reason in ("end_turn", "max_tokens")
        assert reply.usage.output_tokens <= 8

    def test_messages_streamed(self, client: Any) -> None:
        with client.messages.stream(model="tiny", messages=USER, max_tokens=8) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "".join(block.text for block in final.content)

    def test_counting(self, client: Any) -> None:
        tool = {"name": "look", "input_schema": {"type": "object"}}
        plain = client.messages.count_tokens(model="tiny", messages=USER)
        more = client.messages.count_tokens(model="tiny", messages=USER, tools=[tool], system="Be.")
        assert more.input_tokens > plain.input_tokens

    def test_errors(self, client: Any) -> None:
        import anthropic

        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nobody", messages=USER, max_tokens=8)


def test_langchain(server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model="tiny", max_tokens=8, seed=1, temperature=1
    )
    whole = chat.invoke("Where is the ferry?").content
    assert "".join(chunk.content for chunk in chat.stream("Where is the ferry?")) == whole
