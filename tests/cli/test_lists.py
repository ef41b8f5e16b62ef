"""Values with commas: what is taken, and what is said of the rest."""

from __future__ import annotations

import pytest

from benchmarks.peers import peer_names
from foredraft.cli import options as o
from foredraft.core.errors import ConfigError


def test_what_is_taken() -> None:
    assert o.names(None) == []
    assert o.names("a, b") == ["a", "b"]
    assert o.whole_numbers("--lengths", "0,2") == [0, 2]
    assert o.whole_numbers("--tokens", "1, 8", low=1) == [1, 8]
    assert o.real_numbers("--temperature", "0,.7") == [0.0, 0.7]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="--clients 'four' is not whole numbers with commas"):
        o.whole_numbers("--clients", "four")
    with pytest.raises(ConfigError, match="--tokens '1,0' holds 0; counts start at 1"):
        o.whole_numbers("--tokens", "1,0", low=1)
    with pytest.raises(ConfigError, match="--temperature 'warm' is not one or more numbers"):
        o.real_numbers("--temperature", "warm")
    with pytest.raises(ConfigError, match=r"did you mean 'llama\.cpp'"):
        peer_names("llama.ccp", ("llama.cpp",))
