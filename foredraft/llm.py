"""The composition root: the only place that picks concrete classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError, VocabularyMismatchError
from foredraft.core.sampling import SamplingParams
from foredraft.drafters import build_drafter, drafter_spec
from foredraft.drafters.base import DrafterContext
from foredraft.engine.engine import Engine, Event
from foredraft.engine.row import GenerationResult, Session
from foredraft.models.base import Target
from foredraft.models.store import resolve_model
from foredraft.models.tokenizer import Message, Tokenizer
from foredraft.plan import DEFAULT_MODEL, LoadOptions, ModelPlan, plan_model

Prompt = str | Sequence[int]


class LLM:
    """A target with its drafter, ready to generate.

    Load one with `LLM.load`; build one directly only from parts of your own.

    Attributes:
        plan: how the target runs; None when built from parts.
        draft_plan: how the draft model runs, if there is one.
        drafter_name: the drafter in use.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None,
        options: LoadOptions,
        *,
        draft_model: Target | None = None,
        plan: ModelPlan | None = None,
        draft_plan: ModelPlan | None = None,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.plan, self.draft_plan = plan, draft_plan
        self.drafter_name = resolve_drafter(options)
        budget = options.num_draft_tokens
        if budget is None:
            budget = drafter_spec(self.drafter_name).num_draft_tokens
        context = DrafterContext(target, draft_model, options.drafter_options)
        self.engine = Engine(
            target,
            build_drafter(self.drafter_name, context),
            FixedBudget(budget, target.max_context),
            max_batch_size=options.max_batch_size,
            eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
            new_decoder=tokenizer.new_decoder if tokenizer else None,
        )

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, *, progress: Any = None, **options: Any) -> LLM:
        """Load a target, and a draft model if one is named.

        Args:
            model: a built-in name, a local directory, or a hub id.
            progress: told about downloads and conversions (`foredraft.models.store.ProgressFn`).
            **options: fields of `LoadOptions`.

        Raises:
            ConfigError: an unknown option or value.
            ModelLoadError: a checkpoint that cannot be loaded safely and completely.
            VocabularyMismatchError: target and draft model do not share a vocabulary.
        """
        asked = LoadOptions.of(model=model, **options)
        resolve_drafter(asked)  # a mistyped drafter should not cost a download
        if asked.threads is not None:
            torch.set_num_threads(asked.threads)
        plan, target, tokenizer = _load_model(model, asked, progress)
        if asked.draft_model is None:
            return cls(target, tokenizer, asked, plan=plan)
        draft_plan, draft_model, draft_tokenizer = _load_model(asked.draft_model, asked, progress)
        _check_same_vocabulary(plan, tokenizer, draft_plan, draft_tokenizer)
        return cls(
            target, tokenizer, asked, draft_model=draft_model, plan=plan, draft_plan=draft_plan
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt (text, or token ids); results in the order of the prompts.

        Raises:
            PromptError: a prompt is empty or too long; nothing has been generated then.
        """
        params = params or SamplingParams()
        ids = [self._encode(prompt) for prompt in _as_batch(prompts)]
        return self._run(ids, params)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> GenerationResult:
        """The assistant's reply to a conversation of ``{"role": …, "content": …}`` messages."""
        ids = self._tokenizer().encode_chat(messages)
        return self._run([ids], params or SamplingParams())[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, session: Session | None = None
    ) -> Iterator[Event]:
        """Generate one prompt, an event a step; the last one carries the result.

        Closing the iterator early cancels the request.
        """
        return self._stream(self._encode(prompt), params or SamplingParams(), session)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        session: Session | None = None,
    ) -> Iterator[Event]:
        """Like `chat`, streamed. With a session, earlier turns are not read again."""
        ids = self._tokenizer().encode_chat(messages)
        return self._stream(ids, params or SamplingParams(), session)

    def open_session(self) -> Session:
        """A conversation that keeps its cache between turns; `close_session` frees it."""
        return Session()

    def close_session(self, session: Session) -> None:
        self.engine.close_session(session)

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[GenerationResult]:
        ids: list[int] = []
        results: dict[int, GenerationResult] = {}
        try:
            for prompt in prompts:
                ids.append(self.engine.submit(prompt, params))
            for event in self.engine.run():
                if event.result is not None:
                    results[event.request_id] = event.result
        finally:
            for request_id in ids:  # after an interruption; a finished request is not there
                self.engine.cancel(request_id)
        return [results[request_id] for request_id in ids]

    def _stream(
        self, prompt: Sequence[int], params: SamplingParams, session: Session | None
    ) -> Iterator[Event]:
        request_id = self.engine.submit(prompt, params, session)
        try:
            for event in self.engine.run():
                if event.request_id == request_id:
                    yield event
        finally:
            self.engine.cancel(request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        return self._tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("this LLM was built without a tokenizer; pass token ids")
        return self.tokenizer


def resolve_drafter(options: LoadOptions) -> str:
    """The registered name behind ``options.drafter``; "auto" is the best that is there.

    Raises:
        ConfigError: no such drafter, or a draft model for a drafter that uses none.
    """
    name = options.drafter
    if name == "auto":
        name = "ngram" if options.draft_model is None else "draft_model"
    spec = drafter_spec(name)
    if options.draft_model is not None and not spec.needs_draft_model:
        raise ConfigError(
            f"drafter {options.drafter!r} uses no draft model, but {options.draft_model!r} was "
            "named; use drafter 'draft-model'"
        )
    return name.replace("-", "_")


def _load_model(
    name: str, options: LoadOptions, progress: Any
) -> tuple[ModelPlan, Target, Tokenizer]:
    directory = resolve_model(name, revision=options.revision, progress=progress)
    plan = plan_model(name, directory, options)
    tokenizer = Tokenizer(directory)
    return plan, load_target(plan), tokenizer


def load_target(plan: ModelPlan) -> Target:
    """Load the weights of a resolved plan."""
    dtype = getattr(torch, plan.dtype)
    if plan.backend == "hf":
        from foredraft.models.hf import HFTarget

        return HFTarget.load(plan.directory, dtype, plan.device, plan.max_context)
    from foredraft.models.native.eager import EagerDecoder
    from foredraft.models.native.fused import FusedDecoder
    from foredraft.models.native.target import NativeTarget

    decoder = FusedDecoder if plan.decoder == "fused" else EagerDecoder
    return NativeTarget.load(plan.directory, dtype, plan.device, decoder, plan.max_context)


def _check_same_vocabulary(
    plan: ModelPlan, tokenizer: Tokenizer, draft_plan: ModelPlan, draft_tokenizer: Tokenizer
) -> None:
    if tokenizer.fingerprint != draft_tokenizer.fingerprint:
        raise VocabularyMismatchError(
            f"target {plan.name!r} has a vocabulary of {tokenizer.vocab_size} tokens "
            f"(fingerprint {tokenizer.fingerprint}) and draft model {draft_plan.name!r} one of "
            f"{draft_tokenizer.vocab_size} (fingerprint {draft_tokenizer.fingerprint}): the same "
            "id means different text. Use a draft model of the same family"
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]
