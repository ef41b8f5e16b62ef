"""Command-line options, derived from the classes whose objects they fill.

A command takes a `LoadOptions`, `SamplingParams`, `TrainOptions`, `ServerSettings` or a class of
its own as a parameter, and `with_options` turns the fields of that class into options: the name,
the type, the default and the help text of an option are those of the field. A field without an
option of its own is set by ``--set NAME=VALUE``, and both by the user's file of settings
(`foredraft.cli.config`), so a field that is added to such a class needs no other line here.
``--help`` shows the options that most people need, ``--help-all`` every option and field.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic import TypeAdapter, ValidationError

from foredraft.cli import config
from foredraft.cli.display import RichProgress
from foredraft.core.errors import ConfigError, nearest
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from foredraft.core.record import StepRecord
    from foredraft.engine.policy import Trace
    from foredraft.llm import LLM


_HELP_CHARACTERS = 200
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Derived:
    """How a command shows the fields of a class as options.

    Attributes:
        panel: heading of the options in the help.
        fixed: values that the command itself decides; these fields are no options.
        defaults: defaults that differ from those of the class.
        without: fields that cannot be set and keep their defaults.
        flags: the fields that are options; the others are set by ``--set``. None: all.
        shown: the options that ``--help`` shows; None: all.
        section: of the file of settings; None: the file says nothing about them.
        names: flags that differ from the field's name, such as ``{"matrices": "--lr"}``.
        parsers: fields that are read as text and converted by a function.
    """

    panel: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()
    flags: Sequence[str] | None = None
    shown: Sequence[str] | None = None
    section: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    parsers: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


def parse_count(text: str) -> int:
    """``20M`` and the like.

    Raises:
        ConfigError: it is no number.
    """
    factors = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
    number, factor = text.lower(), 1
    if number[-1:] in factors:
        number, factor = number[:-1], factors[number[-1]]
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is no number of tokens; write 500k or 20M") from None


_MODEL_FLAGS = (
    *("model", "drafter", "draft_model", "num_draft_tokens", "drafter_options"),
    *("dtype", "weights", "device", "threads", "max_context"),
)
_MODEL_SHOWN = ("model", "drafter", "draft_model", "weights")
_SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "seed", "max_tokens")
_NO_FLAGS = ("n", "grammar", "prediction", "logprobs", "prompt_logprobs", "skip_special_tokens")


def model(
    *more: str,
    flags: Sequence[str] = _MODEL_FLAGS,
    shown: Sequence[str] = _MODEL_SHOWN,
    defaults: Mapping[str, Any] | None = None,
    samples: bool = False,
    **fixed: Any,
) -> Derived:
    """`LoadOptions` as options of a command.

    Args:
        *more: fields that are options here, beside ``flags``.
        flags: fields that are options.
        shown: the options that ``--help`` shows.
        defaults: defaults of the command's own.
        samples: whether the model's own sampling defaults count; a measurement names its own.
        **fixed: values of the command's own, which cannot be set.
    """
    if not samples:
        fixed["sampling_defaults"] = "none"
    return Derived(
        "Model",
        fixed=fixed,
        defaults=defaults or {},
        flags=(*flags, *more),
        shown=shown,
        section="model",
    )


def sampling(
    *more: str, shown: Sequence[str] = ("temperature", "seed", "max_tokens"), **defaults: Any
) -> Derived:
    """`SamplingParams` as options of a command.

    Args:
        *more: fields that are options here, beside those of every command.
        shown: the options that ``--help`` shows.
        **defaults: defaults of the command's own.
    """
    flags = (*_SAMPLING_FLAGS, *more)
    return Derived("Sampling", defaults=defaults, without=_NO_FLAGS, flags=flags, shown=shown)


Output = Annotated[
    str | None, typer.Option("--output", help="Also write all figures to this file, as JSON.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
TraceTo = Annotated[
    Path | None,
    typer.Option(
        "--trace", help="Write what each step did to this file; see `foredraft trace`.", hidden=True
    ),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a dataclass or settings class are spelled out as options.

    Such a parameter may be annotated ``Annotated[cls, Derived(...)]``. The command is called with
    an object of the class, made from the options that were given and nothing else: whatever was
    not given has the default of the class.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, _Group] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        cls, derived = _class_of(hints[name])
        if cls is not None:
            groups[name] = _Group(cls, derived)
            parameters += groups[name].parameters()
        else:
            kind = Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))
    settable = {name: each for group in groups.values() for name, each in group.settable.items()}
    parameters += _common_options(parameters, settable)
    parameters.append(Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def run(**given: Any) -> None:
        flags = _flags_of(given.pop(_CONTEXT))
        assigned = _assigned(settable, flags, given.pop(_SET, None) or ())
        objects = {name: group.build(given, assigned) for name, group in groups.items()}
        own = {name: value for name, value in given.items() if name in hints}
        command(**own, **objects)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, __name__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.settable = settable  # type: ignore[attr-defined]
    return run


_SET, _CONTEXT = "set_", "context_"


def _common_options(
    parameters: Sequence[Parameter], settable: Mapping[str, _Field]
) -> Iterator[Parameter]:
    """``--set`` where a command has fields for it, and ``--help-all`` where it hides something."""
    if settable:
        help_text = "Any other setting; may be repeated. --help-all lists them."
        option = typer.Option("--set", metavar="NAME=VALUE", help=help_text, hidden=True)
        annotation: Any = Annotated[list[str] | None, option]
        yield Parameter(_SET, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    marks = (mark for each in parameters for mark in get_args(each.annotation)[1:])
    if settable or any(getattr(mark, "hidden", False) for mark in marks):
        option = typer.Option(
            "--help-all", help="Show every option.", is_eager=True, expose_value=False,
            callback=_show_all,
        )  # fmt: skip
        annotation = Annotated[bool, option]
        yield Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _show_all(context: typer.Context, is_asked: bool) -> None:
    """Print the help with every option, then the fields that ``--set`` takes, and leave."""
    if not is_asked:
        return
    from rich.console import Console
    from rich.table import Table

    for each in context.command.params:
        each.hidden = False  # type: ignore[attr-defined]
    typer.echo(context.get_help())
    settable: Mapping[str, _Field] = getattr(context.command.callback, "settable", {})
    if settable:
        table = Table("--set NAME=VALUE", "", "default", box=None, padding=(0, 2, 0, 0))
        for name, field_ in settable.items():
            table.add_row(name, field_.help_text, str(_shown_default(field_.default) or ""))
        Console(highlight=False).print(table)
    raise typer.Exit


def _flags_of(context: typer.Context) -> dict[str, str]:
    """The options of a command, by the names of what they set and by their own."""
    options = [each for each in context.command.params if each.param_type_name == "option"]
    own = {each.opts[0][2:].replace("-", "_"): each.opts[0] for each in options}
    return own | {str(each.name): each.opts[0] for each in options}


def _assigned(
    settable: Mapping[str, _Field], flags: Mapping[str, str], texts: Sequence[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise ConfigError(f"--set {text!r} is not NAME=VALUE")
        if name in flags:
            raise ConfigError(f"--set {name}: it is the option {flags[name]}")
        if name not in settable:
            raise ConfigError(f"--set {name}: there is no such setting{nearest(name, settable)}")
        each = settable[name]
        if each.is_repeated and name in found:
            found[name] = (*found[name], *each.read(f"--set {name}", value))
        else:
            found[name] = each.read(f"--set {name}", value)
    return found


class _Group:
    """The options of one parameter."""

    def __init__(self, cls: type[Any], derived: Derived) -> None:
        self._cls, self._derived = cls, derived
        found = {each.name: each for each in _fields_of(cls) if self._can_be_set(each)}
        flags = found if derived.flags is None else derived.flags
        self._fields = {name: each for name, each in found.items() if name in flags}
        self.settable = {name: each for name, each in found.items() if name not in flags}

    def _can_be_set(self, each: _Field) -> bool:
        derived = self._derived
        if each.name in derived.fixed or each.name in derived.without:
            return False
        return each.name in derived.parsers or each.option_type is not None

    def parameters(self) -> Iterator[Parameter]:
        for each in self._fields.values():
            kind = str if each.name in self._derived.parsers else each.option_type
            annotation: Any = Annotated[kind | None, self._option(each)]
            yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _flag(self, each: _Field) -> str:
        return self._derived.names.get(each.name) or each.flag

    def _option(self, each: _Field) -> Any:
        derived = self._derived
        flag = self._flag(each)
        if each.option_type is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        default = derived.defaults.get(each.name, each.default)
        return typer.Option(
            flag,
            help=each.help_text,
            hidden=derived.shown is not None and each.name not in derived.shown,
            show_default=_shown_default(default),
            rich_help_panel=derived.panel,
            metavar="NAME=VALUE" if each.is_mapping else None,
        )  # fmt: skip

    def build(self, values: dict[str, Any], assigned: Mapping[str, Any]) -> Any:
        """The object; takes its options out of ``values``.

        Args:
            assigned: what ``--set`` says, by field.
        """
        derived = self._derived
        from_file = self._from_file()
        said = {name: value for name, value in assigned.items() if name in self.settable}
        given = {**derived.defaults, **from_file, **said}
        places = {name: f"{config.path()}: {name}" for name in from_file}
        places |= {name: f"--set {name}" for name in said}
        for name, each in self._fields.items():
            value = values.pop(name)
            if value is None or value == []:
                continue
            if name in derived.parsers:
                value = derived.parsers[name](value)
            elif each.is_mapping:
                value = parse_assignments(self._flag(each), value)
            places[name] = self._flag(each)
            given[name] = tuple(value) if isinstance(value, list) else value
        return self._made(given | dict(derived.fixed), places, bool(from_file))

    def _made(self, given: dict[str, Any], places: Mapping[str, str], has_file: bool) -> Any:
        """The object; an error names a value by the place where it was written."""
        parameters = signature(self._cls).parameters
        for name, each in self._fields.items():
            if name not in given and parameters[name].default is Parameter.empty:
                raise ConfigError(f"{self._flag(each)} is missing: {each.help_text}")
        try:
            return getattr(self._cls, "of", self._cls)(**given)
        except ValidationError as error:
            raise self._refused(error, places) from None
        except ConfigError as error:
            name, space, problem = str(error).partition(" ")
            if places.get(name) == (flag := self._derived.names.get(name)) and flag:
                raise ConfigError(f"{flag}{space}{problem}") from None
            if not has_file:
                raise
            raise ConfigError(f"{error} (settings are also read from {config.path()})") from error

    def _refused(self, error: ValidationError, places: Mapping[str, str]) -> ConfigError:
        """The first value that pydantic refuses, by the place where it was written."""
        first = error.errors()[0]
        name, value = str(first["loc"][0] if first["loc"] else ""), first.get("input")
        variable = f"{self._cls.model_config.get('env_prefix', '')}{name}".upper()
        known = re.findall(r"'(\w+)'", str(first.get("ctx", {}).get("expected", "")))
        problem = f"{places.get(name, variable)} is {value!r:.100}: {first['msg'].lower()}"
        return ConfigError(problem + nearest(str(value), known))

    def _from_file(self) -> dict[str, Any]:
        """Fields that the file of settings names; the environment goes before the file."""
        section = self._derived.section
        found = {} if section is None else config.section(section)
        known = {each.name: each for each in _fields_of(self._cls)}
        for name in found.keys() - known.keys():
            raise ConfigError(f"{config.path()}: [{section}] has no {name}{nearest(name, known)}")
        prefix = getattr(self._cls, "model_config", {}).get("env_prefix")
        for name in found:
            if known[name].option_type is None and name not in self._derived.parsers:
                remedy = f": set {f'{prefix}{name}'.upper()}" if prefix else ""
                raise ConfigError(f"{config.path()}: {name} is not read from this file{remedy}")
        allowed = self._fields.keys() | self.settable.keys()
        set_names = {name.upper() for name, value in os.environ.items() if value}
        return {
            name: known[name].read(f"{config.path()}: {name}", value)
            for name, value in found.items()
            if name in allowed and not (prefix and f"{prefix}{name}".upper() in set_names)
        }


@dataclass(frozen=True)
class _Field:
    """A field of a class.

    Attributes:
        option_type: what typer reads for it; None: it can read no such value.
        is_mapping: NAME=VALUE texts stand for it.
        help_text: its docstring, shortened.
    """

    name: str
    default: Any
    option_type: Any
    is_mapping: bool
    help_text: str

    @property
    def is_repeated(self) -> bool:
        return bool(self.option_type == list[str] or self.option_type == list[int])

    @property
    def flag(self) -> str:
        """An option that may be repeated has the singular: ``--allowed-host``."""
        name = self.name.removesuffix("s") if self.is_repeated else self.name
        return "--" + name.replace("_", "-")

    def read(self, place: str, value: object) -> Any:
        """The value of ``--set`` or of the file of settings.

        Args:
            place: where it was written, for the message.

        Raises:
            ConfigError: it is of another type.
        """
        if self.is_mapping and isinstance(value, Mapping):
            return {name.replace("-", "_"): each for name, each in value.items()}
        if self.is_repeated and not isinstance(value, list):
            value = [value]
        try:
            found = TypeAdapter(self.option_type).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].lower()
            raise ConfigError(f"{place} is {value!r:.100}: {problem}") from None
        if self.is_mapping:
            return parse_assignments(place, found)
        return tuple(found) if isinstance(found, list) else found


def _shown_default(default: Any) -> str | bool:
    if isinstance(default, str | int | float) and default is not False and default != "":
        return "on" if default is True else str(default)
    return False


def _class_of(hint: Any) -> tuple[type[Any] | None, Derived]:
    derived = next((a for a in get_args(hint)[1:] if isinstance(a, Derived)), Derived())
    cls = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_class = isinstance(cls, type) and (is_dataclass(cls) or hasattr(cls, "model_fields"))
    return (cls if is_class else None), derived


def _fields_of(cls: type[Any]) -> Iterator[_Field]:
    hints = get_type_hints(cls)
    defaults = (
        {f.name: f.default for f in fields(cls)}
        if is_dataclass(cls)
        else {name: f.default for name, f in cls.model_fields.items()}
    )
    docs = docs_of_fields(cls)
    for name, default in defaults.items():
        option_type, is_mapping = _option_type(hints[name])
        yield _Field(name, default, option_type, is_mapping, docs.get(name, ""))


def _option_type(hint: Any) -> tuple[Any, bool]:
    """The type that typer reads for a field of this type, and whether it maps names to values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = [_option_type(each) for each in arguments if each is not type(None)]
        kinds = [kind for kind, _ in found]
        if list[str] in kinds:  # one text or several
            return list[str], False
        if str in kinds:  # a number, or a text that names one
            return str, False
        return found[0] if len(found) == 1 else (None, False)
    if origin is Literal:
        return str, False
    if hint in (str, int, float, bool, Path):
        return hint, False
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return (list[str], True) if arguments == (str, Any) else (None, False)
    if inspect.isclass(origin) and issubclass(origin, Sequence) and arguments[0] in (str, int):
        return (list[int] if arguments[0] is int else list[str]), False
    return None, False


