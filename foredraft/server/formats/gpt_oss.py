"""Channels (harmony): thoughts, calls and what is said, each behind a header: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foredraft.server.formats.base import Format, Tool
from foredraft.server.formats.reading import Incoming, Part, Reads, json_value

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
_FINAL = f"{CHANNEL}final{MESSAGE}"
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class GptOss(Format):
    """See `Format`."""

    name = "gpt_oss"
    shows = (CHANNEL, MESSAGE)
    begins = (CHANNEL,)
    think, end_think = f"{CHANNEL}analysis{MESSAGE}", END
    stops_thinking = f"{END}{START}assistant{_FINAL}"

    def thinks(self, template: str) -> bool:
        return True

    def marks(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

    def reply(
        self, text: Incoming, tools: Sequence[Tool], thinks: bool, is_open: bool
    ) -> Reads[None]:
        if is_open:
            yield from text.parts_up_to("reasoning", _ENDS)
        while True:
            for mark in _ENDS:
                yield from text.takes(mark)
            start = text.at
            header = yield from text.up_to(MESSAGE)
            if header is None:
                yield text.part("content", len(text.whole) - start)
                return
            recipient = _RECIPIENT.search(header[0])
            if recipient and tools:
                yield Part("call", recipient[1])
                yield from text.skip()
                yield from json_value(text)
                yield from text.skip()
            else:
                kind = f"{CHANNEL}analysis"
                yield from text.parts_up_to("reasoning" if kind in header[0] else "content", _ENDS)

    opens = f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}"
    between = f"{CALL}{START}assistant"
    before_answer = _FINAL
    after_thoughts = f"{START}assistant"
