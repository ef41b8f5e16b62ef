"""The runner of the README's commands reads the README as a person would."""

from __future__ import annotations

from tests.docs.pages import REPO
from tools import newcomer


def test_comments_go_and_continued_lines_are_one() -> None:
    block = "make demo      # installs\n# only a comment\n$ foredraft generate \\\n  'x'\n"
    assert newcomer.commands(block) == ["make demo", "foredraft generate    'x'"]


def test_the_readme_installs_then_generates_chats_and_serves() -> None:
    blocks = [*newcomer.blocks((REPO / "README.md").read_text())]
    commands = [c for language, text in blocks if language == "sh" for c in newcomer.commands(text)]
    assert commands[0] == "make demo"
    assert any(command.startswith(newcomer._KEEPS) for command in commands), "foredraft is found"
    for name in ("foredraft generate", "foredraft chat", "foredraft serve"):
        assert any(command.startswith(name) for command in commands), name
    assert any(language == "python" for language, _ in blocks)
