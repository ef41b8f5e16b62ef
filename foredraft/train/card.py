"""The README of a trained head: what it is, how it was made, what it reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.drafters.heads.store import TargetIdentity


def model_card(
    kind: str,
    target: TargetIdentity,
    num_parameters: int,
    provenance: Mapping[str, Any],
    measured: Mapping[str, Any],
) -> str:
    """Markdown, written from what was measured."""
    depths = " | ".join(str(k + 1) for k in range(len(measured["greedy"])))
    greedy_anchors, sampled_anchors = measured["num_anchors"]
    made = "\n".join(f"| {name} | {shown(value)} |" for name, value in provenance.items())
    return f"""\
# A drafter of kind {kind} for {target.name}

A head of {num_parameters / 1e6:.1f}M parameters that guesses ahead for **{target.name}**
(fingerprint `{target.fingerprint}`) in foredraft. The target checks every guess, so the text is
exactly its own; with another target the head is refused.

```sh
foredraft generate "…" --model {target.name} --drafter {kind} --drafter-option head=THIS_FOLDER
```

## Acceptance on held-out text

| depth | {depths} |
|---{"|---" * len(measured["greedy"])}|
| greedy: right, given that all before it were | {_row(measured["greedy"])} |
| temperature 1: chance with shared noise | {_row(measured["sampled"])} |
| temperature 1: overlap of the distributions | {_row(measured["overlap"])} |

Expected tokens a step of a chain of {len(measured["greedy"])}:
**{measured["committed_greedy"]:.2f}** greedy, **{measured["committed_sampled"]:.2f}** at
temperature 1 (over {greedy_anchors} and {sampled_anchors} positions of replies that were kept from
training). The head can name {measured["covered"]:.1%} of the target's mass there.

## How it was made

| | |
|---|---|
{made}
"""


def _row(shares: Sequence[float]) -> str:
    return " | ".join(f"{share:.3f}" for share in shares)


def shown(value: Any) -> str:
    """A value of a card's table."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
