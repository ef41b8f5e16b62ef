"""The forms of families: replies cut at every character, templates, and the grammars."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.prompts import checked_messages
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.server.formats import FORMATS, format_of, takes_tools
from foredraft.server.formats.base import Format, Spell, reply_grammar
from foredraft.server.formats.values import _QUOTED as QUOTED
from foredraft.server.replies import ReplyParser
from tests.models.checkpoints import save_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = (LOOK, STOP)
ARGUMENTS = '{"city": "Köln </tool_call> }{", "days": 3}'
PLAIN = '{"city": "Köln", "days": 3}'
FORMS: dict[str, Format] = {form.name: form() for form in FORMATS}

Call = tuple[str, Any]
TWICE: dict[str, str] = {
    "hermes": (
        f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=city>\nKöln </tool_call> }{\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=look>\n<parameter=city>Köln </tool_call> }{</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>"
    ),
    "glm": (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Köln </tool_call> }{</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop</tool_call>"
    ),
    "llama3_json": (
        f'{{"name": "look", "parameters": {ARGUMENTS}}}; {{"name": "stop", "parameters": {{}}}}'
    ),
    "mistral_v3": (
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}, '
        '{"name": "stop", "arguments": {}}]'
    ),
    "mistral_tekken": f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]stop{{}}",
    "granite": (
        f'<|tool_call|>[{{"name": "look", "arguments": {ARGUMENTS}}}, '
        '{"name": "stop", "arguments": {}}]'
    ),
    "phi4_mini": (
        f'<|tool_call|>[{{"name": "look", "arguments": {ARGUMENTS}}}, '
        '{"name": "stop", "arguments": {}}]<|/tool_call|>'
    ),
    "lfm2": (
        '<|tool_call_start|>[look(city="Köln </tool_call> }{", days=3), stop()]<|tool_call_end|>'
    ),
    "lfm2.5": (
        "<|tool_call_start|>[look(city='Köln </tool_call> }{', days=3)]<|tool_call_end|>"
        "<|tool_call_start|>stop()<|tool_call_end|>"
    ),
    "gemma4": (
        '<|tool_call>call:look{city:<|"|>Köln </tool_call> }{<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>"
    ),
    "functiongemma": (
        "<start_function_call>call:look{city:<escape>Köln </tool_call> }{<escape>,days:3}"
        "<end_function_call><start_function_call>call:stop{}<end_function_call>"
    ),
    "gpt_oss": (
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant to=functions.stop<|channel|>commentary json"
        "<|message|>{}"
    ),
    "deepseek_v3": (
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>"
        f"look\n```json\n{ARGUMENTS}\n```<\uff5ctool▁call▁end\uff5c>\n<\uff5ctool▁call▁begin\uff5c>"
        "function<\uff5ctool▁sep\uff5c>stop\n```json\n{}\n```<\uff5ctool▁call▁end\uff5c>"
        "<\uff5ctool▁calls▁end\uff5c>"
    ),
    "deepseek_v3.1": (
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>look<\uff5ctool▁sep\uff5c>"
        f"{ARGUMENTS}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁call▁begin\uff5c>stop"
        "<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>"
    ),
}
"""Two calls in each form; the first has the marks of others in its arguments."""
FREE = {name: text for name, text in TWICE.items() if name != "gpt_oss"}


def told(form: Format, steps: list[str], **options: Any) -> list[tuple[str, int, str]]:
    parser = ReplyParser(form, **{"tools": TOOLS} | options)
    changes = [each for step in steps for each in parser.feed(step)] + parser.feed("", True)
    found: list[tuple[str, int, str]] = []
    for block in parser.blocks:
        grown = [each.text for each in changes if each.block is block and each.kind == "delta"]
        assert "".join(grown) == block.text
        kind = {"text": "content", "call": "arguments"}.get(block.kind, block.kind)
        found += [("call", block.call, block.name)] * (block.kind == "call")
        found += [(kind, block.call, block.text)] * bool(block.text)
    assert sum(block.kind == "call" for block in parser.blocks) <= parser.num_calls
    return found


def everywhere(form: Format, text: str, **options: Any) -> list[tuple[str, int, str]]:
    """The parts, which are the same wherever the text is cut."""
    whole = told(form, [text], **options)
    assert told(form, [*text], **options) == whole
    for at in range(0, len(text), 1 + len(text) // 500):
        assert told(form, [text[:at], text[at:]], **options) == whole, text[:at]
    return whole


def raw_calls(parts: list[tuple[str, int, str]]) -> list[tuple[str, str]]:
    names = {index: text for kind, index, text in parts if kind == "call"}
    arguments = {index: text for kind, index, text in parts if kind == "arguments"}
    return [(names[index], arguments.get(index, "")) for index in names]


def calls(parts: list[tuple[str, int, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in raw_calls(parts)]


@pytest.mark.parametrize("name", TWICE)
def test_calls_of_a_reply(name: str) -> None:
    found = everywhere(FORMS[name], TWICE[name])
    assert calls(found) == [("look", json.loads(ARGUMENTS)), ("stop", {})]
    assert [kind for kind, *_ in found] == ["call", "arguments"] * 2


@pytest.mark.parametrize("name", [name for name in FREE if name != "llama3_json"])
def test_content_before_calls(name: str) -> None:
    found = everywhere(FORMS[name], f"Let me see.\n{FREE[name]}")
    assert found[0] == ("content", 0, "Let me see.")
    assert calls(found[1:]) == [("look", json.loads(ARGUMENTS)), ("stop", {})]


@pytest.mark.parametrize("name", FREE)
def test_thoughts_before_content(name: str) -> None:
    form = FORMS[name]
    thought = f"{form.think}Hm, <b>.{form.end_think}\n\nDone."
    said = [("reasoning", 0, "Hm, <b>."), ("content", 0, "Done.")]
    assert everywhere(form, thought, thinks=True) == said
    assert everywhere(form, thought.removeprefix(form.think), in_thoughts=True) == said


@pytest.mark.parametrize("name", FREE)
def test_a_call_that_is_cut_is_no_error(name: str) -> None:
    text = FREE[name]
    for at in range(len(text)):
        found = told(FORMS[name], [text[:at]])
        assert len([each for each in found if each[0] == "call"]) <= 2
    assert "".join(text for *_, text in told(FORMS[name], ["Just { <a> [text]."])) == (
        "Just { <a> [text]."
    )


@pytest.mark.parametrize(
    "name", [each for each in FREE if each not in ("mistral_tekken", "mistral_v3", "llama3_json")]
)
def test_a_mark_without_a_call_is_content(name: str) -> None:
    text = f"Hm {FORMS[name].begins[0]} is a mark"
    assert everywhere(FORMS[name], text) == [("content", 0, text)]


def test_json_that_is_no_call_is_content() -> None:
    text = '{"name": "Bob", "parameters": {"age": 3}}'
    assert everywhere(FORMS["llama3_json"], text) == [("content", 0, text)]
    tagged = f"<|python_tag|>{TWICE['llama3_json']}"
    assert len(calls(everywhere(FORMS["llama3_json"], tagged))) == 2


def test_parameters_are_text_or_json_by_the_schema() -> None:
    text = (
        '<function=look>\n<parameter=city>\nline "1"\nline 2\n</parameter>\n'
        "<parameter=days>\nabout 3\n</parameter>\n<parameter=other>\n[1]\n</parameter></function>"
    )
    arguments = {"city": 'line "1"\nline 2', "days": "about 3", "other": "[1]"}
    assert calls(everywhere(FORMS["qwen3_coder"], text)) == [("look", arguments)]


def test_values_of_gemma() -> None:
    text = '<|tool_call>call:f{a:[1,<|"|>x, y<|"|>],b:{c:true,d:null},e:-2.5,g:"q"}<tool_call|>'
    value = {"a": [1, "x, y"], "b": {"c": True, "d": None}, "e": -2.5, "g": "q"}
    assert calls(everywhere(FORMS["gemma4"], text)) == [("f", value)]


PYTHON = {
    "a='it\\'s', b=\"C:\\dir\", c='say \"hi\"'": {"a": "it's", "b": "C:\\dir", "c": 'say "hi"'},
    "a=[True, 'x', None], b={'k': false, \"l\": null}": {
        "a": [True, "x", None],
        "b": {"k": False, "l": None},
    },
    "from=-1.5, class='é\n\\u00e9\\n'": {"from": -1.5, "class": "é\né\n"},
    'command="echo "a" > b", n=07': {"command": 'echo "a" > b', "n": "07"},
    " a = 'x' , b=NaN ": {"a": "x", "b": "NaN"},
}


@pytest.mark.parametrize("arguments", PYTHON)
def test_values_of_python(arguments: str) -> None:
    for inner in (f"[get-x.y({arguments})]", f" get-x.y({arguments}) ", f"[get-x.y({arguments}"):
        text = f"<|tool_call_start|>{inner}<|tool_call_end|>"
        if inner.endswith((")]", ") ")):
            assert calls(everywhere(FORMS["lfm2"], text)) == [("get-x.y", PYTHON[arguments])]
        else:
            assert everywhere(FORMS["lfm2"], text) == [("content", 0, text)]
    as_json = '[{"name": "f", "arguments": {"x": 1}}]'
    text = f"<|tool_call_start|>{as_json}<|tool_call_end|>so"
    assert calls(everywhere(FORMS["lfm2"], text)) == [("f", {"x": 1})]


@pytest.mark.parametrize("value", ["[" * 5000, "'\\ud800'", "1, 2", "[1"])
def test_values_that_are_none_are_content(value: str) -> None:
    for name, call in (("lfm2", f"f(x={value})"), ("gemma4", f"call:f{{x:{value}}}")):
        text = f"{FORMS[name].begins[0]}{call}{FORMS[name].end_call}"
        assert told(FORMS[name], [text]) == [("content", 0, text)]
    text = "<|tool_call>call:f{x:NaN}<tool_call|>"
    assert calls(everywhere(FORMS["gemma4"], text)) == [("f", {"x": "NaN"})]


@pytest.mark.parametrize("call", ["f(=1)", "f('a'); g(x=1)", "f('a')"])
def test_arguments_without_a_name_are_content(call: str) -> None:
    text = f"<|tool_call_start|>[{call}]<|tool_call_end|>"
    assert told(FORMS["lfm2"], [text]) == [("content", 0, text)]


def test_quotes_that_do_not_end_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search goes to the end of the text, and a server waits."""
    starts = list[int]()

    class Counting:
        def match(self, text: str, at: int) -> Any:
            starts.append(at)
            return QUOTED.match(text, at)

    monkeypatch.setattr("foredraft.server.formats.values._QUOTED", Counting())
    values = ['"a', "'b"] * 99
    text = f"<|tool_call_start|>[f(x=[{', '.join(values)}])]<|tool_call_end|>"
    assert calls(told(FORMS["lfm2"], [text])) == [("f", {"x": values})]
    assert len(starts) < 9


