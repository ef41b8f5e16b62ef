"""Texts to train on: what a target replied, as token ids in shards on disk.

A shard is a ``.npz`` file without pickles: ``prompt_ids`` and ``reply_ids`` one after another,
``prompt_lengths``, ``reply_lengths``, ``temperature``, ``finished`` (the reply ended by itself),
``prompt`` (where the prompt came from), and ``number`` (of the text in its folder).

Held-out texts are never trained on: acceptance is measured on them. A prompt in 40 is held out with
all its replies, by its content, so the split is the same in every run.

Shape legend: T tokens of all texts of a shard, N texts.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foredraft.core.errors import ConfigError
from foredraft.system.files import write_atomically

_SHARD = re.compile(r"part-(\d+)\.npz")
_LARGEST_SHORT = 1 << 16
_HELD_OUT_ONE_IN = 40
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Text:
    """A prompt and what the target replied.

    Attributes:
        tokens: int64 ids of both.
        num_prompt: how many of them are the prompt's.
        temperature: that the reply was drawn at; 0: greedy.
        finished: the reply ended by itself.
        source: where the prompt came from, in a word.
        number: of the text in its folder.
    """

    tokens: Ids
    num_prompt: int
    temperature: float = 0.0
    finished: bool = True
    source: str = ""
    number: int = 0

    @property
    def prompt_ids(self) -> Ids:
        return self.tokens[: self.num_prompt]

    @property
    def reply_ids(self) -> Ids:
        return self.tokens[self.num_prompt :]

    @cached_property
    def number_by_content(self) -> int:
        """A uniform hash of the tokens."""
        return int.from_bytes(hashlib.sha256(self.tokens.tobytes()).digest()[:4], "little")

    @cached_property
    def prompt_number(self) -> int:
        """A uniform hash of the prompt."""
        digest = hashlib.sha256(self.prompt_ids.tobytes()).digest()
        return int.from_bytes(digest[:4], "little")

    @property
    def is_held_out(self) -> bool:
        """Whether it is never trained on."""
        return self.prompt_number % _HELD_OUT_ONE_IN == 0


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a folder, in the order they were written."""
    paths = [path for path in directory.glob("part-*.npz") if _SHARD.fullmatch(path.name)]
    return sorted(paths, key=_number_of)


def _number_of(path: Path) -> int:
    match = _SHARD.fullmatch(path.name)
    assert match
    return int(match[1])


def read_texts(directory: Path) -> list[Text]:
    """All texts of a folder of shards.

    Raises:
        ConfigError: there are none, or a shard is damaged.
    """
    if not directory.is_dir():
        raise ConfigError(f"no such folder of texts: {directory}")
    texts = [text for path in shard_paths(directory) for text in read_shard(path)]
    if not texts:
        raise ConfigError(
            f"{directory} holds no texts (part-0000.npz and so on); write some with: foredraft "
            "train write-text"
        )
    return texts


