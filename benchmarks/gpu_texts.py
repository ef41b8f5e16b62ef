"""Parts of `benchmarks.gpu`: draws, drafters end to end, and what a drafting head costs.

`texts` needs a checkpoint and prompts; all else is made up.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from benchmarks.gpu_run import Results, Run
from benchmarks.head_rounds import Round
from foredraft.core.choices import DrawKey
from foredraft.core.errors import CapabilityError, ConfigError
from foredraft.core.params import SamplingParams
from foredraft.core.record import StepRecord
from foredraft.core.sampling import law_of
from foredraft.drafters.growth import GrowthLimits
from foredraft.drafters.heads.base import HeadModule
from foredraft.drafters.heads.eagle import EagleModule
from foredraft.drafters.heads.hidden_head import HiddenHeadModule
from foredraft.drafters.heads.steps import StepDrafter, StepHead
from foredraft.llm import LLM
from foredraft.models.base import ChainRow, HeadChain, HeadRow, ModelShape, ScoredTokens
from foredraft.models.native.cuda import TILE, RecordedDraws
from foredraft.models.native.head_chain import RecordedChain
from foredraft.models.native.target import NativeTarget
from foredraft.models.timing import measure_cost
from foredraft.options import LoadOptions

_SLOW_MS = 5.0
"""Steps of the default model that took longer are listed."""
_LAPS = ("draft_ms", "score_ms", "verify_ms", "learn_ms")


def texts(run: Run) -> None:
    """Tokens a second of a real model by drafter and temperature, and whether texts are equal.

    Plain decoding takes turns with the drafters, prompt by prompt; each text is timed once.
    """
    names = run.asked.drafters.split(",")
    options = LoadOptions(drafter="none", prefix_caching=False)
    begun = time.perf_counter()
    # A drafter is named for its forwards to be timed: what is drafted is weighed against that.
    asked = {"exact": run.asked.exact, "weights": run.asked.weights}
    llm = LLM.load(run.asked.checkpoint, drafter=names[-1], device=str(run.device), **asked)
    run.found["load_s"] = round(time.perf_counter() - begun, 2)
    run.save()
    others = _views(run, llm, names, options)
    prompts = _prompts(run.asked.prompts, llm)
    warm_up = llm.encode([{"role": "user", "content": "Describe a town by the sea, twice."}])
    for name, each in others.items():  # kernels are compiled
        for temperature in (0.0, 1.0):
            begun = time.perf_counter()
            warm = SamplingParams(max_tokens=48, temperature=temperature, seed=1)
            each.generate([warm_up], warm)
            taken = round(time.perf_counter() - begun, 2)
            run.found[f"first reply of {name} at temperature {temperature}, s"] = taken
    run.save()
    for prompt in prompts:  # libraries choose and load kernels for each new length
        others[names[0]].generate([[*prompt]], SamplingParams(max_tokens=1))
    for temperature in map(float, run.asked.temperatures.split(",")):
        params = SamplingParams(max_tokens=run.asked.length, temperature=temperature, seed=5)
        rows = {name: _Row() for name in others}
        found = run.found[f"temperature {temperature}"] = dict[str, Results]()
        for prompt in prompts:
            if run.is_over:
                break
            for name, each in others.items():
                rows[name].add(each, prompt, params)
            for name, row in rows.items():
                found[name] = row.figures(rows[names[0]])
            run.save()
        for name, each_found in found.items():
            sys.stdout.write(f"{temperature} {name} {json.dumps(each_found)}\n")
        sys.stdout.flush()
        if run.asked.ids:
            ids = {name: row.texts for name, row in rows.items()}
            path = Path(run.asked.ids.format(temperature=temperature))
            path.write_text(json.dumps({"prompts": prompts, "texts": ids}))


def _views(run: Run, llm: LLM, names: Sequence[str], options: LoadOptions) -> dict[str, LLM]:
    """The model by drafter; those that it cannot have are found as they say why."""
    views = dict[str, LLM]()
    for name in names:
        begun = time.perf_counter()
        try:
            views[name] = llm.with_drafter(replace(options, drafter=name))
            run.found[f"{name} is there after, s"] = round(time.perf_counter() - begun, 2)
        except (CapabilityError, ConfigError) as reason:
            run.found[f"no {name}"] = str(reason)
    return views


def draws(run: Run) -> None:
    """Milliseconds from logits to tokens: drawn on the device, and on the host."""
    from foredraft.core.noise import gumbel_argmax

    laws = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature 1": SamplingParams(temperature=1.0),
        "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
        "top-k 40": SamplingParams(temperature=1.0, top_k=40),
    }

    def on_device(logits_NV: torch.Tensor, keys: Sequence[DrawKey]) -> list[int]:
        laws = recorded.draw(logits_NV, keys)
        return [law.drawn for law in laws if law and law.drawn is not None]

    def on_host(logits_NV: torch.Tensor, params: SamplingParams) -> list[int]:
        if not params.temperature:
            return logits_NV.argmax(1).tolist()
        tokens = []
        for place, logits_V in enumerate(logits_NV.cpu()):
            law = law_of(logits_V, params)
            assert law.scale is not None
            tokens.append(gumbel_argmax(logits_V, 5, place, law.scale, law.cut))
        return tokens

    recorded = RecordedDraws(run.device)
    for vocab in (49152, 128256):
        for rows in (1, 5, 16):
            logits_NV = 3 * torch.randn(rows, vocab, device=run.device)
            for name, params in laws.items():
                keys = [DrawKey.of(params, 5, place) for place in range(rows)]
                ways = partial(on_device, logits_NV, keys), partial(on_host, logits_NV, params)
                device_ms, host_ms = (_milliseconds(way, run.asked.rounds) for way in ways)
                figures = {"device_ms": device_ms, "host_ms": host_ms}
                run.found[f"{vocab} {rows} {name}"] = figures | {"equal": ways[0]() == ways[1]()}
        run.save()


def _milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The median of what ends with numbers on the host."""
    times = []
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begun))
    return round(statistics.median(times[2:]), 4)


