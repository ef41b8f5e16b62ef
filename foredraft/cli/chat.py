"""`foredraft chat`: a conversation that keeps its KV cache between turns."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foredraft.cli import options as o
from foredraft.core.errors import PromptError
from foredraft.plan import DEFAULT_MODEL

if TYPE_CHECKING:
    from foredraft.core.params import SamplingParams
    from foredraft.llm import LLM

_HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops a reply"


def chat(
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    model: o.Model = DEFAULT_MODEL,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    num_draft_tokens: o.NumDraftTokens = None,
    drafter_option: o.DrafterOptions = None,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    max_tokens: o.MaxTokens = 512,
    dtype: o.Dtype = "auto",
    weights: o.Weights = "auto",
    device: o.Device = "auto",
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    exact: o.Exact = False,
    max_context: o.MaxContext = None,
) -> None:
    """Talk to a chat model. Each turn reads only what is new; Ctrl-C stops a reply."""
    from foredraft.core.params import SamplingParams

    params = SamplingParams.of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        max_tokens=max_tokens,
    )  # fmt: skip
    asked = o.load_options(
        model, drafter_option, drafter=drafter, draft_model=draft_model,
        num_draft_tokens=num_draft_tokens, dtype=dtype, weights=weights, device=device,
        backend=backend, threads=threads, exact=exact, max_context=max_context, max_batch_size=1,
    )  # fmt: skip
    conversation = Conversation(o.load_llm(asked), params, Console(highlight=False), system)
    conversation.console.print(f"{model}, drafter {conversation.llm.drafter_name}", style="bold")
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
        """Read one line and answer it; False when the user leaves."""
        try:
            line = self.console.input("[bold]you>[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
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
        with _interruptible() as stop:
            for event in events:
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


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising it, so that a reply ends between two steps."""
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
