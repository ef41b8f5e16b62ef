"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.core.errors import ConfigError
from foredraft.core.logprobs import TokenLogprobs
from foredraft.engine.request import Event, GenerationResult
from foredraft.models.text.infill import Infill
from foredraft.server.answers import CallerDep, ContextDep, error_responses, respond, streamed
from foredraft.server.bodies import ParsedRoute
from foredraft.server.context import ServerContext
from foredraft.server.dialects.choices import ANSWER, ChoicesFields, ChoicesWriter
from foredraft.server.dialects.fields import Items, Refused
from foredraft.server.dialects.request import read_prompts
from foredraft.server.generation import GenerationRequest, finish_reason
from foredraft.server.logprobs import CompletionLogprobs

router = APIRouter(route_class=ParsedRoute)


class CompletionRequest(ChoicesFields):
    """Prompts to be continued."""

    default_max_tokens: ClassVar[int] = 16

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    echo: bool | None = None
    chat_template_kwargs: Annotated[Any, Refused("there is no conversation", {})] = None
    add_special_tokens: bool | None = None

    def parameters(self) -> dict[str, tuple[str, Any]]:
        """Echo with logprobs asks for those of the prompt, too."""
        parameters = super().parameters()
        if self.max_tokens == 0:  # the engine generates a token at least, which is not shown
            parameters["max_tokens"] = ("max_tokens", 1)
        if self.echo and self.logprobs is not None:
            parameters["prompt_logprobs"] = ("logprobs", self.logprobs)
        return parameters

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return [*prompt]


@router.post(
    "/v1/completions",
    responses={200: streamed("continuations, whole or as events", **ANSWER), **error_responses()},
)
async def create_completion(
    body: CompletionRequest, request: Request, context: ContextDep, caller: CallerDep
) -> Response:
    """Continue prompts: text, texts, token ids, or lists of token ids."""
    body.check_stream_options()
    special = body.add_special_tokens is not False
    prompts, ends = body.prompts(), tuple[int, ...]()
    if body.suffix:
        marks = Infill.of(context.tokenizer)
        prompts = await context.on_thread(caller.size, _with_hole, context, body, marks)
        ends = marks.ends
    wanted = await context.on_thread(
        caller.size, read_prompts, context, body, prompts, special, caller, ends
    )
    wanted = replace(wanted, scores_only=body.max_tokens == 0)
    return await respond(CompletionWriter(context, wanted, body), body.stream, request)


def _with_hole(
    context: ServerContext, body: CompletionRequest, marks: Infill
) -> list[str | list[int]]:
    """The prompts of texts that go on with the suffix behind what is filled in."""
    prompts: list[str | list[int]] = []
    for prompt in body.prompts():
        if not isinstance(prompt, str) or body.echo:
            raise ConfigError("suffix goes with prompts of text, without echo", field="suffix")
        suffix = body.suffix or ""
        context.tokenizer.check_length(prompt + suffix, context.llm.max_prompt)
        prompts.append(marks.prompt(context.tokenizer, prompt, suffix))
    return prompts


class CompletionWriter(ChoicesWriter):
    """Writes the answer to a completions request."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    last_piece: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(
        self, context: ServerContext, request: GenerationRequest, body: CompletionRequest
    ) -> None:
        super().__init__(context, request, body.check_stream_options())
        self._echo = body.echo
        texts = body.prompts()
        self._num_added = [
            self._count_added(*each) for each in zip(texts, request.prompts, strict=True)
        ]
        self._begun: set[int] = set()
        self._logprobs: list[CompletionLogprobs] = []
        if request.params.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(context.tokenizer, prompt, request.params.logprobs)
                for prompt in request.prompts
                for _ in range(request.params.n)
            ]

    def piece(self, index: int, event: Event) -> dict[str, Any] | None:
        is_hidden = self.request.scores_only
        text = "" if is_hidden else "".join(piece.text for piece in event.pieces)
        tokens, entries = ((), ()) if is_hidden else (event.token_ids, event.logprobs)
        if self._echo and index not in self._begun and (event.token_ids or event.result):
            self._begun.add(index)
            text = self._prompt_text(index) + text
        prompt_entries = event.prompt_logprobs if self._echo else None
        logprobs = None
        if prompt_entries is not None or tokens:
            logprobs = self._formatted(index, prompt_entries, tokens, entries)
        return {"text": text, "logprobs": logprobs} if text or logprobs else None

    def reason(self, index: int, result: GenerationResult) -> str:
        return "length" if self.request.scores_only else finish_reason(result)

    def _count_added(self, prompt: str | list[int], tokens: list[int]) -> int:
        """Number of start tokens that the tokenizer added; an echo does not repeat them."""
        decode, first = self.tokenizer.decode, tokens[:1]
        if not isinstance(prompt, str) or decode(first, skip_special_tokens=True):
            return 0
        start = decode(first, skip_special_tokens=False)
        return int(bool(start) and not prompt.startswith(start))

    def _prompt(self, index: int) -> list[int]:
        """The tokens of a prompt as an echo shows them."""
        number = index // self.request.params.n
        return self.request.prompts[number][self._num_added[number] :]

    def _prompt_text(self, index: int) -> str:
        return self.tokenizer.decode(self._prompt(index), skip_special_tokens=False)

    def _formatted(
        self,
        index: int,
        prompt_entries: Sequence[TokenLogprobs | None] | None,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprobs],
    ) -> dict[str, Any] | None:
        """Log probabilities of a reply's next tokens; None: none are asked for, or known.

        Args:
            prompt_entries: of the prompt, where it is echoed with these tokens; else None.
        """
        if not self._logprobs:
            return None
        prompt = [] if prompt_entries is None else self._prompt(index)
        num_added = self._num_added[index // self.request.params.n]
        together = [*(prompt_entries or ())[num_added:], *entries]
        return self._logprobs[index].format([*prompt, *tokens], together, len(prompt))
