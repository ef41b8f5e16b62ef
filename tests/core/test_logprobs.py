"""Log probabilities by themselves: in float64, whatever the logits come in."""

from __future__ import annotations

import pytest
import torch

from foredraft.core.logprobs import TokenLogprobs


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_they_are_computed_in_float64(kind: torch.dtype) -> None:
    logits_V = (torch.randn(50_000, generator=torch.Generator().manual_seed(3)) * 4).to(kind)
    expected_V = torch.log_softmax(logits_V.double(), 0)
    found = TokenLogprobs.of(logits_V, 7, 3)
    assert abs(found.logprob - float(expected_V[7])) < 1e-12
    likeliest = expected_V.topk(3)
    assert [token for token, _ in found.top] == likeliest.indices.tolist()
    for (_, logprob), value in zip(found.top, likeliest.values.tolist(), strict=True):
        assert abs(logprob - value) < 1e-12
