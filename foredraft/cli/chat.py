"""`foredraft chat`: a conversation that keeps its KV cache between turns."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.display import loaded_drafters, reply_display
from foredraft.core.errors import PromptError
from foredraft.core.params import SamplingParams
from foredraft.options import LoadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foredraft.engine.request import Event
    from foredraft.llm import LLM

_HELP = "/reset starts over, /bye or Ctrl-D leaves, Ctrl-C stops a reply"
_AGAIN = "Ctrl-C again leaves"
_LEAVE = ("/bye", "/exit", "/quit")
_PROMPT = "you> "
_BOLD_PROMPT = f"\001\x1b[1m\002{_PROMPT}\001\x1b[0m\002"
"""The marks tell readline which characters have no width."""


_SAMPLING = replace(o.sampling(max_tokens=512), section="sampling")


@o.with_options
def chat(
    load: Annotated[LoadOptions, o.model(max_batch_size=1, samples=True)],
    params: Annotated[SamplingParams, _SAMPLING],
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    trace: o.TraceTo = None,
) -> None:
    """Talk to a chat model. Each turn prefills only the new message; Ctrl-C stops a reply."""
    with o.tracing(trace) as load_llm:
        llm = load_llm(load)
        assert llm.tokenizer is not None
        llm.tokenizer.template_variables()  # an error now, where the model has no template
        conversation = Conversation(llm, params, Console(highlight=False), system)
        conversation.console.print(f"{load.model}, drafter {loaded_drafters(llm)}", style="bold")
        conversation.console.print(_HELP, style="dim")
        while conversation.turn():
            pass


class Conversation:
    """Messages so far."""

    def __init__(
        self, llm: LLM, params: SamplingParams, console: Console, system: str | None = None
    ) -> None:
        self.llm, self.console = llm, console
        self._params, self._system = params, system
        self.messages: list[dict[str, str]] = []
        self._is_leaving = False
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def turn(self) -> bool:
        """Read one message and answer it; False when the user leaves."""
        try:
            line = read_message().strip()
        except EOFError:
            self.console.print()
            return False
        except KeyboardInterrupt:
            self.console.print("" if self._is_leaving else f"\n{_AGAIN}", style="dim")
            self._is_leaving = not self._is_leaving
            return self._is_leaving
        self._is_leaving = False
        if line in _LEAVE:
            return False
        if line == "/reset":
            self.reset()
        elif line.startswith("/"):
            self.console.print(_HELP, style="dim")
        elif line:
            self.answer(line)
        return True

    def answer(self, message: str) -> None:
        """Stream the reply. A stopped reply stays in the conversation as far as it got."""
        self.messages.append({"role": "user", "content": message})
        try:
            token_ids = self.llm.encode(self.messages)
            reply = self._stream(self.llm.stream(token_ids, self._params), len(token_ids))
        except PromptError as error:
            self.messages.pop()
            self.console.print(f"{error}. /reset starts over", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": reply})

    def _stream(self, events: Iterator[Event], num_prompt_tokens: int) -> str:
        with reply_display(self.llm, self.console, num_prompt_tokens) as show:
            for event in events:
                show(event)
        result = event.result
        assert result is not None
        if result.finish_reason == "cancelled":
            self.console.print(" [dim](stopped)[/dim]", end="")
        if result.error:
            self.console.print(f"\nerror: {result.error}", style="red", markup=False)
        self.console.print()
        return result.text


def read_message() -> str:
    """One message: a line, with those that were pasted with it.

    Raises:
        EOFError: there is no more input.
    """
    if not sys.stdin.isatty():
        return input()
    try:
        import readline  # importing it is all that `input` needs to edit lines
    except ImportError:  # Windows, whose console edits lines by itself
        return input(_PROMPT)
    with contextlib.suppress(Exception):  # libedit knows no such setting
        readline.parse_and_bind("set enable-bracketed-paste on")
    return input(_BOLD_PROMPT)
