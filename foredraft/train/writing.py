"""Text of a target's own: its answers to prompts, and prompts that it makes up.

Whoever runs the target hands in what writes replies; here it is decided which, and they are kept.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.store import TargetIdentity
from foredraft.models.files.json_files import read_json
from foredraft.models.files.progress import Progress
from foredraft.system.files import write_text
from foredraft.train.tasks import ARTICLE, made_up_task
from foredraft.train.texts import Text, is_shard_folder, next_number, read_texts, write_shard

_ORIGIN = "texts.json"
_LONGEST_PROMPT = 256
"""Tokens of a prompt that the target makes up."""
_SHORTEST_PROMPT = 8
"""Characters of one."""
_TASKS = 0.75
"""Share of made-up prompts that are put together from parts."""


@dataclass(frozen=True)
class Request:
    """A reply that is wanted.

    Attributes:
        number: of the text.
        prompt_ids: what it answers.
        temperature: to draw at.
        seed: of the draws.
        max_tokens: of the reply.
    """

    number: int
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Reply:
    """What the target said.

    Attributes:
        number: of the request.
        token_ids: the reply, its end token included.
        finished: it ended by itself.
    """

    number: int
    token_ids: tuple[int, ...]
    finished: bool


Write = Callable[[Sequence[Request]], Generator[Reply, None, None]]
"""Yields each reply as it is over; closing it early gives the others up."""


@dataclass(frozen=True)
class Prompt:
    """A text to answer, and where it is from."""

    source: str
    text: str


class Chat(Protocol):
    """The words of a target that talks.

    Attributes:
        user_prefix: ids up to where the user's words begin.
    """

    @property
    def user_prefix(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """A conversation of one message, ready for the reply."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class WritePlan:
    """What to write.

    Attributes:
        tokens: of replies, those that are there already included.
        temperatures: taken in turns.
        max_tokens: of a reply.
        max_prompt_tokens: longer prompts are passed over.
        seed: of all draws.
        made_up: prompts are made up, beside those that are given: by the target itself, and
            from parts (`foredraft.train.tasks`).
        passes: how often each prompt is answered, at most; None: until there are enough tokens.
        shard: texts of a shard: what a kill costs at most. They are written at the same time, as
            far as the target takes them.
    """

    tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 256
    max_prompt_tokens: int = 1000
    seed: int = 0
    made_up: bool = True
    passes: int | None = None
    shard: int = 64

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures are {self.temperatures}; give some, 0 or higher")


