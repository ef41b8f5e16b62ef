"""Rounds of a model's trained head, for heads that `benchmarks.gpu` scripts.

Each is, by depth, the place of the text's next token among the head's candidates (-1: none of
them), and their scores below the best one's, as a round on a GPU has them. The tokens before are
the text's own: a chain of which all was right. Texts are the model's replies to prompts that no
head learnt from.

    python -m benchmarks.head_rounds --prompts specbench.jsonl --out rounds.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.core.choices import NUM_LOOKED_AT
from foredraft.core.noise import gumbel_top
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.heads.steps import StepDrafter
from foredraft.llm import LLM
from foredraft.models.base import HeadRow, ScoreRow
from foredraft.models.native.target import NativeTarget

_DEPTH, _EVERY = 6, 5
"""Tokens of a round, and places of the text from one to the next."""
Round = list[tuple[int, list[float], float]]
"""By depth: place, scores, and the log of the sum of all, below the best score."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", default="specbench.jsonl")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM.load(asked.model, drafter="hidden_head")
    lines = [json.loads(line) for line in Path(asked.prompts).read_text().splitlines()]
    random.Random(4).shuffle(lines)
    found: dict[str, list[Any]] = {"0.0": [], "1.0": []}
    deadline = time.monotonic() + 60 * asked.minutes
    with torch.no_grad():
        for seed, line in enumerate(lines):
            if time.monotonic() > deadline:
                break
            prompt = llm.encode([{"role": "user", "content": line["turns"][0]}])
            for name in found if len(prompt) < 600 else ():
                params = SamplingParams(max_tokens=128, temperature=float(name), seed=seed)
                found[name] += _rounds(llm, prompt, params)
            Path(asked.out).write_text(json.dumps(found))


def _rounds(llm: LLM, prompt: list[int], params: SamplingParams) -> list[Round]:
    """Of one reply."""
    loaded = llm.policy.drafters["hidden_head"]
    drafter, target = loaded._drafter, llm.target
    assert isinstance(drafter, StepDrafter)
    assert isinstance(target, NativeTarget)
    runner, taps = drafter._runner, drafter.taps
    text = [*prompt, *llm.generate([[*prompt]], params)[0].token_ids]
    slot = target.cache.allocate()
    scores = target.score([ScoreRow(slot, text)], taps)[0]
    target.cache.keep(slot, len(text), ())
    read, found = 0, []
    for anchor in range(len(prompt), len(text) - _DEPTH, _EVERY):
        following, here = text[read + 1 : anchor], slice(read, anchor - 1)
        inputs = runner.text_inputs(following, [scores.taps[tap][here] for tap in taps])
        states, logits = runner.run([HeadRow(slot, read, len(following))], inputs)
        read, levels = anchor - 1, []
        for depth, token in enumerate(text[anchor : anchor + _DEPTH]):
            key = None if not params.temperature else (params.seed or 0, anchor + depth)
            levels.append(_level(logits[-1].float(), drafter._rows.ids_R, token, key))
            tree = TokenTree.chain(text[anchor : anchor + depth + 1])
            own = runner.own_inputs([token], states[-1:])
            states, logits = runner.run([HeadRow(slot, read - 1, 1, tree, 1 + depth)], own)
        found.append(levels)
    target.cache.free(slot)
    return found


def _level(
    logits_R: Tensor, ids_R: Tensor, token: int, key: tuple[int, int] | None
) -> tuple[int, list[float], float]:
    total = float(logits_R.logsumexp(0))
    if key is None:
        top = logits_R.topk(NUM_LOOKED_AT)
        scored = [*zip(ids_R[top.indices].tolist(), top.values.tolist(), strict=True)]
    else:
        spread_V = torch.full((int(ids_R.max()) + 1,), -torch.inf)
        spread_V[ids_R] = logits_R
        scored = gumbel_top(spread_V, NUM_LOOKED_AT, *key, 1.0)
    tokens, best = [each for each, _ in scored], scored[0][1]
    place = tokens.index(token) if token in tokens else -1
    return place, [round(score - best, 3) for _, score in scored], round(total - best, 3)


if __name__ == "__main__":
    main()
