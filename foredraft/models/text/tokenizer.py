"""Text to token ids and back, from the files of a checkpoint directory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from foredraft.core.checks import broken_at, checked_text, shown
from foredraft.core.errors import ConfigError, ModelLoadError, PromptError
from foredraft.models.files.json_files import read_fields, read_json
from foredraft.models.files.kept import KeptFiles
from foredraft.models.files.schema import GenerationFields
from foredraft.models.text.prompts import Message, checked_messages
from foredraft.system.paths import cache_root

if TYPE_CHECKING:
    from foredraft.models.text.chat_encoding import ChatEncoder

_FILLER = re.compile(r"\[PAD\d+\]")
"""Names that GGUF files give to ids without a token."""
_LARGE_BYTES = 1 << 20
"""Least bytes of a vocabulary file whose hash is worth caching."""
_MAX_HELD = 32
_BEGINNING, _CUT = 16, 128
"""Characters for each token of the longest prompt, by which a text is known to be far too long, and
tokens that the cut may add."""
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json", "config.json"),
)
_NEUTRAL = {
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("num_beams", "typical_p"), 1),
}
"""Fields of a generation config that are not honoured, with the values that ask for nothing."""
_OF_ENCODERS = re.compile(r"(begin_)?suppress_tokens|forced_[be]os_token_id")
"""Fields of a generation config that encoder-decoders honour."""
_NUM_BEFORE = 4
"""Tokens of the text before a reply that its first tokens are decoded behind."""
_SAMPLE = "Read it back: é 東 1\n"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNFINISHED = "\ufffd"
"""How decoders write the bytes of a character that is not complete."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        directory: holds ``tokenizer.json`` and, as far as the model has them,
            ``tokenizer_config.json``, ``special_tokens_map.json``, ``chat_template.jinja`` (or
            ``chat_template.json``) and ``generation_config.json``.

    Attributes:
        eos_token_ids: every id that ends the model's text.
        chat_template: the source of the chat template; None when the model has none.
        named_tokens: special tokens by the names of ``tokenizer_config.json``, such as
            ``eos_token``.
        sampling_defaults: sampling parameters that the model's makers name, as `SamplingParams` has
            them.
        tool_template: the source of the template for conversations with tools, where the model has
            one of its own; else the chat template.

    Raises:
        ModelLoadError: there is no ``tokenizer.json``, or a file is malformed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ModelLoadError(
                f"{directory} has no tokenizer.json; save the tokenizer there with "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        with _refusing(path):
            self._fast = FastTokenizer.from_file(str(path))
            # Files saved by a training run may carry its batch settings; a prompt is never cut.
            self._fast.no_truncation()
            self._fast.no_padding()
            self._special = _special_tokens(self._fast)
            self._fast.decode(self._fast.encode(_SAMPLE).ids)
        self._config = _read_optional(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in self._config:  # of before transformers 4.34
            self._config |= _read_optional(directory / "special_tokens_map.json")
        self.named_tokens = _named_tokens(self._config, directory / "tokenizer_config.json")
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for
        self._encoders: dict[str, ChatEncoder] = {}  # by the source of their template
        generation = directory / "generation_config.json"
        self.sampling_defaults: Mapping[str, float] = {}
        if generation.exists():
            self.sampling_defaults = read_fields(generation, GenerationFields).sampling
        self._generation = _read_optional(generation)
        self.eos_token_ids = self._eos_token_ids()
        templates = self._chat_templates()
        self.chat_template = templates.get("default")
        self.tool_template = templates.get("tool_use", self.chat_template)

    def not_honoured(self, has_encoder: bool = False) -> list[str]:
        """Fields of the generation config that would change a reply, and do not here.

        Args:
            has_encoder: whether the model is an encoder-decoder.
        """
        asked = (n for n, v in _NEUTRAL.items() if self._generation.get(n, v) not in (None, [], v))
        return [name for name in asked if not (has_encoder and _OF_ENCODERS.fullmatch(name))]

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def num_ids(self, num_rows: int) -> int:
        """Of so many output rows those up to the last one that is a token; models may have more.

        Tokens that end a reply are among them, also where the tokenizer does not know their text.
        """
        is_token = (i for i in reversed(range(num_rows)) if self._fast.id_to_token(i) is not None)
        last = max(next(is_token, num_rows - 1), *self.eos_token_ids, -1)
        return min(last + 1, num_rows)

    @property
    def definition(self) -> str:
        """All of it, as ``tokenizer.json`` has it."""
        return str(self._fast.to_str())

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None: there is none."""
        found: int | None = self._fast.token_to_id(token)
        return found

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their text."""
        return {text: i for i, text in self._special.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with the model's own start token, where it has one.

        A special token's text, such as ``<|im_end|>``, becomes that token.

        Raises:
            PromptError: not text, or no valid Unicode (half a surrogate pair).
        """
        checked_text("the text", text, PromptError)
        try:
            # A batch of one: unlike `encode` it lets other threads run, and it leaves offsets out.
            (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(found.ids)
        except Exception as error:  # such as a character that a vocabulary cannot spell
            raise PromptError(f"the tokenizer cannot encode {text!r:.80}: {error}") from error

    def check_length(self, text: str, most: int) -> None:
        """Refuse a text that has far more than ``most`` tokens by its beginning: to encode all of
        4 MB takes seconds.

        Raises:
            PromptError: its beginning has twice as many. The number that it names is an estimate.
        """
        beginning = text[: _BEGINNING * most]
        if len(beginning) == len(text):
            return
        if (count := len(self.encode(beginning, False))) > 2 * most + _CUT:
            about = count * len(text) // len(beginning)
            raise PromptError.too_long(about, most, "by the beginning of the text")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # As in `encode`, a batch of one lets other threads run.
        (text,) = self._fast.decode_batch([[*token_ids]], skip_special_tokens=skip_special_tokens)
        return str(text)

    def new_decoder(
        self, before: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> _StreamDecoder:
        """A decoder for one reply. It takes one token at a time.

        Args:
            before: tokens of the text that the reply continues. Decoders drop the space before the
                first token of a text, and a reply is not where its text begins.
            skip_special_tokens: whether special tokens are no text.
        """
        skipped = self._special if skip_special_tokens else frozenset()
        return _StreamDecoder(self._fast, skipped, before)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token in a text, its space included; empty for an unknown id.

        Tokens may hold parts of characters, which are no valid UTF-8 by themselves.
        """
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spelling.bytes_of(token)
        return found

    def token_text(self, token: int) -> str:
        """The text of a token; for a part of a character its bytes, as ``bytes:\\xe2``."""
        content = self.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    @cached_property
    def _spelling(self) -> _Spelling:
        return _Spelling(self._fast)

    def encode_chat(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, bool | str] | None = None,
        most: int | None = None,
        adapt: Callable[[list[dict[str, Any]]], Sequence[Message]] = lambda checked: checked,
    ) -> list[int]:
        """Ids of a conversation in the model's own format, ready for the assistant's reply.

        Special tokens come from the template only: a message is content, whatever it says.

        Args:
            tools: that the model may call, as plain data in OpenAI's form. A template without a
                place for them leaves them out.
            variables: of the template, such as ``enable_thinking``; see `template_variables`.
            most: tokens allowed; None: any number.
            adapt: brings checked messages into the form that the template wants.

        Raises:
            PromptError: see `check_length`.
            ConfigError: a malformed message, a conversation that the model's template refuses, or
                a model without a template.
            ModelLoadError: the template cannot be used.
        """
        checked = checked_messages(messages)
        encoder = self._encoder(bool(tools))
        check = partial(self.check_length, most=most) if most else lambda text: None
        return encoder.encode(adapt(checked), tools, variables or {}, check)

    def template_variables(self, tools: bool = False) -> frozenset[str]:
        """The variables of the chat template that a request may set.

        Args:
            tools: of the template for conversations with tools.

        Raises:
            ConfigError: the model has no chat template.
            ModelLoadError: the template cannot be used.
        """
        return self._encoder(tools).variables

    def _encoder(self, tools: bool) -> ChatEncoder:
        # Jinja is loaded only where there is something to render.
        from foredraft.models.text.chat_encoding import ChatEncoder
        from foredraft.models.text.chat_template import ChatTemplate

        if self.chat_template is None:
            raise ConfigError(
                f"{self._directory.name} has no chat template: it is a base model; use generate"
            )
        source = (tools and self.tool_template) or self.chat_template
        if (found := self._encoders.get(source)) is None:
            template = ChatTemplate(source, self._directory.name)
            found = ChatEncoder(self._fast, template, self.named_tokens, self._special)
        return self._encoders.setdefault(source, found)

    def _chat_templates(self) -> dict[str, str]:
        """The sources of the chat templates by name: "default", "tool_use" and others.

        A file of its own stands above ``tokenizer_config.json``, as in transformers;
        ``chat_template.json`` is what processors of several media have, and comes last.
        """
        path = self._directory / "chat_template.jinja"
        if path.exists():
            try:
                return {"default": path.read_text(encoding="utf-8")}
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
        for name, content in (
            ("tokenizer_config.json", self._config),
            ("chat_template.json", _read_optional(self._directory / "chat_template.json")),
        ):
            if (found := content.get("chat_template")) is not None:
                return _named_templates(found, self._directory / name)
        return {}

    def _eos_token_ids(self) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self._directory / name
            if path.exists():
                found.update(read_fields(path, GenerationFields).eos_token_id)
        eos = self._fast.token_to_id(self.named_tokens.get("eos_token", ""))
        return tuple(sorted(found if eos is None else found | {eos}))

    @property
    def files(self) -> dict[str, bytes]:
        """The files that it was made of, by name: another process makes the same of them."""
        found = [self._directory / name for name in _FILES]
        return {path.name: path.read_bytes() for path in found if path.exists()}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they give ids the same meaning."""
        file = (self._directory / "tokenizer.json").read_bytes()
        digest = hashlib.sha256(file).hexdigest()
        is_large = len(file) >= _LARGE_BYTES
        kept = KeptFiles(cache_root() / "kept" / "tokenizers" if is_large else None)
        return str(kept.json(digest[:16], f"{digest} {_FILLER.pattern}", self._vocabulary_hash))

    def _vocabulary_hash(self) -> str:
        """Files fill a vocabulary up to the rows of their model, and models of one differ there."""
        found = self._fast.get_vocab(with_added_tokens=True).items()
        vocab = sorted((name, number) for name, number in found if not _FILLER.fullmatch(name))
        return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()[:16]


class _Spelling:
    """How a vocabulary writes bytes in the names of its tokens.

    Byte-level vocabularies have a character for each byte; those with byte fallback have a token
    such as ``<0xE2>`` for each. All others write characters.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._added = fast.get_added_tokens_decoder()
        kinds = _decoder_kinds(fast)
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds

    def bytes_of(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        name = self._fast.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return str(self._added[token].content).encode()
        if self._byte_of and all(char in self._byte_of for char in name):
            return bytes(self._byte_of[char] for char in name)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(byte[1])
        # Behind itself: decoders drop the space before the first token of a text.
        once, twice = (self._fast.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


def _decoder_kinds(fast: FastTokenizer) -> set[str]:
    """The types of a tokenizer's decoder and of those it is made of."""
    if fast.decoder is None:
        return set()
    state = json.loads(fast.decoder.__getstate__())
    return {each["type"] for each in (state, *state.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """The bytes by the characters that stand for them in byte-level vocabularies (GPT-2's).

    Printable bytes of Latin-1 stand for themselves, the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


class _StreamDecoder:
    """Fed one token at a time; returns the whole characters it completes, or None.

    A token costs as much as the few tokens that are decoded with it, however long the text is:
    tokens without text are passed over, and at most `_MAX_HELD` wait for the rest of a character.
    (A character has four bytes, so only bytes that are no text ever get there.)

    Args:
        skipped: ids without text.
        before: tokens of the text that goes on here.
    """

    def __init__(
        self, fast: FastTokenizer, skipped: Container[int], before: Sequence[int] = ()
    ) -> None:
        self._fast, self._skipped = fast, skipped
        # Decoders treat the first token of a text differently, so tokens are decoded behind the
        # last ones whose text is out.
        with_text = (token for token in reversed(before) if token not in skipped)
        self._before = [*islice(with_text, _NUM_BEFORE)][::-1]
        self._before_text = self._decode(self._before)
        self._held: list[int] = []  # tokens after those
        self._num_out = 0  # characters of the held tokens that are out

    def __call__(self, token: int) -> str | None:
        if token in self._skipped or self._fast.id_to_token(token) is None:
            return None
        self._held.append(token)
        text = self._held_text()
        is_full = len(self._held) >= _MAX_HELD
        whole = text if is_full else text.rstrip(_UNFINISHED)
        new = whole[self._num_out :]
        if is_full or (text and whole == text):
            self._before, self._before_text = self._held, self._decode(self._held)
            self._held, self._num_out = [], 0
        else:
            self._num_out += len(new)
        return new or None

    def _held_text(self) -> str:
        text = self._decode(self._before + self._held)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        # Byte-fallback vocabularies: a stray byte turns the bytes before it, whose text is out,
        # into replacement characters.
        return self._decode(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._fast.decode(token_ids, skip_special_tokens=False))


def _special_tokens(fast: FastTokenizer) -> dict[int, str]:
    """Ids and texts of the special tokens, which are no text of their own."""
    added = fast.get_added_tokens_decoder()
    return {i: token.content for i, token in added.items() if token.special and token.content}


def _named_templates(found: object, path: Path) -> dict[str, str]:
    """Chat templates as a file has them: one, or a list of named ones."""
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    else:
        named = {"default": found}
    wrong = [template for template in named.values() if not isinstance(template, str)]
    if wrong:
        raise ModelLoadError(f"{path}: chat_template is a {type(wrong[0]).__name__} and not text")
    return {name: str(template) for name, template in named.items()}


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _named_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The special tokens that a template may name."""
    named: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None and value is None:
            continue
        if not isinstance(text, str) or broken_at(text) is not None:
            raise ModelLoadError(f"{path}: {name} is {shown(value)}, no text")
        named[name] = text
    return named


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Any error of the tokenizers library on a file becomes a `ModelLoadError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ModelLoadError(
            f"{path} cannot be read: {error}. Download the checkpoint again"
        ) from error