class _Row:
    """What one drafter did."""

    def __init__(self) -> None:
        self.texts, self.seconds = list[tuple[int, ...]](), list[float]()
        self.steps = self.drafted = self.accepted = self.recorded = 0
        # Of steps without a draft, and of those with one.
        self.laps = [{name: list[float]() for name in (*_LAPS, "between_ms")} for _ in range(2)]
        self.why_plain = Counter[str]()
        self.slow = list[Results]()

    def add(self, llm: LLM, prompt: Sequence[int], params: SamplingParams) -> None:
        last: float | None = None

        def trace(record: StepRecord) -> None:
            nonlocal last
            now = time.perf_counter()
            between_ms = 1e3 * (now - (begun if last is None else last)) - record.times.total_ms
            if record.times.total_ms + between_ms > _SLOW_MS:
                parts = {n: round(v, 2) for n, v in vars(record.times).items() if n != "drafters"}
                where = {
                    "reply": len(self.texts),
                    "decodes": record.is_decoding,
                    "size": str(record.sizes),
                }
                self.slow.append(where | parts | {"between_ms": round(between_ms, 2)})
            if record.is_decoding and last is not None:
                laps = self.laps[any(len(row.proposal.tree) for row in record.rows)]
                for name in _LAPS:
                    laps[name].append(getattr(record.times, name))
                laps["between_ms"].append(1e3 * (now - last) - record.times.total_ms)
            last = now

        llm.policy.trace = trace
        before, begun = _num_recorded(llm), time.perf_counter()
        result = llm.generate([[*prompt]], params)[0]
        self.seconds.append(time.perf_counter() - begun)
        self.recorded += _num_recorded(llm) - before
        self.texts.append(tuple(result.token_ids))
        self.steps += result.stats.steps
        self.drafted += result.stats.drafted
        self.accepted += result.stats.accepted
        self.why_plain.update(result.stats.plain_steps)

    def figures(self, plain: _Row) -> Results:
        pairs = zip(self.texts, plain.texts, strict=True)
        rates = [len(text) / s for text, s in zip(self.texts, self.seconds, strict=True)]
        over = [p / s for s, p in zip(self.seconds, plain.seconds, strict=True)]
        medians = [
            {name: round(statistics.median(each or [0.0]), 4) for name, each in laps.items()}
            for laps in self.laps
        ]
        return {
            "tokens_a_second": round(sum(map(len, self.texts)) / sum(self.seconds), 1),
            "median_tokens_a_second": round(statistics.median(rates), 1),
            "over_plain": round(sum(plain.seconds) / sum(self.seconds), 3),
            "worst_over_plain": round(min(over), 3),
            "tokens_a_step": round(sum(map(len, self.texts)) / max(1, self.steps), 3),
            "drafted_a_step": round(self.drafted / max(1, self.steps), 3),
            "accepted_share": round(self.accepted / max(1, self.drafted), 3),
            "equal_texts": sum(mine == theirs for mine, theirs in pairs),
            "num_texts": len(self.texts),
            "plain_steps": dict(self.why_plain),
            "recorded": self.recorded,
            "seconds": [round(s, 4) for s in self.seconds],
            "slow_steps": self.slow,
            "steps_with_draft": len(self.laps[True]["draft_ms"]),
            "median_lap": medians[False],
            "median_lap_with_draft": medians[True],
        }


