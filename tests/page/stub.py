"""A run of the page as the server would tell it, with a text of one's own."""

from __future__ import annotations

import json
from typing import Any

STATS = {"steps": 1, "drafted": 1, "accepted": 0, "committed": 1}


def told_run(text: str, *, ends: bool = True) -> str:
    """Server-sent events of one step that says, drafts and weighs ``text``."""
    events: list[dict[str, Any]] = [{"type": "step", "lane": 0, "clock_ms": 1.0, **_step(text)}]
    if ends:
        end = {"text": text, "sha256": "0" * 64, "error": None, "num_tokens": 1, "stats": STATS}
        events.append({"type": "end", "lane": 0, "clock_ms": 1.0, "tokens_per_s": 1.0, **end})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def _step(text: str) -> dict[str, Any]:
    candidate = {"token": 1, "text": text, "target_prob": 0.6, "model_prob": 0.6, "noise": 0.1}
    law = {"node": -1, "taken": 1, "candidates": [candidate, {**candidate, "token": 2}]}
    row = {
        "position": 3,
        "num_read": 1,
        "budget": 1,
        "draft": {"tokens": [2], "parents": [-1], "texts": [text], "chances": [0.5]},
        "kind": "correction",
        "path": [],
        "committed": [{"token": 1, "text": text, "by": "correction"}],
        "num_accepted": 0,
        "drafter": text,
        "copies": False,
        "why": {
            "rule": "target-only",
            "seed": 0,
            "temperature": 1.0,
            "laws": [law],
            "decisions": [],
        },
    }
    times = {"draft_ms": 1.0, "score_ms": 1.0, "verify_ms": 0.1, "learn_ms": 0.1}
    return {"row": row, "times": times, "controller": None, "decoding": True}
