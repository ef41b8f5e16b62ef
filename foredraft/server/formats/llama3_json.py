"""The reply is a call in JSON, with ``parameters``: Llama 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.server.formats.base import Format, Tool, name_of
from foredraft.server.formats.reading import Incoming, Reads, held, json_calls

PYTHON = "<|python_tag|>"
_HEADS = ('{"name":"', '{"type":"function","name":"')


class Llama3Json(Format):
    """See `Format`. A reply that is JSON of another kind is content."""

    name = "llama3_json"
    shows = ('"parameters": dictionary',)
    begins = (PYTHON,)
    arguments_key = "parameters"
    between = "; "
    beside_answer = PYTHON

    def reply(
        self, text: Incoming, tools: Sequence[Tool], thinks: bool, is_open: bool
    ) -> Reads[None]:
        if tools and (yield from _begins_a_call(text, tools)):
            start = text.at
            if (yield from json_calls(text)):
                return
            size, text.at = text.at - start, start
            yield text.part("content", size)
            return
        yield from super().reply(text, tools, thinks, is_open)


def _begins_a_call(text: Incoming, tools: Sequence[Tool]) -> Reads[bool]:
    """Whether a reply is a call of one of the tools, as far as its name says."""
    named = (f'{head}{name_of(tool)}"' for head in _HEADS for tool in tools)
    heads = tuple("".join(head.split()) for head in named)
    while True:
        begun = "".join(text.rest.split())
        if begun.startswith(heads):
            return True
        if begun and held(begun, heads) < len(begun):
            return False
        if not (yield from text.more()):
            return False
