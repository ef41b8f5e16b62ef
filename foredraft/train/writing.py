"""Text of a target's own: its replies to prompts, and prompts that it makes up.

A `Writer` decides which replies are written, and keeps them; `engine_replies` has an engine write.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foredraft.cache.base import common_prefix
from foredraft.core.errors import ConfigError, TrainingError
from foredraft.core.params import SamplingParams
from foredraft.drafters.trained import TargetIdentity
from foredraft.engine.request import GenerationResult
from foredraft.llm import LLM
from foredraft.models.files.json_files import read_json
from foredraft.models.files.progress import Progress
from foredraft.models.text.tokenizer import Tokenizer
from foredraft.system.files import write_text
from foredraft.train.options import WriteOptions
from foredraft.train.texts import (
    Text,
    is_shard_folder,
    read_texts,
    write_shard,
)

_ORIGIN = "texts.json"
_LEAST_SHARD = 16
"""Texts of a shard, where few tokens are lacking."""
_LONGEST_OWN_PROMPT = 256
"""Tokens of a prompt that a chat model makes up."""
_OWN_BEGINNING = (8, 48)
"""Tokens of the beginning of a text that a base model makes up, at least and at most."""
_SHORTEST_PROMPT = 8
"""Characters of one."""
_ANY_WORDS = ("A", "7", "Why", "é", "(")


Requests = Mapping[int, tuple[tuple[int, ...], SamplingParams]]
"""Prompts, and how to draw the reply to each, by the number of the text."""
WriteReplies = Callable[[Requests], Generator[tuple[int, GenerationResult], None, None]]
"""Yields each reply as it is over; closing it early gives the others up."""


def engine_replies(
    llm: LLM, pause: Callable[[], object], should_end: Callable[[], bool], requests: Requests
) -> Generator[tuple[int, GenerationResult], None, None]:
    """Replies of an LLM that serves no other requests; a `WriteReplies` when the rest is bound.

    Args:
        pause: called before each step.
        should_end: asked before each step; unfinished replies are then dropped.
    """
    engine, numbers = llm.engine, dict[int, int]()
    try:
        for number, (prompt_ids, params) in requests.items():
            numbers[engine.submit(prompt_ids, params)] = number
        while engine.has_work and not should_end():
            pause()
            for event in engine.step():
                if (result := event.result) is not None:
                    number = numbers.pop(event.request_id)
                    if result.error is None:
                        yield number, result
    finally:
        for request_id in numbers:
            engine.cancel(request_id)


class SourcePrompt(NamedTuple):
    """Where a text to answer is from, in a word, and the text."""

    source: str
    text: str


class PromptEncoder:
    """Encodes prompts as a target expects them.

    A chat model gets conversations of one message in its chat template, a base model the beginning
    of a text, which it continues.

    Attributes:
        plain: whether the target is a base model.
        user_prefix: the ids that every prompt begins with. The target makes up a prompt by
            continuing them; where there are none, it cannot.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.plain = tokenizer.chat_template is None
        encodings = [self.encode(words) for words in _ANY_WORDS]
        first, last = min(encodings), max(encodings)  # all others lie between these
        self.user_prefix = tuple(first[: common_prefix(first, last)])
        if self.plain and not self.user_prefix:  # base models learn from texts behind such a token
            self.user_prefix = tokenizer.eos_token_ids[:1]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, ready for the reply."""
        if self.plain:
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


class Writer:
    """Writes texts into a folder, from where it was left.

    Args:
        prompts: to be answered; without any, all are made up.

    Attributes:
        tokens: of replies in the folder.
        num_skipped: prompts that were passed over because they are longer than `prompt_limit`.
        prompt_limit: most tokens of a prompt.

    Raises:
        ConfigError: the folder holds another target's text.
    """

    def __init__(
        self,
        directory: Path,
        write: WriteReplies,
        encoder: PromptEncoder,
        identity: TargetIdentity,
        max_context: int,
        prompts: Sequence[SourcePrompt],
        options: WriteOptions,
    ) -> None:
        check_origin(directory, identity)
        self._directory, self._write, self._encoder = directory, write, encoder
        self._identity, self._prompts, self._options = identity, prompts, options
        self.prompt_limit, self.num_skipped = options.prompt_limit(max_context), 0
        texts = read_texts(directory) if is_shard_folder(directory) else []
        self.tokens = sum(len(text.reply_ids) for text in texts)
        self._next_number = 1 + max((text.number for text in texts), default=-1)

    def run(self, progress: Progress, should_end: Callable[[], bool]) -> int:
        """Write until there are enough tokens, the prompts are used up, or it should end.

        Returns:
            Tokens of replies in the folder.

        Raises:
            ConfigError: no prompt is short enough, or the target can make none up.
            TrainingError: the target writes nothing, or the disk is full; earlier files are whole.
        """
        if self.tokens >= self._options.tokens:
            return self.tokens
        self._directory.mkdir(parents=True, exist_ok=True)
        if not (self._directory / _ORIGIN).exists():
            origin = json.dumps(asdict(self._identity), indent=2)
            write_text(self._directory / _ORIGIN, origin + "\n")
        progress.stage("Writing text")
        while self.tokens < self._options.tokens and not should_end():
            if not self._write_shard(progress, should_end):
                break
        return self.tokens

    def _write_shard(self, progress: Progress, should_end: Callable[[], bool]) -> bool:
        """Write a shard; False: all prompts are used up."""
        lacking = math.ceil((self._options.tokens - self.tokens) / self._options.max_tokens)
        num_texts = min(self._options.shard, max(_LEAST_SHARD, lacking))
        first, self._next_number = self._next_number, self._next_number + num_texts
        numbers = [n for n in range(first, self._next_number) if self._is_wanted(n)]
        if not numbers:
            return False
        prompts = self._prompts_of(numbers, should_end)
        requests = self._requests(prompts)
        texts: list[Text] = []
        with closing(self._write(requests)) as replies:
            for number, reply in replies:
                texts.append(_text(number, *requests[number], reply, prompts[number]))
                self.tokens += len(reply.token_ids)
                progress.advance(self.tokens / self._options.tokens)
                if should_end():
                    break
        if texts:
            texts.sort(key=lambda text: text.number)
            write_shard(self._directory, texts)
        elif self.num_skipped and not self.tokens and not should_end():
            raise ConfigError(
                f"{self.num_skipped} prompts are longer than {self.prompt_limit} tokens, which "
                "leave room for a reply in the target's context, and none was shorter; give "
                "shorter prompts, or fewer --max-tokens"
            )
        elif (requests or not (self._prompts or self.tokens)) and not should_end():
            raise TrainingError(
                f"the target gave no reply to {len(requests)} prompts; where it makes none up, "
                "give some with --prompts, or --data prompts.jsonl"
            )
        return True

    def _is_wanted(self, number: int) -> bool:
        passes = self._options.passes
        return passes is None or not self._prompts or number < passes * len(self._prompts)

    def _requests(self, prompts: Mapping[int, SourcePrompt]) -> Requests:
        """How to answer prompts; those that are too long are counted."""
        options, requests = self._options, {}
        for number, prompt in sorted(prompts.items()):
            ids = tuple(self._encoder.encode(prompt.text))
            if not 0 < len(ids) <= self.prompt_limit:
                self.num_skipped += 1
                continue
            temperature = options.temperatures[number % len(options.temperatures)]
            requests[number] = ids, self._params("reply", number, temperature, options.max_tokens)
        return requests

    def _params(
        self, purpose: str, number: int, temperature: float, max_tokens: int
    ) -> SamplingParams:
        seed = seed_of(self._options.seed, number, purpose)
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)

    def _prompts_of(
        self, numbers: Sequence[int], should_end: Callable[[], bool]
    ) -> dict[int, SourcePrompt]:
        """The given prompts by number, or else some of the target's own."""
        if not self._prompts:
            return self._own(numbers, should_end)
        return {number: self._given(number) for number in numbers}

    def _given(self, number: int) -> SourcePrompt:
        """Each pass takes all prompts in an order of its own, and other temperatures."""
        which, place = divmod(number, len(self._prompts))
        order = list(range(len(self._prompts)))
        random.Random(f"{self._options.seed} {which}").shuffle(order)
        return self._prompts[order[place]]

    def _own(
        self, numbers: Sequence[int], should_end: Callable[[], bool]
    ) -> dict[int, SourcePrompt]:
        """Prompts of the target's own: it continues where a user, or a text, would begin.

        Raises:
            ConfigError: it begins no text by itself.
        """
        if not self._encoder.user_prefix:
            raise ConfigError(
                "this model has no token that every prompt begins with, so it can make none up; "
                "give some with --prompts, or --data prompts.jsonl"
            )
        requests = {number: self._request_of_own(number) for number in numbers}
        whole, cut = dict[int, SourcePrompt](), dict[int, SourcePrompt]()
        with closing(self._write(requests)) as replies:
            for number, reply in replies:
                text = self._encoder.decode(reply.token_ids).strip()
                is_whole = reply.finish_reason == "stop" or self._encoder.plain
                if len(text) >= _SHORTEST_PROMPT:
                    (whole if is_whole else cut)[number] = SourcePrompt(f"self-{number}", text)
                if should_end():
                    return {}
        return whole or cut

    def _request_of_own(self, number: int) -> tuple[tuple[int, ...], SamplingParams]:
        longest = _LONGEST_OWN_PROMPT
        if self._encoder.plain:
            longest = random.Random(f"{self._options.seed} {number}").randint(*_OWN_BEGINNING)
        most = min(longest, self.prompt_limit // 2)  # the rest is the template's
        return self._encoder.user_prefix, self._params("prompt", number, 1.0, most)


def _text(
    number: int,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    reply: GenerationResult,
    prompt: SourcePrompt,
) -> Text:
    return Text(
        np.array([*prompt_ids, *reply.token_ids], np.int64),
        len(prompt_ids),
        params.temperature,
        reply.finish_reason == "stop",
        prompt.source,
        number,
    )


def seed_of(seed: int, number: int, purpose: str) -> int:
    """A seed of its own for each text and purpose."""
    digest = hashlib.sha256(f"{seed} {number} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def check_origin(directory: Path, identity: TargetIdentity) -> None:
    """Refuse text that another target wrote, where the folder says whose it is.

    Raises:
        ConfigError: it is another's: of other embeddings, or of other weights.
    """
    path = directory / _ORIGIN
    if not path.is_file():
        return
    origin = read_json(path)
    for name in ("fingerprint", "weights"):
        theirs, mine = origin.get(name), getattr(identity, name)
        if theirs != mine and (name == "fingerprint" or None not in (theirs, mine)):
            raise ConfigError(
                f"{directory} holds text of {origin.get('name')!r:.80} ({name} {theirs!r:.40}), "
                f"and the target is {identity.name!r} ({name} {mine!r}): a drafter learns from its "
                "own target's text. Write some with: foredraft train write-text"
            )
