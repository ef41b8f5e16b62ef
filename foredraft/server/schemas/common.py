"""What all dialects share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class RequestBody(BaseModel):
    """A body whose types are held to strictly; fields that are not named may still come."""

    model_config = ConfigDict(strict=True, extra="allow")

    def plain(self) -> dict[str, Any]:
        """The fields that were sent, as they were sent."""
        return self.model_dump(exclude_unset=True)


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's shape of an error."""

    type: str
    error: AnthropicErrorDetail


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_TEXTS = {
    400: "a field cannot be used as given",
    401: "no API key that is known here",
    403: "the server does not go by that name",
    404: "no such model or route",
    408: "the body or the reply took too long",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "too many requests wait; Retry-After says when to come again",
    500: "the reply failed",
    503: "the server is loading or shutting down",
}


def error_responses(model: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for the OpenAPI document."""
    return {status: {"model": model, "description": text} for status, text in _TEXTS.items()}


def streamed(description: str, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """The good answer of a route that may stream."""
    text = {"type": "string"}
    event = {"type": "object", "properties": {"event": text, "data": text}, "required": ["data"]}
    content: dict[str, Any] = {"text/event-stream": {"schema": event}}
    answer: dict[str, Any] = {"description": description, "content": content}
    if model is not None:
        answer["model"] = model
    return answer
