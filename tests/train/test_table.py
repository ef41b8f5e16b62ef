"""Learning a table: many places at once, as one by one; measured on text that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters.text.table import next_hash
from foredraft.models.files.progress import SilentProgress
from foredraft.train.options import TableOptions
from foredraft.train.table import _next_hashes, learn_table, measure, train_table
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text


def test_contexts_have_the_same_keys_here_and_there() -> None:
    generator = np.random.default_rng(0)
    fronts = generator.integers(0, 1 << 20, (4, 50))
    hashes, expected = np.zeros(50, np.uint64), [0] * 50
    for row in fronts:
        hashes = _next_hashes(hashes, row.astype(np.uint64))
        expected = [next_hash(h, int(t)) for h, t in zip(expected, row, strict=True)]
    assert hashes.tolist() == expected


def test_what_is_named_right_is_measured_by_kind_of_text() -> None:
    tokens = np.array([0, 1, 2, 3, 4, 5, 6, 7], np.int64)
    table = learn_table([Text(tokens, 1)] * 5, 50, TableOptions())
    odd = np.array([20, 1, 2, 30, 31, 32], np.int64)
    measured, shares = measure(table, [Text(tokens, 1), Text(odd, 1, 1.0)], SilentProgress())
    assert measured["greedy"]["table"] == measured["greedy"]["with earlier matches"] == 1.0
    assert measured["greedy"]["places"] == 7
    # 1 follows nothing known, 2 follows 1; then 3 is said, and nothing more is known.
    assert measured["sampled"]["table"] == pytest.approx(1 / 5)
    assert all(0.0 < share < 1.0 for rows in shares.values() for row in rows for share in row)


def test_nothing_to_learn_from_is_said(target: TrainingTarget, tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(ConfigError, match="no replies"):
        train_table(target, [], Path(str(tmp_path)), TableOptions(), {}, SilentProgress())
