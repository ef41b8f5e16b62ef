"""Confidence intervals of macro speed-ups: a paired bootstrap over prompts, within categories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.bench.gains import interval, resampled

_PERCENTILES = (2.5, 97.5)


def with_intervals(
    lines: Sequence[Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Lines of the table "overall" with the 95 % interval of their speed-up, ``low`` and ``high``.

    Both are None where a category has a single prompt.

    Args:
        trials: of the same results file, in its order. Older files do not hold ``num_first``, the
            number of tokens that came first: it counts as 1 there.
    """
    found = []
    for line in lines:
        ours, plain = (
            [t for t in trials if (t["contender"], t["temperature"]) == (name, line["temperature"])]
            for name in (line["contender"], "none")
        )
        categories = defaultdict[str, list[list[float]]](list)
        for mine, theirs in zip(ours, plain, strict=True):
            categories[mine["category"]].append([*_decoding(mine), *_decoding(theirs)])
        low, high = _of_macro(line["speedup"], [np.array(rows) for rows in categories.values()])
        found.append({**line, "low": low, "high": high})
    return found


def _decoding(trial: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens and seconds behind the first tokens."""
    num_first = trial.get("num_first", 1)
    return trial["num_tokens"] - num_first, trial["total_s"] - trial["first_s"]


def _of_macro(
    speedup: float, categories: Sequence[NDArray[Any]]
) -> tuple[float | None, float | None]:
    """The interval, from tokens and seconds of ours, then of plain decoding: [prompts, 4] each."""
    if min(map(len, categories)) < 2:
        return None, None
    random = np.random.default_rng(0)
    sums = (resampled(totals_P4, random).T for totals_P4 in categories)
    by_category = [ours / our_s * plain_s / plain for ours, our_s, plain, plain_s in sums]
    return interval(speedup, np.mean(by_category, axis=0), _PERCENTILES)
