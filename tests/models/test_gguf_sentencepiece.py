"""Tokenizers of the kind "llama" in GGUF files: the tokens and texts of sentencepiece itself."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import SentencePieceProcessor
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

from foredraft.models.files.gguf_checkpoint import write_checkpoint
from foredraft.models.files.gguf_tokenizer import _rebuilt
from foredraft.models.files.progress import SilentProgress
from foredraft.models.files.schema import GgufTokenizerFields
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.gguf_files import ARRAY, Typed, metadata_of, shape_of, tensors_of, write_gguf

FLOAT32 = 6
WORDS = "the ferry leaves at noon and comes back late; a bell rings twice, then nobody speaks "
TEXTS = (
    "The ferry leaves at noon.",
    " two  spaces   and\ttabs\nand lines\n\n",
    "",
    " ",
    "naïve café — 東京 🙂🙂 ½ ２３ \u0301",
    "a" * 40 + "the" * 9,
    "▁marks▁of its own",
    "x=1;\n    y = [2, 3]  # comment",
)


def model(**options: Any) -> SentencePieceProcessor:
    """As Llama 2 trained it: pairs, bytes for what is rare, no normalisation."""
    written = io.BytesIO()
    choose = random.Random(3)
    words = WORDS.split()
    lines = [" ".join(choose.choices(words, k=12)) + " 12 é" for _ in range(200)]
    usual = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "user_defined_symbols": ["<|im_end|>"],
        "minloglevel": 2,
    }
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), model_writer=written, **(usual | options))
    return SentencePieceProcessor(model_proto=written.getvalue())


def metadata(found: SentencePieceProcessor) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    ids = range(found.vocab_size())
    kinds = [
        2 if found.is_unknown(i) else 3 if found.is_control(i) else 6 if found.is_byte(i) else 1
        for i in ids
    ]
    kinds[found.piece_to_id("<|im_end|>")] = 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [found.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": Typed(ARRAY, [found.get_score(i) for i in ids], FLOAT32),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tokenizer_of(folder: Path, found: SentencePieceProcessor, **more: Any) -> Tokenizer:
    config = shape_of(vocab_size=found.vocab_size(), num_hidden_layers=1)
    said = metadata_of(config)
    del said["tokenizer.ggml.merges"]
    said |= metadata(found) | {key.replace("__", "."): value for key, value in more.items()}
    path = write_gguf(folder / "model.gguf", said, tensors_of(config, "Q8_0")[0])
    write_checkpoint(path, folder, SilentProgress())
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference() -> SentencePieceProcessor:
    return model()


@pytest.fixture(scope="module")
def rebuilt(
    reference: SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("model"), reference)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_are_those_of_sentencepiece(
    reference: SentencePieceProcessor, rebuilt: Tokenizer, text: str
) -> None:
    ids = rebuilt.encode(text)
    assert ids[0] == 1
    assert ids[1:] == reference.encode(text) if text else ids == [1]
    assert rebuilt.decode(ids) == text.replace("\u2581", " ")


def test_made_up_texts_become_the_same_tokens(
    reference: SentencePieceProcessor, rebuilt: Tokenizer
) -> None:
    choose = random.Random(4)
    letters = WORDS + "  \n\t0123456789éü東🙂.,;-"
    for _ in range(2000):
        text = "".join(choose.choices(letters, k=choose.randint(1, 60)))
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), repr(text)
        assert rebuilt.decode(ids) == text


def test_special_tokens_are_single_and_text_goes_on_behind_them(
    reference: SentencePieceProcessor, rebuilt: Tokenizer
) -> None:
    """As llama.cpp: a space before each stretch of text."""
    ids = rebuilt.encode("the bell</s>noon<|im_end|>late", add_special_tokens=False)
    end = reference.piece_to_id("<|im_end|>")
    parts = [reference.encode(text) for text in ("the bell", "noon", "late")]
    assert ids == [*parts[0], 2, *parts[1], end, *parts[2]]


def test_models_without_a_first_space(tmp_path: Path) -> None:
    """As Gemma's."""
    bare = model(add_dummy_prefix=False)
    tokenizer = tokenizer_of(tmp_path, bare, tokenizer__ggml__add_space_prefix=False)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == bare.encode(text)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_special_tokens_of_phi_3_take_the_space_behind_them() -> None:
    """As its own tokenizer.json and llama.cpp have it; a GGUF file does not say so."""
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>", "\u2581", "a", "\n"]
    said = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for architecture, expected in (("phi3", [3, 6, 4, 7, 6]), ("llama", [3, 7, 6, 4, 7, 6])):
        fields = GgufTokenizerFields.model_validate(said | {"general.architecture": architecture})
        assert _rebuilt(fields).encode("<|user|>\na<|endoftext|>\na").ids == expected


def test_tokens_of_gemma_4_are_those_of_transformers() -> None:
    """Merges as the file lists them, across words and lines; a start token, whatever it says."""
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<|channel>"]
    merges = [("\n", "\n"), ("\n\n", "\n\n"), ("\u2581", "\u2581"), ("\u2581\u2581", "\u2581")]
    for word in dict.fromkeys(WORDS.split()):
        parts = [word[:end] for end in range(1, len(word) + 1)]
        merges += [pair for pair in zip(parts, word[1:], strict=False) if pair not in merges]
        merges.append(("\u2581", word))
    in_bytes = (f"<0x{byte:02X}>" for byte in range(256))
    singles = [*marks, *in_bytes, *"\u2581\n", *sorted({*WORDS})]
    tokens = [*dict.fromkeys([*singles, *(first + second for first, second in merges)])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    kinds = [3] * 6 + [4] + [6] * 256 + [1] * (len(tokens) - 263)
    said = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    rebuilt = _rebuilt(GgufTokenizerFields.model_validate(said))
    theirs = GemmaTokenizer(vocabulary, merges, extra_special_tokens=marks[5:])
    choose = random.Random(6)
    letters = WORDS + "  \n\n\t0123éü東🙂.,;\u2581"
    made_up = ["".join(choose.choices(letters, k=choose.randint(1, 60))) for _ in range(1000)]
    for text in (*TEXTS, "<|turn>user\nthe ferry<|channel>\n\n\n bell", *made_up):
        ids = theirs.encode(text, add_special_tokens=False)
        assert rebuilt.encode(text).ids == [2, *ids]
        assert rebuilt.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
