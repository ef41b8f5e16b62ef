"""The fields of an API by what their marks say."""

from __future__ import annotations

from foredraft.server.dialects.fields import Hint, Refused, RequestBody, marks_of


def honoured(model: type[RequestBody]) -> set[str]:
    """The fields that have an effect."""
    return model.model_fields.keys() - marks_of(model, Hint).keys() - refusals(model).keys()


def hints(model: type[RequestBody]) -> set[str]:
    """The fields that are accepted without effect."""
    return {*marks_of(model, Hint)}


def refusals(model: type[RequestBody]) -> dict[str, Refused]:
    """The fields that are refused, and why."""
    return {name: marks[0] for name, marks in marks_of(model, Refused).items()}
