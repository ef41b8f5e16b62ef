"""The texts that a corrector is trained on."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.corrector import correct_text, with_faults, write_prompts
from foredraft.bench.prompts import load_prompts


def test_texts_have_some_faults_and_are_otherwise_as_they_were(tmp_path: Path) -> None:
    texts = write_prompts(tmp_path / "prompts.jsonl", 6)
    for wrong, right in texts.items():
        kept = set(wrong.split()) & set(right.split())
        assert len(set(right.split()) - kept) in range(1, 16)
        assert len(kept) > 0.6 * len(set(right.split()))
    found = load_prompts(str(tmp_path / "prompts.jsonl"))
    assert [prompt.text for prompt in found] == list(texts)


def test_a_seed_gives_the_same_text() -> None:
    first, second = (correct_text(random.Random(4)) for _ in range(2))
    assert first == second
    assert with_faults(random.Random(1), first) == with_faults(random.Random(1), first) != first
