"""The composition root: the only place that picks concrete classes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from typing import Any, cast, overload

from foredraft.auto import FOR_PREDICTIONS
from foredraft.cache.base import NO_MEMORY
from foredraft.cache.memory import CacheMemory
from foredraft.control.base import Controller
from foredraft.control.experience import Experience
from foredraft.core.cost import CostModel
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams, checked_params
from foredraft.core.rules.book import NewRules, new_rules
from foredraft.core.verify import recorded, verify
from foredraft.drafters import drafter_spec
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.engine.engine import Engine, EngineOptions
from foredraft.engine.policy import Policy, Trace
from foredraft.engine.request import Event, GenerationResult, ReplySoFar
from foredraft.engine.scheduler import MAX_STEP_TOKENS
from foredraft.load import LoadedModel, ModelPlan, forward_cost, load_models, resolve_drafter
from foredraft.models.base import Target
from foredraft.models.files.progress import Progress
from foredraft.models.text.grammars import Grammars
from foredraft.models.text.prompts import Message, Prompt, as_batch, is_conversation, prompt_ids
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.options import DEFAULT_MODEL, LoadOptions
from foredraft.speculation import build_policy
from foredraft.system.machine import give_memory_back

_log = logging.getLogger("foredraft")


class LLM:
    """A target with its drafters, ready to generate. Threads that use one take turns.

    Load one with `LLM.load`; build one directly only from parts of your own.

    Args:
        target: the model whose text it is.
        tokenizer: None: prompts are token ids, and results have no text.
        options: what was asked for.
        draft: the draft model, where there is one.
        plan: how the target runs; None when built from parts.
        cost: what forwards of the target cost; None: it was not measured.
        trace: called with the record of each step.
        keeps_evidence: whether verdicts say what they were decided on, as a `Tracer` wants it.

    Attributes:
        engine: runs the requests.
        policy: chooses the drafter and the number of draft tokens for the requests of this LLM.
        drafter_name: the drafter in use; "auto" may have loaded others beside it, which
            `policy.drafters` holds.
        sampling_defaults: the model's own, for parameters that a request does not give; None: they
            are not wanted.
        grammars: compiles those that requests name; None without a tokenizer.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None,
        options: LoadOptions,
        *,
        draft: LoadedModel | None = None,
        plan: ModelPlan | None = None,
        cost: CostModel | None = None,
        trace: Trace | None = None,
        keeps_evidence: bool = False,
    ) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options
        self._draft, self.plan, self.cost = draft, plan, cost
        self._experience = Experience()
        self.sampling_defaults: Mapping[str, float] | None = None
        if options.sampling_defaults == "model":
            self.sampling_defaults = tokenizer.sampling_defaults if tokenizer else {}
        self._building = threading.Lock()
        self._for_predictions: Policy | None = None
        self.grammars = Grammars(tokenizer, target.vocab_size) if tokenizer else None
        self._rule = recorded(verify) if keeps_evidence else verify
        self.drafter_name, self.policy = self._new_policy(options, self._experience)
        self.engine = Engine(
            target,
            self.policy,
            EngineOptions(
                max_batch_size=options.max_batch_size,
                max_step_tokens=options.max_step_tokens or _prompt_tokens(cost),
                prefix_caching=options.prefix_caching,
                eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
                new_decoder=tokenizer.new_decoder if tokenizer else None,
                new_rules=_rules_for(target, tokenizer, self.grammars),
                cost=cost,
                trace=trace,
            ),
        )
        self._record_steps()

    @classmethod
    def load(
        cls,
        model: str | PathLike[str] = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        trace: Trace | None = None,
        keeps_evidence: bool = False,
        **options: Any,
    ) -> LLM:
        """Load a target, and a draft model if one is named.

        Args:
            model: a built-in name, a local directory, a GGUF file, or a hub id.
            progress: shows downloads and conversions (see
                `foredraft.models.files.progress.Progress`).
            trace: see the class.
            keeps_evidence: see the class.
            **options: fields of `LoadOptions`.

        Raises:
            ConfigError: an unknown option or value.
            ModelLoadError: a checkpoint that cannot be loaded safely and completely.
            VocabularyMismatchError: target and draft model do not share a vocabulary.
        """
        asked = LoadOptions.of(model=model, **options)
        loaded, draft = load_models(asked, progress)
        target, tokenizer, plan = loaded.target, loaded.tokenizer, loaded.plan
        assert tokenizer is not None
        assert plan is not None
        for note in plan.notes:
            _warn_once(note)
        if left_out := tokenizer.not_honoured(plan.encoder):
            _log.warning(
                "the generation config of %s names %s, which is left out",
                plan.name,
                ", ".join(left_out),
            )
        weighs = asked.calibrate and resolve_drafter(asked) != "none"
        return cls(
            target,
            tokenizer,
            asked,
            draft=draft,
            plan=plan,
            cost=forward_cost(plan, target, asked) if weighs else None,
            trace=trace,
            keeps_evidence=keeps_evidence,
        )

    def with_drafter(
        self,
        options: LoadOptions,
        *,
        trace: Trace | None = None,
        drafter: Drafter | None = None,
        is_apart: bool = False,
        keeps_evidence: bool = False,
    ) -> LLM:
        """The same LLM with the drafter that ``options`` names.

        The two share models, cache and engine: their requests run in one batch.

        Args:
            options: as for `LoadOptions`, of which those about drafters and ``prefix_caching``
                count; all others stay as they are loaded.
            trace: called with the records of these requests' steps, without the rows of others.
            drafter: one of your own instead of the one that is named.
            is_apart: whether these requests run in steps of their own, made while their streams are
                read. So two LLMs can race on one target without slowing each other down.
            keeps_evidence: whether verdicts on these requests say what they were decided on.

        Raises:
            ConfigError, CapabilityError: the drafter cannot be built as asked for.
        """
        view = copy(self)
        view.options = options
        view._draft = self._draft if options.draft_model else None
        view._for_predictions = None
        experience = Experience() if drafter else self._experience
        with self._building:  # the engine goes on meanwhile: a head takes a while to load
            view.drafter_name, policy = view._new_policy(options, experience, drafter)
        policy.trace, policy.is_apart = trace, is_apart
        if keeps_evidence:
            policy.rule = recorded(verify)
        view.policy = policy
        view._record_steps()
        return view

    def _record_steps(self) -> None:
        """Record steps now if the target replays them; else a reply would wait for each."""
        if (steps := self.target.capabilities.recorded) is not None:
            self.policy.most_drafted = steps.most_drafted
            taps = sorted({tap for each in self.policy.drafters.values() for tap in each.taps})
            try:
                with self.engine.lock:
                    steps.record(taps)
            except NO_MEMORY as error:  # such as of a full cache: made when they are met
                _log.info("not all steps are recorded beforehand: %s", error)

    @property
    def controller(self) -> Controller:
        """The controller: chooses each row's drafter and number of draft tokens."""
        return self.policy.controller

    @property
    def name(self) -> str | None:
        """The model's name; None when built from parts."""
        return self.plan.name if self.plan else None

    @property
    def max_context(self) -> int:
        """The most tokens of prompt and reply together."""
        return self.target.max_context

    @property
    def max_prompt(self) -> int:
        """The most tokens of a prompt; with an encoder, of its source."""
        encoder = self.target.capabilities.encoder
        return encoder.max_source if encoder else self.max_context

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary: token ids are below it."""
        return self.target.vocab_size

    @property
    def is_exact(self) -> bool:
        """Whether its bits are promised whatever is scored together; see `ModelPlan.is_exact`."""
        return self.plan is None or self.plan.is_exact

    @property
    def draft_plan(self) -> ModelPlan | None:
        """How the draft model runs, if there is one."""
        return self._draft.plan if self._draft else None

    @property
    def cache_bytes(self) -> int | None:
        """The most bytes of keys and values; None: no limit, or a cache of transformers."""
        memory = getattr(self.target.cache, "memory", None)
        return memory.num_bytes if isinstance(memory, CacheMemory) else None

    def give_memory_back(self) -> None:
        """Return cached prompts and freed memory to the system. Later prompts are read anew."""
        self.engine.forget_prefixes()
        if self._draft is not None:
            with self.engine.lock:
                self._draft.target.cache.forget()
        give_memory_back()

    @property
    def drafter_context(self) -> DrafterContext:
        """The context that drafters are built from."""
        draft, plan, draft_plan = self._draft, self.plan, self.draft_plan
        size_share = draft_plan.read_bytes / plan.read_bytes if plan and draft_plan else None
        return DrafterContext(
            self.target,
            draft.target if draft else None,
            self.options.drafter_options,
            self.tokenizer,
            draft.tokenizer if draft else None,
            size_share,
            is_fixed=self.options.num_draft_tokens is not None,
        )

    def policy_for(self, params: SamplingParams) -> Policy:
        """The policy of a request. With a prediction, its drafter reads the prediction."""
        is_named = params.speculation not in ("auto", FOR_PREDICTIONS)
        stays = is_named or self.policy.is_apart or not self.policy.drafters
        if params.prediction is None or stays:
            return self.policy
        if drafter_spec(self.drafter_name).reads_prediction:
            return self.policy
        if self._for_predictions is None:
            options = replace(
                self.options,
                drafter=FOR_PREDICTIONS,
                draft_model=None,
                num_draft_tokens=None,
                drafter_options={},
            )
            self._for_predictions = self.with_drafter(options).policy
            self._for_predictions.trace = self.policy.trace
            self._for_predictions.rule = self.policy.rule
        return self._for_predictions

    def _new_policy(
        self, options: LoadOptions, experience: Experience, drafter: Drafter | None = None
    ) -> tuple[str, Policy]:
        name = resolve_drafter(options, self._draft is not None, self.target)
        context, cost = self.drafter_context, self.cost
        policy = build_policy(name, options, context, cost, experience, drafter)
        policy.rule, policy.prefix_caching = self._rule, options.prefix_caching
        return name if drafter else next(iter(policy.drafters), name), policy

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

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> GenerationResult: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> list[GenerationResult]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """The assistant's reply to a conversation of ``{"role": …, "content": …}`` messages.

        A list of conversations is a batch: the replies come as a list, as those of `generate`.
        """
        encode = self._tokenizer().encode_chat
        if isinstance(messages, list | tuple) and messages and is_conversation(messages[0]):
            several = cast(Sequence[Sequence[Message]], messages)
            return self._run([encode(each) for each in several], params)
        return self._run([encode(cast(Sequence[Message], messages))], params)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        tenant: str | None = None,
        so_far: ReplySoFar | None = None,
    ) -> Iterator[Event]:
        """Generate one prompt or reply, an event a step; the last one carries the result.

        Closing the iterator early cancels the request. Several streams may be read in turns; a
        read of one runs a step for all.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            tenant: the request's owner; the text of one tenant never drafts for another.
            so_far: the tokens of the reply that another LLM has committed; this one continues it.
                ``params`` are those that the reply began with, and name its seed.

        Raises:
            PromptError: the prompt is empty or too long.
            ConfigError: the reply cannot go on (with the first event).
        """
        params = checked_params(params).by(self.sampling_defaults)
        token_ids = self.encode(prompt)
        self.engine.check_prompt(token_ids)  # now, and not when the first event is asked for
        return self.engine.stream([token_ids], params, self.policy_for(params), tenant, so_far)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
    ) -> Iterator[Event]:
        """Like `chat`, streamed."""
        return self.stream(self._tokenizer().encode_chat(messages), params)

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
        params = checked_params(params).by(self.sampling_defaults)
        events = self.engine.stream(prompts, params, self.policy_for(params))
        results = [event.result for event in events if event.result is not None]
        return sorted(results, key=lambda result: result.request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, lambda text: self._tokenizer().encode(text))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("this LLM was built without a tokenizer; pass token ids")
        return self.tokenizer


def _prompt_tokens(cost: CostModel | None) -> int:
    return MAX_STEP_TOKENS if cost is None else cost.prompt_tokens(MAX_STEP_TOKENS)


def _rules_for(target: Target, tokenizer: Tokenizer | None, grammars: Grammars | None) -> NewRules:
    encoder = target.capabilities.encoder
    bans = encoder.bans if encoder is not None else None
    vocab_size = tokenizer.num_ids(target.vocab_size) if tokenizer else target.vocab_size
    of_model = partial(new_rules, vocab_size=vocab_size, model_bans=bans)
    if tokenizer is None or grammars is None:
        return of_model
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return partial(of_model, encode=encode, new_matcher=grammars.new_matcher)


@cache
def _warn_once(note: str) -> None:
    """Log a note of a plan, such as why it is slower than it could be."""
    _log.warning("%s (see `foredraft doctor`)", note)
