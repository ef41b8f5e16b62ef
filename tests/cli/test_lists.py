"""Values with commas: what is taken, and what is said of the rest."""

from __future__ import annotations

import pytest

from foredraft.cli import lists
from foredraft.core.errors import ConfigError


def test_what_is_taken() -> None:
    assert lists.names(None) == []
    assert lists.names("a, b") == ["a", "b"]
    assert lists.whole_numbers("--lengths", "0,2") == [0, 2]
    assert lists.counts("--tokens", "1, 8") == [1, 8]
    assert lists.numbers("--temperature", "0,.7") == [0.0, 0.7]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="--clients 'four' is not whole numbers with commas"):
        lists.whole_numbers("--clients", "four")
    with pytest.raises(ConfigError, match="--tokens '1,0' holds 0; counts start at 1"):
        lists.counts("--tokens", "1,0")
    with pytest.raises(ConfigError, match="--temperature 'warm' is not one or more numbers"):
        lists.numbers("--temperature", "warm")
    with pytest.raises(ConfigError, match=r"did you mean 'llama\.cpp'"):
        lists.known_names("peer", "llama.ccp", ("llama.cpp",))
