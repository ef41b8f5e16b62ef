"""The composition root: the only place that picks concrete classes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from foredraft.control.fixed import FixedBudget
from foredraft.core.errors import ConfigError, PromptError, VocabularyMismatchError
from foredraft.core.params import SamplingParams
from foredraft.drafters import build_drafter, check_options, drafter_spec, needs_draft_model
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.engine.engine import Engine, Event
from foredraft.engine.row import GenerationResult, Session
from foredraft.engine.streams import Streams
from foredraft.models.base import Target
from foredraft.models.store import Progress, resolve_model
from foredraft.models.timing import ForwardTimes
from foredraft.models.tokenizer import Message, Tokenizer
from foredraft.plan import DEFAULT_MODEL, LoadOptions, ModelPlan, plan_model

if TYPE_CHECKING:
    from foredraft.models.native.target import DecoderFactory

Prompt = str | Sequence[int]


def _unwrapped(drafter: Drafter) -> Drafter:
    return drafter


class LLM:
    """A target with its drafter, ready to generate. Use it from one thread at a time.

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
        draft_tokenizer: Tokenizer | None = None,
        plan: ModelPlan | None = None,
        draft_plan: ModelPlan | None = None,
        forward_times: ForwardTimes | None = None,
        wrap_drafter: Callable[[Drafter], Drafter] = _unwrapped,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self._draft_model, self._draft_tokenizer = draft_model, draft_tokenizer
        self.plan, self.draft_plan = plan, draft_plan
        self.drafter_name = resolve_drafter(options, draft_model is not None)
        budget = options.num_draft_tokens
        if budget is None:
            budget = drafter_spec(self.drafter_name).num_draft_tokens
        self.drafter_context = DrafterContext(
            target, draft_model, options.drafter_options, tokenizer, draft_tokenizer, forward_times
        )
        self._forward_times = forward_times
        self.engine = Engine(
            forward_times.watch(target) if forward_times else target,
            wrap_drafter(build_drafter(self.drafter_name, self.drafter_context)),
            FixedBudget(budget, target.max_context),
            max_batch_size=options.max_batch_size,
            eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
            new_decoder=tokenizer.new_decoder if tokenizer else None,
        )
        self._streams = Streams(self.engine)

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> LLM:
        """Load a target, and a draft model if one is named.

        Args:
            model: a built-in name, a local directory, or a hub id.
            progress: told about downloads and conversions (`foredraft.models.store.Progress`).
            **options: fields of `LoadOptions`.

        Raises:
            ConfigError: an unknown option or value.
            ModelLoadError: a checkpoint that cannot be loaded safely and completely.
            VocabularyMismatchError: target and draft model do not share a vocabulary.
        """
        asked = LoadOptions.of(model=model, **options)
        spec = drafter_spec(resolve_drafter(asked))  # a mistyped one should not cost a download
        if asked.threads is not None:
            torch.set_num_threads(asked.threads)
        plan, target, tokenizer = _load_model(asked.model, asked, progress)
        forward_times = ForwardTimes(target) if asked.calibrate else None
        if asked.draft_model is None:
            return cls(target, tokenizer, asked, forward_times=forward_times, plan=plan)
        draft_plan, draft_model, draft_tokenizer = _load_model(
            asked.draft_model, replace(asked, revision=None, exact=False), progress
        )
        if not spec.any_vocabulary:
            _check_same_vocabulary(plan, tokenizer, draft_plan, draft_tokenizer)
        return cls(
            target,
            tokenizer,
            asked,
            draft_model=draft_model,
            draft_tokenizer=draft_tokenizer,
            forward_times=forward_times,
            plan=plan,
            draft_plan=draft_plan,
        )

    def with_drafter(
        self,
        options: LoadOptions,
        *,
        target: Target | None = None,
        wrap_drafter: Callable[[Drafter], Drafter] = _unwrapped,
    ) -> LLM:
        """Another LLM on the same loaded models, with the drafter that ``options`` names.

        The two share the target and its cache; neither's requests see the other's.

        Args:
            options: as for `LoadOptions`; model and dtype stay as they are loaded.
            target: a stand-in for the loaded target, such as one that measures.
            wrap_drafter: puts something around the drafter, likewise.
        """
        return LLM(
            target or self.target,
            self.tokenizer,
            options,
            draft_model=self._draft_model if options.draft_model else None,
            draft_tokenizer=self._draft_tokenizer if options.draft_model else None,
            forward_times=self._forward_times,
            plan=self.plan,
            draft_plan=self.draft_plan if options.draft_model else None,
            wrap_drafter=wrap_drafter,
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt (text, or token ids); results in the order of the prompts.

        A single text or a single list of ids is a batch of one.

        Raises:
            PromptError: a prompt is empty or too long; nothing has been generated then.
        """
        return self._run([self._encode(prompt) for prompt in _as_batch(prompts)], params)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> GenerationResult:
        """The assistant's reply to a conversation of ``{"role": …, "content": …}`` messages."""
        return self._run([self._tokenizer().encode_chat(messages)], params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, session: Session | None = None
    ) -> Iterator[Event]:
        """Generate one prompt, an event a step; the last one carries the result.

        Closing the iterator early cancels the request. Several streams may be read in turns;
        whoever reads moves all of them on.

        Raises:
            PromptError: the prompt is empty or too long.
        """
        return self._stream(self._encode(prompt), params, session)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        session: Session | None = None,
    ) -> Iterator[Event]:
        """Like `chat`, streamed. With a session, earlier turns are not read again."""
        return self._stream(self._tokenizer().encode_chat(messages), params, session)

    def open_session(self) -> Session:
        """A conversation that keeps its cache between turns; `close_session` frees it."""
        return Session()

    def close_session(self, session: Session) -> None:
        self.engine.close_session(session)

    def _run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None
    ) -> list[GenerationResult]:
        events = self._streams.open(prompts, params or SamplingParams())
        results = [event.result for event in events if event.result is not None]
        return sorted(results, key=lambda result: result.request_id)

    def _stream(
        self, prompt: Sequence[int], params: SamplingParams | None, session: Session | None
    ) -> Iterator[Event]:
        self.engine.check_prompt(prompt)  # now, and not when the first event is asked for
        return self._streams.open([prompt], params or SamplingParams(), session)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt)
        if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping):
            raise PromptError(
                f"a prompt is text or token ids, not {prompt!r} (`chat` takes messages)"
            )
        return [_token_id(token) for token in prompt]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("this LLM was built without a tokenizer; pass token ids")
        return self.tokenizer


