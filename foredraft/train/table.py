"""Learn a table of n-grams, measure it on text that was kept from it, and write its folder.

It counts contexts of one to five tokens in replies. The distribution of a context's successors is
interpolated with those of shorter contexts, and a context is dropped if a shorter one predicts
about the same.

Shape legend: T tokens of all texts, N places of a reply where a context fits, G contexts of one
length, K successors kept of each, C contexts that are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.core.errors import ConfigError
from foredraft.drafters.text.suffix import SuffixText
from foredraft.drafters.text.table import (
    BOTH,
    KIND,
    LONGEST,
    NO_SHARES,
    NUM_CLASSES,
    NUM_SUCCESSORS,
    SEEDS,
    SITUATIONS,
    NgramTable,
    TableText,
    load_table,
)
from foredraft.drafters.trained import META, HeadInfo, TargetIdentity, read_info, write_folder
from foredraft.models.files.progress import Progress
from foredraft.train.acceptance import shares_by_depth
from foredraft.train.folder import check_out, how_it_was_made
from foredraft.train.options import TableOptions
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, split_texts, usable
from foredraft.version import __version__

TABLE, COPIES = "table", "earlier matches"
"""Sources of guesses, beside `BOTH`."""
BY_DEPTH = "by depth"
_DEPTH = 3
_PRIOR_TRIALS = 20.0
_HELD_OUT_TEXTS = 200
_SEPARATOR = np.uint64(1 << 40)
_DOUBT = 4.0
"""A context seen this often weighs as much as the shorter ones."""
_SAME = 0.2
"""A context is dropped if a shorter one predicts the same token with about the same probability."""
_CHANCE_WORTH = 0.2
"""Tokens named right that one more exact chance of the same token is worth."""
_ENTRY_BYTES = 4 + NUM_SUCCESSORS * 3
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class _Order:
    """All contexts of one length.

    Attributes:
        keys_G: their hashes.
        gains_G: cases that each is worth: see `_gains`.
        tokens_GK, chances_GK: successors, interpolated.
        best_G, chance_G: likeliest successor and its chance, as they are stored for the context or
            else for the longest shorter one of it.
        is_stored_G: whether it is stored itself.
        group_T: number of the context before each token; -1: none.
    """

    keys_G: NDArray[np.uint64]
    gains_G: Floats
    tokens_GK: Ints
    chances_GK: Floats
    best_G: Ints
    chance_G: Floats
    is_stored_G: NDArray[np.bool_]
    group_T: Ints


def learn_table(texts: Sequence[Text], vocab_size: int, options: TableOptions) -> NgramTable:
    """A table of what followed what in replies; contexts may reach back into the prompts."""
    tokens_T, is_reply_T = _joined(texts)
    hashes_T = np.zeros(len(tokens_T), np.uint64)
    fits_T, orders = is_reply_T, list[_Order]()
    for length in range(1, LONGEST + 1):
        front_T = np.roll(tokens_T, length)
        front_T[:length] = _SEPARATOR
        fits_T = fits_T & (front_T != _SEPARATOR)
        hashes_T = _next_hashes(hashes_T, front_T)
        places_N = np.nonzero(fits_T)[0]
        if not len(places_N):
            break
        shorter = orders[-1] if orders else None
        orders.append(_count(tokens_T, hashes_T, places_N, shorter, options.min_count))
    return _stored(orders, vocab_size, options)


def _joined(texts: Sequence[Text]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """All tokens, a separator behind each text, and which of them are of replies."""
    tokens, is_reply = [], []
    for text in texts:
        tokens += [text.tokens.astype(np.uint64), np.array([_SEPARATOR])]
        is_reply.append(np.arange(len(text.tokens) + 1) >= text.num_prompt)
        is_reply[-1][-1] = False
    empty = np.empty(0, np.uint64), np.empty(0, bool)
    return (np.concatenate(tokens), np.concatenate(is_reply)) if texts else empty


def _next_hashes(hashes_T: NDArray[np.uint64], front_T: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`foredraft.drafters.text.table.next_hash` of each."""
    mixed = hashes_T * np.uint64(SEEDS[0]) + front_T + np.uint64(1)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(SEEDS[1])
    return mixed ^ (mixed >> np.uint64(32))


