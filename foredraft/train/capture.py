"""The target's states of the texts, kept on disk and shared by all kinds of heads.

Texts are captured in chunks that are named by their content: a folder for each target
(`TrainingTarget.forward_key`: all weights, and how they are run), in it one for each chunk, in it a
file for each layer. So other kinds of heads and later runs with more text reuse them, and a kill or
a stop costs only the current chunk. Two training runs may capture at the same time. Texts beyond
the size limit are read by the target again whenever they are trained on.

Shape legend: T tokens of a chunk, L tokens of a text, E hidden size.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.core.errors import ModelLoadError
from foredraft.models.files.safety import check_safetensors
from foredraft.system.files import write_tensors
from foredraft.system.paths import mark_used, remove_unused
from foredraft.train.progress import Monitor
from foredraft.train.target import States, TrainingTarget
from foredraft.train.texts import Text, digest_of

CHUNK_TOKENS = 8192
"""Least tokens of a chunk; the most are about twice as many."""
PACKED_TOKENS = {"cpu": 640, "cuda": 16_384}
"""Tokens of one forward, by the type of the device."""

_NORMALISER = "normaliser"
_ENDS_ONE_IN = 16
_MAX_OPEN = 128
_KEPT_S = 24 * 3600.0


@dataclass(frozen=True)
class Chunk:
    """Texts that are captured together.

    Attributes:
        texts: positions of the first and one past the last in the list of all texts.
    """

    texts: range
    digest: str
    num_tokens: int


def chunks_of(texts: Sequence[Text]) -> list[Chunk]:
    """Texts in order. Chunks end where a text's content says so: they are the same again soon
    after something was put in or left out."""
    chunks, first, num_tokens = [], 0, 0
    for i, text in enumerate(texts):
        num_tokens += len(text.tokens)
        ends = num_tokens >= CHUNK_TOKENS and text.number_by_content % _ENDS_ONE_IN == 0
        if ends or num_tokens >= 2 * CHUNK_TOKENS or i + 1 == len(texts):
            chunks.append(Chunk(range(first, i + 1), digest_of(texts[first : i + 1]), num_tokens))
            first, num_tokens = i + 1, 0
    return chunks


class Capture:
    """The states of texts: from disk where they were captured, from the target otherwise.

    Args:
        texts: all of them; none longer than the target's context.
        taps: the layers that are wanted; the last one is kept in any case, for the logits.
        max_bytes: of all captures in that folder.
    """

    def __init__(
        self,
        target: TrainingTarget,
        texts: Sequence[Text],
        taps: Sequence[int],
        root: Path,
        max_bytes: float,
    ) -> None:
        self._target, self._texts = target, texts
        self.layers = tuple(sorted({*taps, target.last_layer}))
        self._root, self._max_bytes = root, max_bytes
        self._folder = root / target.forward_key
        self._chunks = chunks_of(texts)
        self._places: dict[int, tuple[Chunk, int]] = {}
        for chunk in self._chunks:
            start = 0
            for number in chunk.texts:
                self._places[number] = (chunk, start)
                start += len(texts[number].tokens)
        self._on_disk: set[str] = set()
        self._open: Callable[..., Any] = lru_cache(_MAX_OPEN)(safe_open)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self._chunks)

    @property
    def captured(self) -> set[int]:
        """Positions of the texts whose states are on disk."""
        return {n for chunk in self._chunks if chunk.digest in self._on_disk for n in chunk.texts}

    def fill(self, monitor: Monitor, seconds: float = math.inf) -> bool:
        """Capture missing chunks, up to the size limit.

        Args:
            monitor: shows progress; may pause or stop before each forward.
            seconds: when they are over, no other chunk is begun; one is captured in any case.

        Returns:
            False where time, or a stop, left some of the text unread.

        Raises:
            TrainingError: the disk is full.
        """
        todo = [chunk for chunk in self._chunks if not self._find(chunk)]
        if not todo:
            return True
        total, done = sum(chunk.num_tokens for chunk in todo), 0
        monitor.stage(f"Reading {total} tokens of text")
        room, began = self._max_bytes - self._make_room(), time.monotonic()
        for chunk in todo:
            room -= chunk.num_tokens * self._bytes_per_token()
            if room < 0:
                return True
            if self._on_disk and time.monotonic() - began > seconds:
                return False
            states: list[States] = []
            for group in self._packed(chunk.texts):
                if monitor.wants_stop():
                    return False
                monitor.pause()
                states += [_copied(each) for each in self._read(group)]
                done += sum(len(self._texts[n].tokens) for n in group)
                monitor.advance(done / total)
            self.store(chunk, states)
        return True

    def _bytes_per_token(self) -> int:
        return 2 * self._target.shape.hidden_size * len(self.layers) + 4

    def read(self, numbers: Sequence[int]) -> list[States]:
        """The states of some texts, by their positions in the list of all."""
        stored = {n: self._stored(n) for n in numbers if self._places[n][0].digest in self._on_disk}
        missing = [n for n in numbers if stored.get(n) is None]
        for group in self._packed(missing):
            stored |= dict(zip(group, self._read(group), strict=True))
        return [state for n in numbers if (state := stored[n]) is not None]

    def _read(self, group: Sequence[int]) -> list[States]:
        texts = [self._texts[n] for n in group]
        num_prompts = [text.num_prompt for text in texts]
        return self._target.read([text.tokens for text in texts], self.layers, num_prompts)

    # --------------------------------------------------------------------------------- files

    def _files(self, chunk: Chunk) -> dict[str, Path]:
        folder = self._folder / chunk.digest
        names = [_NORMALISER, *(f"layer-{layer:03d}" for layer in self.layers)]
        return {name: folder / f"{name}.safetensors" for name in names}

    def _find(self, chunk: Chunk) -> bool:
        """Whether a chunk is on disk, in whole."""
        for path in self._files(chunk).values():
            try:
                entries = check_safetensors(path)
            except ModelLoadError:
                return False
            if [each.shape[0] for each in entries.values()] != [chunk.num_tokens]:
                return False
        mark_used(self._folder / chunk.digest)
        self._on_disk.add(chunk.digest)
        return True

    def store(self, chunk: Chunk, states: Sequence[States]) -> None:
        files = self._files(chunk)
        files[_NORMALISER].parent.mkdir(parents=True, exist_ok=True)
        for layer in self.layers:
            x_TE = torch.cat([state.layers[layer] for state in states]).to(torch.bfloat16)
            write_tensors(files[f"layer-{layer:03d}"], {"states": x_TE})
        normaliser_T = torch.cat([state.normaliser_L for state in states]).float()
        write_tensors(files[_NORMALISER], {"states": normaliser_T})
        self._on_disk.add(chunk.digest)

    def _stored(self, number: int) -> States | None:
        """None: it is not there any more."""
        chunk, start = self._places[number]
        stop = start + len(self._texts[number].tokens)
        try:
            read = {
                name: self._open(path, "pt").get_slice("states")[start:stop]
                for name, path in self._files(chunk).items()
            }
        except (OSError, SafetensorError):
            self._on_disk.discard(chunk.digest)
            return None
        layers = {layer: read[f"layer-{layer:03d}"] for layer in self.layers}
        return States(layers, read[_NORMALISER])

    def _packed(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Texts that go into one forward."""
        limit = PACKED_TOKENS[self._target.device.type]
        group: list[int] = []
        num_tokens = 0
        for number in numbers:
            length = len(self._texts[number].tokens)
            if group and num_tokens + length > limit:
                yield group
                group, num_tokens = [], 0
            group.append(number)
            num_tokens += length
        if group:
            yield group

    def _make_room(self) -> int:
        """Bytes that all captures take, after removing old unused ones if necessary."""
        mine = {chunk.digest for chunk in self._chunks}
        folders = [f for f in self._root.glob("*/*") if any(f.glob("*layer-*.safetensors*"))]
        remove_unused(f for f in folders if f.name not in mine)
        folders = [f for f in folders if f.is_dir()]
        sizes = {f: sum(p.stat().st_size for p in f.iterdir()) for f in folders}
        wanted = sum(c.num_tokens for c in self._chunks) * self._bytes_per_token()
        total = sum(sizes.values())
        for folder in sorted(folders, key=lambda f: f.stat().st_mtime):
            old = time.time() - folder.stat().st_mtime > _KEPT_S
            if total + wanted > self._max_bytes and old and folder.name not in mine:
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]
        return total


def _copied(states: States) -> States:
    """On the CPU, independent of the forward's own memory."""
    layers = {layer: x_LE.to("cpu", copy=True) for layer, x_LE in states.layers.items()}
    return States(layers, states.normaliser_L.to("cpu", copy=True))


def as_rows(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Tensors [L, …] one below the other [B, length, …] on their device, filled up with zeros."""
    rows = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    for row, tensor in zip(rows, tensors, strict=True):
        row[: len(tensor)] = tensor
    return rows
