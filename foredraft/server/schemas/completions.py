"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from foredraft.server.schemas.chat import Answer, SamplingFields


class CompletionRequest(SamplingFields):
    """Prompts to be continued."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(BaseModel):
    """One continuation."""

    model_config = ConfigDict(extra="allow")

    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    """Continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
