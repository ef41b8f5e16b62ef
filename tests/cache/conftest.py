"""The kinds of caches that obey one contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache.test_kv import HFProbe, KVProbe, Probe, TokenProbe


@pytest.fixture(params=[TokenProbe, KVProbe, HFProbe])
def probe(request: pytest.FixtureRequest) -> Probe:
    new: Callable[[], Probe] = request.param
    return new()
