"""Streams that go on where a client lost them, on any server of the same model.

Each event has an id that names the reply, its seed, and how far the client has read. A client that
sends the request again with ``Last-Event-ID`` gets the rest: the noise of a token depends on seed
and position alone, so the same text is generated again, and the events that the client has are
left out. Nothing is stored between the two connections.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

from foredraft.core.params import SamplingParams
from foredraft.core.rng import SEED_BITS
from foredraft.engine.request import Event
from foredraft.engine.text import Piece
from foredraft.server.errors import ApiError

_ID = re.compile(r"([0-9a-f]{24})-([0-9a-f]{1,16})-([0-9a-f]{8})" + r"-(\d{1,9})" * 5)


@dataclass(frozen=True)
class EventId:
    """The id of a server-sent event: a place in the stream of one reply.

    Attributes:
        reply_id: of the reply.
        seed: of its noise.
        prompt: a digest of its prompt.
        characters, tokens: of the reply up to here.
        step_characters, step_tokens: that the last step brought.
        num_events: written since then.
    """

    reply_id: str
    seed: int
    prompt: str
    characters: int = 0
    tokens: int = 0
    step_characters: int = 0
    step_tokens: int = 0
    num_events: int = 0

    def __str__(self) -> str:
        counts = (
            *(self.characters, self.tokens, self.step_characters, self.step_tokens),
            self.num_events,
        )
        return "-".join((self.reply_id, f"{self.seed:x}", self.prompt, *map(str, counts)))

    @classmethod
    def of(cls, text: str) -> EventId:
        """Read an id; an `ApiError` if it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            raise ApiError(400, f"Last-Event-ID is no id of an event: {text!r:.200}")
        reply_id, seed, prompt, *counts = found.groups()
        return cls(reply_id, int(seed, 16), prompt, *map(int, counts))


@dataclass
class StreamPlace:
    """How far the stream of one reply has come, beside how far its client has read it.

    Attributes:
        now: the place after the last event.
        read: where the client lost the stream; None: it is a new one.
    """

    now: EventId
    read: EventId | None = None
    _held: list[Event] = field(default_factory=list)
    _is_cut: bool = False

    async def follow(
        self, events: AsyncIterator[tuple[int, Event]]
    ) -> AsyncIterator[tuple[int, Event]]:
        """The events of the reply from now on."""
        async for index, event in events:
            for each in self._cut(event):
                size, count = len(_text(each)), len(each.token_ids)
                self.now = replace(
                    self.now,
                    characters=self.now.characters + size,
                    tokens=self.now.tokens + count,
                    step_characters=size,
                    step_tokens=count,
                    num_events=0,
                )
                yield index, each

    def _cut(self, event: Event) -> Iterator[Event]:
        """The event; those up to where the client lost the stream come as two.

        They are all up to its last step, and that step. A step brings as many tokens as its drafts
        allow, so the same text comes in other steps than the first time.
        """
        if (read := self.read) is None or self._is_cut:
            yield event
            return
        self._held.append(event)
        tokens = [token for each in self._held for token in each.token_ids]
        text = "".join(map(_text, self._held))
        if event.result is None and (len(tokens) < read.tokens or len(text) < read.characters):
            return
        logprobs = [entry for each in self._held for entry in each.logprobs]
        first = read.characters - read.step_characters, read.tokens - read.step_tokens
        bounds = [(0, 0), first, (read.characters, read.tokens), (len(text), len(tokens))]
        parts = [
            event._replace(
                token_ids=tuple(tokens[t:v]),
                logprobs=tuple(logprobs[t:v]),
                pieces=(Piece(text[c:d], drafted=False),) if d > c else (),
                prompt_logprobs=self._held[0].prompt_logprobs if number == 0 else None,
                result=None,
            )
            for number, ((c, t), (d, v)) in enumerate(pairwise(bounds))
        ]
        self._held.clear()
        self._is_cut = True
        last = parts.pop() if parts[-1].token_ids or parts[-1].pieces else None
        yield from parts[:1]
        yield parts[1] if last is not None else parts[1]._replace(result=event.result)
        if last is not None:
            yield last._replace(result=event.result)

    def named(self, event: bytes) -> bytes:
        """An event with its id; empty if the client has it."""
        self.now = now = replace(self.now, num_events=self.now.num_events + 1)
        if self.read is not None:
            here, there = (
                (each.characters, each.tokens, each.num_events) for each in (now, self.read)
            )
            if here <= there:
                return b""
        return b"id: %b\n%b" % (str(now).encode(), event)


def _text(event: Event) -> str:
    return "".join(piece.text for piece in event.pieces)


def placed(
    params: SamplingParams, prompts: Sequence[Sequence[int]], last_event: str | None
) -> tuple[SamplingParams, StreamPlace | None]:
    """The parameters with a seed, and the place in the stream; None: it cannot be resumed.

    Args:
        last_event: the id of the last event that the client has, from a stream that broke.

    Raises:
        ApiError: it is no such id, or one of another request.
    """
    if len(prompts) * params.n != 1 or params.coupling == "drawn":
        if last_event is not None:
            raise ApiError(400, "a stream of several or drawn replies cannot be resumed")
        return params, None
    prompt = blake2b(array("q", prompts[0]).tobytes(), digest_size=4).hexdigest()
    if last_event is None:
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        return replace(params, seed=seed), StreamPlace(EventId(secrets.token_hex(12), seed, prompt))
    read = EventId.of(last_event)
    if read.prompt != prompt:
        raise ApiError(400, "Last-Event-ID is of a stream with another prompt: ask as before")
    return replace(params, seed=read.seed), StreamPlace(
        EventId(read.reply_id, read.seed, prompt), read
    )