def _count(
    tokens_T: NDArray[np.uint64],
    hashes_T: NDArray[np.uint64],
    places_N: Ints,
    shorter: _Order | None,
    min_count: int,
) -> _Order:
    keys_G, first_G, group_N = np.unique(hashes_T[places_N], return_index=True, return_inverse=True)
    own_tokens_GK, counts_GK, totals_G = _most_frequent(
        group_N, tokens_T[places_N].astype(np.int64), len(keys_G)
    )
    weights_G1 = (totals_G / (totals_G + _DOUBT))[:, None]
    own_GK = weights_G1 * counts_GK / totals_G[:, None]
    tokens_GK, chances_GK = own_tokens_GK, own_GK
    backoff_G, backoff_chance_G = np.full(len(keys_G), -1), np.zeros(len(keys_G))
    if shorter is not None:
        parent_G = shorter.group_T[places_N[first_G]]
        less_GK = (1.0 - weights_G1) * shorter.chances_GK[parent_G]
        tokens_GK, chances_GK = _merged(own_tokens_GK, own_GK, shorter.tokens_GK[parent_G], less_GK)
        backoff_G, backoff_chance_G = shorter.best_G[parent_G], shorter.chance_G[parent_G]
    best_G, chance_G = tokens_GK[:, 0], chances_GK[:, 0]
    is_stored_G = (counts_GK[:, 0] >= min_count) & (
        (backoff_G != best_G) | (np.abs(backoff_chance_G - chance_G) > _SAME)
    )
    gains_G = totals_G * _gains(tokens_GK, chances_GK, backoff_G, backoff_chance_G)
    best_G = np.where(is_stored_G, best_G, backoff_G)
    chance_G = np.where(is_stored_G, chance_G, backoff_chance_G)
    group_T = np.full(len(tokens_T), -1, np.int64)
    group_T[places_N] = group_N
    return _Order(keys_G, gains_G, tokens_GK, chances_GK, best_G, chance_G, is_stored_G, group_T)


def _gains(
    tokens_GK: Ints, chances_GK: Floats, backoff_G: Ints, backoff_chance_G: Floats
) -> Floats:
    """The gain of a stored context each time it is seen, over back-off to the next shorter one.

    Args:
        backoff_G, backoff_chance_G: the shorter context's likeliest successor and its probability;
            -1: none.
    """
    best_G = chances_GK[:, 0]
    named_right_G = best_G - np.where(tokens_GK == backoff_G[:, None], chances_GK, 0.0).sum(1)
    better_chance_G = _CHANCE_WORTH * np.abs(best_G - backoff_chance_G)
    return np.where(tokens_GK[:, 0] == backoff_G, better_chance_G, named_right_G)


def _most_frequent(group_N: Ints, next_N: Ints, num_groups: int) -> tuple[Ints, Ints, Ints]:
    """The K tokens that came most in each group [G, K], how often each, and all cases [G]."""
    width = int(next_N.max()) + 1
    pairs, counts = np.unique(group_N * width + next_N, return_counts=True)
    groups, tokens = pairs // width, pairs % width
    order = np.lexsort((-counts, groups))
    groups, tokens, counts = groups[order], tokens[order], counts[order]
    starts_G = np.searchsorted(groups, np.arange(num_groups))
    ranks = np.arange(len(groups)) - starts_G[groups]
    totals_G = np.add.reduceat(counts, starts_G)
    tokens_GK = np.full((num_groups, NUM_SUCCESSORS), -1, np.int64)
    counts_GK = np.zeros((num_groups, NUM_SUCCESSORS), np.int64)
    kept = ranks < NUM_SUCCESSORS
    tokens_GK[groups[kept], ranks[kept]] = tokens[kept]
    counts_GK[groups[kept], ranks[kept]] = counts[kept]
    return tokens_GK, counts_GK, totals_G


