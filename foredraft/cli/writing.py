"""Text of a target's own, written through the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.core.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.drafters.heads.store import TargetIdentity
    from foredraft.llm import LLM
    from foredraft.models.files.progress import Progress
    from foredraft.models.text.tokenizer import Tokenizer
    from foredraft.train.writing import Prompt, Reply, Request, WritePlan

_ANY_WORDS = ("A", "7", "Why", "é", "(")


class EngineWriter:
    """Replies of an LLM, each as it is over; a `foredraft.train.writing.Write`.

    Args:
        llm: what replies; it has nothing else to do.
        pause: called before each step.
    """

    def __init__(self, llm: LLM, pause: Callable[[], object]) -> None:
        self._engine, self._pause = llm.engine, pause

    def __call__(self, requests: Sequence[Request]) -> Generator[Reply, None, None]:
        from foredraft.core.params import SamplingParams
        from foredraft.train.writing import Reply

        engine, numbers = self._engine, {}
        try:
            for request in requests:
                params = SamplingParams(
                    temperature=request.temperature,
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                )
                numbers[engine.submit(request.prompt_ids, params)] = request.number
            while engine.has_work:
                self._pause()
                for event in engine.step():
                    if (result := event.result) is None:
                        continue
                    number = numbers.pop(event.request_id)
                    if result.error is None:
                        finished = result.finish_reason == "stop"
                        yield Reply(number, result.token_ids, finished)
        finally:
            for request_id in numbers:
                engine.cancel(request_id)


class ChatWords:
    """A tokenizer with a chat template, as writing needs it.

    Raises:
        ConfigError: the model has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_chat_template()
        self._tokenizer = tokenizer

    @property
    def user_prefix(self) -> tuple[int, ...]:
        from foredraft.train.writing import common_prefix

        prefix = common_prefix([self.encode(words) for words in _ANY_WORDS])
        if not prefix:
            raise ConfigError(
                "this model's chat template begins with the user's words themselves, so the model "
                "cannot make up prompts; give some with --prompts"
            )
        return prefix

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": text}])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


def write_into(
    directory: Path,
    llm: LLM,
    identity: TargetIdentity,
    files: Sequence[str],
    plan: WritePlan,
    progress: Progress,
    pause: Callable[[], object],
    wants_stop: Callable[[], bool],
) -> int:
    """Write text into a folder; see `foredraft.train.writing.Writer`."""
    from foredraft.train.writing import Writer

    assert llm.tokenizer is not None
    words, prompts = ChatWords(llm.tokenizer), _prompts(files)
    writer = Writer(directory, EngineWriter(llm, pause), words, identity, prompts, plan)
    return writer.run(progress, wants_stop)


def _prompts(files: Sequence[str]) -> list[Prompt]:
    from foredraft.bench.prompts import load_prompts
    from foredraft.train.writing import Prompt

    return [Prompt(each.id, each.text) for file in files for each in load_prompts(file)]
