"""`foredraft chat`: a conversation that keeps its KV cache between turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.cli.interrupt import interruptible
from foredraft.cli.keyboard import read_message
from foredraft.cli.progress import PromptProgress
from foredraft.core.errors import PromptError

if TYPE_CHECKING:
    from foredraft.core.params import SamplingParams
    from foredraft.llm import LLM

_HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops a reply"


@dataclass(frozen=True)
class ReplyOptions(o.SamplingOptions):
    """Replies may be longer than what `generate` makes by default."""

    max_tokens: o.MaxTokens = 512


@o.with_option_objects
def chat(
    running: o.ModelOptions,
    draft: o.DraftOptions,
    sampling: ReplyOptions,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    trace: o.TraceTo = None,
) -> None:
    """Talk to a chat model. Each turn reads only what is new; Ctrl-C stops a reply."""
    params = sampling.params()
    with o.load_traced(o.load_options(running, draft, max_batch_size=1), trace) as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.require_chat_template()
        conversation = Conversation(llm, params, Console(highlight=False), system)
        conversation.console.print(f"{running.model}, drafter {llm.drafter_name}", style="bold")
        conversation.console.print(_HELP, style="dim")
        while conversation.turn():
            pass


class Conversation:
    """Messages so far, and the session whose cache holds them."""

    def __init__(
        self, llm: LLM, params: SamplingParams, console: Console, system: str | None = None
    ) -> None:
        self.llm, self.console = llm, console
        self._params, self._system = params, system
        self._session = llm.open_session()
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def turn(self) -> bool:
        """Read one message and answer it; False when the user leaves."""
        try:
            line = read_message().strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return False
        if line in ("/quit", "/exit"):
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
            events = self.llm.stream_chat(self.messages, self._params, self._session)
            reply = self._stream(events)
        except PromptError as error:
            self.messages.pop()
            self.console.print(f"{error}. /reset starts over", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": reply})

    def _stream(self, events: Any) -> str:
        from foredraft.cli.display import show_pieces

        reply = ""
        with interruptible() as stop, PromptProgress() as progress:
            for event in events:
                progress.show(event)
                show_pieces(self.console, event.pieces)
                reply += "".join(piece.text for piece in event.pieces)
                if event.result and event.result.error:
                    self.console.print(f"\nerror: {event.result.error}", style="red", markup=False)
                if stop:
                    events.close()
                    self.console.print(" [dim](stopped)[/dim]", end="")
                    break
        self.console.print()
        return reply