def _num_recorded(llm: LLM) -> int:
    """Recordings so far: of steps, and of rounds of heads."""
    target = llm.target
    if not isinstance(target, NativeTarget):
        return 0
    chains = [runner.chain for runner in target._head_runners]
    rounds = sum(len(chain._rounds) for chain in chains if chain is not None)
    return rounds + int(getattr(target.decoder, "num_recorded", 0))


def _prompts(path: str, llm: LLM) -> list[list[int]]:
    """Of each category the first prompt."""
    first: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        entry = json.loads(line)
        first.setdefault(entry["category"], entry["turns"][0])
    return [llm.encode([{"role": "user", "content": text}]) for text in first.values()]


# ------------------------------------------------------------------------------------------ heads

_LIMITS = {
    "product": (GrowthLimits(), None),
    "tree of 15": (GrowthLimits(), 15),
    "tree of 8": (GrowthLimits(), 8),
    "chain of 4": (GrowthLimits(max_depth=4, branching=1), 4),
    "chain of 6": (GrowthLimits(max_depth=6, branching=1), 6),
}
"""What drafts, and how many tokens: None is for the controller to say."""
_PROMISE = 0.7915, 0.5854
"""Greedy and sampled: that of the default model's `hidden_head`."""
_LAPS_EACH = 1, 3
"""So many replies warm up, recordings included, and so many are timed."""
_HEADS: dict[str, tuple[int, tuple[int, ...]]] = {
    "135m": (12288, (5, 14, 29)),
    "1b": (32000, (2, 8, 13)),
    "8b": (32000, (2, 16, 28)),
}
"""Output rows and taps."""


def rounds(run: Run) -> None:
    """Milliseconds of a head's round: 3 tokens of the text read, so many drafted."""
    for model in run.asked.models.split(","):
        target = _made_up(model, run.device)
        for kind in ("hidden_head", "eagle"):
            if run.is_over:
                return
            head = _head(kind, model, target, run.device)
            runner = cast(StepHead, head).runner(target)
            ids_R = head.output_ids_R
            assert ids_R is not None
            chain = runner.new_chain(ids_R.cpu(), len(head.taps))
            if not isinstance(chain, RecordedChain):
                continue
            slot = target.cache.allocate()
            target.cache.fill(slot, 300)
            size = target.config.hidden_size
            taps = [
                torch.randn(250, size, device=run.device).to(target.weights.dtype)
                for _ in head.taps
            ]
            text = [7 + i % 90 for i in range(250)]
            runner.run([HeadRow(slot, 0, 250)], runner.text_inputs(text, taps))
            for temperature in (0.0, 1.0):
                key = DrawKey.of(SamplingParams(temperature=temperature), 5, 254)
                few = [tap_TE[:3] for tap_TE in taps]
                row = ChainRow(slot, 250, text[:3], few, key)
                times = dict[str, float]()
                for steps in (2, 4, 6):
                    times[f"whole {steps}"] = _milliseconds(
                        partial(chain.run, [row], steps), run.asked.rounds
                    )
                    replay = chain._rounds[chain._shape([row], steps)].replay
                    times[f"device {steps}"] = _replayed(replay, run.device)
                run.found[f"{model} {kind} temperature {temperature}"] = times
            run.save()
            target.cache.free(slot)
            del head, runner, chain, taps
        del target
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _replayed(replay: Callable[[], object], device: torch.device) -> float:
    """Milliseconds by the device's clock, several in a row."""
    if device.type != "cuda":
        return -1.0
    begin, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay()
    begin.record()
    for _ in range(5):
        replay()
    end.record()
    torch.cuda.synchronize()
    return round(float(begin.elapsed_time(end)) / 5, 4)