def read_shard(path: Path) -> list[Text]:
    """The texts of one shard.

    Raises:
        ConfigError: it is damaged or of another layout.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _texts_of({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no shard of texts ({error}); remove it") from error


def _texts_of(arrays: dict[str, NDArray[np.generic]]) -> list[Text]:
    prompts = _pieces(arrays["prompt_ids"], arrays["prompt_lengths"])
    replies = _pieces(arrays["reply_ids"], arrays["reply_lengths"])
    num = len(prompts)
    numbers = arrays.get("number", np.arange(num))
    sources, finished = arrays["prompt"], arrays["finished"]
    temperatures = arrays["temperature"]
    if not num == len(replies) == len(sources) == len(finished) == len(temperatures):
        raise ValueError("its arrays are of different lengths")
    return [
        Text(
            np.concatenate([prompts[i], replies[i]]),
            len(prompts[i]),
            float(temperatures[i].item()),
            bool(finished[i]),
            str(sources[i]),
            int(numbers[i].item()),
        )
        for i in range(num)
    ]


def _pieces(ids_T: NDArray[np.generic], lengths_N: NDArray[np.generic]) -> list[Ids]:
    if ids_T.dtype.kind not in "ui" or lengths_N.dtype.kind not in "ui" or ids_T.ndim != 1:
        raise ValueError("its ids are no whole numbers")
    lengths = lengths_N.astype(np.int64)
    if (lengths < 0).any() or lengths.sum() != len(ids_T):
        raise ValueError(f"it holds {len(ids_T)} ids and its lengths sum up to {lengths.sum()}")
    return np.split(ids_T.astype(np.int64), np.cumsum(lengths)[:-1]) if len(lengths) else []


def write_shard(directory: Path, texts: Sequence[Text]) -> Path:
    """Write the next shard of a folder; it is there whole, or not at all.

    Raises:
        TrainingError: it cannot be written, such as on a full disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = shard_paths(directory)
    path = directory / f"part-{_number_of(paths[-1]) + 1 if paths else 0:04d}.npz"
    prompts, replies = [t.prompt_ids for t in texts], [t.reply_ids for t in texts]
    largest = max(int(t.tokens.max(initial=0)) for t in texts)
    ids = np.uint16 if largest < _LARGEST_SHORT else np.uint32
    arrays = {
        "prompt_ids": np.concatenate(prompts).astype(ids),
        "prompt_lengths": np.array([len(p) for p in prompts], np.uint16),
        "reply_ids": np.concatenate(replies).astype(ids),
        "reply_lengths": np.array([len(r) for r in replies], np.uint16),
        "temperature": np.array([t.temperature for t in texts], np.float32),
        "finished": np.array([t.finished for t in texts]),
        "prompt": np.array([t.source for t in texts]),
        "number": np.array([t.number for t in texts], np.int64),
    }
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


def digest_of(texts: Sequence[Text]) -> str:
    """Tells these texts, in this order, from all others."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.tokens).to_bytes(8, "little"))
        digest.update(text.num_prompt.to_bytes(8, "little"))
        digest.update(text.tokens.astype("<u4").tobytes())
    return digest.hexdigest()[:32]


def is_shard_folder(path: Path) -> bool:
    return path.is_dir() and any(_SHARD.fullmatch(name) for name in os.listdir(path))


def usable(texts: Sequence[Text], vocab_size: int, max_context: int) -> list[Text]:
    """Texts with a reply, cut to the target's context.

    Raises:
        ConfigError: they are of another vocabulary, or there are none.
    """
    largest = max((int(text.tokens.max(initial=0)) for text in texts), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"the text holds token {largest} and the target's vocabulary has {vocab_size}: it is "
            "another model's; write some with: foredraft train write-text"
        )
    if not any(len(text.tokens) > text.num_prompt for text in texts):
        raise ConfigError("the text holds no replies: there is nothing to learn from")
    return [
        text
        if len(text.tokens) <= max_context
        else replace(text, tokens=text.tokens[:max_context], finished=False)
        for text in texts
        if len(text.tokens) > text.num_prompt and text.num_prompt < max_context
    ]


def split_texts(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Positions of the texts to train on, and of those to measure on.

    Of fewer than some 40 prompts none may be held out by its content; then the last one by content
    is, so that the smallest training can be measured too.

    Raises:
        ConfigError: there is only one prompt, or none.
    """
    held_out = [number for number, text in enumerate(texts) if text.is_held_out]
    if not held_out and texts:
        last = max(text.prompt_number for text in texts)
        held_out = [number for number, text in enumerate(texts) if text.prompt_number == last]
    trained = sorted({*range(len(texts))} - {*held_out})
    if not trained:
        raise ConfigError(
            f"{len(texts)} texts are too few: some have to be kept from training, to measure on. "
            "Give more text (some 100 replies at least)"
        )
    return trained, held_out


def frequent_tokens(texts: Sequence[Text], num_rows: int, vocab_size: int) -> list[int] | None:
    """The tokens that replies use most, ascending; None: all of the vocabulary."""
    if not 0 < num_rows < vocab_size:
        return None
    counts_V = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts_V += np.bincount(text.reply_ids, minlength=vocab_size)
    ranked = np.argsort(-counts_V, kind="stable")[:num_rows]
    return [int(token) for token in np.sort(ranked)]
