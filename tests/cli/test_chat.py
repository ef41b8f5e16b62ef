"""A conversation: what it remembers, and what Ctrl-C does."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from foredraft.cli.chat import Conversation
from foredraft.cli.display import WholeWords
from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event
from foredraft.engine.text import Piece
from foredraft.llm import LLM


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM.load(str(checkpoint), dtype="float32", drafter="ngram")


def conversation(llm: LLM, **options: object) -> Conversation:
    params = SamplingParams.of(**{"max_tokens": 8, "ignore_eos": True, **options})
    return Conversation(llm, params, Console(file=io.StringIO()))


def test_a_second_turn_reads_only_what_is_new(llm: LLM) -> None:
    talk = conversation(llm)
    talk.answer("The ferry crosses the river.")
    assert llm.engine.prefixes.num_cached_tokens == 0
    talk.answer("And then?")
    assert llm.engine.prefixes.num_cached_tokens > 20
    fresh = llm.chat(talk.messages[:3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert talk.messages[3]["content"] == fresh.text


def test_ctrl_c_stops_the_reply_and_not_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = conversation(llm, max_tokens=200)
    whole = llm.stream_chat

    def interrupted(*arguments: object) -> object:
        for number, event in enumerate(whole(*arguments)):  # type: ignore[arg-type]
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            assert isinstance(event, Event)
            yield event

    monkeypatch.setattr(llm, "stream_chat", interrupted)
    talk.answer("Talk for a long time.")
    assert talk.messages[-1]["role"] == "assistant"
    monkeypatch.undo()
    talk.answer("Still there?")
    assert len(talk.messages) == 4


def test_a_message_that_does_not_fit_is_refused_and_forgotten(llm: LLM) -> None:
    talk = conversation(llm)
    talk.answer("word " * 3000)
    assert talk.messages == []
    talk.answer("Hello")
    assert len(talk.messages) == 2


def test_reset_keeps_the_system_message(llm: LLM) -> None:
    talk = Conversation(llm, SamplingParams(max_tokens=2), Console(file=io.StringIO()), "Be brief.")
    talk.answer("Hello")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit"])
def test_words_that_leave(llm: LLM, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setattr("foredraft.cli.chat.read_message", lambda: f" {word} ")
    talk = conversation(llm)
    assert talk.turn() is False
    assert talk.messages == []


def test_ctrl_c_at_the_prompt_leaves_when_it_is_pressed_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, lines = conversation(llm), iter([None, "/reset", None, None])

    def read() -> str:
        line = next(lines)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("foredraft.cli.chat.read_message", read)
    assert [talk.turn() for _ in range(4)] == [True, True, True, False]


def test_lines_break_between_words() -> None:
    text = (
        "The ferry crosses the strait twice a day\nand back, unaccompanied-by-any-passenger at all"
    )
    shown = io.StringIO()
    words = WholeWords(Console(file=shown, width=16, force_terminal=True, color_system=None))
    for at in range(0, len(text), 3):
        words.show([Piece(text[at : at + 3], False)], is_last=at + 3 >= len(text))
    lines = shown.getvalue().split("\n")
    assert " ".join(line.strip() for line in lines) == text.replace("\n", " ")
    assert [line.strip() for line in lines][:3] == ["The ferry", "crosses the", "strait twice a"]
