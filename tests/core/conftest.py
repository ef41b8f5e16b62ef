"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest

from foredraft.core import draws


@pytest.fixture(params=["compiled", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on either half."""
    if request.param == "numpy":
        monkeypatch.setattr(draws, "library", lambda: None)
    elif draws.library() is None:
        pytest.skip("no compiled half here")
