"""Writes docs/reference from the docstrings, so that the pages cannot say something else.

`make reference` runs it; a test fails while a page is not what it would write.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import foredraft
from foredraft.core import errors

HERE = Path(__file__).resolve().parent / "reference"
PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sampling-params": (
        "What a request asks for",
        ("foredraft.core.params:SamplingParams", "foredraft.core.grammar:Grammar"),
    ),
    "load-options": ("How a model is loaded", ("foredraft.options:LoadOptions",)),
    "llm": ("Loading and generating", ("foredraft.llm:LLM",)),
    "async-llm": (
        "Many callers, one engine",
        (
            "foredraft.async_llm:AsyncLLM",
            "foredraft.async_llm:EventStream",
            "foredraft.engine.stats:EngineStats",
        ),
    ),
    "results": (
        "What comes back",
        (
            "foredraft.engine.row:GenerationResult",
            "foredraft.core.request:SpeculationStats",
            "foredraft.engine.engine:Event",
            "foredraft.engine.detokenize:Piece",
            "foredraft.core.logprobs:TokenLogprobs",
        ),
    ),
}
"""Page: its title, and the classes on it."""

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
_NOTE = (
    "<!-- Written by docs/make_reference.py from the docstrings; change those, "
    "then `make reference`. -->"
)


def pages() -> dict[str, str]:
    """Every page by its file name."""
    found = {
        f"{name}.md": _page(title, [describe(_load(path)) for path in classes])
        for name, (title, classes) in PAGES.items()
    }
    return found | {"errors.md": _page("Errors", [_errors()])}


def _load(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _page(title: str, parts: list[str]) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *parts]) + "\n"


def describe(cls: type) -> str:
    """One class: its docstring, its fields with types and defaults, its public members.

    Raises:
        ValueError: something public is not documented.
    """
    doc = _Doc.of(cls, cls.__name__)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    shown = {field.name: _field(field) for field in fields}
    missing = shown.keys() - doc.entries("Attributes").keys()
    if missing:
        raise ValueError(f"{cls.__name__} says nothing of {sorted(missing)} under Attributes")
    home = "foredraft" if cls.__name__ in foredraft.__all__ else cls.__module__
    imported = f"`from {home} import {cls.__name__}`"
    members = [_method(cls, name, member) for name, member in _members(cls)]
    return "\n\n".join([f"## {cls.__name__}", imported, doc.text(shown), *members])


def _field(field: dataclasses.Field[Any]) -> str:
    shown = f"{field.name}: {field.type}"
    if field.default is not dataclasses.MISSING:
        return f"{shown} = {_literal(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{shown} = {_literal(field.default_factory())}"
    return shown


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties in the order of the source."""
    for name, member in vars(cls).items():
        described = callable(member) or isinstance(member, classmethod | staticmethod | property)
        if not name.startswith("_") and described:
            yield name, member


def _method(cls: type, name: str, member: Any) -> str:
    doc = _Doc.of(member, f"{cls.__name__}.{name}").text({})
    if isinstance(member, property):
        kind = member.fget.__annotations__["return"]
        return f"### {name}\n\n`{name}: {kind}` (read only)\n\n{doc}"
    called = f"{cls.__name__}.{name}" if isinstance(member, classmethod) else f".{name}"
    signature = _signature(called, getattr(member, "__func__", member))
    return f"### {name}\n\n```\n{signature}\n```\n\n{doc}"


def _signature(called: str, function: Callable[..., Any]) -> str:
    """As one would write it, one parameter a line where it is long."""
    signature = inspect.signature(function)
    arguments, only_named = [], False
    for parameter in list(signature.parameters.values())[1:]:  # without self or cls
        if parameter.kind is parameter.KEYWORD_ONLY and not only_named:
            arguments.append("*")
            only_named = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = parameter.default
        given = "" if default is parameter.empty else f" = {_literal(default)}"
        arguments.append(f"{stars}{parameter.name}: {parameter.annotation}{given}")
    short = f"{called}({', '.join(arguments)}) -> {signature.return_annotation}"
    if len(short) <= 90:
        return short
    listed = "".join(f"    {argument},\n" for argument in arguments)
    return f"{called}(\n{listed}) -> {signature.return_annotation}"


def _errors() -> str:
    """Every error class, the base first."""
    classes = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, Exception)]
    lines = [
        "`from foredraft.core.errors import …`. Each says what is wrong, with which value, and "
        "what to do. On the command line a `ConfigError` is exit status 2, another one 1."
    ]
    for error in classes:
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        lines.append(f"## {error.__name__}\n\n({bases}) {_Doc.of(error, error.__name__).text({})}")
    return "\n\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Doc:
    """A docstring in parts: paragraphs under "", sections under their titles, in order."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, documented: object, name: str) -> _Doc:
        """Read the docstring of ``documented`` itself; a public thing without one is an error."""
        doc = getattr(documented, "__doc__", None)
        if not doc:
            raise ValueError(f"{name} is public and has no docstring")
        parts: list[tuple[str, list[str]]] = [("", [])]
        for line in inspect.cleandoc(doc).splitlines():
            if _SECTION.fullmatch(line):
                parts.append((line[:-1], []))
            elif parts[-1][0] and line and not line.startswith(" "):
                parts.append(("", [line]))
            else:
                parts[-1][1].append(line)
        return cls(tuple((title, "\n".join(lines).strip("\n")) for title, lines in parts))

    def entries(self, title: str) -> dict[str, str]:
        """Name and text of each entry of a section."""
        found: dict[str, str] = {}
        for name, content in self.parts:
            if name == title:
                joined = re.sub(r"\n {5,}", " ", content)
                found |= dict(line.strip().split(": ", 1) for line in joined.splitlines() if line)
        return found

    def text(self, shown: Mapping[str, str]) -> str:
        """In Markdown. ``shown`` replaces names of attributes by what is to be said of them."""
        lines = []
        for title, content in self.parts:
            if not title:
                lines.append(content)
            elif title in ("Returns", "Yields"):
                lines.append(f"**{title}:** {' '.join(content.split())}")
            else:
                entries = self.entries(title).items()
                listed = [f"- `{shown.get(name, name)}`: {text}" for name, text in entries]
                lines.append("\n".join([f"**{title}:**", "", *listed]))
        return "\n\n".join(filter(None, lines)).replace("``", "`")


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
