"""The fields of an API by what their marks say."""

from __future__ import annotations

from foredraft.server.dialects.fields import Refused, RequestBody, marks_of


def honoured(model: type[RequestBody]) -> set[str]:
    """The fields that have an effect."""
    return model.model_fields.keys() - refusals(model).keys()


def refusals(model: type[RequestBody]) -> dict[str, Refused]:
    """The fields that are refused, and why."""
    return {name: marks[0] for name, marks in marks_of(model, Refused).items()}
