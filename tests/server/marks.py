"""The fields of an API by what their marks say."""

from __future__ import annotations

from collections.abc import Iterator

from foredraft.server.dialects.fields import Hint, Refused, RequestBody, kinds_of


def honoured(model: type[RequestBody]) -> Iterator[str]:
    """The fields that have an effect."""
    return (name for name, kind in kinds_of(model).items() if kind is None)


def hints(model: type[RequestBody]) -> Iterator[str]:
    """The fields that are accepted without effect."""
    return (name for name, kind in kinds_of(model).items() if isinstance(kind, Hint))


def refusals(model: type[RequestBody]) -> dict[str, Refused]:
    """The fields that are refused, and why."""
    kinds = kinds_of(model)
    return {name: kind for name, kind in kinds.items() if isinstance(kind, Refused)}
