"""Conversations to token ids: special tokens come from the template, content stays content.

A template turns a conversation into one text, and in that text a ``<|im_end|>`` that a user wrote
looks like the template's own. To tell them apart the conversation is rendered once more, with
stand-ins (characters that occur nowhere else) for those with which special tokens begin and end.
Special tokens in that rendering are the template's. If the real one has no others, its ids are
what they always were. Otherwise the text is encoded by the same tokenizer with its special tokens
spelled in stand-ins, in the places of the template's: the others are split up like any text, and
merges across their edges are those of ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from foredraft.core.errors import ConfigError
from foredraft.models.text.chat_template import ChatTemplate

_PRIVATE_USE = range(0xF0000, 0x10FFFE)
"""Code points that mean nothing by themselves; the stand-ins are among those not in use."""

Messages = Sequence[Mapping[str, Any]]
_Occurrence = tuple[int, int, int]
"""A special token in a text: start, end, id."""


class _Asked(NamedTuple):
    """The inputs of a chat template."""

    messages: Messages
    tools: Messages
    variables: Mapping[str, bool | str]

    def mapped(self, change: Callable[[str], str]) -> _Asked:
        """The same with all text in it changed but the roles, which are names and no text."""
        messages, tools = _mapped(self.messages, change), _mapped(self.tools, change)
        return _Asked(messages, tools, self.variables)

    def texts(self) -> list[str]:
        """All that text."""
        texts: list[str] = []

        def note(text: str) -> str:
            texts.append(text)
            return text

        self.mapped(note)
        return texts


class ChatEncoder:
    """Encodes conversations in the format of one model.

    Args:
        named: texts that templates may name, such as ``bos_token``.
        special: ids and texts of the tokenizer's special tokens.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        template: ChatTemplate,
        named: Mapping[str, str],
        special: Mapping[int, str],
    ) -> None:
        self._fast, self._template, self._named, self._special = fast, template, named, special
        self._spelled = lru_cache(maxsize=1)(self._spelled_from)

    @property
    def variables(self) -> frozenset[str]:
        """Variables of the template that a conversation does not set."""
        return self._template.variables - self._named.keys()

    def encode(
        self,
        messages: Messages,
        tools: Messages = (),
        variables: Mapping[str, bool | str] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Ids of a conversation of plain data, ready for the assistant's reply.

        Args:
            tools: descriptions of the tools that the model may call. Like messages, they are
                content.
            check: refuses a text that is not worth encoding.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        asked = _Asked(messages, tools, variables or {})
        text = self._render(asked)
        check(text)
        ids = self._ids(self._fast, text)
        edges = {edge for token in self._special.values() for edge in (token[0], token[-1])}
        stand_ins = _stand_ins(edges, [text, self._template.source, *asked.texts()])
        marked_asked = asked.mapped(lambda content: content.translate(stand_ins))
        if marked_asked[:2] == (list(messages), list(tools)):
            return ids
        restore = {ord(stand_in): chr(char) for char, stand_in in stand_ins.items()}
        marked = None
        with suppress(ConfigError):  # the template may refuse them
            marked = self._render(marked_asked)
        if marked is None or marked.translate(restore) != text:
            # The template looks at such characters: only those of whole special tokens are hidden.
            marked = self._render(asked.mapped(lambda c: self._without_special(c, stand_ins)))
        found = list(self._occurrences(marked))
        if [i for *_, i in found] == [i for *_, i in self._occurrences(text)]:
            return ids
        return self._encode_with(found, marked.translate(restore))

    def _render(self, asked: _Asked) -> str:
        return self._template.render(
            asked.messages, {**self._named, **asked.variables}, asked.tools
        )

    def _without_special(self, content: str, stand_ins: Mapping[int, str]) -> str:
        for token in sorted(self._special.values(), key=len, reverse=True):
            content = content.replace(token, stand_ins[ord(token[0])] + token[1:])
        return content

    def _occurrences(self, text: str) -> Iterator[_Occurrence]:
        """The special tokens in a text, as the tokenizer finds them."""
        (encoding,) = self._fast.encode_batch([text], add_special_tokens=False)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._special.get(token_id)
            if token is not None and self._spells(text[start:end], token):
                yield start, end, token_id

    def _spells(self, text: str, token: str) -> bool:
        """Whether it is the token itself, and no unknown character that it stands for."""
        if text.strip() == token:
            return True
        normal = self._fast.normalizer
        return normal is not None and normal.normalize_str(text).strip() == (
            normal.normalize_str(token).strip()
        )

    def _encode_with(self, found: Sequence[_Occurrence], text: str) -> list[int]:
        """Ids of ``text`` with special tokens where they were ``found``, and nowhere else."""
        base = next(
            start
            for start in range(_PRIVATE_USE.start, _PRIVATE_USE.stop, len(self._special))
            if not any(start <= ord(char) < start + len(self._special) for char in set(text))
        )
        spelled = _spellings(self._special, base)
        pieces, end = [], 0
        for start, stop, token_id in found:
            token = self._special[token_id]
            if token in text[start:stop]:  # with spaces that it takes along
                pieces += [text[end:start], text[start:stop].replace(token, spelled[token])]
                end = stop
        return self._ids(self._spelled(base), "".join([*pieces, text[end:]]))

    def _spelled_from(self, base: int) -> FastTokenizer:
        """The same tokenizer with its special tokens spelled as private characters."""
        content = json.loads(self._fast.to_str())
        spelled = _spellings(self._special, base)
        for token in content["added_tokens"]:
            token["content"] = spelled.get(token["content"], token["content"])
        content["post_processor"] = None  # adds special tokens, where that is asked for
        content["model"] = _respelled(content["model"], spelled)
        fast = FastTokenizer.from_str(json.dumps(content))
        assert all(fast.token_to_id(spelled[t]) == i for i, t in self._special.items())
        return fast

    @staticmethod
    def _ids(fast: FastTokenizer, text: str) -> list[int]:
        # A batch of one lets other threads run, unlike `encode`.
        (found,) = fast.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)


def _spellings(special: Mapping[int, str], base: int) -> dict[str, str]:
    return {token: chr(base + number) for number, token in enumerate(special.values())}


def _respelled(model: dict[str, Any], spelled: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer's model with some tokens renamed, so that their old spelling is plain text."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {spelled.get(token, token): i for token, i in vocab.items()}
    else:  # Unigram: pairs of a piece and its score, by id
        model["vocab"] = [[spelled.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [p for p in pairs if not spelled.keys() & {*p, "".join(p)}]
    if model.get("unk_token") in spelled:
        model["unk_token"] = spelled[model["unk_token"]]
    return model


def _stand_ins(chars: set[str], texts: Sequence[str]) -> dict[int, str]:
    """A character for each of ``chars`` that is nowhere in ``texts``, as for `str.translate`."""
    # A set of all characters of 4 MB is made in 60 ms, in which no other thread runs.
    is_free = not any(chr(code) in text for code in _PRIVATE_USE[: len(chars)] for text in texts)
    used = set[str]() if is_free else set[str]().union(*texts)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    return {ord(char): stand_in for char, stand_in in zip(sorted(chars), free, strict=False)}


def _mapped(messages: Messages, change: Callable[[str], str]) -> list[dict[str, Any]]:
    return [
        {key: value if key == "role" else _changed(value, change) for key, value in each.items()}
        for each in messages
    ]


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    return value
