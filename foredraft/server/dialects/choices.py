"""The part shared by chat and completions: fields, and answers made of choices."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from foredraft.core.errors import ConfigError
from foredraft.engine.request import Event, GenerationResult
from foredraft.server.answers import AnswerWriter, now
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Refused, Sets, at_most
from foredraft.server.dialects.sampling import OpenAIFields, Schema, response_grammar
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.server.usage import usage_of
from foredraft.server.wire import DONE, FEW, data_event

_TEXT_ONLY = "text is all there is here"
_NO_BEAMS = "beam search is not sampling from the model"
_GUIDED = "use response_format or structured_outputs"


class StreamOptions(BaseModel):
    """Fields of a stream beside the text.

    Attributes:
        include_usage: a last chunk without choices reports the usage of the replies.
        continuous_usage_stats: every chunk reports the usage so far.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChoicesFields(OpenAIFields):
    """The fields of chat and completions alike."""

    n: Annotated[int | None, Field(ge=1), at_most("max_n")] = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, Sets("max_tokens")] = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[Schema, Sets("grammar", response_grammar)] = None

    audio: Annotated[Any, Refused(_TEXT_ONLY)] = None
    modalities: Annotated[Any, Refused(_TEXT_ONLY, ["text"])] = None
    mm_processor_kwargs: Annotated[Any, Refused(_TEXT_ONLY, {})] = None
    web_search_options: Annotated[Any, Refused("this server makes no requests of its own")] = None
    functions: Annotated[Any, Refused("use tools")] = None
    function_call: Annotated[Any, Refused("use tool_choice", "none", "auto")] = None
    store: Annotated[Any, Refused("nothing is stored", False)] = None
    best_of: Annotated[Any, Refused("ask for n replies and choose yourself", 1, same_as="n")] = None
    use_beam_search: Annotated[Any, Refused(_NO_BEAMS, False)] = None
    beam_width: Annotated[Any, Refused(_NO_BEAMS)] = None
    length_penalty: Annotated[Any, Refused(_NO_BEAMS, 1, 1.0)] = None
    chat_template: Annotated[Any, Refused("a template is a program; the model's own is used")] = (
        None
    )
    documents: Annotated[Any, Refused("put them into a message", [])] = None
    add_generation_prompt: Annotated[Any, Refused("a reply always begins anew", True)] = None
    continue_final_message: Annotated[
        Any, Refused("a reply always begins anew; use /v1/completions", False)
    ] = None
    skip_special_tokens: Annotated[Any, Refused("special tokens are no text", True)] = None
    spaces_between_special_tokens: Annotated[
        Any, Refused("special tokens are no text", True, False)
    ] = None
    prompt_logprobs: Annotated[Any, Refused("use /v1/completions with echo and logprobs")] = None
    truncate_prompt_tokens: Annotated[Any, Refused("shorten the prompt yourself")] = None
    prompt_embeds: Annotated[Any, Refused("prompts are text or token ids")] = None
    return_tokens_as_token_ids: Annotated[
        Any, Refused("tokens are written as their text", False)
    ] = None
    logits_processors: Annotated[Any, Refused("code does not come with a request", [])] = None
    kv_transfer_params: Annotated[Any, Refused("there is one machine here")] = None
    vllm_xargs: Annotated[Any, Refused("it belongs to another engine", {})] = None
    repetition_detection: Annotated[Any, Refused("use stop, or a penalty")] = None
    guided_json: Annotated[Any, Refused(_GUIDED)] = None
    guided_regex: Annotated[Any, Refused(_GUIDED)] = None
    guided_choice: Annotated[Any, Refused(_GUIDED)] = None
    guided_grammar: Annotated[Any, Refused(_GUIDED)] = None
    guided_decoding_backend: Annotated[Any, Refused(_GUIDED)] = None

    def check_stream_options(self) -> StreamOptions:
        """The request's stream options, or the defaults.

        Raises:
            ConfigError: there are options, and no stream is asked for.
        """
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options needs stream: true", field="stream_options")
        return self.stream_options or StreamOptions()


class Usage(BaseModel):
    """Token counts of the replies."""

    model_config = ConfigDict(extra="allow")

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChoicesAnswer(BaseModel):
    """Fields of the answers of chat and completions."""

    model_config = ConfigDict(extra="allow")

    id: str
    created: int
    model: str
    usage: Usage


class ChoicesWriter(AnswerWriter):
    """Writes an answer of choices, one for each reply."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    last_piece: ClassVar[dict[str, Any]]
    """The empty addition of a choice's last chunk, in the form of the API."""

    def __init__(
        self, context: ServerContext, request: GenerationRequest, options: StreamOptions
    ) -> None:
        super().__init__(context, request)
        self._options = options
        self._id, self._created = self.id_prefix + request.reply_id, now()

    @abstractmethod
    def choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """A whole choice, but for its index."""

    @abstractmethod
    def piece(self, index: int, event: Event) -> dict[str, Any] | None:
        """The addition of a step to a choice; None: nothing."""

    @abstractmethod
    def reason(self, index: int, result: GenerationResult) -> str:
        """Why a choice ended."""

    def first_chunks(self) -> Iterator[bytes]:
        """The first chunks of a stream, sent when the request is accepted."""
        yield b""

    def finish(self, generation: Generation) -> None:
        """All replies have ended: the last moment to change what is reported of them."""
        return

    async def whole(self) -> dict[str, Any]:
        async with self.context.generation(self.request) as generation:
            async for _ in generation:
                pass
            self.finish(generation)
            # Of a long reply with log probabilities it is a million numbers.
            return await asyncio.to_thread(self._answered, generation)

    def _answered(self, generation: Generation) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(generation.replies):
            assert reply.result is not None
            choices.append({"index": index, **self.choice(index, reply.result)})
        return self._with_usage(self._answer(self.kind, choices), generation)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options = self._options
        continuous = options.include_usage and options.continuous_usage_stats
        async with self.context.generation(self.request) as generation:
            for chunk in self.first_chunks():
                yield chunk
            async for index, event in generation:
                usage = self._usage(generation) if continuous else None
                write = partial(self._step_chunk, index, event, usage)
                is_long = event.prompt_logprobs is not None or len(event.logprobs) > FEW
                if chunk := await asyncio.to_thread(write) if is_long else write():
                    yield chunk
                if event.result is not None:
                    reason = self.reason(index, event.result)
                    yield self.chunk(index, self.last_piece, reason, usage)
            if options.include_usage:
                self.finish(generation)
                yield data_event(self._with_usage(self._answer(self.chunk_kind, []), generation))
            yield DONE

    def _step_chunk(self, index: int, event: Event, usage: dict[str, Any] | None) -> bytes:
        piece = self.piece(index, event)
        return b"" if piece is None else self.chunk(index, piece, usage=usage)

    def chunk(
        self,
        index: int,
        piece: dict[str, Any],
        reason: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """One event of the stream; where usage is asked for, each chunk has the field."""
        choice = {"index": index, "logprobs": None, **piece, "finish_reason": reason}
        chunk = self._answer(self.chunk_kind, [choice])
        if self._options.include_usage:
            chunk["usage"] = usage
        return data_event(chunk)

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.request.model,
            "choices": choices,
        }

    def _with_usage(self, answer: dict[str, Any], generation: Generation) -> dict[str, Any]:
        return answer | {"usage": self._usage(generation)} | self.metrics(generation.replies)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return usage_of(generation.replies, self.request, self.tokenizer)
