"""Text to token ids and back, from the files of a checkpoint directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from foredraft.core.errors import ConfigError, ModelLoadError, PromptError
from foredraft.models.json_files import read_json

Message = Mapping[str, str]
_ROLES = ("system", "user", "assistant", "tool")
_UNFINISHED = "\ufffd"
"""How decoders write the bytes of a character that is not complete."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        directory: holds ``tokenizer.json`` and, as far as the model has them,
            ``tokenizer_config.json``, ``chat_template.jinja`` and ``generation_config.json``.

    Raises:
        ModelLoadError: there is no readable ``tokenizer.json``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ModelLoadError(
                f"{directory} has no tokenizer.json; save the tokenizer there with "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        # Files saved by a training run may carry its batch settings; a prompt is never cut.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._config = _read_optional(directory / "tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with the model's own start token, where it has one.

        Raises:
            PromptError: not text, or no valid Unicode (half a surrogate pair).
        """
        try:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            raise PromptError(f"{text!r:.80} is no valid Unicode text") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def new_decoder(self) -> _StreamDecoder:
        """A decoder for one request, fed token by token."""
        return _StreamDecoder(self._fast)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation in the model's own format, ready for the assistant's reply.

        Raises:
            ConfigError: a malformed message, a conversation that the model's template refuses, or
                a model without a template.
        """
        if not messages:
            raise ConfigError("the conversation is empty: there is nothing to reply to")
        for message in messages:
            if (
                not isinstance(message, Mapping)
                or message.get("role") not in _ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise ConfigError(
                    f"a message needs a role ({', '.join(_ROLES)}) and text content, "
                    f"not {message!r}"
                )
        if self.chat_template is None:
            raise ConfigError(
                f"{self._directory.name} has no chat template: it is a base model; use generate"
            )
        return self.encode(self._render(messages), add_special_tokens=False)

    def _render(self, messages: Sequence[Message]) -> str:
        # transformers renders templates in a sandbox; a plain jinja environment would run
        # whatever a checkpoint puts into its template.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := self._config.get(name)) is not None
        }
        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **special,
            )
        except TemplateError as error:
            raise ConfigError(
                f"the chat template of {self._directory.name} refuses the conversation: {error}"
            ) from error
        return str(rendered[0])

    @cached_property
    def chat_template(self) -> str | None:
        path = self._directory / "chat_template.jinja"
        if path.exists():
            return path.read_text()
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several templates by name; the others are for tools
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends the model's text."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_optional(self._directory / name).get("eos_token_id")
            found |= {value} if isinstance(value, int) else set(value or ())
        eos = self._config.get("eos_token")
        eos_id = self._fast.token_to_id(eos["content"] if isinstance(eos, dict) else eos or "")
        return tuple(sorted(found | ({eos_id} if eos_id is not None else set())))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they give ids the same meaning."""
        vocab = sorted(self._fast.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()[:16]


class _StreamDecoder:
    """Fed one token at a time; returns the whole characters it completes, or None."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        # Decoders treat the first token of a text differently, so tokens are decoded behind the
        # last ones whose text is out.
        self._before: list[int] = []
        self._before_text = ""
        self._held: list[int] = []  # tokens after those
        self._said = ""  # as much of the held tokens' text as is out

    def __call__(self, token: int) -> str | None:
        self._held.append(token)
        text = self._held_text()
        whole = text.rstrip(_UNFINISHED)
        new = whole[len(self._said) :]
        if text and whole == text:
            self._before, self._before_text = self._held, self._decode(self._held)
            self._held, self._said = [], ""
        else:
            self._said += new
        return new or None

    def _held_text(self) -> str:
        text = self._decode(self._before + self._held)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        # Byte-fallback vocabularies: a stray byte turns the bytes before it, whose text is out,
        # into replacement characters.
        return self._decode(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._fast.decode(token_ids, skip_special_tokens=True))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
