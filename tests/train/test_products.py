"""Matrices are multiplied in a type that the machine is fast at, by the optimiser too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.drafters.registry import head_class
from foredraft.train.optimiser import Muon, orthogonalised
from foredraft.train.progress import Status, expected
from foredraft.train.target import States, TrainingTarget
from tests.train.helpers import Watch, options_of, train, training_target

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv")


class NoSlowProducts(TorchDispatchMode):
    """Counts products, and refuses those of a type other than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[-1] in PRODUCTS:
            self.count += 1
            assert {each.dtype for each in args if isinstance(each, Tensor)} == {torch.float32}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_where_bfloat16_is_slow_nothing_is_multiplied_in_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    target = training_target(checkpoint, dtype=torch.bfloat16)
    options = options_of(tokens=2000, evaluations=1, float32=False)
    with monkeypatch.context() as context:
        read = TrainingTarget.read
        products = NoSlowProducts()

        def reading(self: TrainingTarget, *args: Any) -> list[States]:
            with torch.utils._python_dispatch._disable_current_modes():
                return read(self, *args)  # products of the forward are the target's matter

        context.setattr(TrainingTarget, "read", reading)
        with products:
            train(target, tmp_path / "head", kind=head_class(kind), options=options)
    assert products.count > 100


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_it_is_the_muon_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(4, *shape)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimisers = (
        Muon([mine], 0.02, 0.01, torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for gradient in gradients:
        for weight, optimiser in zip((mine, theirs), optimisers, strict=True):
            weight.grad = gradient.clone()
            optimiser.step()
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=2e-3)
    singular = torch.linalg.svdvals(orthogonalised(gradients[0], torch.float32))
    assert 0.3 < float(singular.min()) <= float(singular.max()) < 1.3


def test_a_normaliser_is_that_of_the_whole_head_and_of_replies_alone(
    target: TrainingTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [torch.arange(3, 12).numpy(), torch.arange(40, 46).numpy()]
    whole = target.read(texts, [])
    monkeypatch.setattr("foredraft.train.target._LOGITS_AT_ONCE", 4 * target.shape.vocab_size)
    for states, some, num_prompt in zip(whole, target.read(texts, [], [4, 1]), (4, 1), strict=True):
        first = num_prompt - 1
        torch.testing.assert_close(some.normaliser_L[first:], states.normaliser_L[first:])
        assert not some.normaliser_L[:first].any()
        (last_LE,) = states.layers.values()
        logits_LV = target.parts.norm(last_LE).float() @ target.head().T
        torch.testing.assert_close(
            states.normaliser_L, logits_LV.logsumexp(-1), rtol=0.0, atol=0.02
        )


def test_the_pace_of_a_run_is_said_and_too_few_steps_are_called_so(
    target: TrainingTarget, tmp_path: Path
) -> None:
    watch = Watch()
    train(target, tmp_path / "head", watch=watch)
    (line,) = watch.said
    assert "tokens a second" in line
    assert "Fewer than 200 steps teach a head too little" in line
    status = Status(0.01, 3000, 6.0, 1.0, (), 500.0, 594.0, None)
    assert expected(status, 6, 0.0).startswith("500 tokens a second: about 600 steps in all, until")
    assert "too little" not in expected(status, 6, 0.0)
    assert "they take 20 minutes of learning here" in expected(status, 1, 0.0)
