"""The part shared by chat and completions: fields, and answers made of choices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from foredraft.core.errors import ConfigError
from foredraft.engine.request import Event, GenerationResult
from foredraft.server.answers import AnswerWriter, in_one_step, now
from foredraft.server.context import ServerContext
from foredraft.server.dialects.fields import Limit, Refused, Sets
from foredraft.server.dialects.sampling import SamplingFields, Schema, Stops, response_grammar
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.server.usage import usage_of
from foredraft.server.wire import DONE, data_event

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


class ChoicesFields(SamplingFields):
    """The fields of chat and completions alike."""

    stop: Stops = None
    n: Annotated[int | None, Field(ge=1), Limit("max_n")] = None
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
    best_of: Annotated[Any, Refused("ask for n replies and choose yourself", 1)] = None
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


ANSWER: dict[str, type] = {"id": str, "created": int, "model": str, "choices": list, "usage": dict}
"""Fields of an answer, for the OpenAPI document."""


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
    def piece(self, index: int, event: Event) -> dict[str, Any] | None:
        """The addition of a step to a choice; None: nothing."""

    def choice(self, index: int, event: Event) -> dict[str, Any]:
        """A whole choice, but for its index and its end."""
        return self.piece(index, event) or {**self.last_piece, "logprobs": None}

    @abstractmethod
    def reason(self, index: int, result: GenerationResult) -> str:
        """Why a choice ended."""

    def step(self, generation: Generation, index: int, event: Event) -> Iterator[bytes]:
        options = self._options
        continuous = options.include_usage and options.continuous_usage_stats
        usage = self._usage(generation) if continuous else None
        if (piece := self.piece(index, event)) is not None:
            yield self.chunk(index, piece, usage=usage)
        if event.result is not None:
            yield self.chunk(index, self.last_piece, self.reason(index, event.result), usage)

    def end(self, generation: Generation) -> Iterator[bytes]:
        if self._options.include_usage:
            yield data_event(self._with_usage(self._answer(self.chunk_kind, []), generation))
        yield DONE

    def answer(self, generation: Generation) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(generation.replies):
            event = in_one_step(reply.result)
            choice = {"index": index, **self.choice(index, event)}
            assert event.result is not None
            choices.append(choice | {"finish_reason": self.reason(index, event.result)})
        return self._with_usage(self._answer(self.kind, choices), generation)

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
        return answer | {"usage": self._usage(generation)} | self.metrics(generation)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return usage_of(generation.replies, self.request, self.tokenizer)
