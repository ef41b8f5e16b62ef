"""What a client wants of a stream beside the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foredraft.server.dialects.fields import Body, FieldError, given


@dataclass(frozen=True)
class StreamOptions:
    """OpenAI's ``stream_options``.

    Attributes:
        include_usage: a last chunk without choices says what it took.
        continuous_usage: every chunk says what it has taken so far.
    """

    include_usage: bool = False
    continuous_usage: bool = False


def stream_options(body: Body) -> StreamOptions:
    """The options of a body that streams.

    Raises:
        FieldError: they are no mapping.
    """
    options = given(body, "stream_options", {})
    if not isinstance(options, Mapping):
        raise FieldError("stream_options", "stream_options must be an object")
    usage = bool(given(options, "include_usage", False))
    return StreamOptions(usage, usage and bool(given(options, "continuous_usage_stats", False)))