def test_channels() -> None:
    form = FORMS["gpt_oss"]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>It rains."
    )
    said = [("reasoning", 0, "Hm."), ("content", 0, "I look.It rains.")]
    parts = everywhere(form, text, thinks=True)
    assert [parts[0], ("content", 0, "".join(text for *_, text in parts[1:]))] == said
    assert everywhere(form, "no channel at all") == [("content", 0, "no channel at all")]
    call = f"{text[: text.index('commentary')]}{TWICE['gpt_oss'].removeprefix('<|channel|>')}"
    assert len(calls(everywhere(form, call)[1:])) == 2


# ----------------------------------------------------------------------------------- JSON in marks

THOUGHT = "<think>\nHm, <b>x</b> or </thin?\n</think>\n\nSo be it. "
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "K\\u00f6ln {1}", "n": -1.5}}\n</tool_call>'
)
LIST = (
    '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "parameters": [1, NaN]}]</tool_call>'
)
NAN = '<tool_call>{"name": "a", "arguments": {"x": [NaN, -Infinity], "y": "NaN", "z": Infinity}}'


def hermes(text: str, **options: Any) -> list[tuple[str, int, str]]:
    return everywhere(FORMS["hermes"], text, **{"thinks": True} | options)


def hermes_calls(text: str) -> list[tuple[str, str]]:
    return raw_calls(hermes(text))