class Writer:
    """Writes texts into a folder, from where it was left.

    Args:
        directory: the folder.
        write: runs the target.
        chat: its words.
        identity: who it is.
        prompts: to be answered.
        plan: what to write.

    Raises:
        ConfigError: the folder holds another target's text, or there is nothing to answer.
    """

    def __init__(
        self,
        directory: Path,
        write: Write,
        chat: Chat,
        identity: TargetIdentity,
        prompts: Sequence[Prompt],
        plan: WritePlan,
    ) -> None:
        if not prompts and not plan.made_up:
            raise ConfigError("there are no prompts to answer, and none are to be made up")
        check_origin(directory, identity)
        self._directory, self._write, self._chat = directory, write, chat
        self._identity, self._prompts, self._plan = identity, prompts, plan
        there = read_texts(directory) if is_shard_folder(directory) else []
        self.tokens = sum(len(text.reply_ids) for text in there)
        self._articles: list[tuple[int, str]] = []
        self._keep_articles(there)

    def run(self, progress: Progress, wants_stop: Callable[[], bool]) -> int:
        """Write until there are enough tokens, the prompts are used up, or it is to stop.

        Returns:
            Tokens of replies in the folder.

        Raises:
            TrainingError: the disk is full; what was written before is whole.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        if not (self._directory / _ORIGIN).exists():
            origin = json.dumps(asdict(self._identity), indent=2)
            write_text(self._directory / _ORIGIN, origin + "\n")
        progress.stage("Writing text")
        while self.tokens < self._plan.tokens and not wants_stop():
            if not self._block(progress, wants_stop):
                break
        return self.tokens

    def _block(self, progress: Progress, wants_stop: Callable[[], bool]) -> bool:
        """Write a shard; False: there is nothing left to answer."""
        first = next_number(self._directory)
        numbers = [n for n in range(first, first + self._plan.shard) if self._is_wanted(n)]
        if not numbers:
            return False
        requests, sources = self._requests(numbers, wants_stop)
        texts: list[Text] = []
        with closing(self._write(requests)) as replies:
            by_number = {request.number: request for request in requests}
            for reply in replies:
                texts.append(_text(by_number[reply.number], reply, sources[reply.number]))
                self.tokens += len(reply.token_ids)
                progress.advance(self.tokens / self._plan.tokens)
                if wants_stop():
                    break
        if texts:
            texts.sort(key=lambda text: text.number)
            write_shard(self._directory, texts)
            self._keep_articles(texts)
        return bool(texts)

    def _keep_articles(self, texts: Sequence[Text]) -> None:
        for text in texts:
            if text.source.startswith(f"{ARTICLE}-"):
                words = self._chat.decode([int(token) for token in text.reply_ids])
                self._articles.append((text.number, words.strip()))

    def _is_wanted(self, number: int) -> bool:
        plan = self._plan
        if plan.passes is None or plan.made_up:
            return True
        return number < plan.passes * len(self._prompts)

    def _requests(
        self, numbers: Sequence[int], wants_stop: Callable[[], bool]
    ) -> tuple[list[Request], dict[int, str]]:
        """What is to be answered, and where each prompt is from."""
        plan = self._plan
        prompts = {n: self._given(n) for n in numbers if not self._is_made_up(n)}
        prompts |= self._made_up([n for n in numbers if self._is_made_up(n)], wants_stop)
        requests, sources = [], {}
        for number, prompt in sorted(prompts.items()):
            ids = tuple(self._chat.encode(prompt.text))
            if len(ids) <= plan.max_prompt_tokens:
                temperature = plan.temperatures[number % len(plan.temperatures)]
                seed = seed_of(plan.seed, number, "reply")
                requests.append(Request(number, ids, temperature, seed, plan.max_tokens))
                sources[number] = prompt.source
        return requests, sources

    def _is_made_up(self, number: int) -> bool:
        """Every other one, where there are both kinds."""
        return self._plan.made_up and (not self._prompts or number % 2 == 1)

    def _given(self, number: int) -> Prompt:
        """Each pass takes all prompts in an order of its own, and other temperatures."""
        count = number // 2 if self._plan.made_up else number
        which, place = divmod(count, len(self._prompts))
        order = list(range(len(self._prompts)))
        random.Random(f"{self._plan.seed} {which}").shuffle(order)
        return self._prompts[order[place]]

    def _made_up(self, numbers: Sequence[int], wants_stop: Callable[[], bool]) -> dict[int, Prompt]:
        """Prompts from parts, or of the target's own."""
        found: dict[int, Prompt] = {}
        for number in numbers:
            random_ = random.Random(f"{self._plan.seed} {number} task")
            if random_.random() < _TASKS:
                # Of a shard before this one, so that it is the same wherever shards were cut.
                known = [text for at, text in self._articles if at < number - self._plan.shard]
                kind, text = made_up_task(random_, known)
                found[number] = Prompt(f"{kind}-{number}", text)
        return found | self._own([n for n in numbers if n not in found], wants_stop)

    def _own(self, numbers: Sequence[int], wants_stop: Callable[[], bool]) -> dict[int, Prompt]:
        """Prompts of the target's own: it goes on where a user would begin to speak."""
        if not numbers:
            return {}
        prefix, seed = self._chat.user_prefix, self._plan.seed
        requests = [
            Request(n, prefix, 1.0, seed_of(seed, n, "prompt"), _LONGEST_PROMPT) for n in numbers
        ]
        found: dict[int, Prompt] = {}
        with closing(self._write(requests)) as replies:
            for reply in replies:
                text = self._chat.decode(reply.token_ids).strip()
                if reply.finished and len(text) >= _SHORTEST_PROMPT:
                    found[reply.number] = Prompt(f"self-{reply.number}", text)
                if wants_stop():
                    return {}
        return found


def _text(request: Request, reply: Reply, source: str) -> Text:
    return Text(
        np.array([*request.prompt_ids, *reply.token_ids], np.int64),
        len(request.prompt_ids),
        request.temperature,
        reply.finished,
        source,
        request.number,
    )


def seed_of(seed: int, number: int, purpose: str) -> int:
    """A seed of its own for each text and purpose."""
    digest = hashlib.sha256(f"{seed} {number} {purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def check_origin(directory: Path, identity: TargetIdentity) -> None:
    """Refuse text that another target wrote, where the folder says whose it is.

    Raises:
        ConfigError: it is another's.
    """
    path = directory / _ORIGIN
    if not path.is_file():
        return
    origin = read_json(path)
    if origin.get("fingerprint") != identity.fingerprint:
        raise ConfigError(
            f"{directory} holds text of {origin.get('name')!r:.80} (fingerprint "
            f"{origin.get('fingerprint')!r:.40}), and the target is {identity.name!r} "
            f"(fingerprint {identity.fingerprint!r}): a drafter learns from its own target's text"
        )


def common_prefix(encodings: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ids that all of these begin with."""
    shared: list[int] = []
    for ids in zip(*encodings, strict=False):
        if len(set(ids)) > 1:
            break
        shared.append(ids[0])
    return tuple(shared)
