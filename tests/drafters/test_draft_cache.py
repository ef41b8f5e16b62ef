"""A draft model's cache: long texts are read in pieces, and what was rejected is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters.base import DraftRow
from foredraft.drafters.model.chain import DraftCache
from foredraft.models.base import ScoreRow, Scores
from foredraft.models.table import TableModel


class Watched(TableModel):
    """Notes how many tokens each forward reads, and whether it is to say something."""

    read: list[tuple[int, bool]]

    def score(self, rows: Sequence[ScoreRow], taps: Sequence[int] = ()) -> Scores:
        self.read = [*getattr(self, "read", []), *((len(r.pending), r.wants_logits) for r in rows)]
        return super().score(rows, taps)


def test_a_long_text_is_read_in_pieces_but_for_its_end() -> None:
    model = Watched.random(50, seed=1)
    cache, tokens = DraftCache(model), [i % 50 for i in range(1300)]
    cache.begin(DraftRow.of(0, tokens))
    pending = cache.catch_up(DraftRow.of(0, tokens))
    assert pending == tokens[1024:]
    assert model.read == [(512, False), (512, False)]
    assert model.cache.context(cache.slot(0)) == tuple(tokens[:1024])
    model.score([ScoreRow(cache.slot(0), pending)])
    cache.keep(0, pending)
    assert cache.catch_up(DraftRow.of(0, [*tokens, 7])) == [7]
    assert cache.catch_up(DraftRow.of(0, [*tokens[:1100], 3])) == [3]


def test_something_is_always_left_to_read() -> None:
    cache = DraftCache(TableModel.random(5, seed=1))
    for request_id, size in enumerate((1, 512, 513, 1024, 1025)):
        cache.begin(DraftRow.of(request_id, [1] * size))
        assert len(cache.catch_up(DraftRow.of(request_id, [1] * size))) in (1, 2, 511, 512)
