"""First estimates that a guess is right, before a text has shown how it goes.

They are data, `priors.json`, measured on greedy replies of the default model to the built-in
prompts (see `foredraft.bench.priors` and the command that the file names). They weigh a few
observations of the text itself, and decide how much is drafted, never what is accepted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from foredraft.core.errors import ConfigError

Shares = tuple[float, ...]
"""By class of match length or distance (`foredraft.drafters.common.confidence`)."""


@dataclass(frozen=True)
class Priors:
    """Shares of right guesses.

    Attributes:
        repeated_text: the most frequent continuation of a match within one text.
        other_text: the same for matches in other texts, of which nothing says that they are
            related.
        followed: the next token of an expected text, by how long the two have agreed.
        met: where both may have met again, by the distance of that place.
        replaced: after as many expected tokens as were written since the texts parted, by these.
        inserted: where the texts parted, likewise.
        ranks: for each steadiness of a token's candidates, the candidate of each rank.
    """

    repeated_text: Shares
    other_text: Shares
    followed: Shares
    met: Shares
    replaced: Shares
    inserted: Shares
    ranks: tuple[Shares, ...]

    def __post_init__(self) -> None:
        shares = asdict(self)
        ranks = shares.pop("ranks")
        for name, values in (*shares.items(), *(("ranks", row) for row in ranks)):
            if not values or not all(0.0 < value < 1.0 for value in values):
                raise ConfigError(f"priors: {name} is {values!r}; shares lie between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> Priors:
        """From JSON as `to_json` writes it; further keys are notes."""
        found: dict[str, Any] = json.loads(text)
        ranks = tuple(map(tuple, found.pop("ranks")))
        names = {field.name for field in fields(cls)} - {"ranks"}
        return cls(**{name: tuple(found[name]) for name in names}, ranks=ranks)

    def to_json(self, notes: dict[str, str]) -> str:
        """What `parse` reads, with ``notes`` on where it is from."""
        lines = [
            f'  "{name}": {json.dumps(value)}' for name, value in (notes | asdict(self)).items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def priors() -> Priors:
    """The package's own."""
    return Priors.parse(files(__package__).joinpath("priors.json").read_text(encoding="utf-8"))
