"""Pages that a command writes are as it would write them now."""

from __future__ import annotations

import pytest

from docs.make_reference import HERE, describe, pages


def test_the_reference_follows_the_docstrings() -> None:
    written = {path.name: path.read_text() for path in HERE.glob("*.md")}
    assert written == pages(), "run `make reference`"


def test_what_is_public_and_says_nothing_is_refused() -> None:
    class Silent:
        """Says something."""

        def shout(self) -> None:
            pass

    with pytest.raises(ValueError, match=r"Silent\.shout is public and has no docstring"):
        describe(Silent)