def test_thoughts_content_and_calls() -> None:
    assert hermes(f"{THOUGHT}\n{CALL}\n{CALL}  Done.") == [
        ("reasoning", 0, "Hm, <b>x</b> or </thin?\n"),
        ("content", 0, "So be it."),
        ("call", 0, "look"),
        ("arguments", 0, '{"at": "K\\u00f6ln {1}", "n": -1.5}'),
        ("call", 1, "look"),
        ("arguments", 1, '{"at": "K\\u00f6ln {1}", "n": -1.5}'),
        ("content", 0, "  Done."),
    ]


def test_what_is_not_looked_for_is_content() -> None:
    assert hermes(CALL, tools=()) == [("content", 0, CALL)]
    assert hermes(THOUGHT, thinks=False) == [("content", 0, THOUGHT)]
    assert hermes("a</think>\nb", in_thoughts=True) == [("reasoning", 0, "a"), ("content", 0, "b")]
    assert [each[1] for each in hermes(CALL + CALL, only_first=True)] == [0, 0]


def test_parts_say_where_they_are() -> None:
    text = f"{THOUGHT}\n{CALL} and <tool_call>that</tool_call>"
    for size in (1, 2, 5, 20, 400):
        parser = ReplyParser(FORMS["hermes"], TOOLS, True)
        steps = (text[at : at + size] for at in range(0, len(text), size))
        found = [each for step in steps for each in parser.feed(step)] + parser.feed("", True)
        verbatim = [each for each in found if each.kind == "delta" and each.block.kind != "call"]
        assert all(text[each.at : each.end] == each.text for each in verbatim)


