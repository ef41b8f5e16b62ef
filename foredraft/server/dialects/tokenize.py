"""What `/tokenize` and `/detokenize` are asked."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from foredraft.core.errors import ConfigError
from foredraft.server.dialects.fields import Items, RequestBody, entries, json_characters


class TokenizeRequest(RequestBody):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        Annotated[list[dict[str, Any]], Field(min_length=1)] | None, entries("max_messages")
    ] = None
    tools: Annotated[
        Items[dict[str, Any]] | None, entries("max_tools"), json_characters("max_schema_bytes")
    ] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check_one(self) -> None:
        """Refuse a request with both a text and a conversation, or with neither.

        Raises:
            ConfigError: it has.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ConfigError("give either prompt or messages", field="prompt")


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]
