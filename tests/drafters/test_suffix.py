"""Suffix decoding: how far a match is trusted, and what is kept of earlier outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import ConfigError
from foredraft.drafters import build_drafter
from foredraft.drafters.base import Drafter
from foredraft.drafters.spec import DrafterContext
from foredraft.drafters.text.suffix import PastOutputs, tenant_file
from foredraft.models.table import TableModel
from tests.drafters.following import Followed, first_level

SONG = list(range(10, 60))
"""Fifty different tokens."""
TWO_WAYS = [1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4]
"""Ends in what was followed by 5 once and by 6 once."""


def build(**options: Any) -> Drafter:
    target = TableModel.random(100, seed=0)
    return build_drafter("suffix", DrafterContext(target, options=options))


def test_the_draft_grows_with_the_match() -> None:
    lengths = []
    for matched in (1, 2, 4, 8, 16):
        request = Followed(build(), [*SONG, 99, *SONG[:matched]])
        tree = request.draft()
        assert list(tree.tokens) == SONG[matched : matched + len(tree)]
        lengths.append(len(tree))
    assert lengths == sorted(lengths)
    assert lengths[0] <= 1
    assert lengths[-1] >= 12


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    request = Followed(build(), [7, 8, 9] * 6)
    assert request.draft(9).tokens == (7, 8, 9) * 3


def test_two_likely_continuations_make_a_branch() -> None:
    request = Followed(build(), TWO_WAYS, node_cost=0.05)
    assert sorted(first_level(request.draft())) == [5, 6]


def test_a_text_that_keeps_departing_from_its_matches_is_drafted_less() -> None:
    """The same two-token match, after matches of that length have failed and after they held."""
    failing = [t for i in range(20) for t in (1, 2, 30 + i)]
    holding = [t for i in range(20) for t in (1, 2, 3, 30 + i)]
    drafted = {}
    for name, text in (("failing", failing), ("holding", holding)):
        request = Followed(build(), [1, 2, 50, 60, 70])
        request.commit(*text, 60, 70, 80, 60, 70)
        drafted[name] = len(request.draft())
    assert drafted["failing"] < drafted["holding"]


def test_copying_takes_few_steps_and_open_text_few_drafts() -> None:
    steps, _ = Followed(build(), SONG).run([*SONG, *SONG])
    assert steps <= 12
    novel = [(7 * i * i + 3 * i) % 97 for i in range(90)]
    steps, drafted = Followed(build(), [98]).run(novel)
    assert drafted <= steps // 4


def test_requests_see_their_own_text_only() -> None:
    drafter = build()
    first = Followed(drafter, [*SONG], request_id=1)
    first.commit(*SONG[:20])
    first.end()
    assert len(Followed(drafter, SONG[:8], request_id=2).draft()) == 0


# -------------------------------------------------------------------------------- earlier outputs


def answer(
    drafter: Drafter, output: list[int], request_id: int = 0, tenant: str | None = None
) -> None:
    request = Followed(drafter, [99], request_id=request_id, tenant=tenant)
    request.commit(*output)
    request.end()


def test_earlier_outputs_are_copied_when_asked_for() -> None:
    drafter = build(shared=True)
    answer(drafter, SONG)
    request = Followed(drafter, [98, *SONG[:1]], request_id=1)
    request.commit(*SONG[1:9])
    assert list(request.draft().tokens[:4]) == SONG[9:13]


def test_the_prompts_of_others_are_not_kept() -> None:
    drafter = build(shared=True)
    request = Followed(drafter, SONG)
    request.commit(98)
    request.end()
    later = Followed(drafter, [99], request_id=1)
    later.commit(*SONG[:9])
    assert len(later.draft()) == 0


def test_what_is_kept_is_bounded_and_recent() -> None:
    past = PastOutputs(20, None, "", 100)
    for start in range(0, 90, 5):
        past.add([start, start + 1, start + 2])
    kept = [token for text in past._texts for token in text]
    assert len(kept) <= 20
    assert sum(map(len, past.automata)) <= 20
    assert kept[-4:-1] == [85, 86, 87]
    past.add(list(range(90)))
    assert sum(map(len, past._texts)) <= 20


def test_outputs_outlive_the_process(tmp_path: Path) -> None:
    answer(build(shared=True, shared_dir=tmp_path), SONG)
    drafter = build(shared=True, shared_dir=str(tmp_path))
    request = Followed(drafter, [99])
    request.commit(*SONG[:9])
    assert list(request.draft().tokens[:4]) == SONG[9:13]
    (path,) = tmp_path.iterdir()  # nothing unfinished is left beside it
    assert path.stat().st_mode & 0o077 == 0


def test_tenants_never_see_each_other(tmp_path: Path) -> None:
    answer(build(shared=True, shared_dir=tmp_path, tenant="anna"), SONG)
    for tenant, sees in (("bert", False), ("anna", True)):
        request = Followed(build(shared=True, shared_dir=tmp_path, tenant=tenant), [99])
        request.commit(*SONG[:9])
        assert bool(len(request.draft())) is sees
    assert "anna" not in tenant_file(tmp_path, "anna").name


def test_requests_of_other_tenants_see_nothing_of_it(tmp_path: Path) -> None:
    """Whose request it is counts, not only whose drafter."""
    drafter = build(shared=True, shared_dir=tmp_path)
    answer(drafter, SONG, tenant="anna")
    for number, (tenant, sees) in enumerate((("bert", False), (None, False), ("anna", True)), 1):
        request = Followed(drafter, [99], request_id=number, tenant=tenant)
        request.commit(*SONG[:9])
        assert bool(len(request.draft())) is sees, tenant
    assert not [*tmp_path.iterdir()], "of tenants by request nothing is written"


def test_tenants_share_what_may_be_kept() -> None:
    """The oldest output is evicted."""
    drafter = build(shared=True, shared_tokens=120)
    for number, tenant in enumerate(("anna", "bert", "carl")):
        answer(drafter, SONG, request_id=number, tenant=tenant)
    for number, (tenant, sees) in enumerate((("carl", True), ("bert", True), ("anna", False)), 3):
        request = Followed(drafter, [99], request_id=number, tenant=tenant)
        request.commit(*SONG[:9])
        assert bool(len(request.draft())) is sees, tenant


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "outputs.safetensors"
    PastOutputs(100, path, "one", 100).add([1, 2, 3])
    with pytest.raises(ConfigError, match="tokenizer one and this model's is two"):
        PastOutputs(100, path, "two", 100)
    with pytest.raises(ConfigError, match="outside the vocabulary of 3"):
        PastOutputs(100, path, "one", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": "perhaps"}, "shared must be True or False"),
        ({"shared_tokens": 0}, "shared_tokens is 0"),
        ({"tenant": "anna"}, "shared=true"),
        ({"shared": True, "tenant": "anna"}, "shared_dir"),
        ({"sharde": True}, "did you mean 'shared'"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)
