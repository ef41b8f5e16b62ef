"""The head's sums stay in float32, whatever its weights are stored in."""

from __future__ import annotations

import pytest
import torch

from foredraft.models.base import ScoreRow
from foredraft.models.native.cuda import GraphedDecoder
from foredraft.models.native.model import (
    DecoderFactory,
    EagerDecoder,
    FixedShapeDecoder,
    head_logits,
)
from foredraft.models.native.quant import INT8, as_tensor
from foredraft.models.native.target import NativeTarget
from tests.models.checkpoints import made


@pytest.mark.parametrize("num_rows", [1, 512, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_as_near_as_float32_comes(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head_VE = torch.randn((num_rows, 96), generator=generator).to(dtype)
    normed_NE = torch.randn((5, 96), generator=generator).to(dtype)
    logits_NV = head_logits(normed_NE, head_VE)
    assert logits_NV.dtype == torch.float32
    assert (logits_NV - normed_NE.double() @ head_VE.double().T).abs().max() < 1e-4
    assert head_logits(normed_NE[:0], head_VE).shape == (0, num_rows)


def test_an_int8_head_is_multiplied_in_float32() -> None:
    head = INT8.of_weight(torch.randn(70, 64))
    normed_NE = torch.randn(3, 64).bfloat16()
    expected_NV = normed_NE.float() @ as_tensor(head, torch.float32).T
    assert torch.equal(head_logits(normed_NE, head), expected_NV)


@pytest.mark.parametrize("new_decoder", [EagerDecoder, FixedShapeDecoder, GraphedDecoder])
def test_no_decoder_rounds_its_logits(new_decoder: DecoderFactory) -> None:
    """Rounded to bfloat16, hundreds of logits share a few dozen values."""
    target = NativeTarget.load(made("llama"), torch.bfloat16, new_decoder=new_decoder)
    for tokens in ([3], [5] * 20):
        [scores] = target.score([ScoreRow(target.cache.allocate(), tokens)])
        assert scores.logits_NV.dtype == torch.float32
        assert not torch.equal(scores.logits_NV, scores.logits_NV.bfloat16().float())
        assert len(scores.logits_NV.unique()) > 0.9 * target.vocab_size
