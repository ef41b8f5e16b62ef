"""The parser of replies, by itself: however the text is cut into steps, the parts are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from foredraft.server.formats.hermes import Hermes
from foredraft.server.formats.reading import Part
from foredraft.server.replies import ReplyParser

TOOL = {"type": "function", "function": {"name": "look"}}
Told = list[tuple[str, int, str]]
THOUGHT = "<think>\nHm, <b>x</b> or </thin?\n</think>\n\nSo be it. "
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "K\\u00f6ln {1}", "n": -1.5}}\n</tool_call>'
)
LIST = (
    '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "parameters": [1, NaN]}]</tool_call>'
)
NAN = '<tool_call>{"name": "a", "arguments": {"x": [NaN, -Infinity], "y": "NaN", "z": Infinity}}'


def cut(text: str, seed: int) -> Iterator[str]:
    generator = random.Random(seed)
    while text:
        size = generator.choice((1, 1, 2, 5, 20, 400))
        yield text[:size]
        text = text[size:]


def parts_of(steps: Iterator[str], **options: Any) -> Told:
    """By kind and number of the call the text, whatever the steps."""
    given = {"thinks": True, "tools": (TOOL,)} | options
    parser = ReplyParser(Hermes(), **given)  # type: ignore[arg-type]
    parts = [part for step in steps for part in parser.feed(step)] + parser.close()
    assert sum(part.kind == "call" for part in parts) <= parser.num_calls
    return [
        (kind, index, "".join(part.text for part in group))
        for (kind, index), group in groupby(parts, lambda part: (part.kind, part.index))
    ]


def parts(text: str, **options: Any) -> Told:
    whole = parts_of(iter([text]), **options)
    for seed in range(30):
        assert parts_of(cut(text, seed), **options) == whole
    return whole


def calls(text: str) -> list[tuple[str, str]]:
    told = [each for each in parts(text) if each[0] in ("call", "arguments")]
    names = {index: name for kind, index, name in told if kind == "call"}
    arguments = {index: value for kind, index, value in told if kind == "arguments"}
    return [(names[index], arguments.get(index, "")) for index in names]


def test_thoughts_content_and_calls() -> None:
    assert parts(f"{THOUGHT}\n{CALL}\n{CALL}  Done.") == [
        ("reasoning", 0, "Hm, <b>x</b> or </thin?\n"),
        ("content", 0, "So be it."),
        ("call", 0, "look"),
        ("arguments", 0, '{"at": "K\\u00f6ln {1}", "n": -1.5}'),
        ("call", 1, "look"),
        ("arguments", 1, '{"at": "K\\u00f6ln {1}", "n": -1.5}'),
        ("content", 0, "  Done."),
    ]


def test_what_is_not_looked_for_is_content() -> None:
    assert parts(CALL, tools=()) == [("content", 0, CALL)]
    assert parts(THOUGHT, thinks=False) == [("content", 0, THOUGHT)]
    assert parts("a</think>\nb", in_thoughts=True) == [("reasoning", 0, "a"), ("content", 0, "b")]
    assert [each[1] for each in parts(CALL + CALL, only_first=True)] == [0, 0]


def test_parts_say_where_they_are() -> None:
    text = f"{THOUGHT}\n{CALL} and <tool_call>that</tool_call>"
    for seed in range(30):
        parser = ReplyParser(Hermes(), (TOOL,), True)
        told: list[Part] = []
        for step in cut(text, seed):
            told += parser.feed(step)
        told += parser.close()
        verbatim = [part for part in told if part.kind in ("content", "reasoning")]
        assert all(text[part.at : part.end] == part.text for part in verbatim)


def test_calls_in_other_forms() -> None:
    assert calls(LIST) == [("a", "{}"), ("b", "[1, null]")]
    turned = '<tool_call>{"arguments": {"x": NaN, "y": "é"}, "name": "a"}</tool_call>'
    assert calls(turned) == [("a", '{"x":null,"y":"é"}')]
    as_text = '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert calls(as_text) == [("a", '{"x": 1}')]
    bare = '<tool_call>{"name": "a", "arguments": null}</tool_call>'
    assert calls(bare) == [("a", "null")]
    more = '<tool_call>{"name": "a", "arguments": {"x": 1}, "id": 7}</tool_call>'
    assert calls(more) == [("a", '{"x": 1}')]


def test_calls_that_are_cut() -> None:
    assert calls('<tool_call>{"name": "a", "arguments": {"x": 12') == [("a", '{"x": 12')]
    assert calls('<tool_call>{"name": "a", "arguments": "{\\"x') == [("a", '{"x')]
    assert calls('<tool_call>{"name": "a", "argu') == []


def test_marks_in_a_string_are_text_and_cut_a_call_elsewhere() -> None:
    code = json.dumps({"code": "x # </tool_call> }{"})
    for order in ('{"name": "a", "arguments": %s}', '{"arguments": %s, "name": "a"}'):
        told = parts(f"<tool_call>{order % code}</tool_call> so")
        assert json.loads(told[1][2]) == json.loads(code)
        assert told[2] == ("content", 0, " so")
    cut_short = '<tool_call>\n{"name": "a", "arguments": {"x": 1}</tool_call> so'
    assert parts(cut_short)[1:] == [("arguments", 0, '{"x": 1}'), ("content", 0, " so")]
    unclosed = '<tool_call>\n{"name": "a", "arguments": {"x": 1</tool_call> so'
    assert parts(unclosed)[1:] == [("arguments", 0, '{"x": 1'), ("content", 0, " so")]


def test_arguments_have_no_nan() -> None:
    ((_, arguments),) = calls(f"{NAN}}}</tool_call>")
    assert json.loads(arguments) == {"x": [None, None], "y": "NaN", "z": None}
    assert "NaN" not in arguments.replace('"NaN"', "")


def test_escapes_of_markdown_in_a_name() -> None:
    call = r'<tool_call>{"name": "get\_weather", "arguments": {}}</tool_call>'
    assert calls(call) == [("get_weather", "{}")]


@pytest.mark.parametrize("name", ["a\nb", "\\ud800", "\\u12", "\x00"], ids=ascii)
def test_a_name_that_is_no_text_is_no_call(name: str) -> None:
    for order in ('"name": "%s", "arguments": {}', '"arguments": {}, "name": "%s"'):
        text = f"Hm <tool_call>{{{order % name}}}</tool_call> so"
        assert parts(text) == [("content", 0, text)]


@pytest.mark.parametrize("inner", ["", "no JSON", "[3]", '{"name": 3}', "[" * 5000, '"\\ud800"'])
def test_what_is_no_call_is_content(inner: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert parts(text) == [("content", 0, text)]
