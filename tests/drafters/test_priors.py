"""The first estimates: data that come with the package."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.priors import as_json
from foredraft.core.errors import ConfigError
from foredraft.drafters.text.confidence import MatchConfidence, Priors, priors


def test_there_is_an_estimate_for_every_class() -> None:
    found = priors()
    for shares in (found.repeated_text, found.followed, found.met, found.inserted):
        confidence = MatchConfidence(shares)
        assert confidence[1] == pytest.approx(shares[0])
        assert confidence[1000] == pytest.approx(shares[-1])
        assert confidence.shares == pytest.approx(shares)


def test_they_survive_being_written_down() -> None:
    assert Priors.parse(as_json(priors(), {"made_by": "hand"})) == priors()


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="met"):
        replace(priors(), met=(0.5, share))
    with pytest.raises(ConfigError, match="ranks"):
        replace(priors(), ranks=((0.5, share),))
