"""Chat templates, which come from a checkpoint, rendered within bounds.

A template is a program. Jinja's sandbox keeps it from reaching Python; nothing in it keeps a
template from looping for ever or from making a string of 10 GB. So every expensive operation is
charged to an allowance: each turn of a loop, each call of a macro, the results of calls, filters
and operators, and, in advance, the results of those that multiply their input. All runs in this
thread, without signals or processes; the bounds are generous to real templates.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from foredraft.core.errors import ConfigError, ModelLoadError

_SECONDS = 5.0
"""Seconds of CPU time of this thread, so that a busy machine does not refuse conversations."""
_CHARACTERS = 1 << 25
"""Most that a rendering may make in all, intermediate values included, beside `_PER_CHARACTER`
times the conversation."""
_PER_CHARACTER = 64
_MAX_SOURCE = 1 << 22
_MAX_INTEGER = 1 << 20
"""Largest number handed to what may take it as a width, a count or an indentation."""
_MAX_BITS = 4096
_ELEMENT = 16
"""Charge for an element of a list, in characters."""
_FORMATS = {"format", "format_map", "_strftime_now"}
_MULTIPLYING = {
    *("replace", "join", "translate", "expandtabs", "indent", "batch", "slice"),
    *("wordwrap", "tojson", "xmlattr", "urlize", "sum", *_FORMATS),
}
"""Calls and filters whose result may be as long as the product of their arguments."""
_LISTING = {"split", "rsplit", "splitlines", "list"}
_HARMLESS = {"default", "d", "int", "float", "abs", "string"}
_WIDTH = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")
_OF_A_CONVERSATION = {"messages", "tools", "documents", "add_generation_prompt"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        source: the Jinja template, in the dialect of transformers.
        name: of the model, for errors.

    Raises:
        ModelLoadError: it is no Jinja template.
    """

    def __init__(self, source: str, name: str) -> None:
        self.source, self._name = source, name
        self._environment = _Bounded()
        self._lock = threading.Lock()  # the environment holds the allowance
        if len(source) > _MAX_SOURCE:
            raise ModelLoadError(f"the chat template of {name} has {len(source)} characters")
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template of {name} is no Jinja template: {error} (line {error.lineno})"
            ) from error
        except Exception as error:  # the template may hold any text
            raise ModelLoadError(f"the chat template of {name} cannot be used: {error}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads and does not set, but those of every conversation."""
        parsed = self._environment.parse(self.source)
        found = meta.find_undeclared_variables(parsed)
        return frozenset(found) - self._environment.globals.keys() - _OF_A_CONVERSATION

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, bool | str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as text, up to where the assistant's reply begins.

        Args:
            messages: plain data: text, numbers, flags, None, lists and mappings of those.
            special: what else templates may name, such as ``bos_token``.
            tools: that the model may call, as plain data in OpenAI's form.

        Raises:
            ConfigError: the template refuses the conversation, or fails on it.
        """
        plain = [_with_reasoning(message) for message in messages]
        with self._lock:
            allowance = self._environment.allowance = _Allowance(_total_size([plain, tools]))
            pieces: list[str] = []
            try:
                for piece in self._template.generate(
                    messages=plain,
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=True,
                    **special,
                ):
                    allowance.spend(len(piece))
                    pieces.append(piece)
            except TemplateError as error:
                raise ConfigError(
                    f"the chat template of {self._name} refuses the conversation: {error}",
                    field="messages",
                ) from error
            except Exception as error:
                raise ConfigError(
                    f"the chat template of {self._name} fails on the conversation: "
                    f"{type(error).__name__}: {error}",
                    field="messages",
                ) from error
        return "".join(pieces)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates know the thoughts of a reply under one name or another, as in transformers."""
    thoughts = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


class TemplateLimitError(TemplateError):
    """A template takes too long, or makes too much."""


class _Allowance:
    """The remaining time and memory of a rendering."""

    def __init__(self, input_size: int) -> None:
        self._left = _CHARACTERS + _PER_CHARACTER * input_size
        self._until = time.thread_time() + _SECONDS

    def spend(self, size: int) -> None:
        self._left -= size + 1
        if self._left < 0:
            raise TemplateLimitError("the template makes too much text; it was stopped")
        if time.thread_time() > self._until:
            raise TemplateLimitError(f"the template runs for over {_SECONDS:.0f} s; it was stopped")

    def foresee(self, size: int) -> None:
        """Refuse what would not fit before it is made."""
        if size > self._left:
            self.spend(size)


class _Bounded(ImmutableSandboxedEnvironment):
    """The dialect of chat templates, with every way to take long charged to ``allowance``."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # or constants would be computed before there is an allowance
            extensions=[_Generation, loopcontrols],
        )
        self.allowance = _Allowance(0)
        self.filters["tojson"] = _to_json
        self.filters = {name: self._charged(name, run) for name, run in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "dict": _dict,
            "namespace": _PublicNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = _Parser(self, source, name, filename).parse()
        repeated: list[Any] = [*template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
        for node in repeated:
            tick = nodes.ExprStmt(_call_of_environment("tick", []))
            node.body.insert(0, tick.set_lineno(node.lineno))
        return template

    def tick(self) -> None:
        """Called by compiled templates at each turn of a loop and in each call of a macro."""
        self.allowance.spend(0)

    def concatenate(self, *values: Any) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        self.allowance.foresee(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, *args: Any, **options: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        receiver = [bound] if isinstance(bound := getattr(method, "__self__", None), str) else []
        self._foresee(getattr(function, "__name__", ""), [*receiver, *args], options)
        return self._paid(super().call(context, function, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._foresee("format", (left, right), {})
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > _MAX_BITS:
                raise TemplateLimitError(f"{right} is too large a power")
        elif operator == "*":
            self.allowance.foresee(_product(left, right))
        elif operator == "+":
            self.allowance.foresee(_size(left) + _size(right))
        return self._paid(super().call_binop(context, operator, left, right))

    def _charged(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)  # with the marks by which Jinja hands over its context
        def charged(*args: Any, **options: Any) -> Any:
            self._foresee(name, args, options)
            return self._paid(run(*args, **options))

        return charged

    def _foresee(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Refuse a call whose result would not fit, or that takes a number to be a width."""
        values = [*args, *options.values()]
        if name in _HARMLESS:
            return
        if name in _FORMATS:
            values = [*_widths(values), *_leaves(values)]
        largest = max((abs(value) for value in values if isinstance(value, int)), default=1)
        if largest > _MAX_INTEGER:
            raise TemplateLimitError(
                f"{name or 'a call'} is given {largest:.3g}, which is too much"
            )
        if name in _MULTIPLYING:
            first, second, *_ = sorted((*map(_total_size, values), 1, 1), reverse=True)
            self.allowance.foresee(first * max(second, largest))
        elif name in _LISTING:
            self.allowance.foresee(_ELEMENT * max(map(_size, values), default=0))

    def _paid(self, value: Any) -> Any:
        self.allowance.spend(_size(value))
        return value


class _Generation(Extension):
    """``{% generation %}`` marks replies for training; here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """Jinja's, without names that could reach into Python."""

    def __init__(*args: Any, **options: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **options)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not name an attribute {name!r}")


def _dict(*args: Any, **options: Any) -> dict[Any, Any]:
    return dict(*args, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it: nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Parser(Parser):
    def parse_concat(self) -> nodes.Expr:
        expression = super().parse_concat()
        if isinstance(expression, nodes.Concat):
            return _call_of_environment("concatenate", expression.nodes)
        return expression


def _call_of_environment(method: str, values: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), values, [], None, None)


def _widths(values: Sequence[Any]) -> list[int]:
    """Numbers in a format string, and in its arguments where it takes widths from those."""
    texts = [value for value in values[:1] if isinstance(value, str)]
    if texts and _NESTED.search(texts[0]):
        texts += [value for value in _leaves(values[1:]) if isinstance(value, str)]
    return [int(width[:9]) for text in texts for width in _WIDTH.findall(text)]


def _size(value: Any) -> int:
    """Size of a value in characters, without the values inside it."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return _ELEMENT * len(value) if isinstance(value, list | tuple | dict | set) else 0


def _total_size(value: Any) -> int:
    """Size of a value with all values inside it."""
    return sum(map(_size, _leaves(value)))


def _leaves(value: Any) -> Iterator[Any]:
    """A value and all that lies in it."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value


def _product(left: Any, right: Any) -> int:
    """Size of ``left * right``."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    if isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        return max(0, count) * _size(value)
    return 0
