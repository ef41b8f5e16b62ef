"""Text comes out a whole character at a time, cut at the first stop string, never taken back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from foredraft.core.params import SamplingParams
from foredraft.engine.text import Piece, TextAssembler, TokenDecoder
from foredraft.models.text.tokenizer import Tokenizer
from tests.drafters.tokenizers import codec
from tests.engine.helpers import counting_model, generate, new_engine

WORDS = ["ab", "c", "abc", "stop", "st", "op", "o", " ", "xx", "é", "\n"]


def of_words(token: int) -> str | None:
    """A decoder for tokens that are whole words."""
    return WORDS[token]


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def assemble(
    tokens: Sequence[int], stop: Sequence[str] = (), decode: TokenDecoder = of_words
) -> tuple[str, list[str], bool]:
    """Push until something stops; the text, what `take` gave each time, and whether it stopped."""
    assembler = TextAssembler(decode, stop)
    taken = []
    stopped = False
    for token in tokens:
        stopped = assembler.push(token, drafted=False)
        taken.append("".join(piece.text for piece in assembler.take(final=stopped)))
        if stopped:
            break
    else:
        taken.append("".join(piece.text for piece in assembler.take(final=True)))
    assert "".join(taken) == assembler.text
    return assembler.text, taken, stopped


def byte_level_tokenizer() -> FastTokenizer:
    """One token a byte, and more: the euro sign's first two bytes, all three of them, and tokens
    that begin it after a letter, after its own end, and after its own end and a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    first, second, third = (_symbol(byte) for byte in "€".encode())
    for merged in (first + second, first + second + third):
        vocab[merged] = len(vocab)
    for straddling in ("a" + first + second, second + third + first, third + "a" + first + second):
        vocab[straddling] = len(vocab)
    merges = [(first, second), (first + second, third)]
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _symbol(byte: int) -> str:
    """The printable character by which a byte-level vocabulary spells ``byte``."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def byte_fallback_tokenizer() -> FastTokenizer:
    """Words with a leading space, and bytes for everything else (as in Llama 2 and Mistral)."""
    vocab = {"<unk>": 0, "▁the": 1, "▁ship": 2, "s": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    bpe = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = FastTokenizer(bpe)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level_tokenizer(), byte_fallback_tokenizer()


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _loaded(BYTE_LEVEL, tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _loaded(BYTE_FALLBACK, tmp_path_factory.mktemp("byte-fallback"))


def _loaded(tokenizer: FastTokenizer, directory: Path) -> Tokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def bytes_of(text: str) -> list[int]:
    """Token ids of the byte-level tokenizer, one a byte, merges unused."""
    return [token_of(byte) for byte in text.encode()]


def token_of(*values: int) -> int:
    """The byte-level token that spells these bytes."""
    token = BYTE_LEVEL.token_to_id("".join(map(_symbol, values)))
    assert token is not None
    return token


def test_a_split_character_belongs_to_the_token_that_completes_it(byte_level: Tokenizer) -> None:
    half, last = token_of(0xE2, 0x82), token_of(0xAC)
    assembler = TextAssembler(byte_level.new_decoder())
    assembler.push(half, drafted=False)
    assert assembler.take() == []
    assembler.push(last, drafted=True)
    assert assembler.take() == [Piece("€", drafted=True)]


A_HALF, END_AND_FIRST = token_of(ord("a"), 0xE2, 0x82), token_of(0x82, 0xAC, 0xE2)


def test_a_token_that_begins_a_character_gives_out_what_it_completes(byte_level: Tokenizer) -> None:
    _, taken, _ = assemble([A_HALF, token_of(0xAC)], decode=byte_level.new_decoder())
    assert taken == ["a", "€", ""]
    tokens = [token_of(0xE2), END_AND_FIRST, END_AND_FIRST]
    assert assemble(tokens, decode=byte_level.new_decoder())[1] == ["", "€", "€", ""]


def test_a_stop_string_is_found_in_a_token_that_begins_another_character(
    byte_level: Tokenizer,
) -> None:
    tokens = [token_of(ord("x")), A_HALF, token_of(0xAC)]
    text, taken, stopped = assemble(tokens, ["xa"], byte_level.new_decoder())
    assert (text, taken, stopped) == ("", ["", ""], True)


@settings(max_examples=100)
@given(
    tokens=st.lists(
        st.one_of(st.integers(256, 260), st.sampled_from(bytes_of("a€")), st.integers(0, 260)),
        max_size=12,
    )
)
def test_the_text_is_all_that_was_decoded_but_the_unfinished_end(
    byte_level: Tokenizer, tokens: list[int]
) -> None:
    text, _, _ = assemble(tokens, decode=byte_level.new_decoder())
    assert text == byte_level.decode(tokens).rstrip("\ufffd")


@settings(max_examples=60)
@given(
    text=st.text(max_size=12),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=2),
)
def test_any_text_survives_bytewise(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    text = text.encode(errors="ignore").decode()
    stops = [s for stop in stops if (s := stop.encode(errors="ignore").decode())]
    decode = byte_level.new_decoder()
    got, _, stopped = assemble(bytes_of(text), stops, decode)
    assert text.startswith(got)
    if stopped:
        assert any(text[len(got) :].startswith(stop) for stop in stops)
    elif "\ufffd" not in text:
        assert got == text
        assert not any(stop in text for stop in stops)


@settings(max_examples=60)
@given(tokens=st.lists(st.one_of(st.integers(1, 3), st.integers(0, 259)), max_size=30))
def test_stray_bytes_never_stop_a_stream(byte_fallback: Tokenizer, tokens: list[int]) -> None:
    """A model may emit any token at a high temperature; the decoder has to live with it."""
    text, _, _ = assemble(tokens, decode=byte_fallback.new_decoder())
    whole = byte_fallback.decode(tokens)
    if "\ufffd" not in whole:
        assert text == whole


@pytest.mark.parametrize("style", ["bpe", "gpt2", "llama2", "characters"])
@pytest.mark.parametrize("prompt", ["A fox", "", "A fox: 🦊", "naïve\n"])
def test_a_reply_is_what_it_adds_to_its_prompt(style: str, prompt: str) -> None:
    """Its first space included: only the first token of a text loses it."""
    tokenizer = codec(style)
    before = tokenizer.encode(prompt)
    for reply in ("The harbour lamp", "  two", "\n"):
        tokens = tokenizer.encode(reply, add_special_tokens=False)
        whole = tokenizer.decode(before + tokens)
        assert whole.startswith(tokenizer.decode(before))
        text, _, _ = assemble(tokens, decode=tokenizer.new_decoder(before))
        assert text == whole[len(tokenizer.decode(before)) :]


def test_words_after_a_stray_byte_keep_their_space(byte_fallback: Tokenizer) -> None:
    byte = 4  # the id of byte 0
    tokens = [1, byte + ord("A"), byte + 0xE2, 2, 2]
    decode = byte_fallback.new_decoder()
    assert assemble(tokens, decode=decode)[0] == "theA\ufffd ship ship"


def test_pieces_say_which_token_was_drafted() -> None:
    assembler = TextAssembler(of_words, ["zz"])
    for word, drafted in (("ab", True), ("c", True), ("xx", False)):
        assembler.push(WORDS.index(word), drafted)
    assert assembler.take() == [Piece("ab", True), Piece("c", True), Piece("xx", False)]


def test_held_back_text_keeps_its_flags() -> None:
    assembler = TextAssembler(of_words, ["cstopx"])
    for word, drafted in (("ab", False), ("c", True), ("stop", False)):
        assembler.push(WORDS.index(word), drafted)
        assert assembler.take() == ([Piece("ab", False)] if word == "ab" else [])
    assembler.push(WORDS.index(" "), True)
    assert assembler.take() == [Piece("c", True), Piece("stop", False), Piece(" ", True)]


@settings(max_examples=100)
@given(
    steps=st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=3), max_size=10),
    stops=st.lists(st.sampled_from(["st", "stopab", "cabcabc", "xxxxxx", "b o"]), max_size=3),
)
def test_no_more_is_held_back_than_may_begin_a_stop(
    steps: list[list[int]], stops: list[str]
) -> None:
    """Also where stop strings do not count yet, and stand in the text."""
    assembler = TextAssembler(of_words, stops, min_tokens=99)
    taken = ""
    for tokens in steps:
        for token in tokens:
            assembler.push(token, drafted=False)
        taken += "".join(piece.text for piece in assembler.take())
        text, longest = assembler.text, max(map(len, stops), default=0)
        ends = [text[-n:] for n in range(1, min(longest, len(text) + 1))]
        begun = [end for end in ends if any(stop.startswith(end) for stop in stops)]
        assert taken == text[: len(text) - max(map(len, begun), default=0)]


def test_long_stop_strings_cost_a_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    begins = TextAssembler._begins_a_stop

    def counted(self: TextAssembler, end: str) -> bool:
        looks.append(end)
        return begins(self, end)

    monkeypatch.setattr(TextAssembler, "_begins_a_stop", counted)
    assembler = TextAssembler(of_words, ["ab" * 1000 + "c"])
    for number in range(600):
        assembler.push(WORDS.index("ab" if number % 100 else "stop"), drafted=False)
        assembler.take()
    assert len(looks) <= 2 * len(assembler.text)


@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), max_size=15),
    stops=st.lists(st.sampled_from(["st", "stop", "cab", "xxx", "b", " o"]), max_size=3),
)
def test_agrees_with_a_search_of_the_whole_text(tokens: list[int], stops: list[str]) -> None:
    """The slow reading: after each token look for every stop string in all of the text."""
    text, stopped = "", False
    for token in tokens:
        text += WORDS[token]
        if hits := [text.index(stop) for stop in stops if stop in text]:
            text, stopped = text[: min(hits)], True
            break
    got, _, did_stop = assemble(tokens, stops)
    assert (got, did_stop) == (text, stopped)


# ---------------------------------------------------------------------------------- ends of replies


PIECES = ["ab", "c", "abc", "st", "op", " ", "x"]


def ended(words: list[str], **options: Any) -> tuple[str, str, int]:
    """The text, what was taken of it on the way, and after how many words it stopped."""
    assembler = TextAssembler(PIECES.__getitem__, **options)
    taken, count, stopped = "", 0, False
    for word in words:
        stopped, count = assembler.push(PIECES.index(word), drafted=True), count + 1
        taken += "".join(piece.text for piece in assembler.take(final=stopped))
        if stopped:
            break
    taken += "".join(piece.text for piece in assembler.take(final=True))
    assert taken == assembler.text, "what was handed out is never taken back"
    return assembler.text, taken, count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop": ("stop",)}, ("ab", 3)),
        ({"stop": ("stop",), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("bst",)}, ("a", 2)),
        ({"stop": ("bst",), "include_stop": True}, ("abst", 2)),
        ({"stop": ("to", "stop"), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("p",), "include_stop": True}, ("abstop", 3)),
        ({"stop": ("t",), "include_stop": True}, ("abst", 2)),
        ({"stop": ("ab",), "min_tokens": 1}, ("abstopc", 5)),  # not the first, the second
        ({"stop": ("ab", "cab"), "min_tokens": 2}, ("abstop", 5)),
        ({"stop": ("bs",), "min_tokens": 1}, ("a", 2)),  # it begins too soon and ends in time
        ({"stop": ("stop",), "min_tokens": 3}, ("abstopcabstx", 7)),
        ({"stop": ("st", "x"), "min_tokens": 6}, ("abstopcabst", 7)),
    ],
)
def test_stop_strings(options: dict[str, Any], expected: tuple[str, int]) -> None:
    text, _, count = ended(["ab", "st", "op", "c", "ab", "st", "x"], **options)
    assert (text, count) == expected


def test_min_tokens_yields_to_a_full_context() -> None:
    target = counting_model()
    target.max_context = 8
    (result,) = generate(new_engine(target), [[0, 1, 2]], SamplingParams(min_tokens=50))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")