def _merged(
    own_GK: Ints, chances_GK: Floats, shorter_GK: Ints, less_GK: Floats
) -> tuple[Ints, Floats]:
    """The K likeliest of both, the chances of a token that is in both added."""
    chances_GK, less_GK = chances_GK.copy(), less_GK.copy()
    for j in range(own_GK.shape[1]):
        for k in range(shorter_GK.shape[1]):
            same = (own_GK[:, j] == shorter_GK[:, k]) & (own_GK[:, j] >= 0)
            chances_GK[same, j] += less_GK[same, k]
            less_GK[same, k] = 0.0
    tokens = np.concatenate((own_GK, shorter_GK), 1)
    chances = np.where(tokens >= 0, np.concatenate((chances_GK, less_GK), 1), 0.0)
    best = np.argsort(-chances, axis=1, kind="stable")[:, :NUM_SUCCESSORS]
    return np.take_along_axis(tokens, best, 1), np.take_along_axis(chances, best, 1)


def _stored(orders: Sequence[_Order], vocab_size: int, options: TableOptions) -> NgramTable:
    kept = [order.is_stored_G for order in orders]

    def of_all(name: str) -> Any:
        parts = [getattr(o, name)[is_kept] for o, is_kept in zip(orders, kept, strict=True)]
        return np.concatenate(parts)

    if orders:
        keys, gains = of_all("keys_G") & np.uint64(0xFFFFFFFF), of_all("gains_G")
        tokens, chances = of_all("tokens_GK"), of_all("chances_GK")
        most = max(1, int(options.megabytes * 1e6 / _ENTRY_BYTES))
        keys, first = np.unique(keys, return_index=True)  # of two with one key the shorter one
        if len(keys) > most:
            worth = np.sort(np.argsort(-gains[first], kind="stable")[:most])
            keys, first = keys[worth], first[worth]
        tokens, chances = tokens[first], chances[first]
    else:
        keys, tokens = np.empty(0), np.empty((0, NUM_SUCCESSORS))
        chances = np.empty((0, NUM_SUCCESSORS))
    ids = np.uint16 if vocab_size <= 1 << 16 else np.int32
    rounded_CK = np.clip(np.rint(chances * 255.0), 0, 255).astype(np.uint8)
    tokens_CK = np.where(rounded_CK > 0, tokens, 0).astype(ids)
    return NgramTable(
        torch.from_numpy(keys.astype(np.uint32)),
        torch.from_numpy(tokens_CK),
        torch.from_numpy(rounded_CK),
        NO_SHARES,
    )


# ------------------------------------------------------------------------------ measuring


Rights = dict[str, list[list[bool]]]
"""For each text of one kind where the next token was named right: by the table, by what followed
earlier matches in the text, and by both together."""


def _shown(rights: Rights) -> dict[str, Any]:
    """Shares of all places; and of the draft tokens of a chain, by depth."""
    flat = {name: [*chain.from_iterable(texts)] for name, texts in rights.items()}
    places = len(flat[TABLE])
    shares = {name: sum(right) / max(1, places) for name, right in flat.items()}
    depths = {name: shares_by_depth(texts, _DEPTH) for name, texts in rights.items()}
    return {**shares, "places": places, BY_DEPTH: depths}


