"""`/v1/chat/completions`, and the fields that it shares with `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foredraft.server.schemas.common import RequestBody, StreamOptions

Number = Annotated[float, Field(allow_inf_nan=False)]


class SamplingFields(RequestBody):
    """Fields of chat and completions alike. Null is the same as leaving a field out."""

    model: str | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: int | None = None
    coupling: Literal["seeded", "drawn"] | None = None


class ChatRequest(SamplingFields):
    """A conversation to be replied to."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Usage(BaseModel):
    """What it took."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(BaseModel):
    """What answers of chat and completions share."""

    model_config = ConfigDict(extra="allow")

    id: str
    created: int
    model: str
    usage: Usage


class ChatChoice(BaseModel):
    """One reply."""

    model_config = ConfigDict(extra="allow")

    index: int
    message: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    """Replies to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
