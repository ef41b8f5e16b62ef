"""The metrics of `/metrics`, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from foredraft.control.adaptive import AdaptiveBudget
from foredraft.core.cost import CostModel
from foredraft.core.record import RowStep, StepRecord

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.server.engine import ServedEngine
    from foredraft.server.generation import Generation

_PREFIX = "foredraft"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_LEDGER = {
    "ledger_plain_seconds": ("Estimated time of all tokens without drafts.", "plain_ms"),
    "ledger_spent_seconds": ("Time that they took.", "spent_ms"),
    "ledger_balance_seconds": ("Time that may still be lost before drafting stops.", "balance_ms"),
}
"""Gauges of a controller that keeps a ledger: description, and field of its report."""


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._drafts = self.counter("spec_decode_num_drafts", "Steps of a request with a draft.")
        self._drafted = self.counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._by_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the draft.",
            "position",
        )
        self._prompt_tokens = self.counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self.counter("generation_tokens", "Tokens generated.")
        self._cache_queries = self.counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = self.counter("prefix_cache_hits", "Prompt tokens that were cached.")
        self._finished = self.counter(
            "request_success", "Replies that are over, by their reason.", "finished_reason"
        )
        self._aborted = self.counter("request_aborted", "Replies ended before they were over.")
        self._responses = self.counter("http_responses", "Answers.", "route", "status")
        self._times = self.counter("step_time_seconds", "Time of steps, by part.", "part")
        self._preemptions = self.counter(
            "num_preemptions", "How often a request gave its place in the cache to another."
        )
        self._steps = self.counter("engine_steps", "Steps of the engine.")
        self._proofs = self.counter("proof_steps", "Steps that drafted, made again without drafts.")
        self._differences = self.counter(
            "proof_differences", "Those that came out otherwise; anything but 0 is a fault."
        )
        self.page_runs = self._gauge("num_page_runs", "Runs of the page under way.")
        self._saved = self._gauge(
            "estimated_time_saved_seconds",
            "Time that plain decoding would have taken for the same tokens, less the time taken; "
            "negative while speculation costs more than it gives.",
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's headers to its first token.", _SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a reply, on average.", _BETWEEN
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's headers to the end of its reply.",
            _SECONDS,
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self._reply_sizes = self._histogram(
            "request_generation_tokens", "Tokens of a reply.", _TOKENS
        )
        self._seen = self._gauge(
            "drafter_first_token_acceptance",
            "How often a drafter's first token is right.",
            *("drafter", "noise"),
        )
        self._promised = self._gauge(
            "drafter_promised_acceptance",
            "How often it was when the drafter was made.",
            *("drafter", "noise"),
        )
        self._below = self._gauge(
            "drafter_below_promise",
            "1 where the one stays below the other by more than chance.",
            *("drafter", "noise"),
        )
        self._has_steps = True
        self._of_steps: tuple[Collector, ...] = (
            *(self._drafts, self._drafted, self._accepted, self._by_position, self._times),
            *(self._preemptions, self._steps, self._proofs, self._differences, self.page_runs),
            *(self._saved, self._seen, self._promised, self._below),
        )
        self._cost: CostModel | None = None
        self._controller: AdaptiveBudget | None = None

    def watch(self, engine: ServedEngine) -> None:
        """Add gauges of an engine's requests and cache, which are read at each scrape."""

        def cache_usage() -> float:
            stats = engine.stats()
            held, free = stats.cache_tokens, stats.cache_free_tokens
            return held / (held + free) if held + free else 0.0

        stats: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_running": ("Requests in the batch.", lambda: engine.stats().running),
            "num_requests_waiting": ("Requests that wait.", lambda: engine.stats().waiting),
            "kv_cache_tokens": ("Tokens in the cache.", lambda: engine.stats().cache_tokens),
            "kv_cache_usage_perc": ("Share of the cache in use.", cache_usage),
        }
        for name, (text, read) in stats.items():
            if self._has_steps or not name.startswith("kv_cache"):
                self._gauge(name, text).set_function(read)

    def watch_speculation(self, llm: LLM) -> None:
        """Add gauges of the gain of speculation, and of the controller's estimates."""
        self._cost, controller = llm.cost, llm.controller
        if not isinstance(controller, AdaptiveBudget):
            return

        def seconds(field: str) -> float:
            return (controller.report()[field] or 0.0) / 1000

        for name, (text, field) in _LEDGER.items():
            self._gauge(name, text).set_function(partial(seconds, field))
        self._controller = controller

    def leave_steps_out(self) -> None:
        """Show no figures of steps and caches: the engines are in other processes."""
        self._has_steps = False
        for collector in self._of_steps:
            self._registry.unregister(collector)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        for found in self._controller.first_tokens if self._controller else ():
            of = found.drafter, found.noise
            self._seen.labels(*of).set(found.seen)
            self._promised.labels(*of).set(found.promised)
            self._below.labels(*of).set(found.is_below)
        text, ours = generate_latest(self._registry), b"foredraft:spec_decode_"
        drafts = b"".join(line for line in text.splitlines(keepends=True) if ours in line)
        return text + drafts.replace(ours, b"vllm:spec_decode_")  # AIPerf's report looks for these

    def add_step(self, record: StepRecord) -> None:
        """Count a step. Called on the engine's thread."""
        self._steps.inc()
        self._preemptions.inc(record.num_preempted)
        times = record.times
        for part in ("draft", "score", "verify", "learn"):
            self._times.labels(part).inc(getattr(times, f"{part}_ms") / 1000)
        for row in record.rows:
            if len(row.proposal.tree):
                self._add_draft(row)
        if self._cost is not None and record.is_decoding and record.rows:
            plain = self._cost.ms([(1, row.context) for row in record.rows])
            per_row = sum(len(row.committed) for row in record.rows) / len(record.rows)
            self._saved.inc((per_row * plain - times.total_ms) / 1000)

    def add_proof(self, is_same: bool) -> None:
        """Count a step that live proof repeated; see `LiveProof`."""
        self._proofs.inc()
        self._differences.inc(not is_same)

    def add_request(self, generation: Generation) -> None:
        """Count the replies of a request that is over, or was ended."""
        self._prompt_tokens.inc(generation.num_prompt_tokens)  # one of several replies counts once
        for reply in generation.replies:
            self._generated.inc(reply.num_tokens)
            self._prompt_sizes.observe(reply.num_prompt_tokens)
            self._reply_sizes.observe(reply.num_tokens)
            arrived = reply.arrived
            if arrived:
                self._first_token.observe(arrived[0] - generation.began)
            if len(arrived) > 1:
                self._between.observe((arrived[-1] - arrived[0]) / (reply.num_tokens - 1))
            if reply.result is None:
                self._aborted.inc()
                continue
            self._cache_queries.inc(reply.num_prompt_tokens)
            self._cache_hits.inc(reply.result.num_cached_tokens)
            self._finished.labels(reply.result.finish_reason).inc()
            if arrived:
                self._whole.observe(arrived[-1] - generation.began)

    def add_response(self, route: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(route, str(status)).inc()

    def _add_draft(self, row: RowStep) -> None:
        self._drafts.inc()
        self._drafted.inc(len(row.proposal.tree))
        self._accepted.inc(row.num_accepted)
        for position in range(row.num_accepted):
            self._by_position.labels(str(position)).inc()

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A further counter."""
        return Counter(f"{_PREFIX}:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{_PREFIX}:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}:{name}", text, buckets=buckets, registry=self._registry)
