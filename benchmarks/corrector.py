"""A model that corrects made sentences: flan-t5-small, trained on for some minutes.

In corrections a reply is its source but for a few words, so they are where copies pay most; and
there is no small corrector in a package. ``python -m benchmarks.corrector FOLDER`` trains one for
so many minutes, goes on with what the folder holds, and says how many new texts it corrects without
a fault. Beside the model it writes ``prompts.jsonl``, those texts for ``foredraft measure``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.flan_t5 import write_model
from foredraft.cli.main import exit_with_message
from foredraft.models.text.tokenizer import Tokenizer

_PARTS = (
    "the teacher, my sister, an old sailor, the new doctor, our neighbour, a young farmer, "
    "the baker, his uncle, the tall gardener, her friend, the captain, a quiet student",
    "carries, paints, cleans, finds, brings, repairs, opens, describes, sells, watches, draws",
    "an apple, the wooden box, a yellow umbrella, an engine, the letter, a heavy coat, "
    "an empty bottle, an orange lamp, the broken window, a small boat, the garden gate",
    "behind the station, near the river, in the market, under the bridge, at school, "
    "beside the harbour, in front of the library, outside the village, on the old road",
    "every morning, on Sunday, before breakfast, after the rain, in December, at night, "
    "when the bell rings, because it is late, while the others sleep, during the summer",
)
"""Of a sentence, one of each line."""
_CHOICES = [part.split(", ") for part in _PARTS]
_NUM_SENTENCES = 4
_BATCH = 8
_RATE = 5e-4
_LAYERS = ("encoder.block", "decoder.block")
"""Embeddings and head are left as they are."""


def correct_text(draw: random.Random) -> str:
    """Some sentences without a fault."""
    sentences = [" ".join(map(draw.choice, _CHOICES)) for _ in range(_NUM_SENTENCES)]
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in sentences)


def with_faults(draw: random.Random, text: str) -> str:
    """About one fault a sentence: a wrong form, two letters in each other's place, a word twice."""
    words = []
    for word in text.split():
        if draw.random() > 0.25:
            words.append(word)
        elif word in _CHOICES[1]:
            words.append(word.removesuffix("s"))
        elif len(word) > 5:
            words.append(word[0] + word[2] + word[1] + word[3:])
        elif word == "an":
            words.append("a")
        elif word in ("the", "in", "of"):
            words += [word, word]
        else:
            words.append(word)
    return " ".join(words)


def train(model: Any, tokenizer: Tokenizer, minutes: float, draw: random.Random) -> float:
    """Train for so many minutes; the loss at the end, averaged over some steps."""
    weights = [w for name, w in model.named_parameters() if name.startswith(_LAYERS)]
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    optimiser = torch.optim.AdamW(weights, lr=_RATE, weight_decay=0.0)
    until, mean_loss, step = time.monotonic() + 60 * minutes, 0.0, 0
    while time.monotonic() < until:
        step += 1
        optimiser.param_groups[0]["lr"] = _RATE * min(1.0, step / 20)
        right = [correct_text(draw) for _ in range(_BATCH)]
        source_BS = _padded([tokenizer.encode(with_faults(draw, text)) for text in right], 0)
        target_BT = _padded([tokenizer.encode(text) for text in right], -100)
        loss = model(
            input_ids=source_BS, attention_mask=(source_BS != 0).long(), labels=target_BT
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        mean_loss = loss.item() if step == 1 else 0.9 * mean_loss + 0.1 * loss.item()
        if step % 20 == 0:
            sys.stderr.write(f"step {step}: loss {mean_loss:.3f}\n")
    return mean_loss


def _padded(rows: list[list[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def write_prompts(path: Path, count: int) -> dict[str, str]:
    """Texts with faults for `foredraft measure`; these with what is right."""
    draw, texts = random.Random("texts to measure with"), dict[str, str]()
    while len(texts) < count:
        right = correct_text(draw)
        texts[with_faults(draw, right)] = right
    lines = [
        json.dumps({"id": f"correction-{i}", "category": "corrections", "turns": [text]})
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return texts


def corrector(
    folder: Annotated[Path, typer.Argument(help="Where the model is, or will be.")],
    minutes: Annotated[float, typer.Option(min=0, help="To train; 0: only look at it.")] = 4.0,
    prompts: Annotated[int, typer.Option(min=1, help="Texts to measure with.")] = 12,
) -> None:
    """Train a corrector of made sentences, or train it on."""
    from transformers import AutoModelForSeq2SeqLM

    if not (folder / "model.safetensors").is_file():
        write_model(folder)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), Tokenizer(folder)
    if minutes:
        draw = random.Random(time.time_ns())  # a later call sees other texts
        typer.echo(f"loss {train(model.train(), tokenizer, minutes, draw):.4f}")
        model.save_pretrained(folder)
    texts, num_right = write_prompts(folder / "prompts.jsonl", prompts), 0
    for wrong, right in texts.items():
        ids = torch.tensor([tokenizer.encode(wrong)])
        written = model.eval().generate(ids, max_new_tokens=160, do_sample=False)
        num_right += tokenizer.decode(written[0].tolist(), skip_special_tokens=True) == right
    typer.echo(f"{num_right} of {len(texts)} new texts are corrected without a fault")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(corrector)
    exit_with_message(app)
