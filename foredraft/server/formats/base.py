"""The form of a family's replies: its thoughts, its tool calls, the grammar that forces them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from foredraft.core.errors import ConfigError
from foredraft.core.grammar import Grammar, known_formats
from foredraft.server.formats.reading import Incoming, Reads, json_calls

Tool = Mapping[str, Any]
"""A tool in OpenAI's form."""

_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""Options of llguidance: without the first a model may write spaces without end, and without the
last a schema with ``oneOf`` is refused."""

_MOST_CALLS = 32
"""In a reply that a grammar binds: a model that repeats itself would call to its context's end."""


class Format:
    """How the models of a family write thoughts and tool calls.

    This class is the form of models that call no tools, and calls are JSON objects where a family
    says no more than its marks. A family overrides what differs.

    Attributes:
        name: as ``--tool-format`` takes it.
        shows: texts that a chat template of the family has, all of them.
        begins: marks of which each begins a call, or several.
        end_call: the mark that ends them; empty: the end of the reply does.
        arguments_key: the key of the arguments in a call that is a JSON object.
        opens: stands before a call where a grammar forces one; with the function's name for NAME
            the arguments follow it, otherwise the call is a JSON object.
        closes: stands behind it.
        think: the mark that opens thoughts.
        end_think: the mark that closes them.
        stops_thinking: what is written to end thoughts that are too long.
        between: stands between two calls of a reply.
        before_call: stands before the first call.
        after_call: stands behind the last one.
        beside_answer: stands before the first call where a reply may be an answer as well: no
            grammar can tell two that begin alike apart.
        before_answer: stands before what a reply says.
        after_thoughts: stands behind thoughts that a reply has opened itself.
    """

    name: ClassVar[str] = "none"
    shows: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]] = ()
    end_call: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "arguments"
    opens: ClassVar[str] = ""
    closes: ClassVar[str] = ""
    think: ClassVar[str] = "<think>"
    end_think: ClassVar[str] = "</think>"
    stops_thinking: ClassVar[str] = "</think>"
    between: ClassVar[str] = "\n"
    before_call: ClassVar[str] = ""
    after_call: ClassVar[str] = ""
    beside_answer: ClassVar[str] = ""
    before_answer: ClassVar[str] = ""
    after_thoughts: ClassVar[str] = ""

    def thinks(self, template: str) -> bool:
        """Whether replies may begin with thoughts, by the model's chat template."""
        return self.think.strip() in template

    def marks(self) -> tuple[str, ...]:
        """Texts that must reach the reader of a reply, though they may be special tokens."""
        ends = (self.end_call,) if self.end_call else ()
        return (*self.begins, self.think, self.end_think, *ends)

    def adapted(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
    ) -> Sequence[dict[str, Any]]:
        """A conversation that is checked, as the family's templates want it."""
        return messages

    # --------------------------------------------------------------------------- reading a reply

    def reply(
        self, text: Incoming, tools: Sequence[Tool], thinks: bool, is_open: bool
    ) -> Reads[None]:
        """Read a whole reply.

        Args:
            tools: that it may call; none: calls are content.
            thinks: whether it may begin with thoughts.
            is_open: whether the prompt has opened them.
        """
        if is_open or (thinks and (yield from self._opens_thoughts(text))):
            yield from text.skip("\n")
            if (yield from text.parts_up_to("reasoning", (self.end_think,))):
                text.at += len(self.end_think)
                yield from text.skip("\n")
        begins = self.begins if tools else ()
        while (yield from self._content(text, begins, tools)):
            pass

    def _opens_thoughts(self, text: Incoming) -> Reads[bool]:
        start = text.at
        yield from text.skip()
        if (yield from text.takes(self.think)):
            return True
        text.at = start
        return False

    def _content(
        self, text: Incoming, begins: tuple[str, ...], tools: Sequence[Tool]
    ) -> Reads[bool]:
        """Content and the call behind it. False: the reply is over."""
        mark = yield from text.parts_up_to("content", begins)
        if not mark:
            return False
        start = text.at
        text.at += text.rest.index(mark) + len(mark)
        if not (yield from self.calls(text, mark, tools)):
            size, text.at = text.at - start, start
            yield text.part("content", size)
        return True

    def calls(self, text: Incoming, mark: str, tools: Sequence[Tool]) -> Reads[bool]:
        """Read the calls behind a mark, and the mark that ends them.

        Returns:
            Whether there were any. If not, what has been read is content.
        """
        return (yield from json_calls(text, self.end_call))

    # -------------------------------------------------------------------------------- the grammar

    def call_rules(self, rule: str, tool: Tool, spell: Spell) -> str:
        """Lark rules of a call of a tool.

        Args:
            rule: the name of the rule that is a call; others begin with it.
        """
        name, call = name_of(tool), f"{rule}_value"
        if "NAME" not in self.opens:
            head = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '
            call = f"{literal(head)} {call} {literal('}')}"
        call = f"{spell(self.opens.replace('NAME', name))} {call} {spell(self.closes)}"
        return f"{rule}: {call}\n{schema_rule(f'{rule}_value', parameters_of(tool))}"


