"""Behaviour at a terminal: Ctrl-C, pasted lines, waiting, and output streams."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from foredraft.cli import chat as keyboard
from foredraft.cli import display
from foredraft.cli.chat import Conversation
from foredraft.cli.display import PromptProgress, RichProgress, loaded_drafters, progress_bar
from foredraft.cli.main import exit_with_message
from foredraft.cli.training_display import TrainingDisplay
from foredraft.core.errors import ConfigError
from foredraft.core.params import SamplingParams
from foredraft.engine.request import Event
from foredraft.engine.text import Piece
from foredraft.llm import LLM
from tests.cli.conftest import Run
from tests.models.checkpoints import NATIVE_CONFIGS, save_tokenizer, tiny_model

REPO = Path(__file__).parents[2]
START = [sys.executable, "-c", "from foredraft.cli.main import main; main()"]


def command(checkpoint: Path, *arguments: str) -> list[str]:
    name, *others = arguments
    return [*START, name, "--model", str(checkpoint), "--dtype", "float32", *others]


def test_ctrl_c_ends_generate_with_what_there_is(checkpoint: Path) -> None:
    arguments = command(checkpoint, "generate", "The ferry", "--max-tokens", "2000", "--drafter",
                        "none", "--temperature", "5")  # fmt: skip
    with subprocess.Popen(
        arguments, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)  # the first of the text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.endswith(b"\n")
    assert b"stopped: " in err
    assert b"tokens in" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("as_json", [True, False])
def test_output_that_cannot_be_written_is_said(checkpoint: Path, as_json: bool) -> None:
    arguments = command(checkpoint, "generate", "The ferry", "--max-tokens", "3")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*arguments, *(["--json"] if as_json else [])],
            cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_characters_that_the_output_does_not_have_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)
    exit_with_message(lambda: output.write("caf\xe9 \N{TEACUP WITHOUT HANDLE}"))
    assert output.buffer.getvalue() == b"caf\xe9 \\U0001f375"


def test_a_closed_pipe_ends_quietly(checkpoint: Path) -> None:
    arguments = command(checkpoint, "generate", "The ferry", "--max-tokens", "1500")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        arguments, cwd=REPO, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.returncode in (1, 141)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "said"),
    [
        ("<&-", ("generate", "-"), 1, "error: the prompt is empty"),
        ("<&-", ("chat",), 0, ""),
        (">&-", ("generate", "The ferry", "--max-tokens", "3"), 0, "3 tokens in"),
        (">&- <&-", ("doctor",), 0, ""),
    ],
)
def test_a_stream_that_the_shell_closed_is_empty(
    checkpoint: Path, closed: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """Python has None for it, which was a traceback."""
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *command(checkpoint, *arguments)]
    done = subprocess.run(shell, cwd=REPO, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fallback_is_said_once_with_its_cure(checkpoint: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "FOREDRAFT_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    environment.pop("FOREDRAFT_KERNELS", None)
    done = subprocess.run(
        command(checkpoint, "demo", "--max-tokens", "2"),
        cwd=REPO, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no fused CPU kernel") == 1, done.stderr
    assert "which is not there; correct or unset it" in done.stderr


# ------------------------------------------------------------------------------------ conversations


def test_pasted_lines_are_one_message() -> None:
    ours, theirs = pty.openpty()
    code = "from foredraft.cli.chat import read_message as r; print([r(), r()])"
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPO, env=environment, stdin=theirs,
                          stdout=theirs, stderr=theirs):  # fmt: skip
        os.close(theirs)
        said = b""
        for keys in (b"\x1b[200~first\nsecond\x1b[201~\r", b"only this\r"):
            while not said.endswith((b"you> ", b"you> \x1b[0m")):
                said += os.read(ours, 99)
            os.write(ours, keys)
            said = b""
        while b"]" not in said.rpartition(b"['")[2]:
            said += os.read(ours, 99)
        assert b"['first\\nsecond', 'only this']" in said
    os.close(ours)


def test_lines_of_a_file_are_a_message_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    assert [keyboard.read_message(), keyboard.read_message()] == ["first", "second"]
    with pytest.raises(EOFError):
        keyboard.read_message()


def test_a_base_model_is_refused_before_the_first_message(run: Run, tmp_path: Path) -> None:
    tiny_model(NATIVE_CONFIGS["llama-tied"]()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, chat_template=None)
    result = run("chat", "--model", str(tmp_path), input="Hello\n")
    assert isinstance(result.exception, ConfigError)
    assert "has no chat template" in str(result.exception)
    assert "you>" not in result.output


def test_a_conversation_ends_with_its_input(run: Run) -> None:
    result = run("chat", "--max-tokens", "3", input="Hello\n/help\n/reset\nAgain\n")
    assert result.exit_code == 0
    assert "you>" not in result.output, "a pipe is asked for nothing"
    assert result.output.count("/reset starts over") == 2, "the greeting, and /help"


@pytest.mark.parametrize(
    ("loaded", "named"), [("table self_draft", "table and self_draft"), ("", "none")]
)
def test_all_drafters_are_named(loaded: str, named: str) -> None:
    """As "auto" has them."""
    llm = SimpleNamespace(policy=SimpleNamespace(drafters=dict.fromkeys(loaded.split())))
    assert loaded_drafters(cast(LLM, llm)) == named


# ------------------------------------------------------------------------------------------ waiting


def event(num_read: int, *token_ids: int) -> Event:
    pieces = tuple(Piece("x", drafted=False) for _ in token_ids)
    return Event(0, token_ids, 0, pieces, num_prompt_read=num_read)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80, _environ={"TERM": "xterm"}), out


def test_reading_a_long_prompt_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    for is_terminal in (True, False):
        drawn, out = console(terminal=is_terminal)
        with PromptProgress(1000, drawn) as progress:
            progress._shown_from = 0.0
            progress.show(event(512))
            if progress._progress is not None:
                progress._progress.refresh()
            assert "reading the prompt" in out.getvalue()
            assert "512/1000" in out.getvalue()
            progress.show(event(1000, 7))
            assert progress._progress is None


@pytest.mark.parametrize("terminal", [True, False])
def test_a_short_prompt_shows_nothing(terminal: bool) -> None:
    drawn, out = console(terminal=terminal)
    with PromptProgress(10, drawn) as progress:
        progress.show(event(5))
        progress.show(event(10, 7))
    assert "reading" not in out.getvalue()


def test_in_a_log_every_stage_is_one_line_and_markup_is_text() -> None:
    log, out = console(terminal=False)
    with RichProgress(log) as progress:
        progress.stage("fetching [bold]x[/] " + "y" * 99)
        for percent in range(101):
            progress.advance(percent / 100)
        progress.stage("converting")
    assert out.getvalue() == f"fetching [bold]x[/] {'y' * 99} …\nconverting …\n"


def test_on_a_terminal_the_bar_shows_the_share_of_the_current_stage() -> None:
    terminal, out = console(terminal=True)
    with RichProgress(terminal) as progress:
        progress.stage("fetching")
        progress.advance(0.25)
        assert progress._progress is not None
        progress._progress.refresh()
        assert "fetching" in out.getvalue()
        assert "25%" in out.getvalue()
        progress.stage("[converting]")
        progress.advance(7.0)  # a total that was guessed too low
        progress._progress.refresh()
        assert len(progress._progress.tasks) == 1
        assert "[converting]" in out.getvalue()
        assert "100%" in out.getvalue()
    assert progress._progress is None


def test_a_bar_says_its_share_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    with progress_bar(40) as advance:
        advance("[bold]1")
    assert capsys.readouterr().err == "40 pieces of work …\n40 pieces of work: 2.5%, [bold]1\n"


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM.load(str(checkpoint), dtype="float32", drafter="ngram")


def conversation(llm: LLM, **options: object) -> Conversation:
    params = SamplingParams.of(**{"max_tokens": 8, "ignore_eos": True, **options})
    return Conversation(llm, params, Console(file=io.StringIO()))


def test_a_second_turn_reads_only_what_is_new(llm: LLM) -> None:
    talk = conversation(llm)
    talk.answer("The ferry crosses the river.")
    assert llm.engine.stats().prefix_cached_tokens == 0
    talk.answer("And then?")
    assert llm.engine.stats().prefix_cached_tokens > 20
    fresh = llm.chat(talk.messages[:3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert talk.messages[3]["content"] == fresh.text


def test_ctrl_c_stops_the_reply_and_not_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = conversation(llm, max_tokens=200)
    whole = llm.stream

    def interrupted(*arguments: object) -> object:
        for number, event in enumerate(whole(*arguments)):  # type: ignore[arg-type]
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            assert isinstance(event, Event)
            yield event

    monkeypatch.setattr(llm, "stream", interrupted)
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


def test_only_training_goes_on_behind_a_first_sigterm() -> None:
    def kill(*_: object) -> None:
        raise InterruptedError

    previous = signal.signal(signal.SIGTERM, kill)
    try:
        with display.interruptible(), pytest.raises(InterruptedError):
            os.kill(os.getpid(), signal.SIGTERM)
        with TrainingDisplay(console(terminal=False)[0], lambda: None) as shown:
            os.kill(os.getpid(), signal.SIGTERM)
            assert shown.wants_stop()
    finally:
        signal.signal(signal.SIGTERM, previous)


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