def scripted(run: Run) -> None:
    """A made-up model with a head whose guesses are right as often as a trained head's were.

    The head runs and its time counts; its candidates are replaced by those of a round of
    `benchmarks.head_rounds`, drawn at random: their scores, and the text's own next token at the
    place where it was among them.
    """
    measured = json.loads(Path(run.asked.head_rounds).read_text())
    for model in run.asked.models.split(","):
        target = _made_up(model, run.device)
        options = LoadOptions(drafter="none", prefix_caching=False)
        llm = LLM(target, None, options, cost=measure_cost(target))
        prompt = [5 + (i * 37 + 11) % 900 for i in range(200)]
        head = _head("eagle", model, target, run.device)
        head.promise = _PROMISE
        for temperature in map(float, run.asked.temperatures.split(",")):
            params = SamplingParams(max_tokens=run.asked.length, temperature=temperature, seed=5)
            plain = _timed(llm, prompt, params)
            row = run.found[f"{model} temperature {temperature}"] = {"plain": plain.figures(plain)}
            for name, (limits, budget) in _LIMITS.items():
                if run.is_over:
                    return
                text = [*prompt, *plain.texts[0]]
                drafter = StepDrafter(cast(StepHead, head), target, limits)
                drafter._chain = ScriptedChain(drafter._chain, measured[str(temperature)], text)
                view = llm.with_drafter(replace(options, num_draft_tokens=budget), drafter=drafter)
                row[name] = _timed(view, prompt, params).figures(plain)
                sys.stdout.write(f"{model} {temperature} {name} {json.dumps(row[name])}\n")
                sys.stdout.flush()
                run.save()
        del target, llm, head, drafter, view
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> _Row:
    warm, timed = _LAPS_EACH
    for count in (warm, timed):
        found = _Row()
        for _ in range(count):
            found.add(llm, prompt, params)
    return found


class ScriptedChain:
    """Rounds of a head whose candidates are those of rounds that were measured; the head runs, too.

    Args:
        chain: the head's own; None: nothing runs.
        measured: see `benchmarks.head_rounds`.
        text: of the request, its reply included.
    """

    most_read = TILE

    def __init__(
        self, chain: HeadChain | None, measured: Sequence[Round], text: Sequence[int]
    ) -> None:
        self._chain, self._measured, self._text = chain, measured, text
        self._random = random.Random(3)

    def can_run(self, slot: int, start: int) -> bool:
        return self._chain is None or self._chain.can_run(slot, start)

    def run(self, rows: Sequence[ChainRow], num_steps: int) -> list[list[ScoredTokens]]:
        if self._chain is not None:
            self._chain.run(rows, num_steps)
        return [self._levels(row.start + len(row.following) + 1, num_steps) for row in rows]

    def _levels(self, position: int, num_steps: int) -> list[ScoredTokens]:
        found = []
        levels = self._random.choice(self._measured)
        for depth, (place, scores, total) in enumerate(levels[:num_steps]):
            after = self._text[position + depth] if position + depth < len(self._text) else 0
            tokens = [(after + 1 + other) % 1000 for other in range(len(scores))]
            if place >= 0:
                tokens[place] = after
            found.append(ScoredTokens([*zip(tokens, scores, strict=True)], total))
        return found


def _head(kind: str, model: str, target: NativeTarget, device: torch.device) -> HeadModule:
    """A head of random numbers."""
    config, num_rows, taps = target.config, *_HEADS[model]
    shape = ModelShape(**{name: getattr(config, name) for name in ModelShape.__dataclass_fields__})
    taps = tuple(min(tap, config.num_hidden_layers - 1) for tap in taps)
    num_rows = min(num_rows, config.vocab_size)
    with torch.device(device):
        head: HeadModule = (
            EagleModule(shape, num_rows, taps, "each", "plain", "normed")
            if kind == "eagle"
            else HiddenHeadModule(shape, num_rows, taps)
        )
    return head.eval()


def _made_up(model: str, device: torch.device) -> NativeTarget:
    from benchmarks.gpu import new_target

    return new_target(model, device)
