"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest

from foredraft.core import noise


@pytest.fixture(params=["compiled", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on either half."""
    if request.param == "numpy":
        monkeypatch.setattr(noise, "_library", lambda: None)
    elif noise._library() is None:
        pytest.skip("no compiled half here")
