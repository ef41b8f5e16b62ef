"""Tiny random encoder-decoders of several families, and an explicit one without weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from foredraft.core.rules.bans import ModelBans
from foredraft.models.base import Capabilities, Encoder, ScoreRow, Scores
from foredraft.models.hf.encoder_decoder import EncoderDecoderTarget
from foredraft.models.table import TableModel
from tests.models.checkpoints import VOCAB_SIZE

START, END = 0, 1
DRAFTERS = ("suffix", "ngram", "prediction", "token_recycling", "draft_model", "cascade")
"""Drafters for encoder-decoders: from texts, or by another model."""
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": START,
    "bos_token_id": START,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}


def t5_config(vocab_size: int = VOCAB_SIZE, **more: Any) -> transformers.T5Config:
    """Of a decoder that is less deep than the encoder."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3}
    tokens = {"pad_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    kind = {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    return transformers.T5Config(vocab_size=vocab_size, **{**sizes, **tokens, **kind, **more})


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "t5": t5_config,
    "bart": lambda: transformers.BartConfig(vocab_size=VOCAB_SIZE, **_BART),
    "marian": lambda: transformers.MarianConfig(vocab_size=VOCAB_SIZE, **_BART),
}


@functools.cache
def tiny(kind: str = "t5", seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Any:
    """A model in float32 with weights wide enough for distributions with some shape."""
    config = t5_config(vocab_size) if kind == "t5" else CONFIGS[kind]()
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.25 * noise)
        model.get_output_embeddings().weight.mul_(2.0)
    return model.eval()


def new_target(kind: str = "t5", seed: int = 0, **options: Any) -> EncoderDecoderTarget:
    return EncoderDecoderTarget(tiny(kind, seed), **options)


class SourceTable(TableModel):
    """A table whose distributions depend on a source: see `foredraft.models.base.Encoder`.

    Args:
        conditional: from a source and the tokens so far to probabilities.
    """

    def __init__(
        self,
        vocab_size: int,
        conditional: Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float]],
    ) -> None:
        def joined(text: tuple[int, ...]) -> Sequence[float]:
            return conditional(text[: text.index(-1)], text[text.index(-1) + 1 :])

        super().__init__(vocab_size, joined)
        self.capabilities = Capabilities(
            tree_attention=True, encoder=Encoder((START,), 1000, ModelBans())
        )
        self._source: tuple[int, ...] = ()

    def _score_row(self, row: ScoreRow, taps: Sequence[int]) -> Scores:
        self._source = row.source.token_ids if row.source else ()
        return super()._score_row(row, taps)

    def _logits_after(self, context: tuple[int, ...]) -> Tensor:
        return super()._logits_after((*self._source, -1, *context))
