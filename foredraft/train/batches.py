"""Batches of texts, in an order that a seed fixes.

A text that is longer than a row becomes several windows. Each window includes some context before
its trained tokens, and every token of a reply is trained once.

Shape legend: B texts, L tokens of the longest, T positions in replies, E hidden size, R output
rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft.train.capture import Capture, as_rows
from foredraft.train.heads.base import TextBatch
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text

_SORTED_BATCHES = 16
"""Batches whose texts are sorted by length together, so that batches have rows of similar
length."""


@dataclass(frozen=True)
class Window:
    """A stretch of a text.

    Attributes:
        text: its position in the list of all.
        start: its first token.
        stop: one past its last.
        learnt_from: first trained token.
    """

    text: int
    start: int
    stop: int
    learnt_from: int

    def __len__(self) -> int:
        return self.stop - self.start


def windows_of(number: int, text: Text, length: int) -> list[Window]:
    """Windows of at most ``length`` tokens that show all of a reply."""
    num_tokens, windows = len(text.tokens), []
    start, learnt_from = 0, text.num_prompt
    if num_tokens > length:
        start = max(0, learnt_from - length // 2)
    while learnt_from < num_tokens:
        stop = min(start + length, num_tokens)
        windows.append(Window(number, start, stop, learnt_from))
        start, learnt_from = stop - length // 2, stop
    return windows


def batches_of(
    windows: Sequence[Window], batch_tokens: int, seed: int, epoch: int
) -> list[list[Window]]:
    """All windows in batches of limited tokens, padding included; shuffled by the seed."""
    draw = random.Random(f"{seed} {epoch}")
    shuffled = list(windows)
    draw.shuffle(shuffled)
    mean = sum(map(len, windows)) / max(1, len(windows))
    group = max(1, int(_SORTED_BATCHES * batch_tokens / max(1.0, mean)))
    batches: list[list[Window]] = []
    for first in range(0, len(shuffled), group):
        batches += _cut(sorted(shuffled[first : first + group], key=len), batch_tokens)
    draw.shuffle(batches)
    return batches


def _cut(windows: Sequence[Window], batch_tokens: int) -> list[list[Window]]:
    """Windows that become longer, in batches."""
    batches: list[list[Window]] = []
    batch: list[Window] = []
    for window in windows:
        if batch and (len(batch) + 1) * len(window) > batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(window)
    return [*batches, batch] if batch else batches


@dataclass(frozen=True)
class Teacher:
    """The target's distribution of each reply token, given the tokens before it.

    Attributes:
        last_TE: normed output of the last layer at the token before.
        normaliser_T: log of the sum of exponentials of the logits over the whole vocabulary.
        rows_BL: which of the T positions is about each token; -1: none.
    """

    last_TE: Tensor
    normaliser_T: Tensor
    rows_BL: Tensor

    def log_probs(self, head_RE: Tensor, rows_T: Tensor | slice = slice(None)) -> Tensor:
        """Log probabilities [T, R] of some tokens, computed in the dtype of their rows."""
        logits_TR = self.last_TE[rows_T].to(head_RE.dtype) @ head_RE.T
        return logits_TR.float() - self.normaliser_T[rows_T, None]


@dataclass(frozen=True)
class TrainBatch:
    """The data of one training step.

    Attributes:
        anchors_BL: whether a position may be the last token that the target has read when a
            reply is drafted.
        temperatures_B: that the replies were drawn at.
        num_tokens: without padding.
    """

    texts: TextBatch
    teacher: Teacher
    anchors_BL: Tensor
    temperatures_B: Tensor
    num_tokens: int


def load_batch(
    windows: Sequence[Window],
    texts: Sequence[Text],
    capture: Capture,
    target: TrainingTarget,
    dtype: torch.dtype,
) -> TrainBatch:
    """Read a batch's states and bring them to the target's device."""
    states = capture.read([window.text for window in windows])
    length, device = max(map(len, windows)), target.device
    spans = [slice(window.start, window.stop) for window in windows]
    ids = [torch.from_numpy(texts[w.text].tokens[w.start : w.stop]) for w in windows]
    tokens_BL = as_rows(ids, length).to(device)
    taps = {
        layer: as_rows(
            [s.layers[layer][span] for s, span in zip(states, spans, strict=True)], length
        ).to(device)
        for layer in capture.layers
    }
    normaliser_BL = as_rows(
        [s.normaliser_L[span] for s, span in zip(states, spans, strict=True)], length
    ).to(device)
    batch = TextBatch(
        tokens_BL,
        torch.tensor([len(window) for window in windows], device=device),
        target.parts.embed(tokens_BL.ravel()).view(*tokens_BL.shape, -1).to(dtype),
        {layer: x_BLE.to(dtype) for layer, x_BLE in taps.items()},
    )
    learnt_BL = _marked(windows, length, lambda w: (w.learnt_from, w.stop)).to(device)
    last_BLE = taps[target.last_layer]
    before_BL = learnt_BL.roll(-1, 1)  # the position whose output is about each such token
    before_BL[:, -1] = False
    learnt_BL[:, 0] = False
    rows_BL = torch.where(learnt_BL, learnt_BL.flatten().cumsum(0).view_as(learnt_BL) - 1, -1)
    teacher = Teacher(target.parts.norm(last_BLE[before_BL]), normaliser_BL[before_BL], rows_BL)
    anchors_BL = _marked(windows, length, lambda w: (w.learnt_from - 1, w.stop)).to(device)
    temperatures_B = torch.tensor([texts[w.text].temperature for w in windows], device=device)
    return TrainBatch(batch, teacher, anchors_BL, temperatures_B, sum(map(len, windows)))


def _marked(
    windows: Sequence[Window], length: int, span_of: Callable[[Window], tuple[int, int]]
) -> Tensor:
    """True inside a span of each window's text."""
    marked_BL = np.zeros((len(windows), length), bool)
    for row, window in zip(marked_BL, windows, strict=True):
        first, stop = span_of(window)
        row[max(0, first - window.start) : stop - window.start] = True
    return torch.from_numpy(marked_BL)