def test_calls_in_other_forms() -> None:
    assert hermes_calls(LIST) == [("a", "{}"), ("b", "[1, null]")]
    turned = '<tool_call>{"arguments": {"x": NaN, "y": "é"}, "name": "a"}</tool_call>'
    assert hermes_calls(turned) == [("a", '{"x":null,"y":"é"}')]
    as_text = '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert hermes_calls(as_text) == [("a", '{"x": 1}')]
    bare = '<tool_call>{"name": "a", "arguments": null}</tool_call>'
    assert hermes_calls(bare) == [("a", "null")]
    more = '<tool_call>{"name": "a", "arguments": {"x": 1}, "id": 7}</tool_call>'
    assert hermes_calls(more) == [("a", '{"x": 1}')]


def test_calls_that_are_cut() -> None:
    assert hermes_calls('<tool_call>{"name": "a", "arguments": {"x": 12') == [("a", '{"x": 12')]
    assert hermes_calls('<tool_call>{"name": "a", "arguments": "{\\"x') == [("a", '{"x')]
    assert hermes_calls('<tool_call>{"name": "a", "argu') == []


def test_marks_in_a_string_are_text_and_cut_a_call_elsewhere() -> None:
    code = json.dumps({"code": "x # </tool_call> }{"})
    for order in ('{"name": "a", "arguments": %s}', '{"arguments": %s, "name": "a"}'):
        found = hermes(f"<tool_call>{order % code}</tool_call> so")
        assert json.loads(found[1][2]) == json.loads(code)
        assert found[2] == ("content", 0, " so")
    cut_short = '<tool_call>\n{"name": "a", "arguments": {"x": 1}</tool_call> so'
    assert hermes(cut_short)[1:] == [("arguments", 0, '{"x": 1}'), ("content", 0, " so")]
    unclosed = '<tool_call>\n{"name": "a", "arguments": {"x": 1</tool_call> so'
    assert hermes(unclosed)[1:] == [("arguments", 0, '{"x": 1'), ("content", 0, " so")]


