"""Values with commas: what is taken, and what is said of the rest."""

from __future__ import annotations

import pytest

from benchmarks.peers import peer_names
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError


def test_what_is_taken() -> None:
    assert o.names(None) == []
    assert o.names("a, b") == ["a", "b"]
    assert o.numbers("--lengths", "0,2", int) == [0, 2]
    assert o.numbers("--tokens", "1, 8", int, low=1) == [1, 8]
    assert o.numbers("--temperature", "0,.7", float) == [0.0, 0.7]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="--clients 'four' is not whole numbers with commas"):
        o.numbers("--clients", "four", int)
    with pytest.raises(ConfigError, match="--tokens '1,0' holds 0; counts start at 1"):
        o.numbers("--tokens", "1,0", int, low=1)
    with pytest.raises(ConfigError, match="--temperature 'warm' is not numbers with commas"):
        o.numbers("--temperature", "warm", float)
    with pytest.raises(ConfigError, match=r"did you mean 'llama\.cpp'"):
        peer_names("llama.ccp", ("llama.cpp",))
