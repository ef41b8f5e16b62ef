"""Learn a table of n-grams, measure it on text that was kept from it, and write its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.core.errors import ConfigError
from foredraft.drafters.heads.store import Learnt, TargetIdentity, write_folder
from foredraft.drafters.suffix import SuffixText
from foredraft.drafters.table import (
    BOTH,
    KIND,
    LONGEST,
    NUM_CLASSES,
    SITUATIONS,
    NgramTable,
    TableText,
    self_test,
)
from foredraft.train.acceptance import shares_by_depth
from foredraft.train.card import shown
from foredraft.train.ngrams import TablePlan, learn_table
from foredraft.train.target import TrainingTarget
from foredraft.train.texts import Text, usable
from foredraft.version import __version__

TABLE, COPIES = "table", "earlier matches"
"""Who names a token, beside `BOTH`."""
BY_DEPTH = "by depth"
_DEPTH = 3
_PRIOR_TRIALS = 20.0
_HELD_OUT_TEXTS = 200
_TESTED = 64


class _Tally:
    """Where the next token was named right in texts of one kind: for each text, by each.

    Attributes:
        rights: of the table, of what followed earlier matches in the text, and of both together.
    """

    def __init__(self) -> None:
        self.rights: dict[str, list[list[bool]]] = {name: [] for name in (TABLE, COPIES, BOTH)}

    def shown(self) -> dict[str, Any]:
        """Shares of all places; and of the draft tokens of a chain, by depth."""
        flat = {name: [*chain.from_iterable(texts)] for name, texts in self.rights.items()}
        places = len(flat[TABLE])
        shares = {name: sum(rights) / max(1, places) for name, rights in flat.items()}
        depths = {n: shares_by_depth(texts, _DEPTH) for n, texts in self.rights.items()}
        return {**shares, "places": places, BY_DEPTH: depths}


def measure(
    table: NgramTable, texts: Sequence[Text]
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """What it names right in texts that it was not learnt from.

    Returns:
        Shares of next tokens named right, for people; and the shares by situation and chance that
        `NgramTable.shares` wants.
    """
    tallies = {name: _Tally() for name in ("greedy", "sampled")}
    hits = {n: np.zeros((SITUATIONS, NUM_CLASSES)) for n in tallies}
    trials = {n: np.zeros((SITUATIONS, NUM_CLASSES)) for n in tallies}
    for text in texts:
        name = "sampled" if text.temperature else "greedy"
        _tally(table, text, tallies[name], hits[name], trials[name])
    middles = (np.arange(NUM_CLASSES) + 0.5) / NUM_CLASSES
    shares = {
        n: ((hits[n] + _PRIOR_TRIALS * middles) / (trials[n] + _PRIOR_TRIALS)).tolist()
        for n in tallies
    }
    return {name: tally.shown() for name, tally in tallies.items()}, shares


def _tally(
    table: NgramTable,
    text: Text,
    tally: _Tally,
    hits: NDArray[np.float64],
    trials: NDArray[np.float64],
) -> None:
    tokens = text.tokens.tolist()
    follower = TableText(tokens[: text.num_prompt], table, bool(text.temperature))
    own = SuffixText(tokens[: text.num_prompt])
    right: dict[str, list[bool]] = {name: [] for name in tally.rights}
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
        tally.rights[name].append(found)


def train_table(
    target: TrainingTarget,
    texts: Sequence[Text],
    out: Path,
    plan: TablePlan,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Learn a table from texts, measure it on those that are kept from it, and write its folder.

    Returns:
        What was measured.

    Raises:
        ConfigError: the texts are another model's, or all of them are kept from it.
        TrainingError: it cannot be written.
    """
    known = usable(texts, target.shape.vocab_size, target.max_context)
    learnt = [text for text in known if not text.is_held_out]
    held_out = [text for text in known if text.is_held_out][:_HELD_OUT_TEXTS]
    if not learnt:
        raise ConfigError("there is too little text to learn from: write more")
    table = learn_table(learnt, target.shape.vocab_size, plan)
    measured, shares = measure(table, held_out)
    made = {**provenance, "texts": len(learnt), "reply tokens": sum(map(_num_reply, learnt))}
    made |= {"contexts": len(table), "min_count": plan.min_count, "foredraft": __version__}
    folder = Learnt(
        KIND,
        {"shares": shares},
        target.shape,
        table.tensors,
        self_test(table, _some_contexts(learnt)),
        _card(target.identity, measured, made),
    )
    write_folder(out, folder, {"target": target.identity, "provenance": made, "measured": measured})
    return measured


def _num_reply(text: Text) -> int:
    return len(text.reply_ids)


def _some_contexts(texts: Sequence[Text]) -> list[list[int]]:
    """For the self test."""
    return [text.tokens[-LONGEST:].tolist() for text in texts[: 4 * _TESTED]][:_TESTED]


def _card(target: TargetIdentity, measured: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {name} | {found[TABLE]:.3f} | {found[COPIES]:.3f} | {found[BOTH]:.3f} "
        f"| {found['places']:,} |"
        for name, found in measured.items()
    )
    how = "\n".join(f"| {name} | {shown(value)} |" for name, value in made.items())
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

## How it was made

| | |
|---|---|
{how}
"""
