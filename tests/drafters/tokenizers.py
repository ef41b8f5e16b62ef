"""Small tokenizers that cut text in different ways, and tables that recite a text in them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from foredraft.drafters.model.cross_tokenizer.shared_vocabulary import token_texts
from foredraft.drafters.model.cross_tokenizer.transcript import Specials
from foredraft.drafters.spec import TextCodec
from foredraft.models.table import TableModel
from foredraft.models.text.tokenizer import Tokenizer
from tests.models.checkpoints import train_tokenizer

SENTENCES = (
    "The lamp in the harbour blinks twice and then twice again, all night long. ",
    "Crème brûlée costs 4 €, coffee costs 2 €; tea is free. ",
    "Two lamps, two boats, two men: the boats and the men came back. ",
    "東京の夜, Москва ночью 🦊🌊 and a quiet night in the harbour.\n",
)
TEXT = "".join(SENTENCES)
END = "<|endoftext|>"


def gpt2_style() -> FastTokenizer:
    """Byte-level BPE with other merges and other ids than the target's."""
    tokenizer = FastTokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=340,
        special_tokens=["<pad>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def llama2_style() -> FastTokenizer:
    """BPE with ▁ for spaces, one put before every text, bytes where a character is unknown."""
    tokenizer = FastTokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    words = pre_tokenizers.Metaspace(prepend_scheme="never")  # so that no merge spans two words
    tokenizer.pre_tokenizer = words
    latin = [sentence.encode("ascii", "ignore").decode() for sentence in SENTENCES]
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in latin], trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # bytes are tokens like any other
    return FastTokenizer.from_str(json.dumps(saved))


def character_level() -> FastTokenizer:
    """One character a token; characters that are not in `TEXT` are lost."""
    known = sorted(set(TEXT))
    vocab = {token: i for i, token in enumerate(["<unk>", END, *known])}
    tokenizer = FastTokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", END])
    return tokenizer


STYLES: dict[str, Callable[[], FastTokenizer]] = {
    "bpe": train_tokenizer,
    "gpt2": gpt2_style,
    "llama2": llama2_style,
    "characters": character_level,
}


@functools.cache
def codec(style: str) -> Tokenizer:
    directory = tempfile.TemporaryDirectory(prefix="foredraft-tokenizer-")
    STYLES[style]().save(f"{directory.name}/tokenizer.json")
    with directory:
        return Tokenizer(Path(directory.name))


class Pieces:
    """A codec whose tokens are the given strings; encoding takes the longest that fits."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens: list[int] = []
        while text:
            fitting = [piece for piece in self._pieces if text.startswith(piece)]
            best = max(fitting, key=len, default="")
            if best:
                tokens.append(self._pieces.index(best))
            text = text[len(best) or 1 :]
        return tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._pieces[token] for token in token_ids)


def reciter(codec: TextCodec, text: str, sharpness: float = 0.9) -> TableModel:
    """Knows ``text`` by heart: wherever a beginning of it stands, it goes on with it."""
    canonical = codec.encode(text)
    pieces = token_texts(codec, Specials(codec), codec.vocab_size)

    def following(context: tuple[int, ...]) -> int | None:
        if list(context) == canonical[: len(context)]:
            return canonical[len(context)] if len(context) < len(canonical) else None
        # Cut elsewhere: the longest token that fits what is left.
        said = codec.decode(context)
        rest = text[len(said) :]
        fitting = [(len(t), i) for (t, special), i in pieces.items() if rest.startswith(t)]
        return max(fitting)[1] if fitting and text.startswith(said) else None

    def conditional(context: tuple[int, ...]) -> list[float]:
        token = following(context)
        if token is None:
            return [1.0 / codec.vocab_size] * codec.vocab_size
        other = (1.0 - sharpness) / (codec.vocab_size - 1)
        return [sharpness if i == token else other for i in range(codec.vocab_size)]

    return TableModel(codec.vocab_size, conditional)
