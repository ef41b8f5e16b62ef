"""``python -m tests.soak``: many callers for a long time, and whether memory stays flat.

Callers come and go, hang up in the middle, ask for several replies, go on with conversations, and
ask for what is refused. By default the engine runs over tables, so that all time goes into the
engine itself; ``--model`` takes a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from foredraft import LLM, AsyncLLM, SamplingParams
from foredraft.core.errors import ForedraftError, QueueFullError
from foredraft.models.table import TokenCache
from foredraft.options import LoadOptions
from tests.simulator.parts import SimTarget

_PAGE = resource.getpagesize()
MAX_GROWTH = 0.02
"""Of memory, from the middle third of the run to the last one; at least `_NOISE`."""
_NOISE = 4 << 20


@dataclass
class Soak:
    """A run; ``memory`` holds samples of bytes, ``seen`` counts what happened."""

    llm: AsyncLLM
    seconds: float
    num_callers: int
    seed: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)

    async def run(self) -> None:
        end = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self.num_callers):
                group.create_task(self._call(random.Random(f"{self.seed}/{number}"), end))
            group.create_task(self._watch(end))
        stats = self.llm.stats()
        assert (stats.running, stats.waiting) == (0, 0), "somebody is still there"
        assert not stats.cache_tokens, "memory is still in use"
        assert self.llm.is_healthy

    @property
    def growth(self) -> float:
        """Of memory, from the middle third to the last, as a share."""
        third = len(self.memory) // 3
        middle, last = self.memory[third : 2 * third], self.memory[2 * third :]
        if not middle or median(last) - median(middle) <= _NOISE:
            return 0.0
        return median(last) / median(middle) - 1.0

    async def _watch(self, end: float) -> None:
        pause = max(0.02, self.seconds / 300)
        while time.monotonic() < end:
            await asyncio.sleep(pause)
            self.memory.append(resident())

    async def _call(self, dice: random.Random, end: float) -> None:
        vocab_size = self.llm.llm.target.vocab_size
        text: list[int] = []
        while time.monotonic() < end:
            if len(text) > 200 or dice.random() < 0.3:
                text = [dice.randrange(vocab_size) for _ in range(dice.choice([1, 10, 60]))]
            if dice.random() < 0.02:
                text = [vocab_size]  # refused
            params = SamplingParams(
                temperature=dice.choice([0.0, 1.0]),
                max_tokens=dice.choice([1, 10, 60]),
                n=dice.choice([1, 1, 1, 3]),
                ignore_eos=True,
            )
            try:
                text += await self._reply(dice, text, params)
            except QueueFullError:
                self.seen["queue full"] += 1
                await asyncio.sleep(0.01)
            except ForedraftError:
                self.seen["refused"] += 1
                text = []
            if dice.random() < 0.2:
                await asyncio.sleep(dice.random() / 10)

    async def _reply(
        self, dice: random.Random, text: list[int], params: SamplingParams
    ) -> list[int]:
        """The text that the first reply adds; nothing after hanging up."""
        hangs_up = dice.random() < 0.15
        reply: list[int] = []
        async with await self.llm.open(text, params, tenant=dice.choice([None, "a"])) as events:
            async for event in events:
                if event.index == 0:
                    reply += event.token_ids
                if event.result is not None:
                    self.seen[event.result.finish_reason] += 1
                elif hangs_up and dice.random() < 0.3:
                    self.seen["hung up"] += 1
                    return []
        return reply


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


async def soak(llm: LLM, seconds: float, num_callers: int = 24) -> Soak:
    """Run one, with a queue that is now and then too short."""
    async with AsyncLLM(llm, max_waiting=12) as served:
        run = Soak(served, seconds, num_callers)
        await run.run()
    return run


def table_llm(max_batch_size: int = 8) -> LLM:
    """Over tables, with an n-gram drafter, and too little memory for a full batch."""
    target = SimTarget(1)
    target.cache = TokenCache(max_tokens=1024)
    return LLM(target, None, LoadOptions(drafter="ngram", max_batch_size=max_batch_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", help="a real one, as in LLM.load; tables otherwise")
    parser.add_argument("--drafter", default="auto", help="for --model")
    parser.add_argument("--callers", type=int, default=24)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    llm = (
        LLM.load(asked.model, drafter=asked.drafter, max_batch_size=8)
        if asked.model
        else table_llm()
    )
    gc.collect()
    run = asyncio.run(soak(llm, 60 * asked.minutes, asked.callers))
    shown = [f"{byte >> 20}" for byte in run.memory[:: max(1, len(run.memory) // 12)]]
    stats = llm.engine.stats()
    sys.stdout.write(
        f"{stats.steps} steps, {stats.committed} tokens, {stats.preemptions} preemptions\n"
        f"{dict(run.seen)}\nMiB resident: {' '.join(shown)}\n"
        f"growth from the middle third to the last: {100 * run.growth:.1f} %\n"
    )
    if run.growth > MAX_GROWTH:
        sys.stdout.write("memory grows\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