class Spell:
    """Texts in a grammar, in which special tokens are written as such: no text matches them.

    Args:
        special: special tokens of the model by their text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def __call__(self, text: str) -> str:
        """A Lark expression of a text."""
        places = [(text.find(token), -len(token), token) for token in self._special]
        at, size, token = min((each for each in places if each[0] >= 0), default=(len(text), 0, ""))
        pieces = [literal(text[:at])] if at else []
        if token:
            pieces += [f"<[{self._special[token]}]>", self(text[at - size :])]
        return " ".join(filter(None, pieces))

    def free_up_to(self, rule: str, mark: str) -> str:
        """The rule of any text up to and with a mark."""
        if mark in self._special:
            return f"{rule}: {rule}_text {self(mark)}\n{rule}_text: /(?s:.*)/\n"
        return f"{rule}[suffix={literal(mark)}]: /(?s:.*)/\n"

    def is_special(self, mark: str) -> bool:
        """Whether a mark has special tokens in it, which are no text of a reply by themselves."""
        return any(token in mark for token in self._special)


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of its arguments; of one that names a definition alone, this one."""
    schema: Mapping[str, Any] = tool["function"].get("parameters") or {"type": "object"}
    shared, name = schema.get("$defs"), str(schema.get("$ref")).removeprefix("#/$defs/")
    found = shared.get(name) if isinstance(shared, Mapping) else None
    return {**found, "$defs": shared} if isinstance(found, Mapping) else schema


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Schemas of an object's properties, each with the definitions that it may name."""
    found = schema.get("properties")
    named = found.items() if isinstance(found, Mapping) else ()
    whole = {name: each if isinstance(each, Mapping) else {} for name, each in named}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {key: {**of, **shared} if "$ref" in str(of) else of for key, of in whole.items()}


def required_of(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Names of the properties that an object must have."""
    found = schema.get("required")
    return found if isinstance(found, list) else []


def schema_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """The rule of one value as JSON."""
    bound = {**known_formats(schema), "x-guidance": _COMPACT}
    return f"{rule}: %json {json.dumps(bound, allow_nan=False)}\n"


def is_text(schema: object) -> bool:
    """Whether a value is text as it stands: by its schema, or because nothing says otherwise."""
    if not isinstance(schema, Mapping):
        return True
    if (kind := schema.get("type")) is not None:
        return bool(kind == "string")
    is_open = not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "properties", "items"}
    return is_open and all(isinstance(choice, str) for choice in choices_of(schema))


def choices_of(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The values that a schema names; none: it names none."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []


def reply_grammar(
    form: Format,
    spell: Spell,
    answer: Grammar | None,
    calls: Sequence[Tool],
    *,
    parallel: bool = False,
    thinks: bool = False,
    is_open: bool = False,
) -> Grammar | None:
    """The grammar of a reply; None: it is free.

    Args:
        answer: of what the reply says; None: it only calls.
        calls: tools of which it may call one; where it says nothing, it must.
        parallel: whether it may call several.
        thinks: whether it may begin with thoughts, which are free.
        is_open: whether the prompt has opened them.

    Raises:
        ConfigError: a tool's parameters are no schema within bounds.
    """
    if not calls and (answer is None or not (thinks or form.before_answer)):
        return answer
    bodies = [] if answer is None else [f"{spell(form.before_answer)} @answer"]
    rules = ""
    if calls:
        bodies.append("calls" if answer is None else f"{spell(form.beside_answer)} calls")
        rules = _calls_rules(form, spell, calls, parallel)
    before = ""
    if is_open:
        before = "thoughts /[ \\n]{0,4}/ "
    elif thinks:
        before = f"({spell(form.think)} thoughts {spell(form.after_thoughts)} /[ \\n]{{0,4}}/)? "
    rules += spell.free_up_to("thoughts", form.end_think) if thinks else ""
    source = f"start: {before}({' | '.join(bodies)})\n{rules}"
    return Grammar.lark(source) if answer is None else replace(answer, frame=source)


def _calls_rules(form: Format, spell: Spell, tools: Sequence[Tool], parallel: bool) -> str:
    names = [f"call_{number}" for number in range(len(tools))]
    for tool in tools:
        try:
            Grammar.json_schema(parameters_of(tool))  # is it a schema within bounds?
        except ConfigError as error:
            raise ConfigError(f"tools: {error}", field="tools") from error
    more = f"({spell(form.between)} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
    start, end = spell(form.before_call), spell(form.after_call)
    rules = f"calls: {start} call {more} {end}\ncall: {' | '.join(names)}\n"
    return rules + "".join(form.call_rules(*each, spell) for each in zip(names, tools, strict=True))