def test_arguments_have_no_nan() -> None:
    ((_, arguments),) = hermes_calls(f"{NAN}}}</tool_call>")
    assert json.loads(arguments) == {"x": [None, None], "y": "NaN", "z": None}
    assert "NaN" not in arguments.replace('"NaN"', "")


def test_escapes_of_markdown_in_a_name() -> None:
    call = r'<tool_call>{"name": "get\_weather", "arguments": {}}</tool_call>'
    assert hermes_calls(call) == [("get_weather", "{}")]


@pytest.mark.parametrize("name", ["a\nb", "\\ud800", "\\u12", "\x00"], ids=ascii)
def test_a_name_that_is_no_text_is_no_call(name: str) -> None:
    for order in ('"name": "%s", "arguments": {}', '"arguments": {}, "name": "%s"'):
        text = f"Hm <tool_call>{{{order % name}}}</tool_call> so"
        assert hermes(text) == [("content", 0, text)]


@pytest.mark.parametrize("inner", ["", "no JSON", "[3]", '{"name": 3}', "[" * 5000, '"\\ud800"'])
def test_what_is_no_call_is_content(inner: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert hermes(text) == [("content", 0, text)]


# -------------------------------------------------------------------------------------- templates

TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>\n</tool_call><think>",
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=example>",
    "seed_oss": "{{ tools }}<seed:tool_call>\n<function=example><seed:think>",
    "glm": "{{ tools }}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "llama3_json": '{{ tools }}{"name": function name, "parameters": dictionary of',
    "mistral_v3": "{{ tools }}[TOOL_CALLS][",
    "mistral_tekken": "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]",
    "granite": "{{ tools }}<|tool_call|>",
    "phi4_mini": "{{ message['tools'] }}<|tool|><|/tool|><|tool_call|>",
    "lfm2": "<|im_start|>system\nList of tools: <|tool_list_start|>[{{ tools }}]",
    "lfm2.5": "<|im_start|>system\nList of tools: [{{ tools }}]<|tool_call_start|>[</think>",
    "gemma4": "{{ tools }}<|tool_call>call:",
    "functiongemma": "{{ tools }}<start_function_call>",
    "gpt_oss": "{{ tools }}<|channel|>commentary<|message|>",
    "deepseek_v3": TWICE["deepseek_v3"],
    "deepseek_v3.1": TWICE["deepseek_v3.1"],
    "none": "{{ messages }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_which_form(name: str) -> None:
    template = TEMPLATES[name]
    assert format_of(template).name == name
    assert takes_tools(format_of(template), template) == ("tools" in template)
    assert format_of(None, name).name == name


def test_a_form_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        format_of(None, "hermess")


# --------------------------------------------------------------------------------------- grammars


@pytest.fixture(scope="module", params=["as text", "as special tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("formats")
    save_tokenizer(directory)
    if request.param == "as special tokens":
        add_special(directory / "tokenizer.json", *FORMS)
    return Tokenizer(directory)


def add_special(path: Path, *names: str) -> None:
    """Make the marks of some forms special tokens."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(path))
    marks = {mark for name in names for mark in FORMS[name].marks() if "\n" not in mark}
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
    fast.save(str(path))


def follows(tokenizer: Tokenizer, grammars: Grammars, grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = grammars.new_matcher(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.permits(token) or not matcher.mask()[token] or not matcher.consume(token):
            return False
    return matcher.is_complete() or matcher.permits(tokenizer.eos_token_ids[0])


ENDS = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</tool_call>",
    "seed_oss": "</seed:tool_call>",
    **dict.fromkeys(("llama3_json", "granite", "phi4_mini"), "}}"),
    "lfm2": ")",
    "gemma4": "<tool_call|>",
    "functiongemma": "<end_function_call>",
    **dict.fromkeys(("deepseek_v3", "deepseek_v3.1"), "<\uff5ctool▁call▁end\uff5c>"),
}
"""Ends of the first call in `TWICE`; the arguments are the end elsewhere."""


def call_in(form: Format, arguments: str) -> str:
    """A call as the first of `TWICE` is written, with other arguments."""
    written = {
        "glm": (
            "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
        "mistral_v3": f'[TOOL_CALLS][{{"name": "look", "arguments": {arguments}}}]',
        "mistral_tekken": f"[TOOL_CALLS]look[ARGS]{arguments}",
    }
    if form.name in written:
        return written[form.name]
    name = "lfm2" if form.name == "lfm2.5" else form.name  # its quotes are JSON's
    first, end = TWICE[name].replace(ARGUMENTS, arguments), ENDS.get(name, arguments)
    first = first.replace("Köln </tool_call> }{", "Köln")
    return first[: first.index(end) + len(end)] + form.after_call


@pytest.mark.parametrize("name", FORMS)
def test_forced_calls(tokenizer: Tokenizer, name: str) -> None:
    """By themselves, behind thoughts, and beside an answer that a schema binds."""
    form, spell = FORMS[name], Spell(tokenizer.special_tokens)
    text = call_in(form, PLAIN)
    fits = partial(follows, tokenizer, Grammars(tokenizer, tokenizer.vocab_size))
    forced = reply_grammar(form, spell, None, TOOLS)
    assert fits(forced, text), text
    assert not fits(forced, f"Hm {text}")
    assert not fits(forced, text.replace("look", "leap"))
    assert not fits(forced, text.replace("3", "true"))
    assert calls(everywhere(form, text)) == [("look", json.loads(PLAIN))]

    thought = f"{form.think}Hm.{form.end_think}{form.after_thoughts}\n{text}"
    may_think = reply_grammar(form, spell, None, TOOLS, thinks=True)
    assert fits(may_think, thought)
    assert fits(may_think, text)
    if not form.after_thoughts:
        thinking = reply_grammar(form, spell, None, TOOLS, thinks=True, is_open=True)
        assert fits(thinking, thought.removeprefix(form.think))
        assert not fits(thinking, text)

    bound = reply_grammar(form, spell, Grammar.json_schema(NODE), TOOLS, parallel=True)
    assert fits(bound, f'{form.before_answer}{{"v": 3}}')
    assert fits(bound, form.beside_answer + text)
    assert not fits(bound, "Hm")


NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},  # as of a class that holds others of itself
        {
            "$defs": {"I": {"type": "integer"}},
            **NODE,
            "properties": {"v": {"$ref": "#/$defs/I", "$defs": {"J": {}}}},
        },
        {"properties": {"v": {"type": "integer"}} | {str(number): {} for number in range(200)}},
    ],
)
def test_definitions_and_many_arguments(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    forced = reply_grammar(FORMS["lfm2"], Spell(tokenizer.special_tokens), None, [tool])
    for arguments, is_one in (("v=1", True), ("", "required" not in str(schema))):
        text = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
        assert follows(tokenizer, grammars, forced, text) == is_one


def test_a_model_that_repeats_itself_comes_to_an_end(tokenizer: Tokenizer) -> None:
    fits = partial(follows, tokenizer, Grammars(tokenizer, tokenizer.vocab_size))
    for name, begin, call, more, end in (
        ("lfm2.5", "<|tool_call_start|>[", "stop()", ", ", "]<|tool_call_end|>"),
        ("hermes", "", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', "\n", ""),
    ):
        answer, spell = Grammar.json_schema(NODE), Spell(tokenizer.special_tokens)
        grammar = reply_grammar(FORMS[name], spell, answer, TOOLS, parallel=True)
        for number, is_one in ((1, True), (32, True), (33, False)):
            assert fits(grammar, begin + more.join([call] * number) + end) == is_one


def test_arguments_as_in_python(tokenizer: Tokenizer) -> None:
    """Those that may be left out stand behind the others; flags have Python's names."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    flags: dict[str, Any] = {name: {"type": "boolean"} for name in "abc"}
    for required, good, bad in (
        (["b"], ["b=True", "b=False, a=True, c=True", "b=True, c=False"], ["", "b=true", "a=True"]),
        ([], ["", "a=True", "b=True, c=True", "a=True, c=False"], ["c=True, a=True", ", a=True"]),
    ):
        schema = {"type": "object", "properties": flags, "required": required}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        forced = reply_grammar(FORMS["lfm2"], Spell(tokenizer.special_tokens), None, [tool])
        for arguments in (*good, *bad):
            text = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
            assert follows(tokenizer, grammars, forced, text) == (arguments in good), text


def test_marks_of_such_calls_are_special_tokens_and_those_in_texts_are_not(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{% for each in messages %}{{ '\\n' + each.content }}{% endfor %}")
    add_special(tmp_path / "tokenizer.json", "lfm2")
    tokenizer, form = Tokenizer(tmp_path), FORMS["lfm2"]
    marks = [tokenizer.special_tokens[mark] for mark in (form.begins[0], form.end_call)]
    for text in ("K", f"{form.end_call}{form.begins[0]}"):
        call = {"function": {"name": "look", "arguments": {"city": text}}}
        turns = [{"role": "assistant", "content": text, "tool_calls": [call]}]
        asked = [{"role": "user", "content": text}, *turns, {"role": "user", "content": text}]
        ids = tokenizer.encode_chat(asked, TOOLS, adapt=partial(form.adapted, tools=TOOLS))
        assert [i for i in ids if i in marks] == marks


def test_calls_that_a_template_does_not_show_stand_in_the_text() -> None:
    told = {"name": "look", "arguments": '{"city": "Köln", "now": true, "at": [1, null]}'}
    turns = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": told}]},
        {"role": "tool", "content": "no", "tool_call_id": "c"},
    ]
    for name in ("lfm2", "lfm2.5"):
        shown = FORMS[name].adapted(checked_messages(turns), TOOLS)
        call = '<|tool_call_start|>[look(city="Köln", now=True, at=[1, null])]<|tool_call_end|>'
        assert [each["content"] for each in shown] == ["rain?", call * (name == "lfm2"), "no"]
        assert "tool_calls" in shown[1] or name == "lfm2"
        assert calls(everywhere(FORMS[name], call)) == [("look", json.loads(told["arguments"]))]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Cat] = []


def test_a_discriminated_union_of_pydantic(tokenizer: Tokenizer) -> None:
    """As its schema comes, with a default kind: as the answer and as a tool's arguments."""
    schema = Owner.model_json_schema()
    assert "oneOf" in schema["properties"]["pet"]
    assert schema["$defs"]["Cat"]["required"] == ["lives"]
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    for form in FORMS.values():
        grammar = reply_grammar(form, Spell(tokenizer.special_tokens), None, [tool])
        assert grammars.new_matcher(grammar) is not None  # type: ignore[arg-type]
    right = '{"kind": "cat", "lives": 9}', '{"lives": 9}', '{"kind": "dog", "name": "Rex"}'
    wrong = '{"kind": "cow", "lives": 9}', '{"kind": "cat"}', '{"kind": "cat", "lives": "9"}'
    for pet in right + wrong:
        text = f'{{"pet": {pet}}}'
        answer = Grammar.json_schema(schema)
        assert follows(tokenizer, grammars, answer, text) == (pet in right), text
        for name in ("hermes", "mistral_tekken"):
            forced = reply_grammar(FORMS[name], Spell(tokenizer.special_tokens), None, [tool])
            called = call_in(FORMS[name], text)
            assert follows(tokenizer, grammars, forced, called) == (pet in right), called
