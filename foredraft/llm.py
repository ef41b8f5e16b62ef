"""The composition root: the only place that picks concrete classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from os import PathLike
from typing import Any, cast

from foredraft.cache.prefix import Session
from foredraft.control.adaptive import Experience
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams, checked_params
from foredraft.core.rules.book import RuleBook
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine, Event, Trace
from foredraft.engine.row import GenerationResult
from foredraft.engine.scheduler import MAX_STEP_TOKENS
from foredraft.engine.streams import Streams
from foredraft.engine.turns import TurnLock
from foredraft.load import ModelPlan, forward_cost, load_models, resolve_drafter
from foredraft.models.base import Target
from foredraft.models.files.progress import Progress
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.prompts import Message, Prompt, as_batch, is_conversation, prompt_ids
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import DEFAULT_MODEL, LoadOptions
from foredraft.speculation import speculation

_log = logging.getLogger("foredraft")


class LLM:
    """A target with its drafter, ready to generate. Threads that use one take turns.

    Load one with `LLM.load`; build one directly only from parts of your own.

    Attributes:
        plan: how the target runs; None when built from parts.
        draft_plan: how the draft model runs, if there is one.
        drafter_name: the drafter in use; with "auto" the best of those that are loaded.
        controller: decides how much is drafted, by which of them.
        options: what was asked for.
        grammars: compiles those that requests name; None without a tokenizer.
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
        cost: CostModel | None = None,
        trace: Trace | None = None,
        lock: TurnLock | None = None,
        drafter: Drafter | None = None,
        experience: Experience | None = None,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.grammars = Grammars(tokenizer, target.vocab_size) if tokenizer else None
        self._draft_model, self._draft_tokenizer = draft_model, draft_tokenizer
        self.plan, self.draft_plan, self.options = plan, draft_plan, options
        self.drafter_name = resolve_drafter(options, draft_model is not None, target)
        self.drafter_context = DrafterContext(
            target, draft_model, options.drafter_options, tokenizer, draft_tokenizer
        )
        self.cost, self.experience = cost, experience or Experience()
        context = self.drafter_context
        followed, self.controller = speculation(
            self.drafter_name, options, context, cost, self.experience, drafter
        )
        self.engine = Engine(
            target,
            followed,
            self.controller,
            max_batch_size=options.max_batch_size,
            max_step_tokens=options.max_step_tokens or MAX_STEP_TOKENS,
            eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
            new_decoder=tokenizer.new_decoder if tokenizer else None,
            rule_book=_rule_book(target, tokenizer, self.grammars),
            trace=trace,
            lock=lock,
            prefix_caching=options.prefix_caching,
        )
        self._streams = Streams(self.engine)

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        trace: Trace | None = None,
        **options: Any,
    ) -> LLM:
        """Load a target, and a draft model if one is named.

        Args:
            model: a built-in name, a local directory, or a hub id.
            progress: told about downloads and conversions (see
                `foredraft.models.files.progress.Progress`).
            trace: told of every step.
            **options: fields of `LoadOptions`.

        Raises:
            ConfigError: an unknown option or value.
            ModelLoadError: a checkpoint that cannot be loaded safely and completely.
            VocabularyMismatchError: target and draft model do not share a vocabulary.
        """
        asked = LoadOptions.of(model=model, **options)
        loaded, draft = load_models(asked, progress)
        for note in loaded.plan.notes:
            _say_once(note)
        weighs = asked.calibrate and resolve_drafter(asked) != "none"
        return cls(
            loaded.target,
            loaded.tokenizer,
            asked,
            draft_model=draft.target if draft else None,
            draft_tokenizer=draft.tokenizer if draft else None,
            cost=forward_cost(loaded.plan, loaded.target, asked) if weighs else None,
            plan=loaded.plan,
            draft_plan=draft.plan if draft else None,
            trace=trace,
        )

    def with_drafter(
        self,
        options: LoadOptions,
        *,
        trace: Trace | None = None,
        drafter: Drafter | None = None,
    ) -> LLM:
        """Another LLM on the same loaded models, with the drafter that ``options`` names.

        The two share the target and its cache; neither's requests see the other's.

        Args:
            options: as for `LoadOptions`; model and dtype stay as they are loaded.
            trace: told of every step.
            drafter: one of your own instead of the one that is named.
        """
        return LLM(
            self.target,
            self.tokenizer,
            options,
            draft_model=self._draft_model if options.draft_model else None,
            draft_tokenizer=self._draft_tokenizer if options.draft_model else None,
            cost=self.cost,
            plan=self.plan,
            draft_plan=self.draft_plan if options.draft_model else None,
            trace=trace,
            lock=self.engine.lock,
            drafter=drafter,
            experience=None if drafter else self.experience,
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt (text, or token ids); results in the order of the prompts.

        With `SamplingParams.n` there are n results for each prompt, one after the other.

        A single text or a single list of ids is a batch of one. Special tokens written in a text
        are recognised; the messages of `chat` are content, whatever they say.

        Raises:
            ConfigError: ``params`` are not `SamplingParams`.
            PromptError: a prompt is empty or too long; nothing has been generated then.
        """
        return self._run([self._encode(prompt) for prompt in as_batch(prompts)], params)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> GenerationResult:
        """The assistant's reply to a conversation of ``{"role": …, "content": …}`` messages."""
        return self._run([self._tokenizer().encode_chat(messages)], params)[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        session: Session | None = None,
        tenant: str | None = None,
    ) -> Iterator[Event]:
        """Generate one prompt, an event a step; the last one carries the result.

        Closing the iterator early cancels the request. Several streams may be read in turns;
        whoever reads moves all of them on.

        Args:
            tenant: whose request it is; nothing of one's text drafts for another.

        Raises:
            PromptError: the prompt is empty or too long.
        """
        return self._stream(self._encode(prompt), params, session, tenant)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        session: Session | None = None,
    ) -> Iterator[Event]:
        """Like `chat`, streamed. A session takes one reply at a time."""
        return self._stream(self._tokenizer().encode_chat(messages), params, session)

    def open_session(self) -> Session:
        """A conversation. Its earlier turns are not read again, as long as the cache has room."""
        return Session()

    def close_session(self, session: Session) -> None:
        """A conversation is over; what the cache holds of it makes way for others in time.

        Raises:
            ConfigError: a reply is under way.
        """
        self.engine.close_session(session)

    def encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """The token ids of a text, of ids, or of the messages of a conversation.

        Raises:
            PromptError, ConfigError: it is none of them.
        """
        if is_conversation(prompt):
            return self._tokenizer().encode_chat(cast(Sequence[Message], prompt))
        return self._encode(cast(Prompt, prompt))

    def _run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None
    ) -> list[GenerationResult]:
        events = self._streams.open(prompts, checked_params(params))
        results = [event.result for event in events if event.result is not None]
        return sorted(results, key=lambda result: result.request_id)

    def _stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        session: Session | None,
        tenant: str | None = None,
    ) -> Iterator[Event]:
        params = checked_params(params)
        self.engine.check_prompt(prompt)  # now, and not when the first event is asked for
        return self._streams.open([prompt], params, session, tenant)

    def _encode(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, lambda text: self._tokenizer().encode(text))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("this LLM was built without a tokenizer; pass token ids")
        return self.tokenizer


def _rule_book(target: Target, tokenizer: Tokenizer | None, grammars: Grammars | None) -> RuleBook:
    """What requests to this model may ask for."""
    if tokenizer is None or grammars is None:
        return RuleBook(target.vocab_size)
    return RuleBook(
        target.vocab_size,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        grammars.new_matcher,
    )


@cache
def _say_once(note: str) -> None:
    """Falling back to something slower is not to be silent."""
    _log.warning("foredraft runs slower than it could: %s (see `foredraft doctor`)", note)
