"""The effect of each request field: honoured, or refused with a reason. Others have none.

The annotation of each field in an API's input model declares its effect. The checks, the answers
with status 400, the response header that names ignored fields, and the lists in the docs follow
from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.server.settings import ServerSettings

Item = TypeVar("Item")
Mark = TypeVar("Mark")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong entry ends the check: a body may hold a million."""
Number = Annotated[float, Field(allow_inf_nan=False)]
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Sets:
    """The field sets a sampling parameter of another name, or from a value of another form.

    Without this mark a field sets the parameter of its own name, if there is one.

    Attributes:
        parameter: its name; "" for none.
        read: makes the parameter of the field's value; None where the value asks for nothing.
    """

    parameter: str
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Limit:
    """The server's operator bounds the field.

    Attributes:
        setting: the field of `ServerSettings` with the bound.
        measure: what is bounded: the value, or what this function makes of it.
        unit: what it counts, for the message.
    """

    setting: str
    measure: Callable[[Any], int] = int
    unit: str = ""

    def check(self, name: str, value: object, settings: ServerSettings) -> None:
        """Refuse a value over the limit."""
        size, most = self.measure(value), getattr(settings, self.setting)
        if size > most:
            size_text = f"has {size} {self.unit}" if self.unit else f"is {size}"
            raise ConfigError(f"{name} {size_text}; this server allows {most}", field=name)


def entries(setting: str) -> Limit:
    """The field's number of entries is bounded; a text alone is one entry."""
    return Limit(setting, lambda value: 1 if isinstance(value, str) else len(value), "entries")


def characters(setting: str) -> Limit:
    """The characters of all its texts are bounded."""

    def measure(value: str | list[str]) -> int:
        return len(value) if isinstance(value, str) else sum(map(len, value))

    return Limit(setting, measure, "characters")


def json_characters(setting: str) -> Limit:
    """The characters of the field as JSON are bounded."""
    return Limit(setting, lambda value: len(json.dumps(value)), "characters")


class Refused:
    """The field would change a reply and cannot be honoured.

    Args:
        why: what to do instead.
        harmless: values that ask for nothing, and are accepted.
    """

    def __init__(self, why: str, *harmless: Any) -> None:
        self.why, self.harmless = why, harmless

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.harmless], "description": f"Refused: {self.why}"}

    def _checked(self, value: object) -> object:
        # Equal as JSON: 0 is not false, nor 1 true.
        if not any(type(value) is type(each) and value == each for each in (None, *self.harmless)):
            raise PydanticCustomError("not_supported", "{why}", {"why": self.why})
        return value


class RequestBody(BaseModel):
    """A request. Types are strict; null is the same as leaving a field out.

    Fields that are not declared are accepted without effect.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    def ignored(self) -> list[str]:
        """The fields that were sent and have no effect, in order of their names."""
        return sorted(self.model_extra or {})

    def check_limits(self, settings: ServerSettings) -> None:
        """Refuse a request with a field over its limit."""
        for name, limits in marks_of(type(self), Limit).items():
            if (value := getattr(self, name)) is not None:
                for limit in limits:
                    limit.check(name, value, settings)

    def parameters(self) -> dict[str, tuple[str, Any]]:
        """By sampling parameter the field that sets it, and the value.

        Raises:
            ConfigError: a value that cannot be read, or two fields that contradict each other.
        """
        read: dict[str, tuple[str, Any]] = {}
        marks = marks_of(type(self), Sets)
        for name in type(self).model_fields:
            mark, value = marks.get(name, [Sets(name)])[0], getattr(self, name)
            if value is None or mark.parameter not in _PARAMETERS:
                continue
            try:
                if mark.read is not None:
                    value = mark.read(value)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}", field=name, code=error.code) from error
            if value is None:
                continue
            other, known = read.setdefault(mark.parameter, (name, value))
            if known != value:
                raise excluded(other, name)
        return read


def excluded(one: str, other: str) -> ConfigError:
    """The error for two fields that set the same thing."""
    return ConfigError(f"{one} and {other} exclude each other; give one", field=other)


@cache
def marks_of(model: type[RequestBody], kind: type[Mark]) -> Mapping[str, list[Mark]]:
    """By field its marks of a kind, where it has any."""
    fields = model.model_fields.items()
    marks = {name: [m for m in field.metadata if isinstance(m, kind)] for name, field in fields}
    return {name: found for name, found in marks.items() if found}