def resolve_drafter(options: LoadOptions, has_draft_model: bool | None = None) -> str:
    """The registered name behind ``options.drafter``; "auto" is the best that is there.

    Args:
        has_draft_model: None goes by whether ``options`` names one.

    Raises:
        ConfigError: no such drafter or option of it, no draft model where one is needed, or one
            where none is used.
    """
    if has_draft_model is None:
        has_draft_model = options.draft_model is not None
    name = options.drafter
    if name == "auto":
        name = "draft_model" if has_draft_model else "suffix"
    spec = drafter_spec(name)
    if spec.needs_draft_model and not has_draft_model:
        raise needs_draft_model(name)
    if has_draft_model and not (spec.needs_draft_model or spec.takes_draft_model):
        raise ConfigError(
            f"drafter {name!r} uses no draft model, but "
            f"{options.draft_model or 'one'!r} was given; use drafter 'draft-model'"
        )
    check_options(name, options.drafter_options)
    return name.replace("-", "_")


def _load_model(
    name: str, options: LoadOptions, progress: Progress | None
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
    from foredraft.models.native.fixed_shape import probe
    from foredraft.models.native.target import NativeTarget

    decoder = native_decoder(plan.decoder)
    target = NativeTarget.load(
        plan.directory, dtype, plan.device, decoder, plan.max_context, int8=plan.weights == "int8"
    )
    if plan.decoder == "fixed-shape":
        probe(target)
    return target


def native_decoder(name: str) -> DecoderFactory:
    """The class behind `ModelPlan.decoder` of a native plan."""
    from foredraft.models.native.eager import EagerDecoder
    from foredraft.models.native.fixed_shape import FixedShapeDecoder
    from foredraft.models.native.fused import FusedDecoder
    from foredraft.models.native.graphed import GraphedDecoder

    decoders: dict[str, DecoderFactory] = {
        "fused": FusedDecoder,
        "graphed": GraphedDecoder,
        "eager": EagerDecoder,
        "fixed-shape": FixedShapeDecoder,
    }
    return decoders[name]


def _check_same_vocabulary(
    plan: ModelPlan, tokenizer: Tokenizer, draft_plan: ModelPlan, draft_tokenizer: Tokenizer
) -> None:
    if tokenizer.fingerprint != draft_tokenizer.fingerprint:
        raise VocabularyMismatchError(
            f"target {plan.name!r} has a vocabulary of {tokenizer.vocab_size} tokens "
            f"(fingerprint {tokenizer.fingerprint}) and draft model {draft_plan.name!r} one of "
            f"{draft_tokenizer.vocab_size} (fingerprint {draft_tokenizer.fingerprint}): the same "
            "id means different text. Use a draft model of the same family, or the drafter "
            "'cross-tokenizer'"
        )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(hasattr(item, "__index__") for item in batch):
        return [batch]  # type: ignore[list-item]  # a single list of ids
    return batch  # type: ignore[return-value]


def _token_id(token: object) -> int:
    """A plain int from whatever counts as one, such as numpy's."""
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):
        raise PromptError(f"prompt token {token!r} is not a token id")
    return operator.index(token)
