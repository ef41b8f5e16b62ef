"""How often a step waits for the device, counted on a tensor that only pretends to be on one.

Every number that Python reads from a device, and every copy to the host, is a transfer. Torch's
dispatch does not see ``tolist`` of a CPU tensor, so they are counted where Python calls torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.control.fixed import FixedBudget
from foredraft.core.choices import DrawKey
from foredraft.core.params import SamplingParams
from foredraft.core.proposal import Proposal
from foredraft.core.record import StepRecord
from foredraft.core.sampling import Law, law_of
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.base import DraftRow
from foredraft.models import base as models_base
from foredraft.models.base import DeviceDraw, ScoreRow, Scores
from foredraft.models.native.cuda import RecordedDraws
from foredraft.models.table import TableModel
from tests.engine.helpers import ScriptedDrafter, engine_of

VOCAB = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, seed=5)
WARM = replace(GREEDY, temperature=0.8)
FILTERED = replace(GREEDY, temperature=1.2, top_k=6, top_p=0.9, min_p=0.02)
DRAWN = replace(WARM, coupling="drawn")


class DeviceTensor(Tensor):
    """A tensor that counts what is read from it; what is computed from it is one, too."""

    num_transfers = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _READS:
            return super().__torch_function__(func, types, args, kwargs)
        DeviceTensor.num_transfers += 1
        args = [a.as_subclass(Tensor) if isinstance(a, DeviceTensor) else a for a in args]
        return func(*args, **(kwargs or {}))


_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.to,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__array__,
    Tensor.__iter__,
    torch.equal,
    torch.nonzero,
}


class DeviceTarget(TableModel):
    """Tables whose scores pretend to be on a device."""

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        scores = super().score(rows, taps)
        return replace(scores, logits_NV=scores.logits_NV.as_subclass(DeviceTensor))


def table(context: tuple[int, ...]) -> list[float]:
    weights = [1.0 + (7 * token + sum(context[-2:])) % VOCAB for token in range(VOCAB)]
    return [weight / sum(weights) for weight in weights]


def draft(row: DraftRow) -> Proposal:
    return drawn_chain(row) if row.params.coupling == "drawn" else chosen_tree(row)


def chosen_tree(row: DraftRow) -> Proposal:
    """Chains below two siblings, as large as may be."""
    tokens = [(len(row.tokens) + node) % VOCAB for node in range(row.budget)]
    parents = [ROOT if node < 2 else node - 2 for node in range(row.budget)]
    return Proposal.chosen(TokenTree(tuple(tokens), tuple(parents)))


def drawn_chain(row: DraftRow) -> Proposal:
    drawn = row.draft()
    for node in range(row.budget):
        drawn.extend(node - 1, torch.zeros(VOCAB, dtype=torch.float64))
    return drawn.build()


def transfers(
    requests: Sequence[SamplingParams],
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
    fetches: bool = True,
) -> list[int]:
    """Number of fetches of each step; without ``fetches`` all data counts as on the host."""
    monkeypatch.setattr(
        models_base, "is_on_host", lambda x: not (fetches and isinstance(x, DeviceTensor))
    )
    counts: list[int] = []

    def count(record: StepRecord) -> None:
        counts.append(DeviceTensor.num_transfers)
        DeviceTensor.num_transfers = 0

    DeviceTensor.num_transfers = 0
    target = DeviceTarget(VOCAB, table)
    controller = FixedBudget(budget)
    engine = engine_of(target, ScriptedDrafter(draft), controller, max_batch_size=8, trace=count)
    for number, params in enumerate(requests):
        engine.submit((number, 1, 2), params)
    results = [event.result for event in engine.run() if event.result is not None]
    assert all(result.finish_reason == "length" for result in results)
    assert any(result.stats.drafted for result in results) == (budget > 0)
    return counts


@pytest.mark.parametrize("budget", [0, 1, 4, 9])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_greedy_rows_take_one(num_rows: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(transfers([GREEDY] * num_rows, budget, monkeypatch)) == {1}


@pytest.mark.parametrize("budget", [0, 1, 4, 9])
@pytest.mark.parametrize("params", [WARM, FILTERED, DRAWN], ids=["warm", "filtered", "drawn"])
def test_sampling_rows_take_one_however_many_nodes(
    params: SamplingParams, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(transfers([params] * 4, budget, monkeypatch)) == {1}


def test_a_mixed_batch_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = transfers([GREEDY, WARM, FILTERED, DRAWN, GREEDY], 5, monkeypatch)
    assert max(counts) == 2


@pytest.mark.parametrize("params", [GREEDY, FILTERED, DRAWN], ids=["greedy", "filtered", "drawn"])
def test_without_the_fetch_there_are_many(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the counter counts."""
    assert max(transfers([params] * 3, 5, monkeypatch, fetches=False)) > 3


class FloatTarget(TableModel):
    """Tables whose logits have the dtype of a device's, and are drawn from as there."""

    draw: DeviceDraw

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        scores = super().score(rows, taps)
        return replace(scores, logits_NV=scores.logits_NV.float(), draw=self.draw)


def drawn_here(logits_NV: Tensor, keys: Sequence[DrawKey]) -> list[Law | None]:
    """The draws of a device, by the functions of the host."""
    laws = list[Law | None]()
    for logits_V, key in zip(logits_NV, keys, strict=True):
        temperature = 1.0 / key.scale if key.scale else 0.0
        filters = {"top_k": key.top_k, "top_p": key.top_p, "min_p": key.min_p}
        law = law_of(logits_V, SamplingParams(temperature=temperature, **filters))
        laws.append(replace(law, drawn=key.draw_target(law, 0)))
    return laws


needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(drawn_here, id="host"),
        pytest.param(RecordedDraws(torch.device("cpu")).draw, id="triton", marks=needs_triton),
    ],
)
def test_what_a_device_draws_is_the_same_text(
    draw: DeviceDraw, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [GREEDY, WARM, FILTERED, replace(WARM, logprobs=2), DRAWN]
    texts = []
    for is_device in (False, True):
        monkeypatch.setattr(models_base, "is_on_host", lambda _, here=is_device: not here)
        target, controller = FloatTarget(VOCAB, table), FixedBudget(budget)
        target.draw = draw
        engine = engine_of(target, ScriptedDrafter(draft), controller, max_batch_size=8)
        for number, params in enumerate(requests):
            engine.submit((number, 1, 2), params)
        texts.append({e.request_id: e.result for e in engine.run() if e.result is not None})
    host, device = ({i: r.token_ids for i, r in found.items()} for found in texts)
    assert all(host.values())
    assert host == device