def docs_of_fields(cls: type[Any]) -> Mapping[str, str]:
    """Help text of each field: pydantic's description, or the lines below ``Attributes:``."""
    if not is_dataclass(cls):
        described = {name: each.description for name, each in cls.model_fields.items()}
        return {name: _shortened(text) for name, text in described.items() if text}
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", attributes)[0]
        for entry in re.split(r"\n(?=    \S)", "\n" + section)[1:]:
            names, _, said = entry.partition(":")
            text = _shortened(said)
            docs |= dict.fromkeys((name.strip() for name in names.split(",")), text)
    return docs


def _shortened(text: str) -> str:
    """The first sentences, as long as they fit a few lines of help."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    sentences = re.split(r"(?<=[.)]) (?=[A-Z\"])", text)
    while len(sentences) > 1 and len(" ".join(sentences)) > _HELP_CHARACTERS:
        sentences.pop()
    return " ".join(sentences)


def parse_assignments(flag: str, texts: Iterable[str]) -> dict[str, int | float | str]:
    """NAME=VALUE texts as a mapping; numbers, true and false are read as such.

    Args:
        flag: the option, for the message.

    Raises:
        ConfigError: a text is not of that form.
    """
    found: dict[str, int | float | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {text!r} is not NAME=VALUE")
        found[name.replace("-", "_")] = value
        for convert in (float, int, {"true": True, "false": False}.__getitem__):
            with suppress(ValueError, KeyError):
                found[name.replace("-", "_")] = convert(value.lower())
    return found


# ------------------------------------------------------------------------------ values with commas


def names(text: str | None) -> list[str]:
    """Names with commas between them; none where the option was not given."""
    return [name.strip() for name in text.split(",")] if text else []


def numbers(flag: str, text: str, read: type[N], low: int | None = None) -> list[N]:
    """Numbers with commas between them.

    Args:
        read: `int` or `float`.
        low: the lowest that is allowed.

    Raises:
        ConfigError: the text holds something else, or a number below ``low``.
    """
    try:
        found = [read(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers" if read is int else "numbers"
        raise ConfigError(f"{flag} {text!r} is not {kind} with commas") from None
    if low is not None and min(found) < low:
        raise ConfigError(f"{flag} {text!r} holds {min(found)}; counts start at {low}")
    return found


# --------------------------------------------------------------------------------- loading a model


@contextmanager
def tracing(path: Path | None, **about: Any) -> Iterator[Callable[..., LLM]]:
    """A loader of an LLM whose steps are written to ``path``, if given, until the end.

    Args:
        **about: more for the first line of the trace.

    Yields:
        A function of the `LoadOptions`, and of another trace to be called as well.
    """
    if path is None:
        yield load_llm
        return
    from foredraft.trace.files import TraceFile

    with TraceFile(path) as file:
        tracer = file.tracer()

        def load(options: LoadOptions, other: Trace | None = None) -> LLM:
            def both(record: StepRecord) -> None:
                if other is not None:
                    other(record)
                tracer(record)

            llm = load_llm(options, both, evidence=True)
            tracer.read_with(llm.tokenizer)
            named = {"model": options.model, "drafter": llm.drafter_name}
            file.begin(**named, num_draft_tokens=options.num_draft_tokens, **about)
            return llm

        yield load


def load_llm(options: LoadOptions, trace: Trace | None = None, evidence: bool = False) -> LLM:
    """Load a model, and show slow stages on the terminal.

    Args:
        trace: called with the record of every step.
        evidence: whether verdicts record the probabilities and draws behind them.
    """
    gc.disable()  # a million objects that stay would be looked at again and again, and at exit
    try:
        with RichProgress() as display:
            display.stage(f"Loading {options.model}")
            from foredraft.llm import LLM  # takes its part of the time

            llm = LLM.load(**vars(options), progress=display, trace=trace, keeps_evidence=evidence)
        gc.freeze()
        return llm
    finally:
        gc.enable()
