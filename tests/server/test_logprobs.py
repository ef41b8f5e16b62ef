"""Log probabilities as clients get them: texts with their spaces, bytes, offsets, borders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.core.logprobs import TokenLogprobs
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server import wire
from foredraft.server.logprobs import CompletionLogprobs, ReplyLogprobs, chat_logprobs
from foredraft.server.wire import JsonResponse, as_json
from tests.drafters.tokenizers import codec

TEXT = "The lamp in the harbour 🦊, 東京!"
STYLES = ["bpe", "gpt2", "llama2"]


def entries(tokens: list[int], top: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, -1.0, tuple((each, -float(n)) for n, each in enumerate(top)))
        for token in tokens
    ]


def plain(tokenizer: Tokenizer, text: str = TEXT) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("style", STYLES)
def test_bytes_of_tokens_are_those_of_the_text(style: str) -> None:
    tokenizer = codec(style)
    content = chat_logprobs(tokenizer, entries(plain(tokenizer)))["content"]
    written = b"".join(bytes(each["bytes"]) for each in content)
    assert written.decode().removeprefix(" ") == TEXT
    for each in content:
        if not each["token"].startswith("bytes:"):
            assert each["token"].encode() == bytes(each["bytes"])
    parts = [each["token"] for each in content if each["token"].startswith("bytes:")]
    assert len(parts) > 2
    assert all(part.startswith("bytes:\\x") for part in parts)


def test_those_of_a_long_reply_are_written_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As objects, 8,000 tokens with 20 alternatives each were 100 MB, and looked through."""
    tokenizer, sizes = codec("gpt2"), list[int]()
    many = entries(plain(tokenizer) * 30, (5, 6))

    def noted(value: Any) -> bytes:
        sizes.append(len(value) if isinstance(value, list) else 0)
        return as_json(value)

    monkeypatch.setattr(wire, "as_json", noted)
    body = JsonResponse({"logprobs": chat_logprobs(tokenizer, many)}).body
    assert 0 < max(sizes) <= wire.FEW
    few = [chat_logprobs(tokenizer, [each])["content"][0] for each in many]
    assert json.loads(body)["logprobs"] == {"content": few, "refusal": None}


def test_half_a_surrogate_pair_beside_those_of_a_long_reply_is_written() -> None:
    """The entries were half read when that was found."""
    tokenizer = codec("gpt2")
    few = entries(plain(tokenizer))[:3]
    value = {"logprobs": chat_logprobs(tokenizer, few * 30), "user": "\ud800"}
    written = json.loads(wire.data_event(value).removeprefix(b"data: "))
    content = chat_logprobs(tokenizer, few)["content"] * 30
    assert written == {"logprobs": {"content": content, "refusal": None}, "user": "?"}


@pytest.mark.parametrize("style", STYLES)
def test_tokens_of_one_start_do_not_collapse(style: str) -> None:
    """With and without a space, and parts of characters."""
    tokenizer = codec(style)
    tokens = plain(tokenizer, "🦊🌊 t at")
    (top,) = CompletionLogprobs(tokenizer, [], 9).format(
        [tokens[0]], entries([tokens[0]], (*tokens,))
    )["top_logprobs"]
    assert len(top) == len(set(tokens))
    assert next(iter(top)) == tokenizer.token_text(tokens[0])
    assert top[tokenizer.token_text(tokens[0])] == -1.0


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_offsets_are_those_of_the_text(style: str, size: int) -> None:
    tokenizer = codec(style)
    tokens, written = plain(tokenizer), CompletionLogprobs(tokenizer, [], 0)
    offsets: list[int] = []
    for at in range(0, len(tokens), size):
        step = tokens[at : at + size]
        offsets += written.format(step, [None] * len(step))["text_offset"]
    for number, offset in enumerate(offsets):
        token = tokenizer.token_text(tokens[number])
        if not token.startswith("bytes:"):
            # Decoders drop the space before a text.
            assert TEXT[offset:].startswith(token if number else token.lstrip())
    assert offsets[-1] == len(TEXT) - 1


@pytest.mark.parametrize("style", STYLES)
def test_offsets_count_the_first_space_of_a_reply(style: str) -> None:
    tokenizer = codec(style)
    prompt, reply = tokenizer.encode("A fox"), plain(tokenizer, "lamp lamp")
    text = tokenizer.decode(prompt + reply)[len(tokenizer.decode(prompt)) :]
    written = CompletionLogprobs(tokenizer, prompt, 0).format(reply, [None] * len(reply))
    last = written["text_offset"][-1]
    assert text[last:] == tokenizer.token_text(reply[-1])


@pytest.mark.parametrize("style", STYLES)
def test_offsets_behind_an_echoed_prompt(style: str) -> None:
    tokenizer = codec(style)
    prompt, reply = tokenizer.encode("A fox:"), plain(tokenizer)
    text = tokenizer.decode(prompt, skip_special_tokens=False) + tokenizer.decode(reply)
    tokens = prompt + reply
    offsets = CompletionLogprobs(tokenizer, [], 0).format(tokens, [None] * len(tokens), len(prompt))
    assert text[offsets["text_offset"][len(prompt)] :] == TEXT
    assert offsets["text_offset"][-1] == len(text) - 1


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("style", STYLES)
def test_a_stretch_of_text_has_those_of_its_own_tokens(style: str, size: int) -> None:
    """However many tokens a step brings."""
    tokenizer = codec(style)
    tokens, found = plain(tokenizer), ReplyLogprobs(tokenizer, [])
    begin, end = TEXT.index("in"), TEXT.index(",")
    taken: list[TokenLogprobs] = []
    for at in range(0, len(tokens), size):
        found.add(entries(tokens[at : at + size]))
        known = len(tokenizer.decode(tokens[: at + size]).rstrip("\ufffd"))
        taken += found.take(begin, min(end, known))
    offsets = CompletionLogprobs(tokenizer, [], 0).format(tokens, [None] * len(tokens))[
        "text_offset"
    ]
    within = [t for t, at in zip(tokens, offsets, strict=True) if begin <= at < end]
    assert [entry.token for entry in taken] == within
    assert "🦊" in b"".join(map(tokenizer.token_bytes, within)).decode()
    assert [entry.token for entry in found.take(end)] == tokens[tokens.index(within[-1]) + 1 :]
