"""OpenTelemetry spans, one for each request, without any of its text.

Names are those of the semantic conventions for generative AI; others are under ``foredraft.``. The
package ``opentelemetry`` is imported only if spans are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation, GenerationRequest
from foredraft.system.extras import needs_extra
from foredraft.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class RequestSpans:
    """Makes a span for each request.

    Args:
        provider: sends the spans; None: no spans are made.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("foredraft", __version__)

    @contextmanager
    def request(self, request: GenerationRequest) -> Iterator[list[Generation]]:
        """The span of a request, from its arrival to the end of the block.

        It belongs to the trace that the client names (``traceparent``).

        Yields:
            A list for its generation, whose usage is reported at the end.
        """
        watched = list[Generation]()
        if self._tracer is None:
            yield watched
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        seconds = time.perf_counter() - request.arrived
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            TraceContextTextMapPropagator().extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=time.time_ns() - int(seconds * 1e9),
        )
        try:
            yield watched
        except BaseException as error:
            # The name alone: a message may repeat what a client wrote.
            span.set_attribute("error.type", _error_type(error))
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            for generation in watched:
                span.set_attributes(_outcome(generation))
            span.end()

    def close(self) -> None:
        """Send the spans that wait. May take seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def _error_type(error: BaseException) -> str:
    if isinstance(error, ApiError) and error.code:
        return str(error.code)
    is_gone = isinstance(error, (asyncio.CancelledError, GeneratorExit))
    return "client_disconnected" if is_gone else type(error).__name__


def _attributes(request: GenerationRequest) -> dict[str, Any]:
    params = request.params
    attributes = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "foredraft",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _outcome(generation: Generation) -> dict[str, Any]:
    replies = generation.replies
    made: dict[str, Any] = {
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(reply.num_tokens for reply in replies),
        "foredraft.speculation.num_steps": sum(len(reply.accepted) for reply in replies),
        "foredraft.speculation.num_draft_tokens": sum(sum(reply.drafted) for reply in replies),
        "foredraft.speculation.num_accepted_tokens": sum(sum(reply.accepted) for reply in replies),
    }
    results = [reply.result for reply in replies if reply.result is not None]
    if results:
        made["gen_ai.response.finish_reasons"] = [result.finish_reason for result in results]
        made["gen_ai.usage.cache_read.input_tokens"] = sum(r.num_cached_tokens for r in results)
    if arrived := [reply.arrived[0] for reply in replies if reply.arrived]:
        made["gen_ai.response.time_to_first_chunk"] = min(arrived) - generation.began
    return made


def spans_to(endpoint: str | None) -> RequestSpans:
    """Spans that are sent to a collector, in batches, on a thread of their own.

    Args:
        endpoint: where it takes OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces". None:
            there are no spans. The exporter reads its other settings (headers, certificates, the
            name of the service) from OpenTelemetry's own variables, ``OTEL_…``.

    Raises:
        ConfigError: the packages are not installed.
    """
    if endpoint is None:
        return RequestSpans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as problem:
        raise needs_extra("spans need", "otel", problem) from problem
    ours = Resource({"service.name": "foredraft", "service.version": __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider)