def measure(
    table: NgramTable, texts: Sequence[Text], progress: Progress
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Measure how often the table predicts the next token on held-out texts.

    Returns:
        Shares of next tokens named right, for people; and the shares by situation and chance that
        `NgramTable.shares` wants.
    """
    kinds = ("greedy", "sampled")
    rights: dict[str, Rights] = {n: {name: [] for name in (TABLE, COPIES, BOTH)} for n in kinds}
    hits = {n: np.zeros((SITUATIONS, NUM_CLASSES)) for n in kinds}
    trials = {n: np.zeros((SITUATIONS, NUM_CLASSES)) for n in kinds}
    for number, text in enumerate(texts, start=1):
        name = "sampled" if text.temperature else "greedy"
        _tally(table, text, rights[name], hits[name], trials[name])
        progress.advance(number / len(texts))
    middles = (np.arange(NUM_CLASSES) + 0.5) / NUM_CLASSES
    shares = {
        n: ((hits[n] + _PRIOR_TRIALS * middles) / (trials[n] + _PRIOR_TRIALS)).tolist()
        for n in kinds
    }
    return {name: _shown(each) for name, each in rights.items()}, shares


def _tally(
    table: NgramTable,
    text: Text,
    rights: Rights,
    hits: Floats,
    trials: Floats,
) -> None:
    tokens = text.tokens.tolist()
    follower = TableText(tokens[: text.num_prompt], table, bool(text.temperature))
    own = SuffixText(tokens[: text.num_prompt])
    right: dict[str, list[bool]] = {name: [] for name in rights}
    for i in range(text.num_prompt, len(tokens)):
        named = table.successors(tokens[max(0, i - LONGEST) : i])
        copied = next(own.successors(own.place), None)
        opinion = follower.opinion(follower.place)
        right[TABLE].append(bool(named) and named[0][0] == tokens[i])
        right[COPIES].append(copied is not None and copied[0] == tokens[i])
        right[BOTH].append(bool(opinion.chances) and opinion.first == tokens[i])
        if opinion.chances:
            hits[opinion.situation, opinion.chance_class] += right[BOTH][-1]
            trials[opinion.situation, opinion.chance_class] += 1
        follower.commit(tokens[i])
        own.commit(tokens[i])
    for name, found in right.items():
        rights[name].append(found)


def train_table(
    target: TrainingTarget,
    texts: Sequence[Text],
    out: Path,
    options: TableOptions,
    provenance: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Learn a table from texts, measure it on those that are kept from it, and write its folder.

    A table that is there is replaced only by one that names as many tokens right.

    Returns:
        The measured shares.

    Raises:
        ConfigError: the texts are another model's, all of them are kept from it, or the folder
            holds something better, or something else.
        TrainingError: it cannot be written.
    """
    kept = kept_table(target, out)
    whole = usable(texts, target.shape.vocab_size, target.max_context)
    trained, held_out = split_texts(whole)
    learnt = [whole[n] for n in trained]
    apart = max(1, -(-len(held_out) // _HELD_OUT_TEXTS))  # those of one source stand together
    tested = [whole[n] for n in held_out[::apart]]
    num_tokens = sum(len(text.reply_ids) for text in learnt)
    progress.stage(f"Counting {num_tokens} tokens of replies")
    table = learn_table(learnt, target.shape.vocab_size, options)
    progress.stage("Measuring on held-out replies")
    measured, shares = measure(table, tested, progress)
    if kept is not None:
        _check_no_worse(measured, measure(kept, tested, progress)[0], out)
    made = {**provenance, "texts": len(learnt), "reply tokens": num_tokens}
    made |= {"contexts": len(table), "min_count": options.min_count, "foredraft": __version__}
    info = HeadInfo(KIND, {"shares": shares}, target.shape, target.identity, made, measured)
    card = _card(target.identity, measured, made)
    write_folder(out, info, table.tensors, card)
    return measured


def kept_table(target: TrainingTarget, out: Path) -> NgramTable | None:
    """The table that a folder holds; None: nothing is there.

    Raises:
        ConfigError: the folder holds a head, or the table of another target.
    """
    if (out / META).exists() and read_info(out).kind == KIND:
        return load_table(out, target.identity, target.shape.vocab_size)
    check_out(out, KIND)
    return None


def _check_no_worse(new: Mapping[str, Any], kept: Mapping[str, Any], out: Path) -> None:
    def score(measured: Mapping[str, Any]) -> float:
        rights = sum(part[TABLE] * part["places"] for part in measured.values())
        return float(rights / max(1, sum(part["places"] for part in measured.values())))

    if score(new) < score(kept):
        raise ConfigError(
            f"{out} holds a better table: of the same held-out replies it names {score(kept):.3f} "
            f"of the tokens right, and the new one {score(new):.3f}. It was left as it is; give "
            "more text, another --out, or --replace"
        )


def _card(target: TargetIdentity, measured: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {name} | {part[TABLE]:.3f} | {part[COPIES]:.3f} | {part[BOTH]:.3f} "
        f"| {part['places']:,} |"
        for name, part in measured.items()
    )
    return f"""\
# A table of what {target.name} writes

What followed the last one to five tokens in text that **{target.name}** (fingerprint
`{target.fingerprint}`) wrote before, for drafting in foredraft. It computes nothing; the
target checks every guess.

```sh
foredraft generate "…" --model {target.name} --drafter table --drafter-option head=THIS_FOLDER
```

## Next tokens named right in held-out replies

| replies | the table | earlier matches in the text | both | places |
|---|---|---|---|---|
{rows}

{how_it_was_made(made)}"""
