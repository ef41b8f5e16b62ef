"""Progress on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foredraft.cli.display import RichProgress, progress_bar


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=60, _environ={"TERM": "xterm"}), out


def test_in_a_log_every_stage_is_one_line_and_markup_is_text() -> None:
    log, out = console(terminal=False)
    with RichProgress(log) as progress:
        progress.stage("fetching [bold]x[/] " + "y" * 80)
        for percent in range(101):
            progress.advance(percent / 100)
        progress.stage("converting")
    assert out.getvalue() == f"fetching [bold]x[/] {'y' * 80} …\nconverting …\n"


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


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_slow_draws_nothing(terminal: bool) -> None:
    target, out = console(terminal=terminal)
    with RichProgress(target) as progress:
        progress.advance(0.5)
    assert out.getvalue() == ""


def test_an_error_passes_and_the_display_ends() -> None:
    terminal, _ = console(terminal=True)
    progress = RichProgress(terminal)

    def work() -> None:
        with progress:
            progress.stage("fetching")
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert progress._progress is None


def test_stdout_stays_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with RichProgress() as progress:
        progress.stage("fetching")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching" in captured.err


@pytest.mark.parametrize("terminal", [True, False])
def test_loading_is_said_where_it_takes_long(terminal: bool) -> None:
    drawn, out = console(terminal=terminal)
    with RichProgress(drawn, waiting="Loading tiny", delay_s=0.0) as progress:
        progress._timer.join()
        if progress._progress is not None:
            progress._progress.refresh()
    assert "Loading tiny" in out.getvalue()


def test_loading_is_not_said_where_it_is_quick_or_something_else_is() -> None:
    drawn, out = console(terminal=False)
    with RichProgress(drawn, waiting="Loading tiny", delay_s=60.0):
        pass
    with RichProgress(drawn, waiting="Loading tiny", delay_s=60.0) as progress:
        progress.stage("Fetching tiny")
        progress._begin_waiting()
    assert out.getvalue() == "Fetching tiny …\n"


def test_a_bar_says_each_tenth_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(40) as advance:
        for number in range(40):
            advance(f"[bold]{number}")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 10
    assert lines[0] == "4 of 40: [bold]3"
